"""Codec ``zstd``: rows of small integers, entropy-coded by zstd (spec: codec zstd).

zstd serves as a Huffman coder: neighbouring rows have like statistics, a few of them make one zstd
frame, and match search is off as far as zstd lets it. Where all values of a frame lie in
[low, low + radix) with radix <= 16, p of them share a byte, since a Huffman code cannot spend less
than one bit on a symbol::

    byte = sum over i < p of (q[i] - low) * radix^i      p consecutive tokens of one row

with p the largest number up to 8 for which radix^p <= 256; a row's last byte is filled up with zero
digits. Payload, little-endian::

    u32 frame_count
    frame_count x (u32 row_count, u32 frame_bytes, u8 low, u8 radix - 1)
    the frames, back to back

An unpacked frame has low 0, radix 256. Each frame is one zstd frame with content size, without
dictionary, checksum or unused header bits, window at most 8 MiB. There are no frames where there
are no values. How rows are cut into frames is the writer's choice.

The caller knows how many rows and tokens there are; nothing in a payload makes a reader allocate
more. All functions are pure, thread-safe, and leave the interpreter lock to others while they work.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np
import zstandard
from numpy.typing import NDArray

from kvformat.errors import InvalidError

Bytes = NDArray[np.uint8]

FRAME_ROWS = 48
FRAME_VALUES = (24 * 1024, 48 * 1024)
"""The writer makes frames of about 48 rows, within these numbers of values.

Smaller frames spend more on Huffman tables and make threads queue for the interpreter lock; in
larger ones the rows' statistics differ more.
"""

MAX_WINDOW = 8 << 20
"""Largest zstd window in bytes that a frame may ask for."""

MAX_PACKED_RADIX = 16

_COUNT = struct.Struct("<I")
_ENTRY = struct.Struct("<IIBB")
_TABLE = np.dtype([("rows", "<u4"), ("size", "<u4"), ("low", "u1"), ("radix", "u1")])
_SMALLEST_FRAME = 9  # magic, descriptor, content size, one block header
_MAGIC = b"\x28\xb5\x2f\xfd"
_FORBIDDEN_FLAGS = 0x1F
_SMALL_RUN = 8 * 1024


class _Engines(threading.local):
    """The zstd contexts of one thread; they hold working memory and are not thread-safe."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(
            compression_params=zstandard.ZstdCompressionParameters(
                strategy=zstandard.STRATEGY_FAST,
                window_log=17,
                hash_log=6,
                chain_log=6,
                search_log=1,
                min_match=7,
                target_length=0,
                write_content_size=True,
                write_checksum=False,
                write_dict_id=False,
            )
        )
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)


_engines = _Engines()


def tokens_per_byte(radix: int) -> int:
    """How many values of a frame share a byte; ``radix`` is 1 to 16, or 256 for unpacked."""
    count = 1
    while count < 8 and radix ** (count + 1) <= 256:
        count += 1
    return count


def encode_rows(rows: Bytes, run: int = 0) -> bytes:
    """Encode uint8 [rows, tokens].

    Args:
        rows: one channel (or byte plane of one) a row, neighbours of like statistics; contiguous.
        run: rows in each stretch that belongs together (a layer, a byte plane of a layer);
            frames do not cross from one to the next unless stretches are tiny. 0: all rows.
    """
    count, tokens = rows.shape
    if not rows.size:
        return _COUNT.pack(0)
    cuts = list(_cuts(count, tokens, run or count))
    spans = _spans(rows, [start for start, _ in cuts])
    contents = [
        _pack(rows[start:end], low, radix)
        for (start, end), (low, radix) in zip(cuts, spans, strict=True)
    ]
    frames = _compress(contents)
    entries = [
        _ENTRY.pack(end - start, len(frame), low, radix - 1)
        for (start, end), (low, radix), frame in zip(cuts, spans, frames, strict=True)
    ]
    return b"".join([_COUNT.pack(len(frames)), *entries, *frames])


