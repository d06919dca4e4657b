"""Level core: values whose restoration shows how a reader computes and rounds (section 9.4)."""

# ruff: noqa: E501, PLR0917 - long sentences and tables

from __future__ import annotations

import numpy as np

from conformance.generate.compose import (
    QUALITY,
    STORED,
    Array,
    Quant,
    RawGroup,
    compose,
    floats,
    noise,
)
from conformance.generate.core import FLOATS, good
from conformance.generate.suite import Suite

LARGEST = {
    "float32": 3.0e38,
    "float16": 65504.0,
    "bfloat16": 3.0e38,
    "float8_e4m3fn": 448.0,
    "float8_e5m2": 57344.0,
}
MANTISSA = {"float16": 10, "bfloat16": 7, "float8_e4m3fn": 3, "float8_e5m2": 2}
TINY = {"float16": -24, "bfloat16": -133, "float8_e4m3fn": -9, "float8_e5m2": -16}


def group_of(
    dtype: str,
    q: Array,
    scale: Array,
    zero: Array,
    bias: Array | None = None,
    token_scale: Array | None = None,
    index: Array | None = None,
) -> RawGroup:
    """One layer, one head: q is ``[T, D]``, scale, zero and bias are ``[D]``."""
    quant = Quant(
        q[None, :, None].astype(np.uint8),
        scale[None, None].astype(np.float32),
        zero[None, None].astype(np.int16),
        None if bias is None else bias[None, None].astype(np.float32),
        None,
        np.zeros(0, np.float32) if token_scale is None else token_scale.astype(np.float32),
        np.zeros((1, len(q)), np.uint8) if index is None else index[None].astype(np.uint8),
    )
    shape = quant.q.shape
    return RawGroup(
        "key", "key", dtype, (0,), floats(f"ar-{dtype}", shape, dtype), {QUALITY: quant}
    )


def large_values(dtype: str) -> tuple[str, str]:
    """What the case of the largest parameters shows: no parameter overflows a binary32."""
    if LARGEST[dtype] > 1e38:
        return (
            f"Values of both signs that the largest scales and biases give in `{dtype}`, beside small ones.",
            "The ranges of the parameters keep every step below 2^98, so nothing is clamped and no step overflows.",
        )
    return (
        f"Values far above what `{dtype}` holds, of both signs, beside small ones.",
        "They are clamped to the largest finite value before rounding: no infinity and no NaN.",
    )


def add_cases(suite: Suite) -> None:
    """All of this module."""

    def add(slug: str, requirements: list[str], group: RawGroup, what: str, why: str) -> None:
        data = compose([group], group.source.shape[1], [STORED]).build()
        good(suite, "ari", slug, [*requirements, "ARI-6"], data, [STORED], what, why)

    ramp = np.arange(256)
    for dtype in FLOATS:
        slug = dtype.replace("_", "-")
        big = LARGEST[dtype] if dtype in MANTISSA and dtype != "bfloat16" else 2.0**40
        scales = np.array([min(big / 100, 2.0**40), min(big / 255, 2.0**40), 1, 0.28])
        factor = np.array([2.0**40, 1, 2.0**-40, 3])
        add(
            f"overflow-{slug}",
            ["ARI-4", "ARI-2"],
            group_of(
                dtype,
                np.stack([ramp] * 4, 1),
                scales,
                np.array([128, 0, 255, 100]),
                np.array([0, 2.0**96, -(2.0**96), 1e4]),
                factor,
                ramp % 4,
            ),
            *(large_values(dtype)),
        )
        if dtype not in MANTISSA:
            continue
        # ties: 2^m + q/4 around integers with m mantissa bits: every quarter step occurs
        m = MANTISSA[dtype]
        base = 2.0 ** (m + 1)
        step = np.array([0.25, 0.5, 0.125, -0.0 + 0.75])
        add(
            f"ties-{slug}",
            ["ARI-4"],
            group_of(
                dtype,
                np.stack([ramp] * 4, 1),
                step,
                np.array([0, 0, 128, 0]),
                np.array([base, -base, base + 1, base / 2]),
            ),
            f"Values on, just below and just above the middle between two values of `{dtype}`.",
            "Ties go to the even neighbour; rounding by truncation or away from zero shows here.",
        )
        low = 2.0 ** TINY[dtype]
        if low < 2.0**-80:
            scale, factor = np.array([2.0**-40] * 4), np.array([2.0**-40, 2.0**-40, 1, 2.0**-30])
        else:
            scale = np.array([low / 8, low / 3, low / 64, low])
            factor = np.array([1, 0.5, 0.25, 0.0078125])
        add(
            f"underflow-{slug}",
            ["ARI-4"],
            group_of(
                dtype,
                np.stack([ramp] * 4, 1),
                np.maximum(scale, 2.0**-40),
                np.array([128, 127, 64, 200]),
                None,
                factor,
                ramp % 4,
            ),
            f"Values around the smallest subnormal of `{dtype}` and far below it, of both signs.",
            "Underflow is gradual, and a negative value that rounds to zero becomes -0.",
        )
    for dtype in ("float32", "float16", "bfloat16"):
        seed = f"fma-{dtype}"
        q = noise(seed, 256 * 8).reshape(256, 8)
        scale = (noise(f"{seed}-s", 8).astype(np.float64) + 1) / 97
        bias = (noise(f"{seed}-b", 8).astype(np.float64) - 128) / 13 + 0.001
        add(
            f"fused-{dtype}",
            ["ARI-2"],
            group_of(
                dtype,
                q,
                scale,
                np.full(8, 128),
                bias,
                np.array([0.9, 1.1, 1 / 3]),
                np.arange(256) % 3,
            ),
            "Parameters with full mantissas, a product that is not exact, and a bias of like size.",
            "A fused multiply-add, or binary64 in between, gives other last bits in a part of these values.",
        )
        add(
            f"order-of-operations-{dtype}",
            ["ARI-2", "ARI-3"],
            group_of(
                dtype,
                q,
                scale,
                np.full(8, -77),
                None,
                np.array([1 / 3, 1.7, 0.3]),
                np.arange(256) % 3,
            ),
            "Scale and token scale whose product would round otherwise than two steps.",
            "The multiplications go from left to right; `scale * token_scale` must not be computed first.",
        )
    q = np.array([[127, 128, 129]] * 3)
    add(
        "zero-times-scale",
        ["ARI-2", "ARI-3"],
        group_of(
            "float32", q, np.array([1, 0.3, 7]), np.array([127, 128, 129]), np.array([0, 1.5, -2.5])
        ),
        "Integers equal to the zero, with a bias of +0 and with others.",
        "0 is the result of the subtraction as +0; +0 plus +0 is +0.",
    )
