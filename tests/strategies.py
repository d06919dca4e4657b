"""Hypothesis strategies for caches and how to write them; the reference restorer for both."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

import kvformat
from kvformat import Cache, Extent, Group, GroupTensors, Identity, Model
from tests.reference import DTYPES, LARGEST, reference_restore

__all__ = [
    "FLOATS",
    "Sample",
    "caches",
    "make_values",
    "raw",
    "reference_restore",
    "samples",
    "unbound",
    "write_bytes",
]

Array = NDArray[Any]
HEAD_DIMS = (1, 3, 64, 80, 96, 128, 192, 256, 512, 576)
FLOATS = tuple(name for name in DTYPES if name != "uint8")
VALUES_PER_LAYER = 6_000
LAYERS_TOTAL = 64


def unbound(layers_total: int = LAYERS_TOTAL) -> Identity:
    """An identity that binds no tokens."""
    return Identity(Model("a model"), layers_total, "bfloat16", kind="unbound")


def raw(array: Array) -> bytes:
    """The bits of an array in C order."""
    return np.ascontiguousarray(array).tobytes()


def write_bytes(cache: Any, **options: Any) -> bytes:
    """``kvformat.write`` to the bytes of the artifact."""
    options.setdefault("identity", unbound())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.kvf"
        kvformat.write(path, cache, **options)
        return path.read_bytes()


@dataclass(frozen=True)
class Sample:
    """A cache and options of ``kvformat.write`` for it."""

    cache: Cache
    options: dict[str, Any] = field(default_factory=dict)

    def write(self, **more: Any) -> bytes:
        """The artifact."""
        return write_bytes(self.cache, **{**self.options, **more})

    def source(self) -> dict[str, Array]:
        """Group name to ``[L, T, H, D]``."""
        return {
            item.group.name: np.stack([np.ascontiguousarray(x) for x in item.layers])
            for item in self.cache.groups
        }


FLAVOURS = ("normal", "zeros", "constant", "outliers", "drift", "huge", "tiny", "signed-zeros")


def make_values(shape: tuple[int, ...], name: str, flavour: str, seed: int) -> Array:
    """Finite values ``[T, H, D]`` of the named dtype; or any bits for flavour ``bits``."""
    rng = np.random.default_rng(seed)
    kind = DTYPES[name]
    if flavour == "bits" or name == "uint8":
        return rng.integers(0, 256, (*shape[:-1], shape[-1] * kind.itemsize), np.uint8).view(kind)
    x = rng.standard_normal(shape)
    if flavour == "zeros":
        x = np.zeros(shape)
    elif flavour == "constant":
        fixed = rng.random(shape[1:]) < 0.5
        x = np.where(fixed, rng.standard_normal(shape[1:]), x)
    elif flavour == "outliers":
        x = np.where(rng.random(shape) < 0.02, x * 200, x)
        x[: shape[0] // 5] *= 50
    elif flavour == "drift":
        x = x * 0.1 + np.linspace(-3, 3, max(shape[0], 1))[: shape[0], None, None]
        x *= np.exp(rng.standard_normal(shape[1:]))
    elif flavour == "huge":
        x *= min(LARGEST[name] / 8, 2.0**36)
    elif flavour == "tiny":
        x *= 2.0**-40 if name in ("float32", "bfloat16") else 2.0**-9
    elif flavour == "signed-zeros":
        x = np.where(rng.random(shape) < 0.5, np.copysign(0, x), x)
    return np.clip(x, -LARGEST[name], LARGEST[name]).astype(np.float32).astype(kind)


@st.composite
def _strided(draw: st.DrawFn, array: Array) -> Array:
    """The same values, perhaps with the axes in another order in memory."""
    order = draw(st.sampled_from([(0, 1, 2), (1, 0, 2), (2, 1, 0)]))
    inverse = np.argsort(order)
    return np.ascontiguousarray(array.transpose(order)).transpose(*inverse)


@st.composite
def _extents(draw: st.DrawFn, count: int, first_position: int) -> Extent:
    if not draw(st.integers(0, 3)):
        start = draw(st.integers(0, count))
        return Extent("window", held_start=start, cumulative_tokens=first_position + count)
    return Extent()


@st.composite
def _groups(
    draw: st.DrawFn,
    *,
    name: str,
    role: str,
    layers: tuple[int, ...],
    count: int,
    first: int,
    bits: bool,
) -> GroupTensors:
    dims = draw(st.sampled_from(HEAD_DIMS))
    most = max(1, min(8, VALUES_PER_LAYER // (dims * max(count, 1))))
    heads = 1 if role in ("latent", "indexer") else draw(st.integers(1, most))
    extent = draw(_extents(count, first))
    if role == "state":
        factors = [2, dims // 2] if dims % 2 == 0 else [dims]
        extent = Extent("state", shape=tuple(factors))
        assert prod(factors) == dims
    start = draw(st.sampled_from([0, 0, 3]))
    dtype = draw(st.sampled_from(tuple(DTYPES)))
    group = Group(
        name=name,
        role=role,
        dtype=dtype,
        layers=layers,
        heads=heads,
        head_dim=dims,
        heads_total=start + heads + draw(st.integers(0, 1)),
        head_start=start,
        tokens=extent,
    )
    begin, end = group.held(count)
    flavour = st.just("bits") if bits or role == "state" else st.sampled_from(FLAVOURS)
    seed = draw(st.integers(0, 2**16))
    tensors = tuple(
        draw(_strided(make_values((end - begin, heads, dims), dtype, draw(flavour), seed + index)))
        for index in range(len(layers))
    )
    return GroupTensors(group, tensors)


@st.composite
def caches(draw: st.DrawFn, *, first_position: int = 0, bits: bool = False) -> Cache:
    """Up to four groups; layers are no ranges, shapes differ between layers of one role."""
    count = draw(st.sampled_from([0, 1, 2, 5, 9, 17, 33]))
    roles = draw(
        st.lists(
            st.sampled_from(["key", "value", "latent", "indexer", "state"]),
            unique=True,
            min_size=1,
            max_size=3,
        )
    )
    groups: list[GroupTensors] = []
    for role in roles:
        numbers = st.integers(0, LAYERS_TOTAL - 1)
        layers = tuple(sorted(draw(st.sets(numbers, min_size=1, max_size=5))))
        cut = draw(st.integers(0, len(layers) - 1))
        for part in filter(None, (layers[:cut], layers[cut:])):
            name = f"{role}-{len(groups)}"
            groups.append(
                draw(
                    _groups(
                        name=name,
                        role=role,
                        layers=part,
                        count=count,
                        first=first_position,
                        bits=bits,
                    )
                )
            )
    return Cache(count, tuple(groups))


@st.composite
def samples(
    draw: st.DrawFn,
    *,
    tracks: tuple[str, ...] = ("near-lossless/zstd", "near-lossless/stored"),
    bits: bool = False,
) -> Sample:
    """A cache with segment size, order, alignment and first position."""
    first_position = draw(st.sampled_from([0, 0, 2, 4096]))
    cache = draw(caches(first_position=first_position, bits=bits))
    options = {
        "tracks": tracks,
        "first_position": first_position,
        "segment_tokens": draw(st.sampled_from([None, 1, 4, 16])),
        "order": draw(st.sampled_from(["token-major", "layer-major"])),
        "alignment": draw(st.sampled_from([1, 1, 4096])),
        "workers": 1,
    }
    return Sample(cache, options)


def canonical_kv(
    layers: int, tokens: int, heads: int, dims: int, *, name: str = "bfloat16", seed: int = 0
) -> Array:
    """A small array ``[2, L, T, H, D]`` with structure in keys and noise in values."""
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((layers, 1, heads, dims)) * 4
    keys = keys + np.cumsum(rng.standard_normal((layers, tokens, heads, dims)) * 0.2, axis=1)
    values = rng.standard_normal((layers, tokens, heads, dims))
    result: Array = np.stack([keys, values]).astype(np.float32).astype(DTYPES[name])
    return result


assert ml_dtypes  # the dtypes of DTYPES are registered with numpy