def _compress(contents: list[Bytes]) -> list[bytes]:
    """One zstd frame for each of ``contents``; all in one call, for the interpreter lock's sake."""
    compressor = _engines.compressor
    if len(contents) > 1 and "multi_compress_to_buffer" in zstandard.backend_features:
        flat: list[Any] = [content.reshape(-1).data for content in contents]
        found = compressor.multi_compress_to_buffer(flat)
        return [found[index].tobytes() for index in range(len(flat))]
    return [compressor.compress(content.data) for content in contents]


def _cuts(count: int, tokens: int, run: int) -> Iterator[tuple[int, int]]:
    """First and last-plus-one row of each frame: runs cut into about equal parts."""
    if run * tokens < _SMALL_RUN:
        run *= -(-_SMALL_RUN // (run * tokens))
    wanted = min(max(FRAME_ROWS * tokens, FRAME_VALUES[0]), FRAME_VALUES[1])
    for start in range(0, count, run):
        extent = min(run, count - start)
        parts = min(extent, max(1, round(extent * tokens / wanted)))
        for part in range(parts):
            yield start + extent * part // parts, start + extent * (part + 1) // parts


def _spans(rows: Bytes, starts: list[int]) -> list[tuple[int, int]]:
    """``low`` and ``radix`` of the frames from ``starts``: (0, 256) where packing is impossible."""
    lows = np.minimum.reduceat(rows.min(axis=1), starts).tolist()
    highs = np.maximum.reduceat(rows.max(axis=1), starts).tolist()
    spans = ((low, high - low + 1) for low, high in zip(lows, highs, strict=True))
    return [span if span[1] <= MAX_PACKED_RADIX else (0, 256) for span in spans]


def _pack(block: Bytes, low: int, radix: int) -> Bytes:
    """A frame's content, uint8 [rows, ceil(tokens / p)], from C-contiguous uint8 [rows, tokens]."""
    per_byte = tokens_per_byte(radix)
    if per_byte == 1:
        return block
    count, tokens = block.shape
    width = -(-tokens // per_byte)
    digits = np.zeros((count, width * per_byte), np.uint8)
    np.subtract(block, np.uint8(low), out=digits[:, :tokens])
    by_place = digits.reshape(count, width, per_byte)
    packed = by_place[:, :, -1].copy()
    for place in range(per_byte - 2, -1, -1):
        np.multiply(packed, np.uint8(radix), out=packed)
        np.add(packed, by_place[:, :, place], out=packed)
    return packed


def decode_rows(payload: bytes | memoryview, rows: int, tokens: int, where: str) -> Bytes:
    """Decode to uint8 [rows, tokens], refusing everything that the spec does not allow.

    Args:
        payload: the bitstream of one segment.
        rows: rows that the segment holds, from its table record.
        tokens: tokens of each row.
        where: the segment's name, for errors.

    Raises:
        InvalidError: ``segment.payload``.
    """
    view = memoryview(payload).cast("B")
    frames = _frames(view, rows, tokens, where)  # refuses before memory is asked for
    out = np.empty((rows, tokens), np.uint8)
    row = 0
    for index, (count, low, radix, frame) in enumerate(frames):
        place = f"{where}, zstd frame {index}"
        content = _decompress(frame, count * -(-tokens // tokens_per_byte(radix)), place)
        _unpack(content, out[row : row + count], low, radix, place)
        row += count
    return out


def _frames(
    view: memoryview, rows: int, tokens: int, where: str
) -> Iterator[tuple[int, int, int, memoryview]]:
    """(row count, low, radix, frame bytes) of each frame, from a table checked before any."""
    if len(view) < _COUNT.size:
        _refuse("payload is cut short", where, f"at least {_COUNT.size} bytes", len(view))
    (frame_count,) = _COUNT.unpack_from(view)
    most = rows if tokens else 0
    if frame_count > most:
        _refuse("too many zstd frames", where, f"at most {most}", frame_count)
    offset = _COUNT.size + frame_count * _ENTRY.size
    if len(view) < offset:
        _refuse("frame table is cut short", where, f"at least {offset} bytes", len(view))
    table = np.frombuffer(view, _TABLE, frame_count, _COUNT.size)
    counts, sizes = table["rows"].astype(np.int64), table["size"].astype(np.int64)
    if frame_count and int(counts.min()) < 1:
        _refuse("a frame has no rows", where, "at least 1", 0)
    if int(counts.sum()) != most:
        _refuse("frames do not hold all rows", where, most, int(counts.sum()))
    if frame_count and int(sizes.min()) < _SMALLEST_FRAME:
        _refuse("a frame is too short", where, _SMALLEST_FRAME, int(sizes.min()))
    if int(sizes.sum()) != len(view) - offset:
        _refuse("frames do not fill the payload", where, len(view) - offset, int(sizes.sum()))
    return _each_frame(view, table, offset, where)


def _each_frame(
    view: memoryview, table: NDArray[Any], offset: int, where: str
) -> Iterator[tuple[int, int, int, memoryview]]:
    for index, entry in enumerate(table):
        size, low, radix = int(entry["size"]), int(entry["low"]), int(entry["radix"]) + 1
        _check_span(low, radix, f"{where}, zstd frame {index}")
        yield int(entry["rows"]), low, radix, view[offset : offset + size]
        offset += size


def _check_span(low: int, radix: int, where: str) -> None:
    """Refuse a value range that the writer's rule cannot have produced."""
    if radix > MAX_PACKED_RADIX and (low, radix) != (0, 256):
        _refuse("value range is invalid", where, "radix up to 16, or 256 and low 0", (low, radix))
    if low + radix > 256:
        _refuse("value range passes 255", where, "low + radix up to 256", low + radix)


def _decompress(frame: memoryview, size: int, where: str) -> Bytes:
    """The content of one zstd frame, exactly ``size`` bytes, after checks of its header."""
    if bytes(frame[:4]) != _MAGIC or len(frame) < 6:
        _refuse("not a zstd frame", where, _MAGIC.hex(), bytes(frame[:4]).hex())
    if frame[4] & _FORBIDDEN_FLAGS:
        _refuse("frame flags are not allowed", where, "content size only", f"{frame[4]:#04x}")
    try:
        header = zstandard.get_frame_parameters(frame)
        if header.content_size != size:
            _refuse("frame content size is wrong", where, size, header.content_size)
        if header.window_size > MAX_WINDOW:
            _refuse("frame window is too large", where, MAX_WINDOW, header.window_size)
        content = _engines.decompressor.decompress(
            frame, read_across_frames=False, allow_extra_data=False
        )
    except (zstandard.ZstdError, MemoryError, ValueError) as error:
        raise InvalidError(
            "segment.payload", f"zstd cannot decode the frame: {error}", where=where
        ) from error
    if len(content) != size:
        _refuse("frame content size is wrong", where, size, len(content))
    return np.frombuffer(content, np.uint8)


def _unpack(content: Bytes, out: Bytes, low: int, radix: int, where: str) -> None:
    """Fill uint8 [rows, tokens] from a frame's content."""
    per_byte = tokens_per_byte(radix)
    count, tokens = out.shape
    if per_byte == 1:
        np.copyto(out, content.reshape(count, tokens))
        return
    width = -(-tokens // per_byte)
    peak = int(content.max())
    if peak >= radix**per_byte:
        _refuse("packed byte is out of range", where, f"below {radix**per_byte}", peak)
    left = tokens % per_byte
    if left and int(content[width - 1 :: width].max()) >= radix**left:
        _refuse("a row's last byte has non-zero filler", where)
    table = _digits(low, radix, per_byte)
    if left:
        values = np.take(table, content, axis=0, mode="clip")
        np.copyto(out, values.reshape(count, width * per_byte)[:, :tokens])
    else:
        target = out.reshape(count * width, per_byte)
        np.take(table, content, axis=0, out=target, mode="clip")


@lru_cache(maxsize=512)
def _digits(low: int, radix: int, per_byte: int) -> Bytes:
    """Values packed in each byte, uint8 [256, p]; meaningless from radix^p on."""
    powers = radix ** np.arange(per_byte)
    table = (np.arange(256)[:, None] // powers % radix + low).astype(np.uint8)
    table.flags.writeable = False
    return table


def _refuse(message: str, where: str, expected: object = None, found: object = None) -> NoReturn:
    """Raise the error of this codec."""
    raise InvalidError("segment.payload", message, where=where, expected=expected, found=found)
