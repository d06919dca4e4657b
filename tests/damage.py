"""Small artifacts to break, and what a reader and the verifier answer to the pieces."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

import kvformat
from kvformat import Cache, Extent, Group, GroupTensors, KvformatError
from kvformat.verify import verify
from tests.builder import Builder
from tests.strategies import make_values, write_bytes

TRACKS = (
    "near-lossless/hevc",
    "near-lossless/zstd",
    "near-lossless/stored",
    "exact/zstd",
    "exact/stored",
)


def small_cache(*, window: bool = False) -> Cache:
    """Two quantisable groups of 10 tokens and, with ``window``, a windowed one and a state."""
    parts = [
        (Group("keys", "key", "bfloat16", (1, 3, 4, 6), 2, 4, 2), 10),
        (Group("values", "value", "float16", (1, 3), 1, 3, 1), 10),
    ]
    if window:
        near = Extent("window", held_start=3, cumulative_tokens=10)
        parts += [
            (Group("near", "value", "float16", (4,), 1, 3, 1, tokens=near), 7),
            (Group("rec", "state", "float32", (5,), 1, 4, 1, tokens=Extent("state", shape=(2, 2))), 1),
        ]
    groups = []
    for seed, (group, tokens) in enumerate(parts):
        shape = (tokens, group.heads, group.head_dim)
        tensors = tuple(
            make_values(shape, group.dtype, "normal", 10 * seed + layer) for layer in group.layers
        )
        groups.append(GroupTensors(group, tensors))
    return Cache(10, tuple(groups))


@cache
def artifact(
    *,
    tracks: tuple[str, ...] = TRACKS,
    window: bool = False,
    alignment: int = 1,
    segment_tokens: int = 6,
) -> bytes:
    """A valid artifact; the same bytes for the same arguments."""
    return write_bytes(
        small_cache(window=window),
        tracks=tracks,
        alignment=alignment,
        segment_tokens=segment_tokens,
        workers=1,
    )


@cache
def _parts(**options: Any) -> Builder:
    return Builder(artifact(**options))


def parts(**options: Any) -> Builder:
    """The parts of ``artifact(**options)``, to be changed freely."""
    return _parts(**options).copy()


def outcome(file: bytes, track: str) -> str | dict[str, bytes]:
    """What reading a whole track gives: an error code, or the bytes of each group."""
    try:
        with kvformat.open(file) as opened:
            restored = opened.read(track=track, check=True, allow_partial=True, workers=1)
            return {name: array.tobytes() for name, array in restored.items()}
    except KvformatError as error:
        return error.code


def verdict(file: bytes) -> str:
    """``ok`` or the code that verification gives."""
    try:
        verify(file, in_child=False, workers=1)
    except KvformatError as error:
        assert error.where, error
        return error.code
    return "ok"


def open_code(file: bytes) -> str:
    """``ok`` or the code that opening gives."""
    try:
        kvformat.open(file).close()
    except KvformatError as error:
        assert error.where, error
        return error.code
    return "ok"


def flipped(file: bytes, place: int, mask: int = 0x01) -> bytes:
    """The file with some bits of one byte inverted."""
    return file[:place] + bytes([file[place] ^ mask]) + file[place + 1 :]


def bits(value: float) -> bytes:
    """A binary32 as it is stored."""
    return np.float32(value).tobytes()
