"""What the tests of ``kvformat.gpu`` share: bits, and synthetic segments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvformat.codecs.base import SegmentShape
from kvformat.codecs.hevc import make_planes
from kvformat.dtypes import DTYPES
from kvformat.groups import Cell, Group
from kvformat.layout import Layout
from kvformat.segments import SegmentContext
from kvformat.sets import Patches, QuantisationSet, SideBlock
from kvformat.tables import SegmentRecord

torch = pytest.importorskip("torch", reason="torch is not installed")

Array = NDArray[Any]


def bits(values: Any) -> bytes:
    """The bits of a numpy array or a torch tensor, in C order."""
    if isinstance(values, np.ndarray):
        return np.ascontiguousarray(values).tobytes()
    tensor = values.detach().contiguous().cpu()
    return tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def random_set(
    rng: np.random.Generator, layers: int, heads: int, dim: int, *, kind: str, big: float
) -> QuantisationSet:
    """A set with what ``kind`` names: any of the letters s, z, b, o, t (per channel, bias, ...)."""
    whole, one = (layers, heads, dim), (layers, 1, 1)
    scale = np.exp2(rng.uniform(-12, big, whole if "s" in kind else one)).astype(np.float32)
    zero = rng.integers(-300, 400, whole if "z" in kind else one).astype(np.int16)
    bias = None
    if "b" in kind:
        bias = (rng.standard_normal(whole) * np.exp2(big)).astype(np.float32)
        bias[rng.random(whole) < 0.1] = 0
    order = None
    if "o" in kind:
        order = np.argsort(rng.random(whole), axis=-1).astype(np.uint8 if dim <= 256 else "<u2")
    levels = np.exp2(rng.uniform(-3, 3, 7)).astype(np.float32) if "t" in kind else np.zeros(0, "f4")
    return QuantisationSet(heads, dim, scale, zero, bias, order, levels)


def random_side(
    rng: np.random.Generator, item: QuantisationSet, tokens: int, heads: int, dtype: str
) -> SideBlock:
    """Token scales where the set has them, and rows of any bits for some tokens."""
    index = None
    if item.has_token_scale:
        index = rng.integers(0, len(item.token_scale), (item.layers, tokens)).astype(np.uint8)
    patches = []
    size = DTYPES[dtype].itemsize
    for _ in range(item.layers):
        ordinals = np.flatnonzero(rng.random(tokens) < 0.1).astype(np.int64)
        raw = rng.integers(0, 256, (len(ordinals), heads, item.head_dim * size), np.uint8)
        patches.append(Patches(ordinals, raw.view(DTYPES[dtype])))
    return SideBlock(index, tuple(patches))


def context_of(
    item: QuantisationSet, dtype: str, cell: Cell, codec: str, layout: Layout | None = None
) -> SegmentContext:
    """A context around a set, without a file."""
    group = Group(
        name="key", role="key", dtype=dtype, layers=tuple(range(item.layers)), heads=item.heads,
        head_dim=item.head_dim, heads_total=item.heads,
    )  # fmt: skip
    fields = dict.fromkeys(SegmentRecord.__dataclass_fields__, 0)
    known: dict[str, Any] = {**fields, "cell": cell, "digest": b"", "integer_digest": b""}
    record = SegmentRecord(**known)
    return SegmentContext(record, group, codec, layout, item, "synthetic segment")


def pictures(integers: Array, context: SegmentContext) -> Array:
    """The pictures ``[F, 3, height, width]`` of integers in original dim order."""
    shape: SegmentShape = context.shape()
    assert context.layout is not None
    return make_planes(integers, replace(shape, layout=context.layout), context.layout)
