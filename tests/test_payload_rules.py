"""Payloads of ``zstd`` and ``hevc`` behind right digests that break a rule of their codec."""

from __future__ import annotations

import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
import zstandard
from numpy.typing import NDArray

from kvformat.codecs import bitstream
from tests.builder import Builder, b3, integer_sum
from tests.damage import artifact, outcome, parts, verdict
from tests.reference import reference_restore, zstd_rows
from tests.requirements import covers
from tests.strategies import canonical_kv, write_bytes

ZSTD, HEVC = "near-lossless/zstd", "near-lossless/hevc"
Array = NDArray[Any]
Entry = tuple[int, bytes, int, int]


# --- zstd ------------------------------------------------------------------------------------

ROWS, TOKENS = 24, 6  # segment 0: three layers, two heads, four dims


def frame(content: bytes, **options: Any) -> bytes:
    """One zstd frame."""
    settings = {"write_content_size": True, "write_checksum": False, "write_dict_id": False}
    parameters = zstandard.ZstdCompressionParameters.from_level(3, **{**settings, **options})
    return zstandard.ZstdCompressor(compression_params=parameters).compress(content)


def payload(entries: list[Entry], *, count: int | None = None, tail: bytes = b"") -> bytes:
    """A payload from (rows, frame, low, radix) entries."""
    data = struct.pack("<I", len(entries) if count is None else count)
    for rows, body, low, radix in entries:
        data += struct.pack("<IIBB", rows, len(body), low, radix - 1)
    return data + b"".join(body for _, body, _, _ in entries) + tail


def rows_of_segment() -> Array:
    """The rows of segment 0."""
    return zstd_rows(parts(tracks=(ZSTD,)).segments[ZSTD][0].payload, ROWS, TOKENS)


def with_payload(data: bytes, track: str = ZSTD, number: int = 0) -> bytes:
    builder = parts(tracks=(track,))
    builder.segments[track][number].payload = data
    return builder.build()


def refused(data: bytes, track: str = ZSTD) -> None:
    """Reading and verification both name the payload."""
    code = "segment.payload" if track == ZSTD else "segment.bitstream"
    file = with_payload(data, track)
    assert outcome(file, track) == code
    assert verdict(file) == code


def accepted(data: bytes, track: str = ZSTD) -> None:
    """Another encoding of the same integers."""
    file = with_payload(data, track)
    assert verdict(file) == "ok"
    assert outcome(file, track) == outcome(artifact(tracks=(track,)), track)


def plain(rows: Array | None = None) -> Entry:
    """All rows in one frame that is not packed."""
    rows = rows_of_segment() if rows is None else rows
    return len(rows), frame(rows.tobytes()), 0, 256


def parameters_of(body: bytes) -> Any:
    return zstandard.get_frame_parameters(body)


@covers("ZST-1", "ZST-3", "ZST-4", "ZST-5")
def test_other_cuts_of_the_same_rows_are_accepted() -> None:
    rows = rows_of_segment()
    accepted(payload([plain()]))
    accepted(payload([plain(rows[index : index + 1]) for index in range(ROWS)]))
    accepted(payload([plain(rows[:5]), plain(rows[5:])]))
    accepted(payload([(ROWS, frame(rows.tobytes(), window_log=23), 0, 256)]))
    stored = zstandard.ZstdCompressor(level=-50).compress(rows.tobytes())
    accepted(payload([(ROWS, stored, 0, 256)]))


@covers("ZST-1")
def test_row_counts() -> None:
    rows = rows_of_segment()
    body = plain()[1]
    for count in (0, ROWS - 1, ROWS + 1, 2**32 - 1):
        refused(payload([(count, body, 0, 256)]))
    refused(payload([plain(rows[:5]), plain(rows[5:-1])]))
    refused(payload([plain(), (0, frame(b""), 0, 256)]))
    refused(payload([plain(), plain(rows[:1])]))
    refused(payload([]))
    refused(b"\0")


