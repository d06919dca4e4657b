"""Writing ``hevc`` segments with an NVIDIA encoder: lossless 4:4:4, or refused.

The encoder's stream lacks the MD5 messages that the format wants (HEV-9) and has units that it
does not allow; both are put right from the samples, which are known here. The writer decodes and
compares every segment anyway (HEV-7): some encoders make 4:2:0 of this without a word.
"""

from __future__ import annotations

from fractions import Fraction
from hashlib import md5
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvformat.codecs.base import Bytes, SegmentShape
from kvformat.codecs.bitstream import PIXEL_FORMAT, check_stream, parse_nal_units
from kvformat.codecs.hevc import HevcCodec, make_planes
from kvformat.errors import InvalidError, UnsupportedError
from kvformat.gpu.frames import wrong_count
from kvformat.gpu.levels import escaped
from kvformat.gpu.probing import DOCTOR

ENCODER: Final = "hevc_nvenc"
OPTIONS: Final = {
    "preset": "p1",
    "tune": "lossless",
    "profile": "rext",
    "bf": "0",
    "g": "65535",
    "rc-lookahead": "0",
    "delay": "0",
    "aud": "0",
}
_PARAMETER_SETS: Final = (32, 33, 34)
_LAST_SLICE: Final = 20
_HASH_SEI: Final = bytes((40 << 1, 1))
_HASH_HEAD: Final = bytes((132, 49, 0))


def hash_unit(planes: NDArray[np.uint8]) -> bytes:
    """The suffix SEI unit with the MD5 digests of three planes, with its start code."""
    digests = b"".join(md5(plane.tobytes(), usedforsecurity=False).digest() for plane in planes)
    return b"\0\0\0\1" + _HASH_SEI + escaped(_HASH_HEAD + digests + b"\x80")


def conforming(stream: bytes, planes: NDArray[np.uint8], where: str) -> bytes:
    """``stream`` of ``planes`` ``[F, 3, height, width]`` with the units that the format allows.

    Raises ``segment.bitstream`` where the encoder's parameter sets are not those of HEV-4.
    """
    out = bytearray()
    picture = -1
    sets = 0
    for unit in parse_nal_units(stream, where):
        body = stream[unit.start : unit.stop]
        if unit.kind in _PARAMETER_SETS and picture < 0:
            sets += 1
        elif unit.kind <= _LAST_SLICE:
            if body[2] & 0x80:
                if picture >= 0:
                    out += hash_unit(planes[picture])
                picture += 1
                if picture >= len(planes):
                    raise wrong_count(where, len(planes), picture + 1)
        else:
            continue
        out += b"\0\0\0\1" + body
    if 0 <= picture < len(planes):
        out += hash_unit(planes[picture])
    frames, _, height, width = planes.shape
    check_stream(bytes(out), frames, width, height, where)
    return bytes(out)


class NvencCodec(HevcCodec):
    """Codec ``hevc`` whose streams an NVIDIA encoder makes."""

    def __init__(self, encoder: str = ENCODER, options: dict[str, str] | None = None) -> None:
        self._encoder = encoder
        self._options = OPTIONS if options is None else options

    def encode(self, integers: Bytes, shape: SegmentShape) -> bytes:
        """An Annex B stream; ``codec.unavailable`` where the device cannot make one."""
        layout = shape.layout
        if layout is None:
            raise ValueError("the hevc codec needs a layout")
        planes = make_planes(integers, shape, layout)
        stream = self._stream(planes)
        try:
            return conforming(stream, planes, "new segment")
        except InvalidError as error:
            raise _refused(
                "the streams of this encoder are not of the form that kvformat allows", error
            ) from error

    def encoder(self) -> str:
        """For the manifest."""
        import av

        codec = ".".join(str(part) for part in av.library_versions["libavcodec"])
        return f"{self._encoder} through PyAV {av.__version__}, libavcodec {codec}"

    def _stream(self, planes: NDArray[np.uint8]) -> bytes:
        import av

        frames, _, height, width = planes.shape
        stream = bytearray()
        try:
            context: Any = av.CodecContext.create(self._encoder, "w")
            context.width, context.height, context.pix_fmt = width, height, PIXEL_FORMAT
            context.time_base = Fraction(1, 25)
            context.options = dict(self._options)
            for index in range(frames):
                picture = av.VideoFrame(width, height, PIXEL_FORMAT)
                for plane, samples in zip(picture.planes, planes[index], strict=True):
                    rows = np.frombuffer(memoryview(plane), np.uint8)
                    rows.reshape(-1, plane.line_size)[:height, :width] = samples
                picture.pts = index
                for packet in context.encode(picture):
                    stream += memoryview(packet)
            for packet in context.encode(None):
                stream += memoryview(packet)
        except (av.error.FFmpegError, ValueError) as error:
            raise _refused("there is no NVIDIA encoder for lossless 4:4:4 HEVC", error) from error
        return bytes(stream)


def _refused(message: str, error: Exception) -> UnsupportedError:
    return UnsupportedError(
        "codec.unavailable",
        message,
        found=f"{type(error).__name__}: {error}"[:200],
        next_step=f"A100, H100 and H200 have no encoder: write with encoder=None. {DOCTOR}",
    )
