"""The writer's side of transformed groups: what a profile keeps for writers, and its use.

Token scales come from a regression that calibration fitted: the log energy of the model's gradient
at a token, from its key and value. Steps are those of the profile, one for all coefficients of all
layers in units of the root of the divergence that an error causes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from kvformat.cache import Cache
from kvformat.errors import UsageError
from kvformat.groups import Group
from kvformat.identity import Identity
from kvformat.profiles import Profile, check_model
from kvformat.quant import load_float32
from kvformat.quantiser import LEVELS, SINK_TOKENS, QuantisedSegment, finish_segment
from kvformat.sets import Patches, QuantisationSet
from kvformat.transforms import CENTRE, LayerTransform
from kvformat.workers import in_order, single_threaded_blas, worker_count

WIDE: Final = 128
"""A coefficient too large for 127 steps is kept as low + WIDE * high in two slots."""
PER_OCTAVE: Final = 4
TINY: Final = 1e-6

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LayerForward:
    """From values to integers: ``forward`` float32 ``[C, C]``, column k in steps of component k.

    ``component`` and ``multiple`` int64 ``[C]`` say what each slot holds: a component, times
    ``WIDE`` for a high part.
    """

    transform: LayerTransform
    forward: Float32
    component: NDArray[np.int64]
    multiple: NDArray[np.int64]

    def quantise(
        self, x: NDArray[Any], token_scale: Float32, positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """Integers uint8 ``[N, H, D]`` of values ``[N, H, D]``, and the rows that do not fit."""
        z = load_float32(np.ascontiguousarray(x))
        if self.transform.rotation is not None:
            self.transform.rotation.turn(z, positions, back=True)
        flat = z.reshape(len(z), -1)
        np.subtract(flat, self.transform.mean, out=flat)
        np.divide(flat, token_scale[:, None], out=flat)
        with single_threaded_blas:
            whole = flat @ self.forward
        np.rint(whole, out=whole)
        slots = whole[:, self.component]
        high = self.multiple == WIDE
        if high.any():
            split = np.isin(self.component, self.component[high])
            carry = np.floor((slots[:, split] + WIDE // 2) / WIDE)
            top = high[split]
            slots[:, split] = np.where(top, carry, slots[:, split] - carry * WIDE)
        unfit = ~(np.abs(slots) < CENTRE).all(axis=1)
        np.nan_to_num(slots, copy=False)
        np.clip(slots, 1 - CENTRE, CENTRE - 1, out=slots)
        np.add(slots, CENTRE, out=slots)
        _, heads, head_dim = x.shape
        q = slots.astype(np.uint8).reshape(len(x), head_dim, heads).transpose(0, 2, 1)
        return np.ascontiguousarray(q), unfit


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """A linear model of the log weight of a token, of its features ``[F]`` (``features``)."""

    centre: Float64
    coefficient: Float64
    power: float
    limit: float
    window: int = 0

    def levels(self, features: Float64) -> NDArray[np.uint8]:
        """Indices into ``LEVELS`` uint8 ``[T]``: a weight four times as high halves the step."""
        with single_threaded_blas:
            log = self.power * ((features - self.centre) @ self.coefficient)
        steps = np.rint(-0.5 * PER_OCTAVE * np.clip(log, -self.limit, self.limit) / np.log(2))
        middle = len(LEVELS) // 2
        levels: NDArray[np.uint8] = np.clip(steps + middle, 0, len(LEVELS) - 1).astype(np.uint8)
        return levels


def features(key: Float32, value: Float32, window: int = 0) -> Float64:
    """``[T, F]`` of un-rotated keys and values ``[T, H, D]``: recency, energies, the values.

    A layer with a sliding window of ``window`` tokens has one more: how many of the tokens to come
    will see this one.
    """
    tokens = len(key)
    steps_back = np.arange(tokens, 0, -1.0)[:, None]
    distance = np.log(steps_back)
    seen = [np.log(np.maximum(window - steps_back, 1.0))] if window else []
    energies = [np.log((x.astype(np.float64) ** 2).sum(-1) + TINY) for x in (key, value)]
    flat = [x.reshape(tokens, -1).astype(np.float64) for x in (key, value)]
    return np.concatenate([distance, distance**2, *seen, *energies, *flat], axis=1)


class ProfileWriter:
    """What a profile's ``writer`` object holds, by tensor name (safetensors)."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        try:
            self._tensors = safetensors.numpy.load(profile.writer)
        except (safetensors.SafetensorError, ValueError) as error:
            raise UsageError(
                "usage.argument",
                "the profile holds nothing for writers that this version understands",
                where=f"profile {profile.digest[:12]}",
                next_step="Make it again with kvformat calibrate",
            ) from error

    def fits(self, quality: str, group: Group) -> bool:
        """Whether all layers of a group have a transform of this shape in a quality."""
        records = {record.key: record for record in self.profile.records}
        for layer in group.layers:
            record = records.get((quality, group.role, layer))
            shape = (group.heads, group.heads_total, group.head_start, group.head_dim)
            if record is None or shape != (
                record.heads, record.heads_total, record.head_start, record.head_dim,
            ):  # fmt: skip
                return False
            if f"{quality}.{group.role}.{layer}.step" not in self._tensors:
                return False
        return True

    def forward(self, quality: str, group: Group, layer: int, identity: Identity) -> LayerForward:
        """The matrices of a global layer."""
        name = f"{quality}.{group.role}.{layer}"
        step = self._tensors[f"{name}.step"].astype(np.float32)[0]
        return LayerForward(
            self.profile.transform(quality, group, layer, identity),
            self._tensors[f"{group.role}.{layer}.forward"].astype(np.float32) / step,
            self._tensors[f"{name}.component"].astype(np.int64),
            self._tensors[f"{name}.multiple"].astype(np.int64),
        )

    def weights(self, role: str, layer: int) -> TokenWeights | None:
        """The regression of a role and layer, if the profile has one."""
        name = f"{role}.{layer}.weights"
        if f"{name}.centre" not in self._tensors:
            return None
        power, limit, *window = (float(item) for item in self._tensors[f"{name}.options"])
        return TokenWeights(
            self._tensors[f"{name}.centre"].astype(np.float64),
            self._tensors[f"{name}.coefficient"].astype(np.float64),
            power,
            limit,
            int(window[0]) if window else 0,
        )


