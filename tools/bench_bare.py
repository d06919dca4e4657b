"""The codecs with nothing around them: what ``tools/bench.py`` compares kvformat with.

The work is prepared beforehand - pictures, packed rows - and each thread calls the library in a
loop, on the same data and with the same settings as kvformat, and drops the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import av
import zstandard

from kvformat.cache import Cache
from kvformat.codecs import bitstream, hevc, zstd, zstd_codec
from kvformat.encoder import Job, prepare, quantise_cell, segment_shape
from kvformat.groups import Cell
from kvformat.planning import TrackPlan, parse_tracks, plan_segmentation

T = TypeVar("T")
DECODER_OPTIONS = {"err_detect": "crccheck+bitstream+buffer+explode"}


@dataclass(frozen=True, slots=True)
class Bare:
    """Seconds per value of the bare codec, on all threads together."""

    encode: Callable[[], float]
    decode: Callable[[], float]


def plan(cache: Cache, track: str) -> tuple[Job, TrackPlan]:
    """What the writer decides before it encodes."""
    plans = parse_tracks([track])
    groups = tuple(item.group for item in cache.groups)
    segmentation = plan_segmentation(groups, cache.token_count)
    job, _ = prepare(cache, segmentation, plans, first_position=0, workers=None)
    return job, plans[0]


def sample_cells(job: Job, most: int) -> list[Cell]:
    """Cells of at most ``most`` values, spread over the cache."""
    cells = list(job.grid)
    values = sum(_values(job, cell) for cell in cells)
    step = max(1, -(-values // most)) | 1  # odd, for keys and values alternate
    return cells[step // 2 :: step]


def _values(job: Job, cell: Cell) -> int:
    return cell.values(job.cache.groups[cell.group].group)


def _timed(work: Callable[[T], object], items: Sequence[T], values: int, workers: int) -> float:
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(int, range(workers)))
        start = time.perf_counter()
        for _ in pool.map(work, items):
            pass
        return (time.perf_counter() - start) / values


def bare_hevc(cache: Cache, track: str, workers: int, most: int) -> Bare:
    """libx265 and FFmpeg's decoder through PyAV."""
    job, what = plan(cache, track)
    cells = sample_cells(job, most)
    pictures: list[tuple[Any, str]] = []
    for cell in cells:
        number = job.layout_numbers[what.name, cell.group, cell.token_count]
        layout = job.layouts[what.name][number]
        shape = replace(segment_shape(job, what.quality, cell), layout=layout)
        integers = quantise_cell(job, what.quality, cell).integers
        pictures.append((hevc.make_planes(integers, shape, layout), hevc.preset_for(layout)))
    streams = [bitstream.encode_pictures(*item) for item in pictures]
    values = sum(_values(job, cell) for cell in cells)

    def decode(stream: bytes) -> None:
        context = av.CodecContext.create("hevc", "r")
        context.thread_type, context.thread_count = "NONE", 1
        context.options = dict(DECODER_OPTIONS)
        for packet in (*context.parse(stream), *context.parse(None), None):
            context.decode(packet)

    return Bare(
        lambda: _timed(lambda item: bitstream.encode_pictures(*item), pictures, values, workers),
        lambda: _timed(decode, streams, values, workers),
    )


def bare_zstd(cache: Cache, track: str, workers: int, most: int) -> Bare:
    """The zstd frames that kvformat writes, one call each."""
    job, what = plan(cache, track)
    cells = sample_cells(job, most)
    frames: list[list[bytes]] = []
    contents: list[list[bytes]] = []
    for cell in cells:
        shape = segment_shape(job, what.quality, cell)
        integers = quantise_cell(job, what.quality, cell).integers
        rows = zstd.to_rows(integers, shape)
        payload = memoryview(zstd_codec.encode_rows(rows, run=shape.channels))
        found = zstd_codec._frames(payload, len(rows), shape.tokens, "bench")
        frames.append([bytes(item[3]) for item in found])
        contents.append([zstandard.decompress(item) for item in frames[-1]])
    values = sum(_values(job, cell) for cell in cells)

    def encode(items: list[bytes]) -> None:
        for item in items:
            zstd_codec._engines.compressor.compress(item)

    def decode(items: list[bytes]) -> None:
        for item in items:
            zstd_codec._engines.decompressor.decompress(item)

    return Bare(
        lambda: _timed(encode, contents, values, workers),
        lambda: _timed(decode, frames, values, workers),
    )


def general(data: bytes, level: int) -> tuple[int, float]:
    """Bytes and seconds of zstd at ``level`` over ``data``, on one thread."""
    start = time.perf_counter()
    size = len(zstandard.ZstdCompressor(level=level).compress(data))
    return size, time.perf_counter() - start
