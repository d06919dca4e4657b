"""The arithmetic of transformed groups (spec 9.5) against a naive one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvformat.transforms import ROW_BUDGET, LayerTransform, Rotation
from tests.requirements import covers
from tests.transformed import Transform, restore_layer, sums, turned_by

Array = NDArray[Any]
few = settings(
    max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
POSITIONS = st.one_of(
    st.integers(0, 70),
    st.integers(2**24 - 40, 2**24 + 40),
    st.integers(2**32 - 8, 2**32 + 8),
    st.integers(0, 2**40 - 64),
    st.just(2**40 - 64),
)


def as_layer(transform: Transform) -> LayerTransform:
    """The package's form of a transform."""
    count = transform.turns.shape[1]
    rotation = None
    if count:
        rotation = Rotation(transform.pairing, *transform.turns)
    return LayerTransform(
        transform.mean,
        transform.row_scale,
        np.ascontiguousarray(transform.matrix.T, np.float32),
        rotation,
    )


def bounded_rows(rng: np.random.Generator, count: int, extreme: float) -> Array:
    """A matrix whose rows use up a part of the budget, all of it where ``extreme`` is 1."""
    weights = rng.random((count, count)) ** rng.integers(1, 12)
    budget = int(ROW_BUDGET * extreme)
    rows = np.floor(weights / weights.sum(axis=1, keepdims=True) * budget).astype(np.int64)
    rows[:, 0] += budget - rows.sum(axis=1)
    return rows * rng.choice([-1, 1], rows.shape)


