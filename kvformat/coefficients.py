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
    """From values to integers: ``forward`` float32 ``[C, C]``, a column per channel of integers.

    A column holds the component, in steps of its own, whose integer is stored there. Those of
    ``high`` int64 ``[W]`` hold multiples of ``WIDE`` of the components in the columns ``low``.
    """

    transform: LayerTransform
    forward: Float32
    low: NDArray[np.int64]
    high: NDArray[np.int64]

    @staticmethod
    def make(
        transform: LayerTransform, components: Float32, component: Any, multiple: Any, heads: int
    ) -> LayerForward:
        """From a column per component and, by slot, the component and multiple that it holds."""
        slots = np.arange(len(component)).reshape(-1, heads).T.reshape(-1)
        component, multiple = component[slots], multiple[slots]
        high = np.flatnonzero(multiple == WIDE)
        narrow = np.flatnonzero(multiple != WIDE)
        place = np.zeros(len(component), np.int64)
        place[component[narrow]] = narrow
        columns = np.take(components, component, axis=1)
        columns /= np.where(multiple == WIDE, 1, multiple).astype(np.float32)
        return LayerForward(transform, columns, place[component[high]], high)

    def quantise(
        self, x: NDArray[Any], token_scale: Float32, positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """Integers uint8 ``[N, H, D]`` of values ``[N, H, D]``, and the rows that do not fit.

        The caller keeps BLAS on one thread.
        """
        z = load_float32(np.ascontiguousarray(x))
        if self.transform.rotation is not None:
            self.transform.rotation.turn(z, positions, back=True)
        flat = z.reshape(len(z), -1)
        np.subtract(flat, self.transform.mean, out=flat)
        np.divide(flat, token_scale[:, None], out=flat)
        whole = flat @ self.forward
        np.rint(whole, out=whole)
        if len(self.high):
            carry = np.floor((whole[:, self.low] + WIDE // 2) / WIDE)
            whole[:, self.high] = carry
            whole[:, self.low] -= carry * WIDE
        unfit = ~(np.abs(whole) < CENTRE).all(axis=1)
        whole[unfit] = 0
        np.add(whole, CENTRE, out=whole)
        return whole.astype(np.uint8).reshape(x.shape), unfit


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """A linear model of the log weight of a token, of its features ``[F]`` (``features``)."""

    centre: Float64
    coefficient: Float64
    power: float
    limit: float
    window: int = 0

    def levels(self, facts: TokenFacts) -> NDArray[np.uint8]:
        """Indices into ``LEVELS`` uint8 ``[T]``: a weight four times as high halves the step."""
        log = self.power * (facts.times(self.coefficient) - self.centre @ self.coefficient)
        log = np.clip(np.nan_to_num(log), -self.limit, self.limit)  # NaN is refused elsewhere
        steps = np.rint(-0.5 * PER_OCTAVE * log / np.log(2))
        middle = len(LEVELS) // 2
        levels: NDArray[np.uint8] = np.clip(steps + middle, 0, len(LEVELS) - 1).astype(np.uint8)
        return levels


@dataclass(frozen=True, slots=True)
class TokenFacts:
    """Features of the tokens of a layer: ``few`` ``[T, f]``, and ``rows`` float32 ``[T, C]``."""

    few: Float64
    rows: tuple[Float32, ...]

    def matrix(self) -> Float64:
        """``[T, F]``."""
        return np.concatenate([self.few, *self.rows], axis=1, dtype=np.float64)

    def times(self, coefficient: Float64) -> Float64:
        """The matrix times ``[F]``, without making it."""
        start = self.few.shape[1]
        total: Float64 = self.few @ coefficient[:start]
        for rows in self.rows:
            stop = start + rows.shape[1]
            total += rows @ coefficient[start:stop].astype(np.float32)
            start = stop
        return total


def token_facts(key: Float32, value: Float32, window: int = 0) -> TokenFacts:
    """Of un-rotated keys and values ``[T, H, D]``: recency, energies by head, the rows.

    A layer with a sliding window of ``window`` tokens has one more: how many of the tokens to come
    will see this one.
    """
    tokens = len(key)
    steps_back = np.arange(tokens, 0, -1.0)[:, None]
    distance = np.log(steps_back)
    seen = [np.log(np.maximum(window - steps_back, 1.0))] if window else []
    energies = [
        np.log(np.einsum("thd,thd->th", x, x, dtype=np.float32).astype(np.float64) + TINY)
        for x in (key, value)
    ]
    few = np.concatenate([distance, distance**2, *seen, *energies], axis=1)
    return TokenFacts(few, (key.reshape(tokens, -1), value.reshape(tokens, -1)))


class ProfileWriter:
    """What a profile's ``writer`` object holds, by tensor name (safetensors)."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        try:
            self._tensors = safetensors.numpy.load(profile.writer)
        except (safetensors.SafetensorError, ValueError) as error:
            raise self.refusal("safetensors") from error

    def refusal(self, expected: str) -> UsageError:
        """The error for a part of the writer's object that is missing or makes no sense."""
        return UsageError(
            "usage.argument",
            "the profile holds nothing for writers that this version understands",
            where=f"profile {self.profile.digest[:12]}",
            expected=expected,
            next_step="Make it again with kvformat calibrate",
        )

    def _numbers(self, name: str, *shape: int | None) -> NDArray[Any]:
        """A finite tensor of this shape, None for any length."""
        found: NDArray[Any] | None = self._tensors.get(name)
        if (
            found is None
            or found.dtype.kind not in "fiu"
            or len(found.shape) != len(shape)
            or any(want not in {None, size} for want, size in zip(shape, found.shape, strict=True))
            or not np.isfinite(found).all()
        ):
            raise self.refusal(f"{name}: numbers {[size or 'any' for size in shape]}")
        return found

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
        count = group.heads * group.head_dim
        components = self._numbers(f"{group.role}.{layer}.forward", count, None)
        step = self._numbers(f"{name}.step", 1).astype(np.float32)[0]
        component = self._numbers(f"{name}.component", count).astype(np.int64)
        multiple = self._numbers(f"{name}.multiple", count).astype(np.int64)
        if not step > 0:
            raise self.refusal(f"{name}.step: above 0")
        narrow = component[multiple != WIDE]
        if not (
            ((component >= 0) & (component < min(count, components.shape[1]))).all()
            and (multiple >= 1).all()
            and len(np.unique(narrow)) == len(narrow)
            and np.isin(component[multiple == WIDE], narrow).all()
        ):
            raise self.refusal(f"{name}: a slot for each component, and one more for wide ones")
        return LayerForward.make(
            self.profile.transform(quality, group, layer, identity),
            components.astype(np.float32) / step,
            component,
            multiple,
            group.heads,
        )

    def weights(self, role: str, layer: int, facts: Mapping[int, int]) -> TokenWeights | None:
        """The regression of a role and layer, if the profile has one.

        ``facts`` has the number of features without a window (0) and with one (1).
        """
        name = f"{role}.{layer}.weights"
        if f"{name}.centre" not in self._tensors:
            return None
        options = self._numbers(f"{name}.options", None)
        if len(options) not in {2, 3} or not 0 <= options[-1] < 2**31:
            raise self.refusal(f"{name}.options: power, limit and perhaps a window")
        window = int(options[2]) if len(options) == 3 else 0
        count = facts[int(window > 0)]
        return TokenWeights(
            self._numbers(f"{name}.centre", count).astype(np.float64),
            self._numbers(f"{name}.coefficient", count).astype(np.float64),
            float(options[0]),
            float(options[1]),
            window,
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
    with single_threaded_blas:  # once, not for every product
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
    places = [
        (quality, number, index)
        for quality, number in sorted(fitting)
        for index in range(len(cache.groups[number].layers))
    ]

    def forward(place: tuple[str, int, int]) -> LayerForward:
        quality, number, index = place
        group = cache.groups[number].group
        return writer.forward(quality, group, group.layers[index], identity)

    found = in_order(forward, places, worker_count(workers, 2**25))
    forwards = dict(zip(places, found, strict=True))
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
    layers = sorted({cache.groups[number].group.layers[index] for number, index in rotations})

    def plain(place: tuple[int, int]) -> Float32:
        """The tokens held of a layer ``[T, H, D]``, not rotated."""
        number, index = place
        item = cache.groups[number]
        x = load_float32(np.ascontiguousarray(item.layers[index]))
        rotation = rotations.get(place)
        if rotation is not None:
            start, stop = item.group.held(cache.token_count)
            rotation.turn(x, np.arange(first_position + start, first_position + stop), back=True)
        return x

    def one(layer: int) -> dict[tuple[int, int], NDArray[np.uint8]]:
        """Of all transformed places of a layer."""
        pair = [places[role, layer] for role in ("key", "value") if (role, layer) in places]
        with np.errstate(all="ignore"):
            rows = [plain(place) for place in pair if place in rotations]
        known = len(rows) == 2 and len(rows[0]) == len(rows[1]) > 0
        count = 2 + sum(item.shape[1] * (1 + item.shape[2]) for item in rows)
        facts: dict[int, TokenFacts] = {}
        found = {}
        for (role, number), place in places.items():
            if number != layer or place not in rotations:
                continue
            weights = writer.weights(role, layer, {0: count, 1: count + 1}) if known else None
            if weights is None:
                start, stop = cache.groups[place[0]].group.held(cache.token_count)
                found[place] = np.full(stop - start, len(LEVELS) // 2, np.uint8)
                continue
            with single_threaded_blas, np.errstate(all="ignore"):
                if weights.window not in facts:
                    facts[weights.window] = token_facts(rows[0], rows[1], weights.window)
                found[place] = weights.levels(facts[weights.window])
        return found

    levels: dict[tuple[int, int], NDArray[np.uint8]] = {}
    for found in in_order(one, layers, worker_count(workers, 2**25)):
        levels.update(found)
    return levels