@covers("ZST-2", "ORD-4")
def test_ends_of_payloads() -> None:
    good = payload([plain()])
    refused(good + b"\0")
    refused(payload([plain()], tail=frame(b"")))
    for size in (1, 3, 4, 13, 14, 20, len(good) - 1):
        refused(good[:size])
    for count in (0, 2, ROWS + 1, 2**32 - 1):
        refused(payload([plain()], count=count))
    for size in (0, 2**32 - 1, len(plain()[1]) - 1, len(plain()[1]) + 1):
        refused(good[:8] + struct.pack("<I", size) + good[12:])


@covers("ZST-3", "ZST-7")
def test_frame_headers() -> None:
    content = rows_of_segment().tobytes()
    without_size = zstandard.ZstdCompressor(write_content_size=False).compress(content)
    assert parameters_of(without_size).content_size == 2**64 - 1
    refused(payload([(ROWS, without_size, 0, 256)]))
    checked = frame(content, write_checksum=True)
    assert parameters_of(checked).has_checksum
    refused(payload([(ROWS, checked, 0, 256)]))
    samples = [bytes([n % 251]) * 200 + bytes(range(n % 100, n % 100 + 60)) for n in range(300)]
    book = zstandard.train_dictionary(2048, samples)
    named = zstandard.ZstdCompressor(dict_data=book).compress(content)
    assert parameters_of(named).dict_id
    refused(payload([(ROWS, named, 0, 256)]))
    body = bytearray(frame(content))
    for mask in (0x08, 0x10):  # the reserved and the unused bit
        other = bytes(body[:4]) + bytes([body[4] | mask]) + bytes(body[5:])
        refused(payload([(ROWS, other, 0, 256)]))


def raw_frame(content: bytes, descriptor: int, fields: bytes, blocks: bytes | None = None) -> bytes:
    """A frame made by hand, with one raw block unless ``blocks`` says otherwise."""
    block = (len(content) << 3 | 1).to_bytes(3, "little") + content
    return (
        b"\x28\xb5\x2f\xfd" + bytes([descriptor]) + fields + (block if blocks is None else blocks)
    )


@covers("ZST-3", "ZST-4", "ZST-7", "LIM-3", "SEC-3")
def test_frames_made_by_hand() -> None:
    content = rows_of_segment().tobytes()
    size = bytes([len(content)])
    assert len(content) == 144
    accepted(payload([(ROWS, raw_frame(content, 0x20, size), 0, 256)]))
    eight = struct.pack("<Q", len(content))
    accepted(payload([(ROWS, raw_frame(content, 0xC0, b"\x68" + eight), 0, 256)]))  # 8 MiB window
    bad = {
        "window above 8 MiB": raw_frame(content, 0xC0, b"\x69" + eight),
        "window of 128 MiB": raw_frame(content, 0xC0, b"\x88" + eight),
        "window of 3 TiB": raw_frame(content, 0xC0, b"\xff" + eight),
        "content size too large": raw_frame(content, 0x20, bytes([145])),
        "content size too small": raw_frame(content, 0x20, bytes([143])),
        "content size 0": raw_frame(content, 0x20, b"\0"),
        "content size 2^63": raw_frame(content, 0xE0, struct.pack("<Q", 2**63)),
        "content size 2^64 - 1": raw_frame(content, 0xE0, b"\xff" * 8),
        "content size 1 GiB": raw_frame(content, 0xA0, struct.pack("<I", 2**30)),
        "less content than stated": raw_frame(content[:100], 0x20, size),
        "more content than stated": raw_frame(content + b"\0", 0x20, size),
        "reserved block type": raw_frame(content, 0x20, size, b"\x07\0\0"),
        "no block": raw_frame(content, 0x20, size, b""),
        "no last block": raw_frame(content, 0x20, size, b"\x80\x04\0" + content),
        "a bomb": raw_frame(content, 0x20, size, (2**17 << 3 | 3).to_bytes(3, "little") + b"\0"),
        "skippable frame": b"\x50\x2a\x4d\x18\x04\0\0\0abcd",
        "skippable frame in front": b"\x50\x2a\x4d\x18\0\0\0\0" + raw_frame(content, 0x20, size),
        "two frames": frame(content[:72]) + frame(content[72:]),
        "empty frame behind": raw_frame(content, 0x20, size) + frame(b""),
        "byte behind": raw_frame(content, 0x20, size) + b"\0",
        "other magic": b"\x27" + raw_frame(content, 0x20, size)[1:],
        "legacy magic": b"\x24\xb5\x2f\xfd" + raw_frame(content, 0x20, size)[4:],
        "magic alone": b"\x28\xb5\x2f\xfd",
        "nothing": b"",
        "garbage": bytes(range(200)),
    }
    for name, body in bad.items():
        file = with_payload(payload([(ROWS, body, 0, 256)]))
        assert (name, outcome(file, ZSTD)) == (name, "segment.payload")
        assert (name, verdict(file)) == (name, "segment.payload")


