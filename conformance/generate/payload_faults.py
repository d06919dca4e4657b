"""Level faulty: payloads of zstd and hevc behind right digests that break a rule of their codec."""

# ruff: noqa: E501, PLR0917 - long sentences and tables

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from conformance.generate.compose import (
    HEVC,
    QUALITY,
    ZSTD,
    Array,
    Entry,
    Quant,
    RawGroup,
    compose,
    floats,
    pack,
    raw_frame,
    small,
    typical,
    zstd_payload,
)
from conformance.generate.core import good
from conformance.generate.faults import fault
from conformance.generate.suite import Suite, decode
from tests.reference import zstd_rows

# isort: split
from kvconform.fuzz.pieces import PER_BYTE

ROWS, TOKENS = 24, 6


def add_cases(suite: Suite) -> None:
    """All of this module."""
    _zstd(suite)
    _radix(suite)
    _hevc(suite)
    _parameter_sets(suite)
    _pictures(suite)


def group_base() -> Any:
    """One group of three layers, two heads and four dims; a single zstd segment."""
    source, quant = typical("zstd", (3, TOKENS, 2, 4), "float16", patches=(0,))
    return compose(
        [RawGroup("key", "key", "float16", (0, 1, 2), source, {QUALITY: quant})], TOKENS, [ZSTD]
    )


def checksum(content: bytes) -> bytes:
    """The low four bytes of XXH64 of the content; whatever the blocks, they end a zstd frame."""
    import zstandard

    return zstandard.ZstdCompressor(write_checksum=True).compress(content)[-4:]


