"""How fast a reader opens the front of a long artifact: the part of ``tools/bench.py`` for it.

The front is that of 100,000 tokens, 80 layers and 8 KV heads x 128 with two tracks. Its digests
of segments are made up, everything that opening checks is consistent, and the data behind it is
a hole in a sparse file.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvformat
from kvformat.digests import digest
from kvformat.fields import float64_bits
from kvformat.groups import make_grid
from kvformat.header import HEADER_BYTES, Header
from kvformat.layout import candidate_layouts, tail_layout
from kvformat.manifest import content_id
from kvformat.planning import RELATIVE_STEPS, plan_segmentation
from kvformat.tables import COORDINATES, NO_LAYOUT, SEGMENT_DTYPE, SET_DTYPE, place
from kvformat.tokens import BLOCK_TOKENS, Chain, Tokens
from kvformat.tracks import Quality, Track

TOKENS, LAYERS, HEADS, HEAD_DIM = 100_000, 80, 8, 128
QUALITY = "near-lossless"
SEGMENT_BYTES = 1_000


@dataclass(frozen=True, slots=True)
class FrontResult:
    """Size of the front, its segments in one track, and milliseconds to open it and one table."""

    front_bytes: int
    segments: int
    open_ms: float
    table_ms: float


def make_front() -> tuple[bytes, int]:
    """The bytes of a synthetic front, and the length of the file that it describes."""
    groups = tuple(
        kvformat.Group(role, role, "bfloat16", tuple(range(LAYERS)), HEADS, HEAD_DIM, HEADS)
        for role in ("key", "value")
    )
    segmentation = plan_segmentation(groups, TOKENS)
    grid = make_grid(groups, segmentation, TOKENS)
    first = grid.fields["token_start"] == 0
    sets = np.zeros(int(first.sum()), SET_DTYPE)
    for name in ("group", "layer_index", "layer_count"):
        sets[name] = grid.fields[name][first]
    sets = sets[np.lexsort((sets["layer_index"], sets["group"]))]
    sets["bytes"] = 16 + 5 * sets["layer_count"] * HEADS * HEAD_DIM
    sets["offset"], cursor = place([int(size) for size in sets["bytes"]], 0, 1)
    quality = Quality(
        QUALITY,
        ("quantised", "quantised"),
        len(sets),
        digest(sets.tobytes()).hex(),
        0,
        cursor,
        float64_bits(RELATIVE_STEPS[QUALITY]),
    )
    counts = np.unique(grid.fields["token_count"])[::-1]
    whole = candidate_layouts(int(counts[0]), HEADS * HEAD_DIM)[-1]
    layouts = (whole, *(tail_layout(whole, int(count)) for count in counts[1:]))
    tables, tracks = [sets.tobytes()], []
    for codec in ("hevc", "zstd"):
        rows = _segments(grid.fields, sets, counts, hevc=codec == "hevc")
        rows["offset"], stop = place([SEGMENT_BYTES] * len(rows), cursor, 1)
        tables.append(rows.tobytes())
        mine = tuple(dict.fromkeys(layouts)) if codec == "hevc" else ()
        tracks.append(
            Track(
                f"{QUALITY}/{codec}",
                QUALITY,
                (codec, codec),
                len(rows),
                digest(tables[-1]).hex(),
                cursor,
                stop,
                mine,
            )
        )
        cursor = stop
    return _front(groups, segmentation, quality, tracks, tables)


def _segments(
    fields: NDArray[Any], sets: NDArray[Any], counts: NDArray[Any], *, hevc: bool
) -> NDArray[Any]:
    rows = np.zeros(len(fields), SEGMENT_DTYPE)
    for name in COORDINATES:
        rows[name] = fields[name]
    key = sets["group"].astype(np.int64) * 65_536 + sets["layer_index"]
    wanted = fields["group"].astype(np.int64) * 65_536 + fields["layer_index"]
    rows["set_index"] = np.searchsorted(key, wanted)
    rows["stored_bytes"], rows["side_bytes"] = SEGMENT_BYTES, 100
    number = np.searchsorted(-counts, -fields["token_count"])
    rows["layout"] = number if hevc else NO_LAYOUT
    noise = np.random.default_rng(0)
    for name in ("digest", "integer_digest"):
        rows[name] = noise.integers(0, 256, (len(rows), 32), np.uint8).view("V32")[:, 0]
    return rows


def _front(
    groups: tuple[kvformat.Group, ...],
    segmentation: kvformat.groups.Segmentation,
    quality: Quality,
    tracks: Sequence[Track],
    tables: Sequence[bytes],
) -> tuple[bytes, int]:
    identity = kvformat.Identity(kvformat.Model("synthetic"), LAYERS, "bfloat16")
    blocks = -(-TOKENS // BLOCK_TOKENS)
    source = digest(b"source").hex()
    manifest = kvformat.Manifest(
        identity=identity,
        tokens=Tokens(
            TOKENS, 0, Chain(tuple(digest(bytes([i % 256, i // 256])).hex() for i in range(blocks)))
        ),
        groups=groups,
        segmentation=segmentation,
        qualities=(quality,),
        tracks=tuple(tracks),
        source_digest=source,
        content_id=content_id(groups, identity, source),
        data_bytes=tracks[-1].data_stop,
    )
    raw = replace(manifest, generator="kvformat bench").to_bytes()
    joined = b"".join(tables)
    size = HEADER_BYTES + len(raw) + len(joined)
    header = Header(size + manifest.data_bytes, len(raw), len(joined), digest(raw))
    return header.to_bytes() + raw + joined, header.file_bytes


def measure_front(repeats: int) -> FrontResult:
    """Median times to open the synthetic front, and then to load the grid and one table."""
    front, file_bytes = make_front()
    opening, loading = [], []
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "front.kvf"
        with path.open("wb") as file:
            file.write(front)
            file.truncate(file_bytes)
        for _ in range(repeats):
            start = time.perf_counter()
            with kvformat.open(path) as artifact:
                opened = time.perf_counter()
                table = artifact.segment_table(artifact.track(f"{QUALITY}/zstd"))
                loading.append(time.perf_counter() - opened)
            opening.append(opened - start)
    return FrontResult(len(front), len(table), 1e3 * median(opening), 1e3 * median(loading))
