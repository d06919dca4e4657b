"""The codec ``hevc``: 8-bit planes as lossless 4:4:4 HEVC, three planes a picture (spec section 6).

A payload is one closed segment in Annex B form: VPS, SPS, PPS, then an IDR picture, decode order
equal to output order. HEVC decoders answer damage and lies with wrong pixels rather than with
errors, and allocate what the SPS says. So ``check_stream`` reads the parameter sets and counts
the pictures without a decoder, and ``iter_pictures`` calls it before it lets FFmpeg see a byte.
Damage inside slices is the business of the segment's digest; the MD5 SEI is a second line.

PyAV is imported when it is first needed: ``import kvformat`` must stay fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from kvformat.errors import InvalidError, UnsupportedError, UsageError

if TYPE_CHECKING:
    from av import VideoCodecContext, VideoFrame

_FLAT_BLOCK: Final = 32
PRESETS: Final = MappingProxyType(
    {
        "flat": ("ultrafast", f":min-cu-size={_FLAT_BLOCK}"),
        "ultrafast": ("ultrafast", ""),
        "superfast": ("superfast", ""),
        "medium": ("medium", ""),
    }
)
"""Name to (x265 preset, extra parameters). Slower ones than ``superfast`` gain nothing.

``flat`` tries one block size only: 1.7 times as fast at the same size where prediction gains
nothing (values), but 2-15 % larger where it does (keys). It needs both sides of the picture to
be multiples of 32, and is ``ultrafast`` for others.
"""
DEFAULT_PRESET: Final = "ultrafast"
PLANES: Final = 3
SLICES_PER_PICTURE: Final = 64
PIXEL_FORMAT: Final = "yuv444p"

_X265: Final = (
    "log-level=none:lossless=1:info=0:hash=1:bframes=0:ref=1:keyint=-1:scenecut=0:rc-lookahead=0"
    ":wpp=0:pools=none:frame-threads=1"
)
_STRICT: Final = {"err_detect": "crccheck+bitstream+buffer+explode"}
_SLICES: Final = frozenset({0, 1, 19, 20})
_IDR: Final = frozenset({19, 20})
_VPS, _SPS, _PPS = 32, 33, 34
_HASH_SEI: Final = 40
_HASH_HEAD: Final = bytes((132, 49, 0))  # decoded picture hash, 1 + 3 * 16 bytes, MD5
_HASH_BYTES: Final = 52
_SLICE_HEADER_BYTES: Final = 3
_PARAMETER_SET_BYTES: Final = 4096


# ---------------------------------------------------------------------------------------------
# Encoding and decoding


def encode_pictures(planes: NDArray[np.uint8], preset: str = DEFAULT_PRESET) -> bytes:
    """Encode ``planes`` ``[frames, 3, height, width]`` uint8 (any strides) without loss.

    The same x265 build gives the same bytes for the same input. x265 ignores parameters that
    it does not know, so the caller must decode and compare what comes back.
    """
    av = _library()
    if preset not in PRESETS:
        raise UsageError(
            "usage.argument", "unknown preset", expected=", ".join(PRESETS), found=preset
        )
    frames, _, height, width = planes.shape
    try:
        context = av.CodecContext.create("libx265", "w")
    except ValueError as error:
        raise _unavailable("encoder libx265") from error
    context.width, context.height, context.pix_fmt = width, height, PIXEL_FORMAT
    context.time_base = Fraction(1, 25)
    context.thread_count = 1
    if preset == "flat" and (width % _FLAT_BLOCK or height % _FLAT_BLOCK):
        preset = "ultrafast"  # x265 would code a larger picture and crop it
    name, extra = PRESETS[preset]
    context.options = {"preset": name, "x265-params": _X265 + extra}
    stream = bytearray()
    for index in range(frames):
        picture = av.VideoFrame(width, height, PIXEL_FORMAT)
        for target, source in zip(_views(picture), planes[index], strict=True):
            target[...] = source
        picture.pts = index
        for packet in context.encode(picture):
            stream += memoryview(packet)
    for packet in context.encode(None):
        stream += memoryview(packet)
    return bytes(stream)


def encoder_name() -> str:
    """The encoder and the libraries around it, for the manifest."""
    av = _library()
    codec = ".".join(str(part) for part in av.library_versions["libavcodec"])
    return f"libx265 through PyAV {av.__version__}, libavcodec {codec}"


def iter_pictures(
    payload: bytes | memoryview, frames: int, width: int, height: int, where: str
) -> Iterator[tuple[int, tuple[NDArray[np.uint8], ...]]]:
    """Check ``payload``, then decode it on this thread: yields a frame's index and its planes.

    The three planes are ``[height, width]`` uint8 views with padded rows, valid as long as
    they are referenced; do not write to them. The last frame is yielded before its successors
    are known to be absent, so run the iterator to its end before you trust the result.
    """
    av = _library()
    data = _as_bytes(payload)
    check_stream(data, frames, width, height, where)
    try:
        context = av.CodecContext.create("hevc", "r")
    except ValueError as error:
        raise _unavailable("decoder hevc") from error
    context.thread_type, context.thread_count = "NONE", 1
    context.options = dict(_STRICT)
    count = 0
    for picture in _decoded(av, context, data, where):
        found = f"{picture.width}x{picture.height} {picture.format.name}"
        wanted = f"{width}x{height} {PIXEL_FORMAT}"
        if found != wanted or picture.is_corrupt:
            raise _invalid("a decoded picture is not as declared", where, wanted, found)
        if count < frames:
            yield count, _views(picture)
        count += 1
    if count != frames:
        raise _invalid("wrong number of decoded pictures", where, frames, count)


def decode_pictures(
    payload: bytes | memoryview, frames: int, width: int, height: int, where: str
) -> NDArray[np.uint8]:
    """Check and decode ``payload`` into a new ``[frames, 3, height, width]`` uint8 array."""
    pictures = iter_pictures(payload, frames, width, height, where)
    first = next(pictures, None)  # the stream is checked before the memory is asked for
    planes = np.empty((frames, PLANES, height, width), np.uint8)
    while first is not None:
        index, views = first
        for target, view in zip(planes[index], views, strict=True):
            target[...] = view
        first = next(pictures, None)
    return planes


def _decoded(
    av: ModuleType, context: VideoCodecContext, payload: bytes, where: str
) -> Iterator[VideoFrame]:
    """All pictures of ``payload`` in output order; every FFmpeg error becomes InvalidError."""
    try:
        packets = context.parse(payload)
        packets += context.parse(None)  # the last access unit
        for packet in (*packets, None):
            yield from context.decode(packet)
    except av.error.FFmpegError as error:
        raise _invalid(f"the HEVC decoder refused the bitstream: {error}", where) from error


def _views(picture: VideoFrame) -> tuple[NDArray[np.uint8], ...]:
    """The planes of an 8-bit picture as ``[height, width]`` arrays that share its memory."""
    return tuple(
        np.frombuffer(memoryview(plane), np.uint8).reshape(-1, plane.line_size)[
            : picture.height, : picture.width
        ]
        for plane in picture.planes
    )


def _as_bytes(payload: bytes | memoryview) -> bytes:
    return payload if isinstance(payload, bytes) else bytes(payload)


def _library() -> ModuleType:
    try:
        import av
    except ImportError as error:
        raise _unavailable("PyAV") from error
    return av


def _unavailable(what: str) -> UnsupportedError:
    return UnsupportedError(
        "codec.unavailable",
        f"codec hevc needs {what}, which this installation lacks",
        next_step="Install the wheel of PyAV from PyPI, or use a track with another codec",
    )


def _invalid(
    message: str, where: str, expected: object = None, found: object = None
) -> InvalidError:
    return InvalidError("segment.bitstream", message, where=where, expected=expected, found=found)


# ---------------------------------------------------------------------------------------------
# Structure, without a decoder


@dataclass(frozen=True, slots=True)
class NalUnit:
    """One NAL unit: its type and the range of its bytes (header included) in the payload."""

    kind: int
    start: int
    stop: int


def parse_nal_units(
    payload: bytes | memoryview, where: str, most: int | None = None
) -> list[NalUnit]:
    """Split Annex B ``payload`` at its start codes and check every NAL unit header.

    More than ``most`` units are refused as soon as they are seen.

    A start code is ``00 00 01``, with at most one more zero in front; nothing else may stand
    between NAL units, and a NAL unit does not end in a zero byte.
    """
    data = _as_bytes(payload)
    units: list[NalUnit] = []
    mark = data.find(b"\0\0\1")
    if mark not in (0, 1) or data[:mark].strip(b"\0"):
        raise _invalid("the payload does not begin with a start code", where)
    while mark >= 0:
        start = mark + 3
        mark = data.find(b"\0\0\1", start)
        stop = len(data) if mark < 0 else mark
        if mark > 0 and data[mark - 1] == 0:
            stop -= 1
        if stop - start < _SLICE_HEADER_BYTES or data[stop - 1] == 0:
            raise _invalid("a NAL unit is too short or padded", f"{where}, byte {start}")
        if data.find(b"\0\0\0", start, stop) >= 0 or data.find(b"\0\0\2", start, stop) >= 0:
            raise _invalid("a NAL unit lacks emulation prevention", f"{where}, byte {start}")
        head = data[start]
        if head & 0x81 or data[start + 1] != 1:
            raise _invalid("a NAL unit header has a layer or sub-layer", f"{where}, byte {start}")
        units.append(NalUnit(head >> 1, start, stop))
        if most is not None and len(units) > most:
            raise _invalid("too many NAL units", f"{where}, byte {start}", most, "more")
    return units


def check_stream(
    payload: bytes | memoryview, frames: int, width: int, height: int, where: str
) -> None:
    """Check the structure of ``payload`` against the spec and the declared pictures.

    Costs one scan for start codes and the parsing of the parameter sets; of a slice it reads
    the bit that says whether the slice begins a picture.
    """
    data = _as_bytes(payload)
    units = parse_nal_units(data, where, 3 + frames * (SLICES_PER_PICTURE + 1))
    kinds = [unit.kind for unit in units]
    if kinds[:3] != [_VPS, _SPS, _PPS]:
        raise _invalid("the stream does not begin with VPS, SPS, PPS", where, found=kinds[:3])
    if len(kinds) < 4 or kinds[3] not in _IDR:
        raise _invalid("the first picture is not an IDR picture", where, found=kinds[3:4])
    if strange := sorted(set(kinds[3:]) - _SLICES - {_HASH_SEI}):
        raise _invalid("NAL unit type is not allowed", where, found=strange)
    pictures = _count_pictures(data, units[3:], where)
    if pictures != frames:
        raise _invalid("wrong number of coded pictures", where, frames, pictures)
    try:
        _check_vps(_bits(data, units[0]), where)
        _check_sps(_bits(data, units[1]), width, height, where)
        _check_pps(_bits(data, units[2]), where)
    except IndexError as error:
        raise _invalid("a parameter set ends too early", where) from error


def _count_pictures(data: bytes, units: list[NalUnit], where: str) -> int:
    """Count the pictures and check that each is one or more slices and then its MD5 message.

    Without that message the decoder would not notice that the last picture is cut off.
    """
    pictures = 0
    inside = False
    for unit in units:
        place = f"{where}, byte {unit.start}"
        if unit.kind == _HASH_SEI:
            body = _unescaped(data, unit)
            if len(body) != _HASH_BYTES or body[:3] != _HASH_HEAD or body[-1] != 0x80:
                raise _invalid("not the MD5 message of three planes", place)
            if not inside:
                raise _invalid("an MD5 message without a picture", place)
            inside = False
            continue
        first = data[unit.start + 2] & 0x80
        if bool(first) == inside:
            raise _invalid("a picture does not end with its MD5 message", place)
        pictures += not inside
        inside = True
    if inside:
        raise _invalid("the last picture does not end with its MD5 message", where)
    return pictures


class _Bits:
    """Reads the RBSP of a parameter set, most significant bit first."""

    def __init__(self, rbsp: bytes) -> None:
        self._value = int.from_bytes(rbsp, "big")
        self._left = 8 * len(rbsp)

    def u(self, count: int) -> int:
        """An unsigned integer of ``count`` bits."""
        if count > self._left:
            raise IndexError(count)
        self._left -= count
        return self._value >> self._left & ((1 << count) - 1)

    def ue(self) -> int:
        """An unsigned Exp-Golomb number of at most 32 leading zeros."""
        zeros = 0
        while not self.u(1):
            zeros += 1
            if zeros > 32:
                raise IndexError(zeros)
        return (1 << zeros) - 1 + self.u(zeros)

    def at_end(self) -> bool:
        """Whether only the stop bit and the zeros that fill its byte are left."""
        rest = self._value & ((1 << self._left) - 1)
        return 1 <= self._left <= 8 and rest == 1 << (self._left - 1)


def _unescaped(data: bytes, unit: NalUnit) -> bytes:
    """The body of a unit without its two header bytes and the emulation prevention bytes."""
    return data[unit.start + 2 : unit.stop].replace(b"\0\0\3", b"\0\0")


def _bits(data: bytes, unit: NalUnit) -> _Bits:
    if unit.stop - unit.start > _PARAMETER_SET_BYTES:
        raise IndexError(unit)
    return _Bits(_unescaped(data, unit))


def _need(name: str, found: int, expected: int, where: str) -> None:
    if found != expected:
        raise _invalid(f"{name} of the bitstream is not allowed", where, expected, found)


def _check_vps(bits: _Bits, where: str) -> None:
    """One layer, one sub-layer. The rest of the VPS does not reach a decoder of one layer."""
    _need("vps_video_parameter_set_id", bits.u(4), 0, where)
    bits.u(2)
    _need("vps_max_layers_minus1", bits.u(6), 0, where)
    _need("vps_max_sub_layers_minus1", bits.u(3), 0, where)
    bits.u(17)
    _check_profile(bits, where)


def _check_profile(bits: _Bits, where: str) -> None:
    _need("general_profile_space", bits.u(2), 0, where)
    bits.u(1)
    _need("general_profile_idc", bits.u(5), 4, where)
    bits.u(32 + 48 + 8)  # compatibility and constraint flags, level_idc


def _check_sps(bits: _Bits, width: int, height: int, where: str) -> None:
    _need("sps_video_parameter_set_id", bits.u(4), 0, where)
    _need("sps_max_sub_layers_minus1", bits.u(3), 0, where)
    bits.u(1)
    _check_profile(bits, where)
    _need("sps_seq_parameter_set_id", bits.ue(), 0, where)
    _need("chroma_format_idc", bits.ue(), 3, where)
    _need("separate_colour_plane_flag", bits.u(1), 0, where)
    _need("pic_width_in_luma_samples", bits.ue(), width, where)
    _need("pic_height_in_luma_samples", bits.ue(), height, where)
    _need("conformance_window_flag", bits.u(1), 0, where)
    _need("bit_depth_luma_minus8", bits.ue(), 0, where)
    _need("bit_depth_chroma_minus8", bits.ue(), 0, where)
    poc_bits = bits.ue() + 4
    bits.u(1)
    _need("sps_max_dec_pic_buffering_minus1 > 4", int(bits.ue() > 4), 0, where)
    _need("sps_max_num_reorder_pics", bits.ue(), 0, where)
    bits.ue()
    for _ in range(6):  # block sizes and transform depths
        bits.ue()
    _need("scaling_list_enabled_flag", bits.u(1), 0, where)
    bits.u(2)  # amp, sample adaptive offset
    _need("pcm_enabled_flag", bits.u(1), 0, where)
    _skip_reference_sets(bits, bits.ue(), where)
    _need("long_term_ref_pics_present_flag", bits.u(1), 0, where)
    bits.u(2)  # temporal motion vectors, strong intra smoothing
    if bits.u(1):
        _skip_vui(bits, where)
    _need("sps_extension_present_flag", bits.u(1), 0, where)
    _need("end of the SPS", int(bits.at_end()), 1, where)
    _need("log2_max_pic_order_cnt_lsb > 16", int(poc_bits > 16), 0, where)


def _skip_reference_sets(bits: _Bits, count: int, where: str) -> None:
    """Short-term reference picture sets: at most one earlier picture each, coded as such."""
    _need("num_short_term_ref_pic_sets > 64", int(count > 64), 0, where)
    for index in range(count):
        if index:
            _need("inter_ref_pic_set_prediction_flag", bits.u(1), 0, where)
        earlier, later = bits.ue(), bits.ue()
        _need("num_negative_pics > 1", int(earlier > 1), 0, where)
        _need("num_positive_pics", later, 0, where)
        for _ in range(earlier):
            bits.ue()
            bits.u(1)


def _skip_vui(bits: _Bits, where: str) -> None:
    """Video usability information: no meaning here, but the extension flags lie behind it."""
    if bits.u(1) and bits.u(8) == 255:  # aspect ratio
        bits.u(32)
    if bits.u(1):  # overscan
        bits.u(1)
    if bits.u(1):  # video signal type
        bits.u(4)
        if bits.u(1):
            bits.u(24)
    if bits.u(1):  # chroma location
        bits.ue()
        bits.ue()
    bits.u(1)
    _need("field_seq_flag", bits.u(1), 0, where)
    bits.u(1)
    _need("default_display_window_flag", bits.u(1), 0, where)
    if bits.u(1):  # timing
        bits.u(64)
        if bits.u(1):
            bits.ue()
        _need("vui_hrd_parameters_present_flag", bits.u(1), 0, where)
    if bits.u(1):  # bitstream restrictions
        bits.u(3)
        for _ in range(5):
            bits.ue()


def _check_pps(bits: _Bits, where: str) -> None:
    _need("pps_pic_parameter_set_id", bits.ue(), 0, where)
    _need("pps_seq_parameter_set_id", bits.ue(), 0, where)
    bits.u(7)  # dependent slices, output flag, extra slice header bits, sign hiding, cabac init
    for _ in range(3):  # reference index defaults, initial QP
        bits.ue()
    bits.u(2)  # constrained intra prediction, transform skip
    if bits.u(1):  # QP deltas
        bits.ue()
    bits.ue()
    bits.ue()
    bits.u(3)  # chroma QP offsets in slices, weighted prediction
    _need("transquant_bypass_enabled_flag", bits.u(1), 1, where)
    _need("tiles_enabled_flag", bits.u(1), 0, where)
    bits.u(2)  # wavefronts, loop filter across slices
    if bits.u(1):  # deblocking control
        bits.u(1)
        if not bits.u(1):
            bits.ue()
            bits.ue()
    _need("pps_scaling_list_data_present_flag", bits.u(1), 0, where)
    bits.u(1)
    bits.ue()
    bits.u(1)
    _need("pps_extension_present_flag", bits.u(1), 0, where)
    _need("end of the PPS", int(bits.at_end()), 1, where)
