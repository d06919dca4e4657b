"""``kvformat doctor``: versions, codecs that really work, video hardware, how fast it decodes."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import asdict, replace
from typing import Any, Final

import click
import numpy as np

from kvformat import FORMAT_VERSION, __version__
from kvformat.cli.doctor_gpu import gpu_report, show_gpu
from kvformat.cli.show import emit, facts, heading, progress, table
from kvformat.cli.text import clean, write_json
from kvformat.codecs.base import SegmentShape
from kvformat.codecs.registry import CODECS
from kvformat.costs import CPU, CodecRate, Rates, seconds
from kvformat.errors import UnsupportedError
from kvformat.layout import candidate_layouts
from kvformat.rates import load_rates, measure, save_rates, target_path
from kvformat.workers import cores

PACKAGES: Final = (
    "numpy",
    "ml_dtypes",
    "av",
    "zstandard",
    "blake3",
    "fsspec",
    "s3fs",
    "aiohttp",
    "click",
    "rich",
)
WORKS: Final = "works"


@click.command(name="doctor")
@click.option(
    "--measure",
    "measuring",
    is_flag=True,
    help="Also measure how fast each codec decodes here, and keep the rates.",
)
@click.option("--gpu", "gpu", is_flag=True, help="Also try every decoder of kvformat.gpu.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(*, measuring: bool, gpu: bool, as_json: bool) -> None:
    """Show versions and try every codec on a tiny segment.

    Ends with exit code 69 if a codec of the format does not work here.

    The rates choose the track where a reader asks for "auto", and kvformat plan computes with
    them. --measure takes about ten seconds; run it while the machine is otherwise idle. It writes
    $KVFORMAT_RATES, or kvformat/rates.json in the user's cache directory.
    """
    found: dict[str, Any] = {
        "kvformat": {"package": __version__, "format": FORMAT_VERSION},
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "packages": {name: _version(name) for name in PACKAGES},
        "libraries": _libraries(),
        "codecs": {name: _try_codec(name) for name in CODECS},
        "video_hardware": _hardware(),
        "cores": cores(),
    }
    broken = [name for name, state in found["codecs"].items() if not state.startswith(WORKS)]
    rates = _measured() if measuring and not broken else load_rates()
    found["rates"] = rates_json(rates)
    if gpu:
        found["gpu"] = gpu_report()
    if as_json:
        write_json(found)
    else:
        _show(found)
        show_rates(rates)
        if gpu:
            show_gpu(found["gpu"])
    if broken:
        raise UnsupportedError(
            "codec.unavailable",
            "a codec does not work here",
            where=", ".join(broken),
            found=found["codecs"][broken[0]],
            next_step="Install kvformat again, or report what kvformat doctor prints",
        )


def _measured() -> Rates:
    path = target_path()  # before the work, not after it
    with progress("measuring") as step:
        rates = measure(progress=step)
    save_rates(rates, path)
    return replace(rates, source=f"measured on this machine just now, written to {path}")


def rates_json(rates: Rates) -> dict[str, Any]:
    """The rates for ``--json``."""
    return {"source": rates.source, "entries": [asdict(item) for item in rates.entries]}


def show_rates(rates: Rates) -> None:
    """The rates as a table."""
    heading("Rates, in million values per second")
    emit(table(RATE_COLUMNS, [_rate_row(item) for item in rates.entries]), "")
    emit(facts([("from", rates.source)]))


RATE_COLUMNS: Final = (
    "codec",
    ">decode",
    ">restore",
    ">both",
    ">all workers",
    ">segment",
    "origin",
)


def _rate_row(item: CodecRate) -> tuple[str, ...]:
    together = item.values_per_s * item.faster(item.workers)
    return (
        item.name if item.device == CPU else f"{item.name}, {item.device}",
        f"{item.decode_values_per_s / 1e6:,.0f}",
        f"{item.restore_values_per_s / 1e6:,.0f}",
        f"{item.values_per_s / 1e6:,.0f}",
        f"{together / 1e6:,.0f} by {item.workers}",
        seconds(item.segment_s),
        item.origin,
    )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _libraries() -> dict[str, str]:
    """The C libraries behind the codecs."""
    found: dict[str, str] = {}
    try:
        import av

        for name in ("libavcodec", "libavutil"):
            found[name] = ".".join(str(part) for part in av.library_versions[name])
    except Exception as error:
        found["libavcodec"] = f"not usable: {_reason(error)}"
    for name, codec in CODECS.items():
        try:
            found[f"encoder of {name}"] = codec.encoder()
        except Exception as error:
            found[f"encoder of {name}"] = f"not usable: {_reason(error)}"
    return found


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {clean(error)}"


def _try_codec(name: str) -> str:
    """Encode and decode a segment of random integers, and compare."""
    tokens, heads, dim = 48, 2, 32
    layout = candidate_layouts(tokens, heads * dim)[-1] if name == "hevc" else None
    shape = SegmentShape(3, tokens, heads, dim, layout=layout)
    integers = np.random.default_rng(0).integers(0, 256, shape.integers_shape, np.uint8)
    try:
        payload = CODECS[name].encode(integers, shape)
        decoded = CODECS[name].decode(payload, shape, "test segment", strict=True)
    except Exception as error:
        return f"does not work: {_reason(error)}"
    if not np.array_equal(decoded.integers, integers) or not decoded.clean:
        return "does not work: it gives back other values"
    return f"{WORKS}: {integers.size:,} integers came back from {len(payload):,} bytes"


def _hardware() -> dict[str, str]:
    """What the video library was built with, and whether an NVIDIA engine can be opened."""
    try:
        import av
        from av.codec.hwaccel import hwdevices_available

        kinds = ", ".join(hwdevices_available()) or "none"
    except Exception as error:
        return {"built in": f"not known: {_reason(error)}", "nvidia": "not tried"}
    return {
        "built in": f"{kinds} (says nothing about this machine)",
        "nvidia": _try_nvidia(av),
        "note": "used only where asked for (decoder='nvdec'): see --gpu",
    }


def _try_nvidia(av: Any) -> str:
    """Open a decoder on CUDA; the library says why not only in its log."""
    level = av.logging.get_level()
    said: list[str] = []
    try:
        from av.codec.hwaccel import HWAccel

        av.logging.set_level(av.logging.ERROR)
        with av.logging.Capture() as lines:
            try:
                device = HWAccel(device_type="cuda", allow_software_fallback=False)
                av.CodecContext.create("hevc", "r", hwaccel=device)
            finally:
                said = [str(line[2]).strip() for line in lines]
    except Exception as error:
        return f"no usable NVIDIA video engine: {clean('; '.join(said)) or _reason(error)}"
    finally:
        av.logging.set_level(level)
    return "CUDA starts; whether its engine decodes 8-bit 4:4:4 HEVC is not tried"


def _show(found: dict[str, Any]) -> None:
    heading(f"kvformat {found['kvformat']['package']}, format {found['kvformat']['format']}")
    emit(facts([("python", found["python"]), ("cores", found["cores"])]), "")
    heading("Packages")
    packages = found["packages"].items()
    emit(facts([(name, version or "not installed") for name, version in packages]), "")
    heading("Libraries")
    emit(facts(found["libraries"].items()), "")
    heading("Codecs")
    emit(facts(found["codecs"].items()), "")
    heading("Video hardware")
    emit(facts(found["video_hardware"].items()), "")
