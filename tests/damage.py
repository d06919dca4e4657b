"""Small artifacts to break, and what a reader and the verifier answer to the pieces."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

import kvformat
from kvformat import Cache, Extent, Group, GroupTensors, KvformatError
from kvformat.identity import CacheScale
from kvformat.verification import verify
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
            (
                Group(
                    "rec", "state", "float32", (5,), 1, 4, 1, tokens=Extent("state", shape=(2, 2))
                ),
                1,
            ),
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


def put(value: Any, pointer: str, new: Any) -> None:
    """Set the value behind a JSON pointer; ``-`` appends to a list, DROP removes."""
    *steps, last = pointer.strip("/").split("/")
    for step in steps:
        value = value[int(step) if isinstance(value, list) else step]
    if isinstance(value, list):
        if last == "-":
            value.append(new)
        elif new is DROP:
            del value[int(last)]
        else:
            value[int(last)] = new
    elif new is DROP:
        del value[last]
    else:
        value[last] = new


DROP: Any = ...


def with_members(builder: Builder, changes: dict[str, Any]) -> bytes:
    """The file with other values in its manifest and the content id that follows from them."""

    def edit(manifest: dict[str, Any]) -> None:
        for pointer, new in changes.items():
            put(manifest, pointer, new)
        if "/content_id" not in changes and {"groups", "identity", "source_digest"} <= set(
            manifest
        ):
            manifest["content_id"] = builder.content_id()

    return builder.build(edit_manifest=edit)


@cache
def bound_artifact(first_position: int = 0) -> bytes:
    """An artifact bound to tokens, with every optional object of the identity."""
    count = 300
    identity = kvformat.Identity(
        model=kvformat.Model("a model", "main", "sha256:" + "0f" * 32),
        layers_total=8,
        cache_dtype="bfloat16",
        tokenizer=kvformat.Reference("a tokenizer", "blake3:" + "12" * 32),
        adapters=(kvformat.Reference("lora"),),
        rope=(
            kvformat.Rope.from_array(np.float32([1, 0.1]), (0, 1, 2)),
            kvformat.Rope.from_array(np.float32([1, 0.5]), (3, 5), pairing="interleaved"),
        ),
        rotation=kvformat.Rotation("hadamard"),
        scale_scheme=kvformat.ScaleScheme(
            "per-layer", (CacheScale(0, "key", "3f800000"), CacheScale(0, "value", "3f000000"))
        ),
    )
    content = (
        kvformat.ContentSpan(first_position + 3, 4, "image", "sha256:" + "ab" * 32),
        kvformat.ContentSpan(first_position + 7, 2, "audio", "blake3:" + "cd" * 32),
    )
    return write_bytes(
        np.float16(np.random.default_rng(1).standard_normal((2, 1, count, 1, 2))),
        identity=identity,
        token_ids=np.arange(first_position + count),
        salt=b"tenant",
        first_position=first_position,
        content=content,
        tracks=["zstd"],
        lineage=kvformat.Lineage("lossy", 2, "near-lossless", None),
        extensions={"com.example.a": kvformat.Extension([1, {"b": None}])},
        workers=1,
    )
