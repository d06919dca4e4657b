"""The writer's art: parameters from the data alone (rationale; any writer may choose others).

Channel means become biases, one step per layer and role relative to its RMS, a scale per token,
columns sorted by variance within each head. The first tokens of a sequence are attention sinks:
an error there is an error everywhere, so they are patches, as are tokens that do not fit 8 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvformat import quant
from kvformat.digests import digest
from kvformat.errors import KvformatError, UsageError
from kvformat.sets import (
    BIAS_RANGE,
    SCALE_RANGE,
    Patches,
    QuantisationSet,
    SideBlock,
    neutral_integers,
    order_dtype,
)
from kvformat.sums import integer_sum

LEVELS: Final = quant.geometric_levels()
SINK_TOKENS: Final = 4
NEGLIGIBLE: Final = 1e-6
"""Deviations below this part of the channel means are noise of the dtype, not information."""
MODEST: Final = 2.0**32
HEAD_REACH: Final = 4.0
"""A head's step is at most the step that this multiple of its own deviation would get."""
DEVIATIONS_HELD: Final = 6.0
"""A channel's step is widened so that this many standard deviations fit in 127 steps."""


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """Statistics of one layer; ``levels`` uint8 ``[T]`` are indices into ``LEVELS``."""

    statistics: quant.Statistics
    levels: NDArray[np.uint8]


def is_modest(x: NDArray[Any]) -> bool:
    """Whether all values are finite and of such a size that ``measure_layer`` refuses none."""
    if not x.size:
        return True
    values = quant.load_float32(np.ascontiguousarray(x))
    return bool(values.max() < MODEST and values.min() > -MODEST)


def measure_layer(x: NDArray[Any], *, sinks: bool, where: str) -> LayerFacts:
    """Statistics of one layer ``[T, H, D]``; raises ``input.non-finite`` or ``input.range``."""
    try:
        found = quant.statistics(x, SINK_TOKENS if sinks else 0)
    except KvformatError as error:
        raise UsageError(
            error.code,
            error.message,
            where=f"{where}, {error.where}",
            found=error.found,
            next_step=error.next_step,
        ) from None
    largest = float(np.abs(found.mean).max(initial=0))
    if largest > BIAS_RANGE[1] or found.rms * 2 > SCALE_RANGE[1]:
        raise UsageError(
            "input.range",
            "the values are too large to be quantised",
            where=where,
            expected="magnitudes below about 2^40",
            found=max(largest, found.rms),
            next_step="Write an exact track",
        )
    return LayerFacts(found, quant.nearest_levels(found.token_rms, LEVELS))


def needs_exact_rows(facts: LayerFacts, relative_step: float) -> bool:
    """Whether the step that a layer wants is finer than the format has: then all is patched."""
    rms = facts.statistics.rms
    largest = float(np.abs(facts.statistics.mean).max(initial=0))
    return 0 < rms * relative_step < SCALE_RANGE[0] and rms > largest * NEGLIGIBLE


def make_set(facts: Sequence[LayerFacts], relative_step: float) -> QuantisationSet:
    """The quantisation set of a layer run from the facts of its layers."""
    statistics = [item.statistics for item in facts]
    heads, head_dim = statistics[0].mean.shape
    step = np.array([quant.relative_scale(item.rms, relative_step) for item in statistics])
    step = step.astype(np.float32).reshape(-1, 1, 1)
    deviation = np.sqrt(np.stack([item.variance for item in statistics]).astype(np.float64))
    needed = np.minimum(deviation * (DEVIATIONS_HELD / 127), SCALE_RANGE[1]).astype(np.float32)
    scale = np.maximum(_head_steps(step, deviation), needed)
    scale = step if (scale == step).all() else np.broadcast_to(scale, needed.shape).copy()
    bias = np.stack([item.mean for item in statistics])
    bias = np.where(np.abs(bias) < BIAS_RANGE[0], np.float32(0), bias).astype(np.float32)
    order = np.argsort(-deviation, axis=-1, kind="stable").astype(order_dtype(head_dim))
    zero = np.full((len(facts), 1, 1), quant.ZERO, np.int16)
    return QuantisationSet(heads, head_dim, scale, zero, bias, order, LEVELS)


def _head_steps(step: NDArray[np.float32], deviation: NDArray[Any]) -> NDArray[np.float32]:
    """The steps ``[n, H, 1]``: the layer's, or finer for a head that is far below its layer.

    One head far above the others would otherwise decide the step of all of them.
    """
    heads = np.sqrt((deviation**2).mean(axis=2, keepdims=True))
    layers = np.sqrt((deviation**2).mean(axis=(1, 2), keepdims=True))
    part = np.minimum(1.0, HEAD_REACH * heads / np.maximum(layers, 2.0**-80))
    finest = np.maximum(step * np.maximum(part, 2.0**-20), SCALE_RANGE[0])
    return np.where(part < 1, finest, step).astype(np.float32)


@dataclass(frozen=True, slots=True)
class QuantisedSegment:
    """Integers uint8 ``[n, N, H, D]`` in original dim order, their digest and sum, side block."""

    integers: NDArray[np.uint8]
    integer_digest: bytes
    integer_sum: int
    side: bytes


def quantise_segment(
    layers: Sequence[NDArray[Any]],
    item: QuantisationSet,
    *,
    heads: slice,
    levels: NDArray[np.uint8],
    exact_tokens: NDArray[np.bool_],
) -> QuantisedSegment:
    """Quantise ``layers``, arrays ``[N, H, D]`` of one segment with heads already cut.

    ``levels`` uint8 and ``exact_tokens`` bool are ``[n, N]``; the latter are patched whatever
    their values.
    """
    tokens = exact_tokens.shape[1]
    scale, zero = _of_heads(item.scale, heads), _of_heads(item.zero, heads)
    bias = None if item.bias is None else item.bias[:, heads]
    neutral = neutral_integers(item)
    neutral = _of_heads(neutral, heads)
    index = levels.copy()
    integers = np.empty((len(layers), tokens, *layers[0].shape[1:]), np.uint8)
    patches: list[Patches] = []
    for number, x in enumerate(layers):
        part = slice(number, number + 1)
        clipped = quant.quantise(
            x[None],
            integers[part],
            scale=scale[part],
            zero=zero[part],
            bias=None if bias is None else bias[part],
            token_scale=item.token_scale[index[part]],
        )
        ordinals = np.flatnonzero(clipped[0] | exact_tokens[number])
        integers[number, ordinals] = neutral[number]
        index[number, ordinals] = 0
        patches.append(Patches(ordinals.astype(np.int64), x[ordinals]))
    return finish_segment(integers, index, patches)


def finish_segment(
    integers: NDArray[np.uint8], index: NDArray[np.uint8], patches: Sequence[Patches]
) -> QuantisedSegment:
    """The segment of ``integers`` ``[n, N, H, D]`` and token scale ``index`` ``[n, N]``."""
    side = SideBlock(index, tuple(patches)).to_bytes()
    return QuantisedSegment(
        integers, digest(integers.reshape(-1).data), integer_sum(integers), side
    )


def _of_heads(values: NDArray[Any], heads: slice) -> NDArray[Any]:
    return values if values.shape[1] == 1 else values[:, heads]
