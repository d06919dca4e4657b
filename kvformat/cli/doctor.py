"""``kvformat doctor``: versions, codecs that really work, video hardware."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any, Final

import click
import numpy as np

from kvformat import FORMAT_VERSION, __version__
from kvformat.cli.show import emit, facts, heading
from kvformat.cli.text import clean, write_json
from kvformat.codecs.base import SegmentShape
from kvformat.codecs.registry import CODECS
from kvformat.errors import UnsupportedError
from kvformat.layout import candidate_layouts
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
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(*, as_json: bool) -> None:
    """Show versions and try every codec on a tiny segment.

    Ends with exit code 69 if a codec of the format does not work here.
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
    if as_json:
        write_json(found)
    else:
        _show(found)
    broken = [name for name, state in found["codecs"].items() if not state.startswith(WORKS)]
    if broken:
        raise UnsupportedError(
            "codec.unavailable",
            "a codec does not work here",
            where=", ".join(broken),
            found=found["codecs"][broken[0]],
            next_step="Install kvformat again, or report what kvformat doctor prints",
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
        "note": "kvformat 0.9 itself decodes on the CPU",
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
    emit(facts(found["video_hardware"].items()))
