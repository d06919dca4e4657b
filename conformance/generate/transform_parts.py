"""Small artifacts with transformed groups, and the calibration profiles that they need.

Rotations are by angles of Pythagorean triples: their sines and cosines come from no library.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from conformance.generate.compose import (
    EXACT,
    IDENTITY,
    LEVELS,
    QUALITY,
    STORED,
    RawGroup,
    compose,
    noise,
    typical,
)
from tests.builder import Builder
from tests.transformed import Transform, profile_digest, profile_file

# isort: split
from kvconform.fuzz.pieces import Array, Quant

FEATURE = "transform-klt"
PROFILE = "profile.kvp"
TURNS = np.array([(0.6, 0.28, 5 / 13, -0.8), (0.8, 0.96, 12 / 13, 0.6)])
KEY_LAYERS, VALUE_LAYERS = (1, 3, 4, 6), (1, 3)
HEADS, DIMS = 2, 4


def transform(
    role: str, layer: int, *, pairing: str = "none", pairs: int = 0, heads: int = HEADS,
    dims: int = DIMS, **changes: Any,
) -> Transform:  # fmt: skip
    """A transform whose last row has the largest sum that is allowed."""
    count = heads * dims
    seed = f"{role}-{layer}-{count}"
    matrix = noise(seed, count, count).astype(np.int64) * 64 - 8192
    matrix[-1] = np.where(noise(f"{seed}-signs", count) & 1, 1, -1) * (131_072 // count)
    mean = (noise(f"{seed}-mean", count).astype(np.float32) - 128) / 256
    row_scale = np.float32(2**-20) * (1 + noise(f"{seed}-rows", count).astype(np.float32) / 256)
    turns = TURNS[:, :pairs]
    values: dict[str, Any] = {
        "quality": QUALITY, "role": role, "layer": layer, "heads": heads, "head_dim": dims,
        "mean": mean, "row_scale": row_scale, "matrix": matrix, "pairing": pairing, "turns": turns,
    }  # fmt: skip
    return Transform(**{**values, **changes})


def transforms(*, pairing: str = "half", pairs: int = 2) -> list[Transform]:
    """For the groups of ``groups``: keys are rotated, values are not."""
    keys = [transform("key", layer, pairing=pairing, pairs=pairs) for layer in KEY_LAYERS]
    keys[0].dtype = "int32"
    return keys + [transform("value", layer) for layer in VALUE_LAYERS]


def coefficients(
    seed: str, shape: tuple[int, int, int, int], dtype: str, *, patches: Sequence[int] = (0, 7),
    scales: Array | None = None,
) -> tuple[Array, Quant]:  # fmt: skip
    """Source bytes and integers of the whole range, with a set of flags 0 and zeros 128."""
    source, usual = typical(seed, shape, dtype, patches=patches, scales=scales)
    q = noise(f"{seed}-slots", *shape)
    layers = shape[0]
    quant = Quant(
        q=q,
        scale=usual.scale,
        zero=np.full(layers, 128, np.int16),
        token_scale=usual.token_scale,
        index=usual.index,
        patches=usual.patches,
    )
    return source, quant


def groups(
    *, scales: Array = LEVELS, patches: Sequence[int] = (0, 7), window: dict[str, Any] | None = None
) -> list[RawGroup]:
    """Keys and values of 10 tokens, H = 2 and D = 4; with ``window`` keys hold the last 7."""
    held = 10 if window is None else 7
    found = []
    for name, role, dtype, layers, tokens in (
        ("keys", "key", "bfloat16", KEY_LAYERS, held),
        ("values", "value", "float16", VALUE_LAYERS, 10),
    ):
        source, quant = coefficients(
            name, (len(layers), tokens, HEADS, DIMS), dtype,
            patches=[item for item in patches if item < tokens], scales=scales,
        )  # fmt: skip
        group = RawGroup(name, role, dtype, layers, source, {QUALITY: quant})
        if window is not None and role == "key":
            group.tokens = window
        found.append(group)
    return found


def rope(pairs: int, pairing: str, layers: Sequence[int] = KEY_LAYERS) -> dict[str, Any]:
    """An element of ``identity.rope``."""
    return {
        "inv_freq": "3f800000" * pairs,
        "keys_rotated": True,
        "layers": list(layers),
        "pairing": pairing,
        "scaling": "3ff0000000000000",
    }


def identity(*, pairing: str = "half", pairs: int = 2) -> dict[str, Any]:
    """An unbound identity that says how keys are rotated."""
    return {**copy.deepcopy(IDENTITY), "rope": [rope(pairs, pairing)] if pairs else []}


def attach(builder: Builder, profile: bytes, transformed: Sequence[int] = (0, 1)) -> Builder:
    """Make these groups transformed ones of that profile."""
    manifest = builder.manifest
    manifest["features"] = [FEATURE]
    manifest["profile"] = {"digest": profile_digest(profile)}
    for quality in manifest["qualities"]:
        for group in transformed if quality["name"] == QUALITY else ():
            quality["encodings"][group] = "transformed"
    return builder


def parts(
    tracks: Sequence[str],
    *,
    made: list[Transform] | None = None,
    pairing: str = "half",
    pairs: int = 2,
    first_position: int = 0,
    window: bool = False,
    profile: Callable[[list[Transform]], bytes] = profile_file,
    scales: Array = LEVELS,
    patches: Sequence[int] = (0, 7),
    **options: Any,
) -> tuple[Builder, bytes]:
    """An artifact of 10 tokens in segments of 6, and its profile."""
    file = profile(transforms(pairing=pairing, pairs=pairs) if made is None else made)
    held = {"cumulative_tokens": first_position + 10, "held_start": 3, "kind": "window"}
    tokens = {"chain": None, "content": [], "count": 10, "first_position": first_position}
    builder = compose(
        groups(scales=scales, patches=patches, window=held if window else None),
        10,
        tracks,
        **{
            "seg": 6,
            "identity": identity(pairing=pairing, pairs=pairs),
            "tokens": tokens,
            **options,
        },
    )
    return attach(builder, file), file


def tiny(
    *,
    profile: Callable[[list[Transform]], bytes] = profile_file,
    patches: Sequence[int] = (0,),
    cut: tuple[int, int] = (3, HEADS),
    **changes: Any,
) -> tuple[Builder, bytes]:
    """The smallest: keys of layers 1 and 3, three tokens, `exact/stored` beside; and its profile.

    ``changes`` are to the integers and the set.
    """
    source, quant = coefficients(
        "tiny", (2, 3, HEADS, DIMS), "float16", patches=patches, scales=LEVELS[:2]
    )
    for name, value in changes.items():
        setattr(quant, name, value)
    group = RawGroup("key", "key", "float16", (1, 3), source, {QUALITY: quant}, cut=cut)
    file = profile([transform("key", n, pairing="half", pairs=2, dtype="int32") for n in (1, 3)])
    named = {**copy.deepcopy(IDENTITY), "rope": [rope(2, "half", (1, 3))]}
    builder = compose([group], 3, [STORED, EXACT], seg=16, identity=named)
    return attach(builder, file, [0]), file
