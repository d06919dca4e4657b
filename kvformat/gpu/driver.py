"""The NVIDIA driver through ctypes: what there is, asked in a child process, and contexts.

Structures are described by the few offsets that are used (see ``Capability``). Nothing here is
called in this process before ``probing`` has seen it work in another.
"""

from __future__ import annotations

import ctypes
import json
import struct
from dataclasses import asdict, dataclass
from typing import Any, Final

HEVC: Final = 8
CHROMA: Final = {"4:0:0": 0, "4:2:0": 1, "4:4:4": 3}
DEPTHS: Final = (8, 10, 12)
YUV444: Final = 1 << 2
_CAPS_BYTES: Final = 256
NAMES: Final = {1: "invalid value", 2: "out of memory", 3: "not initialised", 100: "no device",
                101: "no such device", 802: "system not ready", 803: "driver mismatch",
                999: "unknown error"}  # fmt: skip


class DriverError(Exception):
    """A call of the driver failed, or a library of it is missing."""


@dataclass(frozen=True, slots=True)
class Capability:
    """What the engines do with HEVC of one chroma format and bit depth; sides in samples."""

    chroma: str
    depth: int
    supported: bool
    engines: int = 0
    output_mask: int = 0
    least: tuple[int, int] = (0, 0)
    most: tuple[int, int] = (0, 0)
    most_blocks: int = 0

    def refusal(self, width: int, height: int) -> str:
        """Why a picture of this size cannot be decoded to planes, or an empty string."""
        if not self.supported:
            return f"HEVC {self.chroma} of {self.depth} bits is not decoded"
        if self.chroma == "4:4:4" and not self.output_mask & YUV444:
            return "4:4:4 is decoded but not put out as planes"
        if not (self.least[0] <= width <= self.most[0] and self.least[1] <= height <= self.most[1]):
            return f"sizes from {self.least} to {self.most} are decoded"
        if width * height > self.most_blocks * 256:
            return f"pictures of more than {self.most_blocks} macroblocks are not decoded"
        return ""


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU."""

    index: int
    name: str
    memory_bytes: int
    capabilities: tuple[Capability, ...]

    def capability(self, chroma: str = "4:4:4", depth: int = 8) -> Capability:
        """That of one format."""
        for item in self.capabilities:
            if (item.chroma, item.depth) == (chroma, depth):
                return item
        return Capability(chroma, depth, supported=False)


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a probe found; ``problem`` says why there is nothing."""

    driver: str = ""
    devices: tuple[Device, ...] = ()
    encode_library: bool = False
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        """For reports."""
        return asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> Hardware:
        """The inverse."""
        devices = tuple(
            Device(
                item["index"],
                item["name"],
                item["memory_bytes"],
                tuple(
                    Capability(**{**cap, "least": tuple(cap["least"]), "most": tuple(cap["most"])})
                    for cap in item["capabilities"]
                ),
            )
            for item in value["devices"]
        )
        return Hardware(value["driver"], devices, bool(value["encode_library"]), value["problem"])


def _library(name: str) -> Any:
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise DriverError(f"{name} cannot be loaded: {error}") from error


def _call(library: Any, name: str, *arguments: Any) -> None:
    status = getattr(library, name)(*arguments)
    if status:
        raise DriverError(f"{name} failed with {status} ({NAMES.get(status, 'see cuda.h')})")


def start() -> Any:
    """libcuda, initialised; raises ``DriverError``."""
    cuda = _library("libcuda.so.1")
    _call(cuda, "cuInit", 0)
    return cuda


def make_current(index: int) -> None:
    """Make the primary context of a device, which torch uses too, current on this thread.

    FFmpeg is told to take the current context: it refuses to make the primary one when torch has
    it already, with other flags.
    """
    cuda = start()
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _call(cuda, "cuDeviceGet", ctypes.byref(device), index)
    _call(cuda, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    _call(cuda, "cuCtxSetCurrent", context)


def _capability(cuvid: Any, chroma: str, depth: int) -> Capability:
    """cuvidGetDecoderCaps: asks with three 32-bit words, answers from byte 24 on."""
    caps = ctypes.create_string_buffer(_CAPS_BYTES)
    struct.pack_into("<III", caps, 0, HEVC, CHROMA[chroma], depth - 8)
    _call(cuvid, "cuvidGetDecoderCaps", caps)
    supported, engines, mask, wide, high, blocks, narrow, low = struct.unpack_from(
        "<BBHIIIHH", caps, 24
    )
    return Capability(
        chroma, depth, bool(supported), engines, mask, (narrow, low), (wide, high), blocks
    )


def look() -> Hardware:
    """All devices with their capabilities. Run it in a child: drivers may end the process."""
    try:
        cuda = start()
        version, count = ctypes.c_int(), ctypes.c_int()
        _call(cuda, "cuDriverGetVersion", ctypes.byref(version))
        _call(cuda, "cuDeviceGetCount", ctypes.byref(count))
        cuvid = _library("libnvcuvid.so.1")
        devices = tuple(_device(cuda, cuvid, index) for index in range(count.value))
    except DriverError as error:
        return Hardware(problem=str(error))
    try:
        _library("libnvidia-encode.so.1")
        encode = True
    except DriverError:
        encode = False
    driver = f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    return Hardware(driver, devices, encode, "" if devices else "the driver lists no device")


def _device(cuda: Any, cuvid: Any, index: int) -> Device:
    name, memory = ctypes.create_string_buffer(128), ctypes.c_size_t()
    _call(cuda, "cuDeviceGetName", name, len(name), index)
    _call(cuda, "cuDeviceTotalMem_v2", ctypes.byref(memory), index)
    make_current(index)
    found = tuple(_capability(cuvid, chroma, depth) for chroma in CHROMA for depth in DEPTHS)
    return Device(index, name.value.decode(errors="replace"), memory.value, found)


if __name__ == "__main__":
    print(json.dumps(look().to_json()))
