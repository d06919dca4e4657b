"""Artifacts and helpers of the tests that read over a network; there are no tests here."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import fsspec
import numpy as np
import psutil
from fsspec.asyn import sync
from fsspec.implementations.http import HTTPFileSystem

import kvformat
from kvformat import Cache, Extent, Group, GroupTensors
from kvformat.fetching import Wish
from kvformat.manifest import Extension
from kvformat.reading import Request, choose_cells
from kvformat.storage import Piece
from tests.reference import DTYPES
from tests.strategies import canonical_kv, unbound, write_bytes

PREFETCH_BYTES = 262_144
LAYERS, TOKENS, HEADS, DIMS = 6, 1_500, 2, 32
SEGMENT_TOKENS = 128


@cache
def ordinary(order: str = "token-major", alignment: int = 1) -> bytes:
    """A file of 7 MB whose front is small: most of the data lies behind the first request."""
    return write_bytes(
        canonical_kv(LAYERS, TOKENS, HEADS, DIMS),
        tracks=["zstd", "exact/zstd", "exact/stored"],
        segment_tokens=SEGMENT_TOKENS,
        order=order,
        alignment=alignment,
    )


def filler(size: int) -> dict[str, Extension]:
    """An extension that makes the manifest longer by about so many bytes."""
    strings = ["x" * 4_000] * (size // 4_003)
    return {"com.example.filler": Extension(must_understand=False, value=strings)}


@cache
def far(order: str = "token-major") -> bytes:
    """A file whose manifest ends in the first request; most tables and all sets lie behind."""
    return write_bytes(
        canonical_kv(10, 300, 2, 16),
        tracks=["zstd", "exact/stored"],
        segment_tokens=8,
        order=order,
        extensions=filler(256_192),
    )


@cache
def many() -> bytes:
    """A file whose tables do not fit in the first request: 2,400 segments in each track."""
    return write_bytes(
        canonical_kv(10, 300, 2, 16), tracks=["zstd", "exact/stored"], segment_tokens=1
    )


@cache
def long_manifest() -> bytes:
    """A file whose manifest does not fit in the first request."""
    return write_bytes(
        canonical_kv(2, 40, 1, 8), tracks=["exact/stored"], extensions=filler(320_240)
    )


def hybrid_cache() -> Cache:
    """Full attention, a window, and a state, in layers that interleave."""
    random = np.random.default_rng(5)
    full = Group("key", "key", "bfloat16", (0, 2, 4), 2, 64, 2)
    window = Group(
        "window", "key", "bfloat16", (1, 3), 2, 64, 2,
        tokens=Extent("window", held_start=700, cumulative_tokens=1000),
    )  # fmt: skip
    state = Group(
        "state", "state", "float32", (5,), 1, 4096, 1, tokens=Extent("state", shape=(64, 64))
    )

    def values(group: Group, tokens: int) -> tuple[Any, ...]:
        shape = (tokens, group.heads, group.head_dim)
        kind = DTYPES[group.dtype]
        return tuple(random.standard_normal(shape).astype(kind) for _ in group.layers)

    tensors = [(full, 1000), (window, 300), (state, 1)]
    return Cache(1000, tuple(GroupTensors(g, values(g, n)) for g, n in tensors))


@cache
def hybrid(order: str = "token-major") -> bytes:
    """A window and a state beside full attention; it serves 1,000 tokens."""
    return write_bytes(
        hybrid_cache(),
        identity=unbound(6),
        tracks=["zstd", "exact/stored"],
        segment_tokens=SEGMENT_TOKENS,
        order=order,
        valid_lengths=(1000,),
    )


def arrays(restored: kvformat.Restored) -> dict[str, bytes]:
    """The bits of each group."""
    return {name: item.array.tobytes() for name, item in restored.groups.items()}


def local(data: bytes, **options: Any) -> dict[str, bytes]:
    """What reading the bytes in memory gives."""
    with kvformat.open(data) as artifact:
        return arrays(artifact.read(**options))


def assemble(artifact: kvformat.Artifact, data: bytes, **options: Any) -> dict[str, bytes]:
    """A stream put together, every place written once. ``data`` are the bytes of the artifact."""
    selected = {key: value for key, value in options.items() if key != "order"}
    with kvformat.open(data) as twin:
        shapes = twin.read(**selected).groups
    out = {name: np.zeros(item.array.shape, item.array.dtype) for name, item in shapes.items()}
    seen = {name: np.zeros(item.array.shape[:3], np.int8) for name, item in shapes.items()}
    with artifact.stream(**options) as stream:
        for block in stream:
            whole = shapes[block.group.name]
            layers = [whole.layers.index(layer) for layer in block.layers]
            tokens = slice(
                block.token_start - whole.token_start,
                block.token_start - whole.token_start + block.array.shape[1],
            )
            heads = slice(
                block.head_start - whole.head_start,
                block.head_start - whole.head_start + block.array.shape[2],
            )
            for number, layer in enumerate(layers):
                out[block.group.name][layer, tokens, heads] = block.array[number]
                seen[block.group.name][layer, tokens, heads] += 1
        assert stream.report.validity.complete
    assert all((item == 1).all() for item in seen.values())
    return {name: item.tobytes() for name, item in out.items()}


def wanted(artifact: kvformat.Artifact, **options: Any) -> list[Piece]:
    """The whole segments that a read touches and the prefix lacks, in the order of the read."""
    track = artifact.track(options.pop("track", None))
    _, _, cells = choose_cells(artifact, Request(**options))
    table = artifact.segment_table(track)
    start = artifact.front.data_start
    wishes = [Wish(track, table[int(cell)]) for cell in cells]
    pieces = [Piece(start + item.record.offset, item.record.stored_bytes) for item in wishes]
    return [piece for piece in pieces if piece.stop > len(artifact.front.prefix)]


def threads() -> list[str]:
    """Names of threads that reading started and that still run."""
    names = [item.name for item in threading.enumerate() if item.name.startswith("kvformat")]
    return [name for name in names if not name.startswith("kvformat-aio")]  # a pool that stays


def sessions() -> list[Any]:
    """The HTTP sessions of this process."""
    found = [fs._session for fs in HTTPFileSystem._cache.values()]
    return [session for session in found if session is not None]


def in_use() -> int:
    """Connections that a request still holds."""
    return sum(len(session.connector._acquired) for session in sessions())


def close_sessions() -> None:
    """End the connections that are kept for reuse."""
    loop = fsspec.asyn.get_loop()
    for session in sessions():
        sync(loop, session.close)
    HTTPFileSystem.clear_instance_cache()


def eventually(check: Callable[[], bool], seconds: float = 20) -> bool:
    """Whether something becomes true; the other end of a socket closes when it notices."""
    stop = time.monotonic() + seconds
    while not check():
        if time.monotonic() > stop:
            return False
        time.sleep(0.002)
    return True


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """No thread, connection or file of the block is left behind it."""
    close_sessions()
    process = psutil.Process(os.getpid())
    fsspec.asyn.get_loop()
    before, children = process.num_fds(), len(process.children())
    yield
    assert threads() == []
    assert in_use() == 0
    close_sessions()
    assert eventually(lambda: process.num_fds() <= before), process.open_files()
    assert len(process.children()) <= children
