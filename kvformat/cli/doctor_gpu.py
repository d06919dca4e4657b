"""``kvformat doctor --gpu``: driver, engines, capabilities, and a clip through every decoder."""

from __future__ import annotations

from typing import Any, Final

from kvformat.cli.show import emit, facts, heading, table
from kvformat.errors import KvformatError
from kvformat.gpu.driver import Capability, Hardware
from kvformat.gpu.probing import probe

EXACT: Final = "a clip came back bit for bit"
COLUMNS: Final = ("HEVC", ">bits", "decoded", ">engines", "planes", "smallest", "largest")


def gpu_report() -> dict[str, Any]:
    """What there is, as JSON. Never raises for what is missing."""
    hardware = probe()
    devices: list[dict[str, Any]] = []
    for device in hardware.devices:
        decoders = {name: try_decoder(name, device.index) for name in ("nvdec", "nvdec-pynv")}
        devices.append({**hardware.to_json()["devices"][device.index], "decoders": decoders})
    return {
        "problem": hardware.problem,
        "driver": hardware.driver,
        "encode_library": hardware.encode_library,
        "torch": _torch(),
        "software": try_decoder("software", 0),
        "devices": devices,
    }


def _torch() -> str:
    try:
        from kvformat.gpu.libraries import load_torch

        torch = load_torch()
    except KvformatError as error:
        return str(error)
    built = torch.version.cuda
    return f"{torch.__version__}, " + (f"CUDA {built}" if built else "built without CUDA")


def try_decoder(name: str, index: int) -> str:
    """Decode a clip of the smallest picture size in this process; the driver was probed before."""
    try:
        from kvformat.gpu.clip import differs, make_clip
        from kvformat.gpu.engine import make_decoder
        from kvformat.gpu.libraries import as_device

        device = as_device("cpu" if name == "software" else f"cuda:{index}")
        wrong = differs(make_decoder(name, device), make_clip(144, 144, 4))
    except KvformatError as error:
        return str(error)
    return wrong or EXACT


def show_gpu(found: dict[str, Any]) -> None:
    """The report for people."""
    heading("GPU")
    first = [("torch", found["torch"]), ("decoder software", found["software"])]
    if found["problem"]:
        first.append(("NVIDIA driver", found["problem"]))
    else:
        first.append(("NVIDIA driver", found["driver"]))
        first.append(("encode library", "there" if found["encode_library"] else "missing"))
    emit(facts(first), "")
    for device in Hardware.from_json(_as_hardware(found)).devices:
        heading(f"Device {device.index}: {device.name}, {device.memory_bytes / 2**30:.0f} GiB")
        emit(table(COLUMNS, [capability_row(item) for item in device.capabilities]), "")
        decoders = found["devices"][device.index]["decoders"]
        emit(facts([(f"decoder {name}", state) for name, state in decoders.items()]), "")


def _as_hardware(found: dict[str, Any]) -> dict[str, Any]:
    return {name: found[name] for name in ("driver", "devices", "encode_library", "problem")}


def capability_row(item: Capability) -> tuple[str, ...]:
    """One line of the table."""
    if not item.supported:
        return (item.chroma, str(item.depth), "no", "", "", "", "")
    planes = "yes" if item.chroma != "4:4:4" or not item.refusal(*item.least) else "no"
    return (
        item.chroma,
        str(item.depth),
        "yes",
        str(item.engines),
        planes,
        f"{item.least[0]} x {item.least[1]}",
        f"{item.most[0]} x {item.most[1]}",
    )