@covers("ZST-3", "ZST-7")
def test_no_flip_in_a_frame_escapes_as_another_exception() -> None:
    good = payload([plain()])
    right = outcome(artifact(tracks=(ZSTD,)), ZSTD)
    for place in range(len(good)):
        bad = good[:place] + bytes([good[place] ^ (1 << place % 8)]) + good[place + 1 :]
        found = outcome(with_payload(bad), ZSTD)
        assert found in ("segment.payload", "segment.integers") or found == right, place


PACKING = {1: 8, 2: 8, 3: 5, 4: 4, 5: 3, 6: 3, **dict.fromkeys(range(7, 17), 2), 256: 1}


def pack(values: Array, low: int, radix: int) -> Array:
    """Section 10.3: ``[rows, tokens]`` to ``[rows, ceil(tokens / p)]``."""
    p = PACKING[radix]
    width = -(-values.shape[1] // p)
    digits = np.zeros((len(values), width * p), np.int64)
    digits[:, : values.shape[1]] = values.astype(np.int64) - low
    weights = radix ** np.arange(p)
    packed = (digits.reshape(len(values), width, p) * weights).sum(axis=-1)
    assert packed.max(initial=0) < 256
    return packed.astype(np.uint8)


def packed_artifact(values: Array, body: bytes, low: int, radix: int) -> bytes:
    """An artifact whose first segment has these integers, all behind one frame."""
    builder = parts(tracks=(ZSTD,))
    for item in builder.sets["near-lossless"]:  # neutral integers, so that any value may be packed
        item.data = item.data[:12] + b"\0\0" + item.data[14:-132]
    for item in builder.segments[ZSTD]:
        item.side = bytes(4 * item.record["layer_count"])
    item = builder.segments[ZSTD][0]
    item.payload = payload([(ROWS, body, low, radix)])
    order = np.frombuffer(builder.sets["near-lossless"][0].data[-24:], np.uint8).reshape(3, 2, 4)
    ranked = values.reshape(3, 4, 2, TOKENS).transpose(0, 3, 2, 1)
    q = np.empty_like(ranked)
    for layer in range(3):
        for head in range(2):
            q[layer][:, head, order[layer, head]] = ranked[layer][:, head]
    item.record["integer_digest"] = b3(q.tobytes())
    item.record["integer_sum"] = integer_sum(q.tobytes())
    return builder.build()


@covers("ZST-4", "ZST-5", "ZST-6")
@pytest.mark.parametrize("radix", PACKING)
@pytest.mark.parametrize("high", [False, True])
def test_every_radix(radix: int, high: bool) -> None:
    low = 256 - radix if high else 0
    rng = np.random.default_rng(radix)
    values = (rng.integers(0, radix, (ROWS, TOKENS)) + low).astype(np.uint8)
    content = pack(values, low, radix)
    file = packed_artifact(values, frame(content.tobytes()), low, radix)
    assert verdict(file) == "ok"
    expected = {k: v.tobytes() for k, v in reference_restore(file)[ZSTD].items()}
    assert outcome(file, ZSTD) == expected
    p = PACKING[radix]
    if radix**p < 256:
        bad = content.copy()
        bad[3, 0] = radix**p
        assert (
            verdict(packed_artifact(values, frame(bad.tobytes()), low, radix)) == "segment.payload"
        )
    left = TOKENS % p
    if left and radix > 1:
        bad = content.copy()
        bad[7, -1] += radix**left
        assert (
            verdict(packed_artifact(values, frame(bad.tobytes()), low, radix)) == "segment.payload"
        )


@covers("ZST-5")
@pytest.mark.parametrize(
    ("low", "radix"),
    [(0, 17), (0, 255), (0, 128), (1, 256), (255, 2), (241, 16), (250, 7), (255, 256)],
)
def test_radix_out_of_range(low: int, radix: int) -> None:
    refused(payload([(ROWS, plain()[1], low, radix)]))
    half = frame(bytes(ROWS * TOKENS // 2))
    refused(payload([(ROWS, half, low, radix)]))


# --- hevc ------------------------------------------------------------------------------------

Units = list[bytes]


def base() -> tuple[bytes, dict[str, Any]]:
    """Payload and layout of segment 0."""
    builder = parts(tracks=(HEVC,))
    return builder.segments[HEVC][0].payload, builder.manifest["tracks"][0]["layouts"][0]


def units(data: bytes) -> Units:
    """NAL units without start codes."""
    return [part.rstrip(b"\0") for part in data.split(b"\0\0\1")[1:]]


def joined(parts_: Units, code: bytes = b"\0\0\0\1") -> bytes:
    return b"".join(code + part for part in parts_)


def planes() -> Array:
    """The decoded pictures ``[frames, 3, height, width]``."""
    data, layout = base()
    size = layout["frames"], layout["width"], layout["height"]
    return bitstream.decode_pictures(data, *size, "test")


def encode(
    pictures: Array, *, form: str = "yuv444p", extra: str = "", lossless: bool = True
) -> bytes:
    """Any x265 stream of uint8 ``[frames, planes, height, width]``."""
    context = av.CodecContext.create("libx265", "w")
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


@covers("HEV-1", "HEV-2", "HEV-10")
def test_other_streams_of_the_same_pictures_are_accepted() -> None:
    data, _ = base()
    accepted(data, HEVC)
    accepted(encode(planes()), HEVC)
    accepted(joined(units(data), b"\0\0\1"), HEVC)
    accepted(joined(units(data)), HEVC)
    assert [unit[0] >> 1 for unit in units(data)] == [32, 33, 34, 20, 40]


STREAMS: dict[str, Callable[[], bytes]] = {
    "HEV-8 two pictures": lambda: encode(np.repeat(planes(), 2, axis=0)),
    "HEV-6 wider": lambda: encode(np.pad(planes(), ((0, 0), (0, 0), (0, 0), (0, 16)))),
    "HEV-6 higher": lambda: encode(np.pad(planes(), ((0, 0), (0, 0), (0, 16), (0, 0)))),
    "HEV-4 4:2:0": lambda: encode(planes(), form="yuv420p"),
    "HEV-4 4:2:2": lambda: encode(planes(), form="yuv422p"),
    "HEV-4 monochrome": lambda: encode(planes(), form="gray"),
    "HEV-4 10 bits": lambda: encode(planes(), form="yuv444p10le"),
    "HEV-11 RGB": lambda: encode(planes(), form="gbrp"),
    "HEV-11 matrix 0": lambda: encode(planes(), extra=":colormatrix=gbr"),
    "HEV-4 cropped": lambda: encode(planes()[:, :, :136], extra=":min-cu-size=16"),
    "HEV-4 lossy": lambda: encode(planes(), lossless=False),
    "HEV-9 no hash": lambda: encode(planes(), extra=":hash=0"),
    "HEV-9 CRC": lambda: encode(planes(), extra=":hash=2"),
    "HEV-9 checksum": lambda: encode(planes(), extra=":hash=3"),
    "HEV-9 hash dropped": lambda: joined(units(base()[0])[:-1]),
    "HEV-9 hash twice": lambda: joined([*units(base()[0]), units(base()[0])[-1]]),
    "HEV-8 wrong hash": lambda: base()[0][:-2] + bytes([base()[0][-2] ^ 1]) + base()[0][-1:],
    "HEV-9 hash cut": lambda: joined([*units(base()[0])[:-1], units(base()[0])[-1][:-4] + b"\x80"]),
    "HEV-1 no VPS": lambda: joined(units(base()[0])[1:]),
    "HEV-1 no SPS": lambda: joined([u for u in units(base()[0]) if u[0] >> 1 != 33]),
    "HEV-1 no PPS": lambda: joined([u for u in units(base()[0]) if u[0] >> 1 != 34]),
    "HEV-1 parameter sets twice": lambda: joined([*units(base()[0])[:3], *units(base()[0])]),
    "HEV-1 in another order": lambda: joined(
        [units(base()[0])[1], units(base()[0])[0], *units(base()[0])[2:]]
    ),
    "HEV-1 no picture": lambda: joined(units(base()[0])[:3]),
    "HEV-1 repeated headers": lambda: encode(planes(), extra=":repeat-headers=1") * 2,
    "HEV-5 access unit delimiter": lambda: encode(planes(), extra=":aud=1"),
    "HEV-5 info SEI": lambda: encode(planes(), extra=":info=1"),
    "HEV-5 end of sequence": lambda: joined([*units(base()[0]), b"\x48\x01\x80"]),
    "HEV-5 filler data": lambda: joined([*units(base()[0]), b"\x4c\x01\xff\x80"]),
    "HEV-5 reserved type": lambda: joined([*units(base()[0]), b"\x60\x01\x80"]),
    "HEV-5 unspecified type": lambda: joined([*units(base()[0]), b"\x70\x01\x80"]),
    "HEV-5 another layer": lambda: joined([*units(base()[0]), b"\x50\x09\x80"]),
    "HEV-5 another sub-layer": lambda: joined([*units(base()[0]), b"\x50\x02\x80"]),
    "HEV-5 forbidden bit": lambda: joined([*units(base()[0]), b"\xd0\x01\x80"]),
    "HEV-5 hash of another layer": lambda: joined(
        [*units(base()[0])[:-1], b"\x50\x09" + units(base()[0])[-1][2:]]
    ),
    "HEV-5 hash of another sub-layer": lambda: joined(
        [*units(base()[0])[:-1], b"\x50\x02" + units(base()[0])[-1][2:]]
    ),
    "HEV-5 SPS of another layer": lambda: joined(
        [units(base()[0])[0], b"\x42\x09" + units(base()[0])[1][2:], *units(base()[0])[2:]]
    ),
    "HEV-10 zeros in front": lambda: b"\0" + joined(units(base()[0])),
    "HEV-10 zeros behind": lambda: base()[0] + b"\0",
    "HEV-10 zeros between": lambda: joined(units(base()[0]), b"\0\0\0\0\1"),
    "HEV-10 bytes in front": lambda: b"\1" + base()[0],
    "HEV-10 start code alone": lambda: base()[0] + b"\0\0\1",
    "HEV-15 too many units": lambda: joined(units(base()[0]) + units(base()[0])[-1:] * 66 * 9),
    "HEV-10 no emulation prevention": lambda: base()[0].replace(b"\0\0\3", b"\0\0\0", 1),
    "HEV-1 garbage": lambda: bytes(range(256)) * 4,
    "HEV-1 zeros": lambda: bytes(1000),
    "HEV-1 start codes": lambda: b"\0\0\1" * 1000,
    "HEV-1 zstd": lambda: parts().segments[ZSTD][0].payload,
    "HEV-2 cut": lambda: base()[0][: len(base()[0]) // 2],
    "HEV-2 last byte cut": lambda: base()[0][:-1],
    "HEV-2 slice cut": lambda: joined(
        [*units(base()[0])[:3], units(base()[0])[3][:-20], units(base()[0])[4]]
    ),
}


@covers("HEV-1", "HEV-2", "HEV-4", "HEV-5", "HEV-6", "HEV-8", "HEV-9", "HEV-10", "HEV-11", "HEV-15")
@pytest.mark.parametrize("name", STREAMS)
def test_streams_that_break_a_rule(name: str) -> None:
    refused(STREAMS[name](), HEVC)


@covers("HEV-2", "HEV-9", "PAR-2")
def test_no_flip_in_a_stream_gives_other_values() -> None:
    data, _ = base()
    right = outcome(artifact(tracks=(HEVC,)), HEVC)
    for place in range(0, len(data), 3):
        bad = data[:place] + bytes([data[place] ^ (1 << place % 8)]) + data[place + 1 :]
        found = outcome(with_payload(bad, HEVC), HEVC)
        assert found in ("segment.bitstream", "segment.integers") or found == right, place


@covers("HEV-3", "HEV-4", "HEV-5", "HEV-12")
def test_reordered_pictures_are_refused() -> None:
    kv = canonical_kv(1, 900, 2, 64)
    builder = Builder(write_bytes(kv, tracks=["hevc"], segment_tokens=900))
    layouts = builder.manifest["tracks"][0]["layouts"]
    item = builder.segments[HEVC][0]
    layout = layouts[item.record["layout"]]
    size = layout["frames"], layout["width"], layout["height"]
    assert layout["frames"] > 3
    pictures = bitstream.decode_pictures(item.payload, *size, "test")
    for extra, code in (
        ("", "ok"),
        (":bframes=2:b-adapt=0:rc-lookahead=5", "segment.bitstream"),  # reordered
        (":temporal-layers=2:bframes=3:b-adapt=0:rc-lookahead=6", "segment.bitstream"),
        (":scaling-list=default", "segment.bitstream"),
        (":display-window=16,0,0,0", "segment.bitstream"),
    ):
        builder.segments[HEVC][0].payload = encode(pictures, extra=extra)
        assert verdict(builder.build()) == code


@covers("LAY-6", "LAY-7", "LAY-5")
@pytest.mark.parametrize("where", ["unused plane", "behind the channels", "behind the tokens"])
def test_filler_is_128(where: str) -> None:
    pictures = planes().copy()
    builder = parts(tracks=(HEVC,))
    number = 0
    if where == "unused plane":
        number = next(
            n for n, item in enumerate(builder.segments[HEVC]) if item.record["layer_count"] == 1
        )
        layout = builder.manifest["tracks"][0]["layouts"][0]
        pictures = bitstream.decode_pictures(
            builder.segments[HEVC][number].payload, 1, layout["width"], layout["height"], "test"
        )
        pictures[0, 1, 0, 0] = 127
    elif where == "behind the channels":
        pictures[0, 2, 143, 143] = 0
    else:
        pictures[0, 0, 0, TOKENS * 8] = 129
    builder.segments[HEVC][number].payload = encode(pictures)
    file = builder.build()
    assert verdict(file) == "segment.filler"
    assert outcome(file, HEVC) == outcome(artifact(tracks=(HEVC,)), HEVC)


@covers("INT-1", "INT-2", "LAY-5")
def test_other_samples_are_other_integers() -> None:
    pictures = planes().copy()
    pictures[0, 1, 0, 5 * 8 + 3] ^= 1
    file = with_payload(encode(pictures), HEVC)
    assert outcome(file, HEVC) == "segment.integers"
    assert verdict(file) == "segment.integers"