def _zstd(suite: Suite) -> None:
    base = group_base()
    rows = zstd_rows(base.segments[ZSTD][0].payload, ROWS, TOKENS)
    content = rows.tobytes()
    size, eight = bytes([len(content)]), struct.pack("<Q", len(content))

    def plain(part: Array = rows) -> Entry:
        return len(part), raw_frame(part.tobytes()), 0, 256

    def add(slug: str, requirements: str, data: bytes, what: str, why: str) -> None:
        builder = base.copy()
        builder.segments[ZSTD][0].payload = data
        fault(
            suite,
            slug,
            requirements,
            builder.build(),
            "segment.payload",
            what,
            why,
            family="zst",
            requires=["zstd"],
            more=[decode(ZSTD, code="segment.payload")],
        )

    whole = zstd_payload([plain()])
    why = "Counts and lengths are checked against the record before a frame is decoded."
    for count in (0, ROWS - 1, ROWS + 1, 2**32 - 1):
        add(
            f"row-count-{count}",
            "ZST-1",
            zstd_payload([(count, plain()[1], 0, 256)]),
            f"One frame says {count:,} of {ROWS} rows.",
            why,
        )
    add(
        "rows-missing",
        "ZST-1",
        zstd_payload([plain(rows[:5]), plain(rows[5:-1])]),
        "Two frames hold one row too few.",
        why,
    )
    add(
        "frame-without-rows",
        "ZST-1",
        zstd_payload([plain(), (0, raw_frame(b""), 0, 256)]),
        "A last frame of no rows.",
        why,
    )
    add(
        "rows-too-many",
        "ZST-1",
        zstd_payload([plain(), plain(rows[:1])]),
        "A second frame holds a row too many.",
        why,
    )
    add("no-frames", "ZST-1", zstd_payload([]), "No frames.", why)
    add("one-byte", "ZST-2", b"\0", "A payload of one byte.", why)
    add("byte-behind-payload", "ZST-2", whole + b"\0", "A byte behind the last frame.", why)
    add(
        "frame-behind-payload",
        "ZST-2",
        zstd_payload([plain()], tail=raw_frame(b"")),
        "A frame behind the last that the table names.",
        why,
    )
    for cut in (3, 4, 13, 14, 20, len(whole) - 1):
        add(
            f"payload-cut-to-{cut}",
            "ZST-2",
            whole[:cut],
            f"The payload ends after {cut} of {len(whole)} bytes.",
            why,
        )
    for count in (0, 2, 2**32 - 1):
        add(
            f"frame-count-{count}",
            "ZST-2 ORD-4",
            zstd_payload([plain()], count=count),
            f"frame_count is {count:,}, one frame is there.",
            why,
        )
    for length in (0, 2**32 - 1, len(plain()[1]) - 1, len(plain()[1]) + 1):
        add(
            f"frame-bytes-{length}",
            "ZST-2 CNV-3",
            whole[:8] + struct.pack("<I", length) + whole[12:],
            f"frame_bytes is {length:,}.",
            why,
        )
    why = "One form of frame keeps decoders simple and bounds their memory."
    block = (len(content) << 3 | 1).to_bytes(3, "little") + content
    frames = {
        "no-content-size": (
            "ZST-3",
            raw_frame(content, 0x00, b"\x58"),
            "No content size in the frame header",
        ),
        "checksum": ("ZST-3", raw_frame(content, 0x24, size) + bytes(4), "A content checksum"),
        "checksum-that-is-right": (
            "ZST-3",
            raw_frame(content, 0x24, size) + checksum(content),
            "A content checksum, which is that of the content",
        ),
        "dictionary-id": ("ZST-3", raw_frame(content, 0x21, b"\1" + size), "A dictionary id"),
        "dictionary-id-of-0": (
            "ZST-3",
            raw_frame(content, 0x21, b"\0" + size),
            "The flag of a dictionary id, which is 0",
        ),
        "reserved-bit": (
            "ZST-3",
            raw_frame(content, 0x28, size),
            "The reserved bit of the descriptor is set",
        ),
        "unused-bit": (
            "ZST-3",
            raw_frame(content, 0x30, size),
            "The unused bit of the descriptor is set",
        ),
        "window-above-8-mib": (
            "ZST-3",
            raw_frame(content, 0xC0, b"\x69" + eight),
            "A window of 9 MiB",
        ),
        "content-size-145": (
            "ZST-4 ZST-7",
            raw_frame(content, 0x20, b"\x91"),
            "A content size one too large",
        ),
        "content-size-143": (
            "ZST-4 ZST-7",
            raw_frame(content, 0x20, b"\x8f"),
            "A content size one too small",
        ),
        "content-size-0": ("ZST-4", raw_frame(content, 0x20, b"\0"), "A content size of 0"),
        "less-content": ("ZST-4", raw_frame(content[:100], 0x20, size), "Less content than stated"),
        "more-content": (
            "ZST-4 LIM-3",
            raw_frame(content + b"\0", 0x20, size),
            "More content than stated",
        ),
        "reserved-block-type": (
            "ZST-3",
            raw_frame(content, 0x20, size, b"\x07\0\0"),
            "The reserved block type",
        ),
        "no-block": ("ZST-3", raw_frame(content, 0x20, size, b""), "No block"),
        "no-last-block": (
            "ZST-3",
            raw_frame(content, 0x20, size, (len(content) << 3).to_bytes(3, "little") + content),
            "No last block",
        ),
        "skippable": ("ZST-3", b"\x50\x2a\x4d\x18\x04\0\0\0abcd", "A skippable frame"),
        "skippable-in-front": (
            "ZST-3",
            b"\x50\x2a\x4d\x18\0\0\0\0" + raw_frame(content, 0x20, size),
            "A skippable frame in front",
        ),
        "two-zstd-frames": (
            "ZST-3",
            raw_frame(content[:72]) + raw_frame(content[72:]),
            "Two zstd frames in one entry",
        ),
        "empty-frame-behind": (
            "ZST-3",
            raw_frame(content, 0x20, size) + raw_frame(b""),
            "An empty zstd frame behind",
        ),
        "byte-behind-frame": (
            "ZST-3",
            raw_frame(content, 0x20, size) + b"\0",
            "A byte behind the frame",
        ),
        "other-magic": (
            "ZST-3",
            b"\x27" + raw_frame(content, 0x20, size)[1:],
            "Another magic number",
        ),
        "legacy-magic": (
            "ZST-3",
            b"\x24\xb5\x2f\xfd" + raw_frame(content, 0x20, size)[4:],
            "The magic number of zstd 0.4",
        ),
        "magic-alone": ("ZST-3", b"\x28\xb5\x2f\xfd", "The magic number alone"),
        "nothing": ("ZST-3", b"", "Nothing"),
        "gzip": ("ZST-3", b"\x1f\x8b\x08\0" + bytes(40), "A gzip header"),
        "garbage": ("ZST-3", bytes(range(200)), "Garbage"),
        "offset-behind-start": (
            "ZST-3",
            raw_frame(content, 0x20, size, b"\x45\0\0" + bytes(8)),
            "A compressed block that makes no sense",
        ),
    }
    assert block
    for slug, (requirements, body, what) in frames.items():
        add(f"frame-{slug}", requirements, zstd_payload([(ROWS, body, 0, 256)]), f"{what}.", why)
    why = (
        "The radix says how many tokens share a byte; others than those of the table are undefined."
    )
    half = raw_frame(bytes(ROWS * TOKENS // 2))
    for low, radix in ((0, 17), (0, 255), (0, 128), (1, 256), (255, 2), (241, 16), (250, 7)):
        body = half if 7 <= radix <= 16 else plain()[1]
        add(
            f"low-{low}-radix-{radix}",
            "ZST-5",
            zstd_payload([(ROWS, body, low, radix)]),
            f"low is {low}, the radix {radix}.",
            why,
        )


def _radix(suite: Suite) -> None:
    why = "Two payloads must not mean the same: what the digits leave over must be zero."
    for radix in (2, 3, 4, 5, 7, 15):
        p = PER_BYTE[radix]
        tokens = p + 1
        q = (np.arange(6 * tokens) % radix).astype(np.uint8).reshape(1, tokens, 2, 3)
        rows = q.transpose(0, 3, 2, 1).reshape(6, tokens)
        group = RawGroup(
            "key",
            "key",
            "float32",
            (0,),
            floats("r", q.shape, "float32"),
            {QUALITY: Quant(q, np.float32([1]), np.int16([0]))},
        )
        base = compose([group], tokens, [ZSTD])
        for slug, place, value in (
            ("byte-too-large", (3, 0), radix**p),
            ("digits-behind-the-last-token", (5, -1), None),
        ):
            packed = pack(rows, 0, radix)
            if value is None:
                packed[place] += radix
            elif value > 255:
                continue
            else:
                packed[place] = value
            builder = base.copy()
            builder.segments[ZSTD][0].payload = zstd_payload(
                [(6, raw_frame(packed.tobytes()), 0, radix)]
            )
            fault(
                suite,
                f"radix-{radix}-{slug}",
                "ZST-6",
                builder.build(),
                "segment.payload",
                f"Radix {radix}, {p} tokens to a byte: {slug.replace('-', ' ')}.",
                why,
                family="zst",
                requires=["zstd"],
            )


# --- hevc --------------------------------------------------------------------------------------

Units = list[bytes]


def units(data: bytes) -> Units:
    """NAL units without start codes."""
    return [part.rstrip(b"\0") for part in data.split(b"\0\0\1")[1:]]


def joined(parts: Units, code: bytes = b"\0\0\0\1") -> bytes:
    """An Annex B stream."""
    return b"".join(code + part for part in parts)


def encode(pictures: Array, form: str = "yuv444p", extra: str = "", lossless: bool = True) -> bytes:
    """Any x265 stream of uint8 ``[frames, planes, height, width]``."""
    from fractions import Fraction

    import av

    context: Any = av.CodecContext.create("libx265", "w")
    frames, _, height, width = pictures.shape
    context.width, context.height, context.pix_fmt = width, height, form
    context.time_base = Fraction(1, 25)
    head = "log-level=none:info=0:hash=1:bframes=0:ref=1:keyint=-1:scenecut=0:rc-lookahead=0"
    head += ":wpp=0:pools=none:frame-threads=1" + (":lossless=1" if lossless else ":crf=30")
    context.options = {"preset": "ultrafast", "x265-params": head + extra}
    data = b""
    for index in range(frames):
        picture = av.VideoFrame(width, height, form)
        for number, plane in enumerate(picture.planes):
            raw = np.full((plane.height, plane.line_size), 128, np.uint8)
            source = pictures[index, number][: plane.height, : plane.width]
            raw[:, : source.shape[1]] = source
            plane.update(raw.tobytes())
        picture.pts = index
        data += b"".join(bytes(packet) for packet in context.encode(picture))
    return data + b"".join(bytes(packet) for packet in context.encode(None))


def segment(suite: Suite) -> tuple[bytes, dict[str, Any]]:
    """Payload and layout of segment 0 of the small artifact."""
    builder = small(suite, [HEVC])
    return builder.segments[HEVC][0].payload, builder.manifest["tracks"][0]["layouts"][0]


def planes(suite: Suite, number: int = 0) -> Array:
    """The decoded pictures of a segment of the small artifact."""
    from kvformat.codecs import bitstream

    builder = small(suite, [HEVC])
    return bitstream.decode_pictures(builder.segments[HEVC][number].payload, 1, 144, 144, "here")


def with_stream(suite: Suite, data: bytes, number: int = 0) -> bytes:
    """The small artifact with another stream."""
    builder = small(suite, [HEVC])
    builder.segments[HEVC][number].payload = data
    return builder.build()


def refused(
    suite: Suite,
    slug: str,
    requirements: str,
    data: bytes,
    what: str,
    why: str,
    code: str = "segment.bitstream",
) -> None:
    """A stream that is refused by verify and by decode."""
    fault(
        suite,
        slug,
        requirements,
        with_stream(suite, data),
        code,
        what,
        why,
        family="hev",
        requires=["hevc"],
        more=[decode(HEVC, code=code)] if code == "segment.bitstream" else (),
        how="A valid artifact with another stream in its first segment; every digest of the stored bytes is right.",
    )


def accepted(suite: Suite, slug: str, requirements: str, data: bytes, what: str, why: str) -> None:
    """Another stream of the same pictures."""
    good(
        suite,
        "hev",
        slug,
        requirements.split(),
        with_stream(suite, data),
        [HEVC],
        what,
        why,
        level="uncommon",
        how="A valid artifact with another stream in its first segment.",
    )


def _hevc(suite: Suite) -> None:
    data, _ = segment(suite)
    mine = units(data)
    assert [unit[0] >> 1 for unit in mine] == [32, 33, 34, 20, 40]

    def made(name: str, make: Callable[[], bytes]) -> bytes:
        return suite.stream(f"other-{name}", make)

    def p() -> Array:
        return planes(suite)

    why = "Decoders accept all of HEVC; the format is a small part of it, checked before a decoder sees a byte."
    other = "Whether one stream or another holds the pictures is the writer's choice."
    accepted(
        suite,
        "start-codes-of-3-bytes",
        "HEV-1 HEV-10",
        joined(mine, b"\0\0\1"),
        "All start codes have three bytes.",
        other,
    )
    accepted(
        suite,
        "start-codes-of-4-bytes",
        "HEV-1 HEV-10",
        joined(mine),
        "All start codes have four bytes.",
        other,
    )
    streams: dict[str, tuple[str, str, bytes]] = {
        "two-pictures": (
            "HEV-8 HEV-2",
            "Two pictures, the layout says one",
            made("two", lambda: encode(np.repeat(p(), 2, axis=0))),
        ),
        "wider": (
            "HEV-6 HEV-2 HEV-8",
            "Pictures 16 samples wider",
            made("wider", lambda: encode(np.pad(p(), ((0, 0), (0, 0), (0, 0), (0, 16))))),
        ),
        "higher": (
            "HEV-6 HEV-2",
            "Pictures 16 samples higher",
            made("higher", lambda: encode(np.pad(p(), ((0, 0), (0, 0), (0, 16), (0, 0))))),
        ),
        "420": ("HEV-4", "4:2:0 instead of 4:4:4", made("420", lambda: encode(p(), "yuv420p"))),
        "422": ("HEV-4", "4:2:2 instead of 4:4:4", made("422", lambda: encode(p(), "yuv422p"))),
        "monochrome": ("HEV-4", "Monochrome", made("gray", lambda: encode(p(), "gray"))),
        "ten-bits": ("HEV-4", "Ten bits a sample", made("ten", lambda: encode(p(), "yuv444p10le"))),
        "rgb": (
            "HEV-11",
            "Components that are called R, G and B",
            made("rgb", lambda: encode(p(), "gbrp")),
        ),
        "matrix-0": (
            "HEV-11",
            "matrix_coeffs 0",
            made("matrix", lambda: encode(p(), extra=":colormatrix=gbr")),
        ),
        "cropped": (
            "HEV-4",
            "A conformance window",
            made("crop", lambda: encode(p()[:, :, :136], extra=":min-cu-size=16")),
        ),
        "lossy": (
            "HEV-4",
            "A stream that is not lossless",
            made("lossy", lambda: encode(p(), lossless=False)),
        ),
        "no-hash": (
            "HEV-9",
            "No picture hashes",
            made("nohash", lambda: encode(p(), extra=":hash=0")),
        ),
        "crc": (
            "HEV-9",
            "Picture hashes of kind CRC",
            made("crc", lambda: encode(p(), extra=":hash=2")),
        ),
        "checksum": (
            "HEV-9",
            "Picture hashes of kind checksum",
            made("sum", lambda: encode(p(), extra=":hash=3")),
        ),
        "delimiter": (
            "HEV-5",
            "An access unit delimiter",
            made("aud", lambda: encode(p(), extra=":aud=1")),
        ),
        "info-sei": (
            "HEV-5",
            "A prefix SEI unit that names the encoder",
            made("info", lambda: encode(p(), extra=":info=1")),
        ),
        "headers-twice-stream": ("HEV-1", "The whole stream twice", joined(mine) * 2),
        "hash-dropped": ("HEV-9", "The picture hash is missing", joined(mine[:-1])),
        "hash-twice": ("HEV-9", "The picture hash stands there twice", joined([*mine, mine[-1]])),
        "hash-cut": (
            "HEV-9",
            "The picture hash is cut",
            joined([*mine[:-1], mine[-1][:-4] + b"\x80"]),
        ),
        "no-vps": ("HEV-1", "No VPS", joined(mine[1:])),
        "no-sps": ("HEV-1", "No SPS", joined([mine[0], *mine[2:]])),
        "no-pps": ("HEV-1", "No PPS", joined([*mine[:2], *mine[3:]])),
        "parameter-sets-twice": (
            "HEV-1 HEV-5",
            "VPS, SPS and PPS twice",
            joined([*mine[:3], *mine]),
        ),
        "sps-first": ("HEV-1", "SPS before VPS", joined([mine[1], mine[0], *mine[2:]])),
        "no-picture": ("HEV-1 HEV-2", "Parameter sets and no picture", joined(mine[:3])),
        "end-of-sequence": ("HEV-5", "An end of sequence", joined([*mine, b"\x48\x01\x80"])),
        "filler-unit": ("HEV-5", "A filler data unit", joined([*mine, b"\x4c\x01\xff\x80"])),
        "reserved-type": (
            "HEV-5",
            "A NAL unit of a reserved type",
            joined([*mine, b"\x60\x01\x80"]),
        ),
        "unspecified-type": (
            "HEV-5",
            "A NAL unit of an unspecified type",
            joined([*mine, b"\x70\x01\x80"]),
        ),
        "another-layer": (
            "HEV-5",
            "An SEI unit of another layer",
            joined([*mine, b"\x50\x09\x80"]),
        ),
        "another-sub-layer": (
            "HEV-5",
            "An SEI unit of another sub-layer",
            joined([*mine, b"\x50\x02\x80"]),
        ),
        "forbidden-bit": (
            "HEV-5",
            "The forbidden bit of a NAL unit is set",
            joined([*mine, b"\xd0\x01\x80"]),
        ),
        "hash-of-another-layer": (
            "HEV-5",
            "The picture hash has another layer",
            joined([*mine[:-1], b"\x50\x09" + mine[-1][2:]]),
        ),
        "hash-of-another-sub-layer": (
            "HEV-5",
            "The picture hash has another sub-layer",
            joined([*mine[:-1], b"\x50\x02" + mine[-1][2:]]),
        ),
        "sps-of-another-layer": (
            "HEV-5",
            "The SPS has another layer",
            joined([mine[0], b"\x42\x09" + mine[1][2:], *mine[2:]]),
        ),
        "zero-in-front": ("HEV-10", "A zero byte more in front", b"\0" + joined(mine)),
        "zero-behind": ("HEV-10", "A zero byte behind", data + b"\0"),
        "zeros-between": ("HEV-10", "Start codes of five bytes", joined(mine, b"\0\0\0\0\1")),
        "zeros-inside": (
            "HEV-10 HEV-6",
            "Two zero bytes and a 2 inside a slice",
            joined([*mine[:3], mine[3][:-8] + b"\0\0\2" + mine[3][-5:], mine[4]]),
        ),
        "zero-behind-the-slice": (
            "HEV-10 HEV-6",
            "A zero byte between a slice and a start code of four bytes",
            joined([*mine[:3], mine[3] + b"\0", mine[4]]),
        ),
        "byte-in-front": ("HEV-10", "A byte in front of the first start code", b"\1" + data),
        "start-code-alone": ("HEV-10", "A start code and nothing behind it", data + b"\0\0\1"),
        "zeros": ("HEV-1", "Zeros", bytes(1000)),
        "start-codes": ("HEV-1", "Start codes only", b"\0\0\1" * 1000),
        "garbage": ("HEV-1", "Garbage", bytes(range(256)) * 4),
        "half": ("HEV-2", "The first half of the stream", data[: len(data) // 2]),
        "last-byte-cut": ("HEV-2 HEV-9", "The stream without its last byte", data[:-1]),
        "slice-cut": (
            "HEV-2 HEV-8",
            "The end of the slice is missing",
            joined([*mine[:3], mine[3][:-20], mine[4]]),
        ),
    }
    for slug, (requirements, what, stream) in streams.items():
        refused(suite, slug, requirements, stream, f"{what}.", why)


# In the order of ITU-T H.265: a number of bits, or ``ue`` for an Exp-Golomb number.
PROFILE: list[tuple[str, int | str]] = [
    ("profile_space", 2),
    ("tier", 1),
    ("profile_idc", 5),
    ("profile_rest", 88),
]
FIELDS: dict[int, list[tuple[str, int | str]]] = {
    0: [
        ("vps_id", 4),
        ("base_layer", 2),
        ("max_layers_minus1", 6),
        ("max_sub_layers_minus1", 3),
        ("nesting_and_reserved", 17),
        *PROFILE,
    ],
    1: [
        ("vps_id", 4),
        ("max_sub_layers_minus1", 3),
        ("nesting", 1),
        *PROFILE,
        ("sps_id", "ue"),
        ("chroma_format_idc", "ue"),
        ("separate_colour_plane", 1),
        ("width", "ue"),
        ("height", "ue"),
        ("conformance_window", 1),
        ("bit_depth_luma", "ue"),
        ("bit_depth_chroma", "ue"),
        ("log2_max_poc", "ue"),
        ("sub_layer_ordering", 1),
        ("max_dec_pic_buffering_minus1", "ue"),
        ("max_num_reorder", "ue"),
        ("max_latency", "ue"),
        ("min_block", "ue"),
        ("block_difference", "ue"),
        ("min_transform", "ue"),
        ("transform_difference", "ue"),
        ("depth_inter", "ue"),
        ("depth_intra", "ue"),
        ("scaling_list_enabled", 1),
        ("amp", 1),
        ("sao", 1),
        ("pcm_enabled", 1),
        ("reference_sets", "ue"),
        ("long_term_ref_pics", 1),
        ("temporal_mvp", 1),
        ("strong_intra", 1),
        ("vui", 1),
        ("aspect", 1),
        ("overscan", 1),
        ("video_signal", 1),
        ("video_format", 3),
        ("full_range", 1),
        ("colours", 1),
        ("chroma_location", 1),
        ("neutral_chroma", 1),
        ("field_seq", 1),
        ("frame_field", 1),
        ("default_display_window", 1),
    ],
    2: [
        ("pps_id", "ue"),
        ("sps_id", "ue"),
        ("dependent_slices", 1),
        ("output_flag", 1),
        ("extra_bits", 3),
        ("sign_hiding", 1),
        ("cabac_init", 1),
        ("l0", "ue"),
        ("l1", "ue"),
        ("init_qp", "ue"),
        ("constrained_intra", 1),
        ("transform_skip", 1),
        ("cu_qp_delta", 1),
    ],
}


def bits_of(unit: bytes) -> str:
    """The RBSP behind the two header bytes."""
    return "".join(f"{byte:08b}" for byte in unit[2:].replace(b"\0\0\3", b"\0\0"))


def unit_of(head: bytes, bits: str) -> bytes:
    """The inverse: aligns with zeros behind the stop bit and escapes."""
    bits = bits.rstrip("0")
    bits += "0" * (-len(bits) % 8)
    escaped = bytearray()
    for byte in int(bits, 2).to_bytes(len(bits) // 8, "big"):
        if byte <= 3 and escaped[-2:] == b"\0\0":
            escaped.append(3)
        escaped.append(byte)
    return head + bytes(escaped)


def exp_golomb(value: int) -> str:
    """ue(v)."""
    text = f"{value + 1:b}"
    return "0" * (len(text) - 1) + text


def spans(number: int, bits: str) -> dict[str, tuple[int, int]]:
    """Where each field of FIELDS lies."""
    found, place = {}, 0
    for name, kind in FIELDS[number]:
        size = kind if isinstance(kind, int) else 2 * bits.index("1", place) - 2 * place + 1
        found[name] = (place, place + size)
        place += size
    return found


def changed(data: bytes, number: int, field: str, new: str) -> bytes:
    """The payload with one field of one parameter set replaced by other bits."""
    parts = units(data)
    bits = bits_of(parts[number])
    start, stop = spans(number, bits)[field]
    parts[number] = unit_of(parts[number][:2], bits[:start] + new + bits[stop:])
    return joined(parts)


def _parameter_sets(suite: Suite) -> None:
    data, _ = segment(suite)
    why = "A decoder would take it and give other samples, other sizes, or nothing at all."
    names = ("VPS", "SPS", "PPS")
    reject: list[tuple[int, str, str, str, str]] = [
        (0, "vps_id", "0001", "1", "HEV-4"),
        (0, "max_layers_minus1", "000001", "1", "HEV-4"),
        (0, "max_sub_layers_minus1", "001", "1", "HEV-4"),
        (0, "profile_space", "01", "1", "HEV-4"),
        (0, "profile_idc", "00001", "1", "HEV-4"),
        (0, "profile_idc", "00101", "5", "HEV-4"),
        (1, "vps_id", "0001", "1", "HEV-4"),
        (1, "max_sub_layers_minus1", "001", "1", "HEV-4"),
        (1, "profile_space", "10", "2", "HEV-4"),
        (1, "profile_idc", "00001", "1", "HEV-4"),
        (1, "sps_id", exp_golomb(1), "1", "HEV-4"),
        (1, "chroma_format_idc", exp_golomb(0), "0", "HEV-4"),
        (1, "chroma_format_idc", exp_golomb(1), "1", "HEV-4"),
        (1, "separate_colour_plane", "1", "1", "HEV-4"),
        (1, "width", exp_golomb(152), "152", "HEV-2"),
        (1, "height", exp_golomb(16), "16", "HEV-2"),
        (1, "height", exp_golomb(0), "0", "HEV-2"),
        (1, "conformance_window", "1" + exp_golomb(0) * 4, "1", "HEV-4"),
        (1, "bit_depth_luma", exp_golomb(2), "10", "HEV-4"),
        (1, "bit_depth_chroma", exp_golomb(2), "10", "HEV-4"),
        (1, "log2_max_poc", exp_golomb(13), "17", "HEV-2"),
        (1, "max_dec_pic_buffering_minus1", exp_golomb(5), "5", "HEV-4"),
        (1, "max_num_reorder", exp_golomb(1), "1", "HEV-4 HEV-3"),
        (1, "scaling_list_enabled", "10", "1", "HEV-4"),
        (1, "pcm_enabled", "1" + "0" * 8 + exp_golomb(0) * 2 + "0", "1", "HEV-4"),
        (1, "reference_sets", exp_golomb(65), "65", "HEV-12"),
        (1, "long_term_ref_pics", "1" + exp_golomb(0), "1", "HEV-4"),
        (1, "field_seq", "1", "1", "HEV-12"),
        (1, "default_display_window", "1" + exp_golomb(0) * 4, "1", "HEV-12"),
        (2, "pps_id", exp_golomb(1), "1", "HEV-4"),
        (2, "sps_id", exp_golomb(1), "1", "HEV-4"),
    ]
    for number, field, new, value, requirement in reject:
        refused(
            suite,
            f"{names[number].lower()}-{field.replace('_', '-')}-{value}",
            f"{requirement} HEV-6",
            changed(data, number, field, new),
            f"In the {names[number]} {field} is {value}.",
            why,
        )

    def reference_set(negative: int, positive: int, later: bool = False) -> str:
        pictures = (exp_golomb(0) + "1") * (negative + positive)
        return ("0" if later else "") + exp_golomb(negative) + exp_golomb(positive) + pictures

    for slug, sets, fine in (
        ("one-reference", [reference_set(1, 0)], True),
        ("no-reference", [reference_set(0, 0)], True),
        ("two-sets", [reference_set(1, 0), reference_set(0, 0, True)], True),
        ("two-references", [reference_set(2, 0)], False),
        ("later-reference", [reference_set(0, 1)], False),
        ("second-set-of-two", [reference_set(1, 0), reference_set(2, 0, True)], False),
        ("predicted-set", [reference_set(1, 0), "1" + "1" + exp_golomb(0) + "11"], False),
    ):
        stream = changed(data, 1, "reference_sets", exp_golomb(len(sets)) + "".join(sets))
        text = f"Short-term reference picture sets of the SPS: {slug.replace('-', ' ')}."
        if fine:
            accepted(
                suite,
                f"sps-{slug}",
                "HEV-12",
                stream,
                text,
                "Allowed, though no picture uses them.",
            )
        else:
            refused(suite, f"sps-{slug}", "HEV-12 HEV-3 HEV-6", stream, text, why)
    bits = bits_of(units(data)[1])
    start, stop = spans(1, bits)["full_range"][0], spans(1, bits)["colours"][1]
    for slug, full, colours, fine in (
        ("full-range", "1", "0", True),
        ("bt709-full-range", "1", "1" + "00000001" * 3, True),
        ("bt2020", "0", "1" + "00001001" * 3, True),
        ("identity-matrix", "1", "1" + "00000001" * 2 + "00000000", False),
    ):
        parts = units(data)
        parts[1] = unit_of(parts[1][:2], bits[:start] + full + colours + bits[stop:])
        text = f"A video signal type: {slug.replace('-', ' ')}."
        if fine:
            accepted(
                suite,
                f"signal-{slug}",
                "HEV-14 HEV-11",
                joined(parts),
                text,
                "Samples are not converted: the digests are those without it.",
            )
        else:
            refused(
                suite,
                f"signal-{slug}",
                "HEV-11 HEV-6",
                joined(parts),
                text,
                "Decoders turn such pictures into RGB.",
            )
    for number in (0, 1, 2):
        parts = units(data)
        parts[number] = parts[number][:4].rstrip(b"\0") + b"\x80"
        refused(
            suite,
            f"{names[number].lower()}-cut",
            "HEV-4 HEV-6",
            joined(parts),
            f"The {names[number]} ends too early.",
            why,
        )
        if number:
            parts = units(data)
            parts[number] += b"\x80"
            refused(
                suite,
                f"{names[number].lower()}-too-long",
                "HEV-4 HEV-6",
                joined(parts),
                f"A byte stands behind the end of the {names[number]}.",
                why,
            )


def _pictures(suite: Suite) -> None:
    """Filler and samples."""
    builder = small(suite, [HEVC])
    one = next(
        n for n, item in enumerate(builder.segments[HEVC]) if item.record["layer_count"] == 1
    )
    kinds: list[tuple[str, int, tuple[int, ...], int]] = [
        ("unused-plane", one, (0, 1, 0, 0), 127),
        ("behind-the-channels", 0, (0, 2, 143, 143), 0),
        ("behind-the-tokens", 0, (0, 0, 0, TOKENS * 8), 129),
    ]
    for slug, number, place, value in kinds:

        def make(number: int = number, place: tuple[int, ...] = place, value: int = value) -> bytes:
            pictures = planes(suite, number).copy()
            pictures[place] = value
            return encode(pictures)

        data = with_stream(suite, suite.stream(f"filler-{slug}", make), number)
        fault(
            suite,
            f"filler-{slug}",
            "LAY-6 LAY-7 LAY-5",
            data,
            "segment.filler",
            f"One sample {slug.replace('-', ' ')} is {value} instead of 128.",
            "Unused samples could carry hidden content. Restoring does not look at them.",
            requires=["hevc"],
        )

    def sample() -> bytes:
        pictures = planes(suite).copy()
        pictures[0, 1, 0, 5 * 8 + 3] ^= 1
        return encode(pictures)

    fault(
        suite,
        "other-sample",
        "INT-1 INT-2 LAY-5",
        with_stream(suite, suite.stream("filler-sample", sample)),
        "segment.integers",
        "One sample of a channel is another; the stream is right in itself.",
        "The integer digest binds the pictures.",
        requires=["hevc"],
    )
    from conformance.generate.compose import Video, streams
    from conformance.generate.uncommon import layout, smooth

    group = smooth((1, 20, 2, 4), "many")
    many = layout("time", 10, (1, 2), (1, 1), (1, 8))
    base = compose([group], 20, [HEVC], video=Video([many], lambda _: 0, streams(suite, "many")))

    def pictures() -> Array:
        from kvformat.codecs import bitstream

        return bitstream.decode_pictures(base.segments[HEVC][0].payload, 10, 144, 144, "here")

    for slug, extra, requirements in (
        ("plain", "", ""),
        ("reordered", ":bframes=2:b-adapt=0:rc-lookahead=5", "HEV-3"),
        ("temporal-layers", ":temporal-layers=2:bframes=3:b-adapt=0:rc-lookahead=6", "HEV-5 HEV-3"),
        ("scaling-lists", ":scaling-list=default", "HEV-4"),
        ("display-window", ":display-window=16,0,0,0", "HEV-12"),
    ):
        builder = base.copy()
        builder.segments[HEVC][0].payload = suite.stream(
            f"many-{slug}", lambda extra=extra: encode(pictures(), extra=extra)
        )
        text = f"Ten pictures, {slug.replace('-', ' ')}."
        if slug == "plain":
            good(
                suite,
                "hev",
                "ten-pictures-plain",
                ["HEV-1", "HEV-3"],
                builder.build(),
                [HEVC],
                text,
                "The base of the other four.",
                level="uncommon",
                how="libx265 made the stream.",
            )
        else:
            fault(
                suite,
                f"ten-pictures-{slug}",
                requirements,
                builder.build(),
                "segment.bitstream",
                text,
                "Decoding order is output order, and each picture is read as it is coded.",
                requires=["hevc"],
            )
