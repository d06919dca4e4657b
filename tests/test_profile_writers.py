"""What a profile holds for writers may be missing or make no sense: refused, never a traceback."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from numpy.typing import NDArray

import kvformat
from kvformat import Cache, Extent, Group, GroupTensors, UsageError
from kvformat.coefficients import WIDE
from kvformat.profiles import Profile, parse_profile
from tests.stores import stepwise_profile
from tests.strategies import write_bytes

LAYERS, TOKENS, HEADS, DIMS = 2, 40, 2, 4
COUNT = HEADS * DIMS
FACTS = 2 + 2 * HEADS * (1 + DIMS)
STEP = 0.25
IDENTITY = kvformat.Identity(kvformat.Model("m"), LAYERS, "float16", kind="unbound")
STEM = "near-lossless.key.1"


def profile(**changes: NDArray[Any] | None) -> Profile:
    """A profile for writers, with tensors replaced, added, or left out."""
    made = parse_profile(stepwise_profile((LAYERS, HEADS, DIMS), STEP, model="m"))
    tensors = safetensors.numpy.load(made.writer)
    for name, value in changes.items():
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    return replace(made, writer=safetensors.numpy.save(tensors))


def weights(count: int = FACTS, *options: float, coefficient: float = 0.1) -> dict[str, Any]:
    """The regression of both roles of all layers."""
    return {
        f"{role}.{layer}.weights.{name}": value
        for role in ("key", "value")
        for layer in range(LAYERS)
        for name, value in {
            "centre": np.zeros(count, np.float32),
            "coefficient": np.full(count, coefficient, np.float32),
            "options": np.array(options or (1.0, 4.0), np.float32),
        }.items()
    }


def values(tokens: int = TOKENS) -> NDArray[np.float16]:
    """Multiples of the step."""
    made = np.random.default_rng(1).integers(-50, 50, (2, LAYERS, tokens, HEADS, DIMS)) * STEP
    return made.astype(np.float16)


def written(cache: Any, made: Profile) -> kvformat.Restored:
    data = write_bytes(cache, identity=IDENTITY, tracks=["zstd"], profile=made)
    with kvformat.open(data, profiles=made) as artifact:
        return artifact.read(allow_partial=True)


def index(*numbers: int) -> NDArray[np.int32]:
    return np.array([*numbers, *range(len(numbers), COUNT)], np.int32)


BAD: dict[str, dict[str, NDArray[Any] | None]] = {
    "no forward": {"key.1.forward": None},
    "forward of another shape": {"key.1.forward": np.eye(COUNT + 1, dtype=np.float32)},
    "forward with NaN": {"key.1.forward": np.full((COUNT, COUNT), np.nan, np.float32)},
    "no component": {f"{STEM}.component": None},
    "component out of range": {f"{STEM}.component": index(COUNT)},
    "component below 0": {f"{STEM}.component": index(-1)},
    "component twice": {f"{STEM}.component": index(1)},
    "components of another length": {f"{STEM}.component": np.arange(COUNT - 1, dtype=np.int32)},
    "multiple 0": {f"{STEM}.multiple": np.zeros(COUNT, np.int32)},
    "high part of nothing": {f"{STEM}.multiple": np.array([WIDE] + [1] * (COUNT - 1), np.int32)},
    "empty step": {f"{STEM}.step": np.zeros(0, np.float32)},
    "step 0": {f"{STEM}.step": np.zeros(1, np.float32)},
    "step NaN": {f"{STEM}.step": np.full(1, np.nan, np.float32)},
    "coefficients of another length": weights(FACTS + 1),
    "a window, and features without": weights(FACTS, 1.0, 4.0, 8.0),
    "no options": {**weights(), "key.1.weights.options": None},
    "too many options": weights(FACTS, 1.0, 4.0, 8.0, 1.0),
    "coefficients that are NaN": weights(coefficient=np.nan),
    "a window below 0": weights(FACTS, 1.0, 4.0, -1.0),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(name: str) -> None:
    with pytest.raises(UsageError, match="nothing for writers") as caught:
        written(values(), profile(**BAD[name]))
    assert caught.value.expected


@pytest.mark.parametrize(
    "changes",
    [{}, weights(), weights(FACTS + 1, 1.0, 4.0, 8.0)],
    ids=["no weights", "weights", "weights of a window"],
)
def test_what_makes_sense_is_used(changes: dict[str, Any]) -> None:
    restored = written(values(), profile(**changes))
    if not changes:
        assert restored.kv.tobytes() == values().tobytes()
    coarsest = 8.0 if changes else 1.0  # e^(limit / 2), in quarter octaves
    assert np.abs(restored.kv.astype(np.float32) - values()).max() <= STEP * coarsest / 2
    assert (restored.kv.tobytes() != values().tobytes()) == bool(changes)


@pytest.mark.parametrize("with_weights", [False, True])
@pytest.mark.parametrize("token", [0, 3, 17, TOKENS - 1])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_no_number_is_refused(with_weights: bool, token: int, bad: float) -> None:
    """With the token and without a warning (ARI-7, SID-5)."""
    cache = values()
    cache[1, 1, token, 1, 2] = bad
    with pytest.raises(UsageError, match="NaN or infinity") as caught:
        written(cache, profile(**weights() if with_weights else {}))
    assert caught.value.code == "input.non-finite"
    assert "group value, layer 1" in str(caught.value)


@pytest.mark.parametrize("with_weights", [False, True])
def test_huge_values_are_patched(with_weights: bool) -> None:
    cache = values()
    cache[:, :, 9, 1] = 60_000
    restored = written(cache, profile(**weights() if with_weights else {}))
    assert restored.kv[:, :, 9].tobytes() == cache[:, :, 9].tobytes()


def windowed(held: int) -> Cache:
    """Keys of a sliding window of ``held`` tokens beside values of all."""
    key, value = values()
    groups = [
        Group(
            "key", "key", "float16", (0, 1), HEADS, DIMS, HEADS,
            tokens=Extent("window", held_start=TOKENS - held, cumulative_tokens=TOKENS),
        ),
        Group("value", "value", "float16", (0, 1), HEADS, DIMS, HEADS),
    ]  # fmt: skip
    parts = [tuple(key[:, TOKENS - held :]), tuple(value)]
    return Cache(TOKENS, tuple(GroupTensors(g, x) for g, x in zip(groups, parts, strict=True)))


@pytest.mark.parametrize("held", [0, 1, 39])
def test_keys_and_values_of_other_tokens_have_no_weights(held: int) -> None:
    restored = written(windowed(held), profile(**weights()))
    assert restored["value"].tobytes() == values()[1].tobytes()
    if held:
        assert restored["key"].tobytes() == values()[0, :, TOKENS - held :].tobytes()


def test_values_alone_have_no_weights() -> None:
    """The keys of a layer without a transform are rotated, and no features."""
    made = profile(**weights())
    only = replace(made, records=tuple(r for r in made.records if r.role == "value"))
    restored = written(values(), only)
    assert restored["value"].tobytes() == values()[1].tobytes()
    assert restored["key"].tobytes() != values()[0].tobytes()