def transformed_set(layers: int, heads: int, head_dim: int) -> QuantisationSet:
    """The set of a transformed layer run (TRF-3): the step is in the profile."""
    return QuantisationSet(
        heads,
        head_dim,
        np.ones((layers, 1, 1), np.float32),
        np.full((layers, 1, 1), CENTRE, np.int16),
        None,
        None,
        LEVELS,
    )


def quantise_transformed(
    layers: Sequence[NDArray[Any]],
    forwards: Sequence[LayerForward],
    *,
    positions: NDArray[np.int64],
    levels: NDArray[np.uint8],
    exact_tokens: NDArray[np.bool_],
) -> QuantisedSegment:
    """Integers and side block of ``layers``, arrays ``[N, H, D]`` with all heads.

    ``levels`` uint8 and ``exact_tokens`` bool are ``[n, N]``; the latter are patched.
    """
    index = levels.copy()
    integers = np.empty((len(layers), *layers[0].shape), np.uint8)
    patches: list[Patches] = []
    for number, (x, forward) in enumerate(zip(layers, forwards, strict=True)):
        integers[number], unfit = forward.quantise(x, LEVELS[index[number]], positions)
        ordinals = np.flatnonzero(unfit | exact_tokens[number])
        integers[number, ordinals] = CENTRE
        index[number, ordinals] = 0
        patches.append(Patches(ordinals.astype(np.int64), x[ordinals]))
    return finish_segment(integers, index, patches)