@st.composite
def made(draw: st.DrawFn) -> tuple[Transform, Array, np.float32, Array | None, int]:
    """A transform, integers, scale, token scales and the first position."""
    heads, dims = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 3, 8, 16, 20]))
    tokens = draw(st.integers(0, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = heads * dims
    pairing = draw(st.sampled_from(["none", "half", "interleaved"])) if dims > 1 else "none"
    pairs = 0 if pairing == "none" else draw(st.integers(1, dims // 2))
    angles = rng.random(pairs) * 2 * np.pi
    matrix = bounded_rows(rng, count, draw(st.sampled_from([0.01, 0.7, 1.0])))
    mean = rng.standard_normal(count).astype(np.float32)
    mean[rng.random(count) < 0.3] = 0
    row_scale = np.exp2(rng.uniform(*draw(st.sampled_from([(-24, -10), (-40, 22)])), count))
    transform = Transform(
        "q", "key", 0, heads, dims, mean, row_scale.astype(np.float32), matrix, pairing,
        np.stack([np.cos(angles), np.sin(angles)]),
    )  # fmt: skip
    q = rng.integers(0, 256, (tokens, heads, dims), np.uint8)
    if draw(st.booleans()):
        q = np.where(rng.random(q.shape) < 0.5, 0, 255).astype(np.uint8)
    scale = np.float32(2.0 ** draw(st.integers(-40, 40)))
    factors = None
    if draw(st.booleans()):
        factors = np.exp2(rng.uniform(-40, 40, tokens)).astype(np.float32)
    return transform, q, scale, factors, draw(POSITIONS)


@covers("TRF-6", "TRF-7", "PRF-5")
@few
@given(made())
def test_values_are_those_of_the_naive_reader(
    case: tuple[Transform, Array, np.float32, Array | None, int],
) -> None:
    """Bit for bit; and with all parameters in their ranges nothing overflows or is a NaN."""
    transform, q, scale, factors, first = case
    positions = np.arange(first, first + len(q))
    found = as_layer(transform).values(q, scale, factors, positions)
    expected = restore_layer(q, transform, scale, factors, first)
    assert found.dtype == np.float32
    assert found.tobytes() == expected.tobytes()
    assert np.isfinite(found).all()


@covers("TRF-6", "PRF-4")
@pytest.mark.parametrize("count", [1, 2, 96, 1024])
@pytest.mark.parametrize("kind", ["spread", "alternating", "one", "powers"])
def test_sums_at_the_budget_are_exact_in_any_order(count: int, kind: str) -> None:
    """Rows of 131,072: the products reach 2^24, the last integer that binary32 counts to."""
    rng = np.random.default_rng(count)
    if kind == "one":
        matrix = np.zeros((count, count), np.int64)
        matrix[:, rng.integers(count)] = ROW_BUDGET
    elif kind == "powers":
        matrix = np.sort(bounded_rows(rng, count, 1.0), axis=1)
    else:
        matrix = bounded_rows(rng, count, 1.0)
        if kind == "alternating":
            matrix = np.abs(matrix) * np.where(np.arange(count) % 2, -1, 1)
    matrix[0] = np.abs(matrix[0])  # with integers 0 the sum itself is -2^24
    assert (np.abs(matrix).sum(axis=1) == ROW_BUDGET).all()
    signs = np.where(matrix[:8] < 0, 255, 0)
    q = np.concatenate([signs, 255 - signs, np.zeros((1, count)), rng.integers(0, 256, (9, count))])
    q = q.astype(np.uint8).reshape(-1, 1, count)
    layer = LayerTransform(
        np.zeros(count, np.float32),
        np.ones(count, np.float32),
        np.ascontiguousarray(matrix.T, np.float32),
    )
    exact = sums(q, matrix)
    assert np.abs(exact).max() == 2**24
    found = layer.values(q, np.float32(1), None, np.zeros(len(q), np.int64))
    assert (found.reshape(exact.shape).astype(np.int64) == exact).all()
    u = q[:, 0].astype(np.float32) - 128
    for order in (np.arange(count), np.arange(count)[::-1], rng.permutation(count)):
        total = np.zeros((len(q), count), np.float32)
        for slot in order if count <= 96 else ():
            total += u[:, slot, None] * matrix[:, slot].astype(np.float32)
        if count <= 96:
            assert (total.astype(np.int64) == exact).all()


@covers("TRF-6")
def test_slots_are_dim_major_and_channels_head_major() -> None:
    """Slot d * H + h, channel h * D + d: H = 2, D = 3, the number of a slot as its integer."""
    heads, dims = 2, 3
    q = np.array([[[128 + d * heads + h for d in range(dims)] for h in range(heads)]], np.uint8)
    matrix = np.eye(6, dtype=np.float32)
    layer = LayerTransform(np.zeros(6, np.float32), np.ones(6, np.float32), matrix)
    found = layer.values(q, np.float32(1), None, np.zeros(1, np.int64))
    assert found.reshape(-1).tolist() == [0, 1, 2, 3, 4, 5]
    assert found.shape == (1, heads, dims)


@covers("TRF-7")
@few
@given(st.floats(0, 6.3), POSITIONS)
def test_powers_of_a_rotation(angle: float, first: int) -> None:
    """Binary powers, not a library's cosine; and they are near it all the same."""
    step = (float(np.cos(angle)), float(np.sin(angle)))
    rotation = Rotation("half", *np.array(step)[:, None])
    cosine, sine = rotation.table(np.arange(first, first + 4))
    for row, position in enumerate(range(first, first + 4)):
        wide = turned_by(position, *step)
        assert (cosine[row, 0], sine[row, 0]) == tuple(np.float32(item) for item in wide)
        if position < 2**24:
            assert abs(wide[0] - np.cos(angle * position)) < 1e-6


@covers("TRF-7")
def test_powers_of_quarter_turns_are_exact() -> None:
    """cos 0 and sin 1: position p turns by p quarters."""
    rotation = Rotation("half", np.zeros(1), np.ones(1))
    quarters = [(1, 0), (0, 1), (-1, 0), (0, -1)]
    for first in (0, 2**24 - 3, 2**40 - 6):
        cosine, sine = rotation.table(np.arange(first, first + 6))
        found = list(zip(cosine[:, 0], sine[:, 0], strict=True))
        assert found == [quarters[p % 4] for p in range(first, first + 6)]


@covers("TRF-7")
@pytest.mark.parametrize(
    ("pairing", "pairs", "expected"),
    [
        ("half", 1, [-2, 1, 3, 4, 5]),
        ("half", 2, [-3, -4, 1, 2, 5]),
        ("interleaved", 1, [-2, 1, 3, 4, 5]),
        ("interleaved", 2, [-2, 1, -4, 3, 5]),
    ],
)
def test_pairs(pairing: str, pairs: int, expected: list[int]) -> None:
    """A quarter turn of 1, 2, 3, 4, 5; dims from 2 n on stay."""
    z = np.arange(1, 6, dtype=np.float32).reshape(1, 1, 5)
    rotation = Rotation(pairing, np.zeros(pairs), np.ones(pairs))
    rotation.turn(z, np.ones(1, np.int64))
    assert z.reshape(-1).tolist() == expected
    rotation.turn(z, np.ones(1, np.int64), back=True)
    assert z.reshape(-1).tolist() == [1, 2, 3, 4, 5]


@covers("PRF-5", "TRF-6")
def test_the_largest_parameters_stay_finite() -> None:
    """2^24 x 2^22 x 2^40 x 2^40 = 2^126, turned by more than one."""
    step = np.full((2, 1), np.sqrt((1 + 2.0**-41) / 2))
    layer = LayerTransform(
        np.full(2, 2.0**96, np.float32),
        np.full(2, 2.0**22, np.float32),
        np.full((2, 2), 65_536, np.float32),
        Rotation("half", *step),
    )
    q = np.zeros((5, 1, 2), np.uint8)
    scale = np.float32(2.0**40)
    for first in (0, 2**24, 2**40 - 5):
        with np.errstate(all="raise"):
            found = layer.values(q, scale, np.full(5, scale), np.arange(first, first + 5))
        assert np.isfinite(found).all()
        assert np.abs(found).max() >= 2.0**125
