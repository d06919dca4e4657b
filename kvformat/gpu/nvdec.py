"""NVDEC through PyAV: FFmpeg parses, the engine decodes, frames stay in device memory.

Frames own their memory. FFmpeg copies each from the engine's surface on the default stream, where
restoring is queued too, so that no event is needed between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from kvformat.errors import InvalidError
from kvformat.gpu.driver import DriverError, make_current
from kvformat.gpu.frames import Picture, access_units, refused, wrong_count
from kvformat.gpu.levels import LEVEL_8_5, with_level
from kvformat.gpu.probing import DOCTOR, require_device
from kvformat.gpu.surfaces import plane_at

SURFACE: Final = "cuda"
PLANAR: Final = "yuv444p"


class NvdecDecoder:
    """The engines of one device."""

    name = "nvdec"

    def __init__(self, device: Any, *, level_idc: int = LEVEL_8_5) -> None:
        """``device`` is a CUDA device, or the CPU with the pretend driver of the tests."""
        self.device = device
        self.level_idc = level_idc
        self.index = device.index or 0
        self.hardware = require_device(self.index)
        self.sessions = self.hardware.capability().engines

    def open(self, width: int, height: int) -> NvdecSession:
        """See ``FrameDecoder``."""
        require_size(self.hardware, width, height)
        return NvdecSession(self, width, height)


def require_size(hardware: Any, width: int, height: int) -> None:
    """Refuse what the engines cannot decode, before a decoder is made."""
    problem = hardware.capability().refusal(width, height)
    if problem:
        raise refused(
            f"{hardware.name} does not decode pictures of {width} x {height}", found=problem
        )


def bind(index: int) -> None:
    """Have the device's context current on this thread."""
    try:
        make_current(index)
    except DriverError as error:
        raise refused("the GPU cannot be used", found=error, next_step=DOCTOR) from error


class NvdecSession:
    """One codec context, used again from segment to segment as long as nothing fails."""

    def __init__(self, decoder: NvdecDecoder, width: int, height: int) -> None:
        self._decoder, self._width, self._height = decoder, width, height
        self._context: Any = None

    def _open(self) -> Any:
        import av
        from av.codec.hwaccel import HWAccel

        bind(self._decoder.index)
        device = HWAccel(
            device_type="cuda",
            device=str(self._decoder.index),
            allow_software_fallback=False,
            options={"primary_ctx": "0", "current_ctx": "1"},
            is_hw_owned=True,
        )
        context = av.CodecContext.create("hevc", "r", hwaccel=device)
        context.thread_type, context.thread_count = "NONE", 1
        return context

    def decode(self, payload: bytes, frames: int, where: str) -> Iterator[Picture]:
        """See ``Session``."""
        import av

        level = self._decoder.level_idc
        data = payload if level == LEVEL_8_5 else with_level(payload, level, where)
        context, self._context = self._context, None  # kept only if all goes well
        count = 0
        try:
            context = context or self._open()
            bind(self._decoder.index)
            for frame in _decoded(av, context, access_units(data, where)):
                picture = self._picture(frame, count, where)
                count += 1
                if count <= frames:
                    yield picture
            if count != frames:
                raise wrong_count(where, frames, count)
            context.flush_buffers()
            self._context = context
        except av.error.InvalidDataError as error:
            raise InvalidError(
                "segment.bitstream", f"the decoder refused the bitstream: {error}", where=where
            ) from error
        except av.error.FFmpegError as error:
            raise refused(
                "the NVIDIA decoder failed", found=f"{type(error).__name__}: {error}", where=where
            ) from error

    def _picture(self, frame: Any, index: int, where: str) -> Picture:
        """A frame in device memory; anything else would be a silent software decode."""
        inner = getattr(frame, "sw_format", None)
        found = f"{frame.format.name} of {getattr(inner, 'name', 'nothing')}"
        if found != f"{SURFACE} of {PLANAR}":
            raise refused(
                "the decoder left the device or changed the format",
                expected=f"{SURFACE} of {PLANAR}",
                found=found,
                where=where,
            )
        if (frame.width, frame.height) != (self._width, self._height):
            raise InvalidError(
                "segment.bitstream",
                "a decoded picture is not as declared",
                where=where,
                expected=f"{self._width}x{self._height}",
                found=f"{frame.width}x{frame.height}",
            )
        planes = tuple(
            plane_at(
                plane.buffer_ptr, self._height, self._width, plane.line_size, self._decoder.device
            )
            for plane in frame.planes
        )
        return Picture(index, planes)

    def close(self) -> None:
        """See ``Session``."""
        self._context = None


def _decoded(av: Any, context: Any, units: list[bytes]) -> Iterator[Any]:
    """Frames in order, each kept alive until the next is asked for."""
    for number, unit in enumerate(units):
        packet = av.Packet(unit)
        packet.pts = number
        yield from context.decode(packet)
    yield from context.decode(None)