@dataclass(frozen=True, slots=True)
class Coefficients:
    """What a profile adds to the encoding of one cache.

    ``groups`` holds (quality, group index) of the transformed ones; matrices are by (quality, group
    index, layer index), token levels uint8 ``[T held]`` by (group index, layer index).
    """

    profile: Profile
    groups: frozenset[tuple[str, int]]
    forwards: Mapping[tuple[str, int, int], LayerForward]
    levels: Mapping[tuple[int, int], NDArray[np.uint8]]

    def encode(
        self, key: tuple[str, int], layers: range, sources: Sequence[NDArray[Any]],
        positions: NDArray[np.int64], tokens: slice,
    ) -> QuantisedSegment:  # fmt: skip
        """Integers and side block of a cell; ``tokens`` are those held that it covers."""
        return quantise_transformed(
            sources,
            [self.forwards[(*key, layer)] for layer in layers],
            positions=positions,
            levels=np.stack([self.levels[key[1], layer][tokens] for layer in layers]),
            exact_tokens=np.tile(positions < SINK_TOKENS, (len(layers), 1)),
        )


def make_coefficients(
    cache: Cache,
    qualities: Sequence[str],
    profile: Profile,
    *,
    identity: Identity,
    first_position: int,
    workers: int | None,
) -> Coefficients:
    """The matrices and token levels for the groups that the profile fits.

    Raises ``usage.argument`` where it fits none, and ``profile.content`` for one of another model.
    """
    check_model(profile, identity.model)
    writer = ProfileWriter(profile)
    fitting = frozenset(
        (quality, number)
        for quality in qualities
        for number, item in enumerate(cache.groups)
        if item.group.quantisable and writer.fits(quality, item.group)
    )
    if not fitting:
        raise UsageError(
            "usage.argument",
            "the profile has no transform for any group and quality to be written",
            where=f"profile {profile.digest[:12]}",
            expected=", ".join(sorted({record.quality for record in profile.records})),
            found=", ".join(qualities),
        )
    forwards = {
        (quality, number, index): writer.forward(
            quality, cache.groups[number].group, layer, identity
        )
        for quality, number in sorted(fitting)
        for index, layer in enumerate(cache.groups[number].group.layers)
    }
    levels = _token_levels(cache, writer, forwards, first_position, workers)
    return Coefficients(profile, fitting, forwards, levels)


def _token_levels(
    cache: Cache,
    writer: ProfileWriter,
    forwards: Mapping[tuple[str, int, int], LayerForward],
    first_position: int,
    workers: int | None,
) -> dict[tuple[int, int], NDArray[np.uint8]]:
    """Levels of each transformed layer, from the key and the value of its tokens."""
    rotations = {key[1:]: item.transform.rotation for key, item in forwards.items()}
    places = {
        (item.group.role, layer): (number, index)
        for number, item in enumerate(cache.groups)
        for index, layer in enumerate(item.group.layers)
    }

    def one(place: tuple[int, int]) -> NDArray[np.uint8]:
        number, index = place
        item = cache.groups[number]
        layer = item.group.layers[index]
        weights = writer.weights(item.group.role, layer)
        start, stop = item.group.held(cache.token_count)
        pair = [places.get((role, layer)) for role in ("key", "value")]
        if weights is None or None in pair:
            return np.full(stop - start, len(LEVELS) // 2, np.uint8)
        positions = np.arange(first_position + start, first_position + stop)
        parts = []
        for found in pair:
            assert found is not None  # noqa: S101 - for the type checker; tested above
            x = load_float32(np.ascontiguousarray(cache.groups[found[0]].layers[found[1]]))
            rotation = rotations.get(found)
            if rotation is not None:
                rotation.turn(x, positions, back=True)
            parts.append(x)
        return weights.levels(features(parts[0], parts[1], weights.window))

    order = sorted(rotations)
    return dict(zip(order, in_order(one, order, worker_count(workers, 2**25)), strict=True))
