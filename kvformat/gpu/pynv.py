"""NVDEC through PyNvVideoCodec: NVIDIA's own parser, one packet a picture, frames to copy from.

The wrapper overwrites a frame at the next ``Decode`` and waits for the default stream in it, so
restoring, which is queued on that stream, is over by then.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from kvformat.errors import InvalidError
from kvformat.gpu.frames import PLANES, Picture, access_units, refused, wrong_count
from kvformat.gpu.levels import LEVEL_8_5, with_level
from kvformat.gpu.libraries import load_pynv
from kvformat.gpu.nvdec import bind, require_size
from kvformat.gpu.probing import require_device
from kvformat.gpu.surfaces import plane_at

END_OF_PICTURE: Final = 8


class PynvDecoder:
    """The engines of one device."""

    name = "nvdec-pynv"

    def __init__(self, device: Any, *, level_idc: int = LEVEL_8_5) -> None:
        """``device`` is a CUDA device, or the CPU with the pretend driver of the tests."""
        self.device = device
        self.level_idc = level_idc
        self.index = device.index or 0
        # Before the library is imported: it ends the process where CUDA does not start.
        self.hardware = require_device(self.index)
        bind(self.index)
        self.library = load_pynv()
        self.sessions = self.hardware.capability().engines

    def open(self, width: int, height: int) -> PynvSession:
        """See ``FrameDecoder``."""
        require_size(self.hardware, width, height)
        return PynvSession(self, width, height)


class PynvSession:
    """One decoder object, used again from segment to segment as long as nothing fails."""

    def __init__(self, decoder: PynvDecoder, width: int, height: int) -> None:
        self._decoder, self._width, self._height = decoder, width, height
        self._inner: Any = None

    def _open(self) -> Any:
        library = self._decoder.library
        bind(self._decoder.index)
        return library.CreateDecoder(
            gpuid=self._decoder.index,
            codec=library.cudaVideoCodec.HEVC,
            cudacontext=0,
            cudastream=0,
            usedevicememory=True,
            latency=library.DisplayDecodeLatencyType.LOW,
        )

    def decode(self, payload: bytes, frames: int, where: str) -> Iterator[Picture]:
        """See ``Session``."""
        library = self._decoder.library
        level = self._decoder.level_idc
        data = payload if level == LEVEL_8_5 else with_level(payload, level, where)
        inner, self._inner = self._inner, None  # kept only if all goes well
        count = 0
        try:
            bind(self._decoder.index)
            inner = inner or self._open()
            for frame in self._frames(inner, access_units(data, where)):
                picture = self._picture(frame, count, where)
                count += 1
                if count <= frames:
                    yield picture
            if count != frames:
                raise wrong_count(where, frames, count)
            self._inner = inner
        except (
            library.PyNvVCException,
            library.PyNvVCExceptionUnsupported,
            RuntimeError,
        ) as error:
            said = " ".join(str(error).split())[:200]
            raise refused("the NVIDIA decoder failed", found=said, where=where) from error

    def _frames(self, inner: Any, units: list[bytes]) -> Iterator[Any]:
        library = self._decoder.library
        for number, unit in enumerate(units):
            held = np.frombuffer(unit, np.uint8)
            packet = library.PacketData()
            packet.bsl, packet.bsl_data = len(unit), held.ctypes.data
            packet.pts, packet.decode_flag = number, END_OF_PICTURE
            yield from inner.Decode(packet)
        yield from inner.Decode(library.PacketData())

    def _picture(self, frame: Any, index: int, where: str) -> Picture:
        library = self._decoder.library
        if frame.format != library.Pixel_Format.YUV444:  # it takes NV12 without a word
            raise refused(
                "the decoder changed the format",
                expected="YUV444",
                found=str(frame.format),
                where=where,
            )
        shape = tuple(int(side) for side in frame.shape)
        if shape != (PLANES * self._height, self._width) or frame.getPTS() != index:
            raise InvalidError(
                "segment.bitstream",
                "a decoded picture is not as declared",
                where=where,
                expected=f"{self._width}x{self._height}, picture {index}",
                found=f"{shape}, picture {frame.getPTS()}",
            )
        start = int(frame.GetPtrToPlane(0))
        step = self._height * self._width
        planes = tuple(
            plane_at(
                start + number * step,
                self._height,
                self._width,
                self._width,
                self._decoder.device,
            )
            for number in range(PLANES)
        )
        return Picture(index, planes)

    def close(self) -> None:
        """See ``Session``."""
        self._inner = None
