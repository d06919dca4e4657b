"""Calibration: a profile (spec 9.6) from a transformers model and text.

The divergence that an error e of a cached row causes is half of e' F e, with F the mean of g g'
over gradients g of the log likelihood of tokens that are sampled from the model itself. F splits
well into a weight per token, which a regression on the token's key and value predicts, and a
metric per layer and role. In that metric a Karhunen-Loeve transform of the un-rotated rows is
learnt; then one step fits all coefficients of all layers (rationale 24). Layers with a sliding
window are calibrated on what the window holds when the text to cache ends.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import safetensors.numpy
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from kvformat.coefficients import WIDE, token_facts
from kvformat.errors import UsageError
from kvformat.identity import Identity, Rope
from kvformat.integrations.transformers import (
    FULL,
    SLIDING,
    cache_argument,
    fill_layer,
    identity_of,
    text_config,
)
from kvformat.profiles import Transform, TransformRecord, build
from kvformat.quantiser import SINK_TOKENS
from kvformat.sets import SCALE_RANGE
from kvformat.transforms import ROW_BUDGET, Rotation
from kvformat.writer import GENERATOR

ROLES: Final = ("key", "value")
CACHE_TOKENS: Final = 1024
TEXT_TOKENS: Final = 1000
POWER: Final = 0.7
LIMIT: Final = 4.0
ACROSS: Final = 0.8
"""Blocks of the metric between heads are shrunk by this: few samples estimate them."""
FLOOR: Final = 0.02
RIDGE: Final = 100.0
DEVIATIONS: Final = 8.0
COARSEST: Final = 4
"""Longer steps for large components cost less than the small ones that a second slot drops."""
STEPS: Final[Mapping[str, float]] = {
    "high": 0.0003,
    "near-lossless": 0.00042,
    "balanced": 0.0024,
    "small": 0.005,
}
"""In units of the root of the divergence, chosen on SmolLM2-135M (README): near-lossless is no
worse than float8_e4m3fn in the mean, the 99th percentile and the agreement of the best token."""

Float64 = NDArray[np.float64]
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Held:
    """What one layer's cache holds of a stretch of text, without the first tokens of the sequence.

    Keys and values, un-rotated, are ``[T, H, D]``, their gradients in the same basis
    ``[samples, T, H, D]``; ``features`` ``[T, F]`` are those of the tokens. ``window`` is 0 for
    full attention.
    """

    rows: tuple[NDArray[np.float32], ...]
    gradients: tuple[NDArray[np.float32], ...]
    features: Float64
    window: int


def calibrate(
    model: Any,
    token_ids: Sequence[int],
    *,
    beginning: Sequence[int] = (),
    identity: Identity | None = None,
    model_id: str | None = None,
    steps: Mapping[str, float] = STEPS,
    windows: int = 4,
    samples: int = 4,
    cache_tokens: int = CACHE_TOKENS,
    text_tokens: int = TEXT_TOKENS,
    seed: int = 1,
    progress: Progress | None = None,
) -> bytes:
    """The bytes of a profile for the keys and values of ``model``.

    ``token_ids`` are those of the calibration text, at least one window of ``cache_tokens`` +
    ``text_tokens``; each window starts with ``beginning`` (``beginning_of``). ``steps`` names the
    qualities and their steps. Layers may be of full attention or have sliding windows. Raises
    ``usage.argument``.
    """
    known = identity or identity_of(model, model_id=model_id)
    tell = progress or (lambda line: print(line, file=sys.stderr))
    rotations = _rotations(known, int(text_config(model).num_hidden_layers))
    length = cache_tokens + text_tokens - len(beginning)
    count = min(windows, len(token_ids) // length)
    if count < 1:
        raise UsageError(
            "usage.argument",
            "the calibration text is too short",
            expected=f"at least {length} tokens",
            found=len(token_ids),
        )
    found: list[dict[int, Held]] = []
    generator = torch.Generator().manual_seed(seed)
    for number in range(count):
        ids = [*beginning, *token_ids[number * length : (number + 1) * length]]
        started = time.monotonic()
        found.append(
            _measure(
                model,
                ids,
                cache_tokens=cache_tokens,
                samples=samples,
                rotations=rotations,
                generator=generator,
            )
        )
        tell(f"window {number + 1} of {count}: {time.monotonic() - started:.0f} s")
    return _fit(found, known, rotations, steps, tell)


def beginning_of(tokenizer: Any) -> list[int]:
    """The token that a tokenizer puts before every sequence, if it does so by default."""
    first = tokenizer.bos_token_id
    return [int(first)] if first is not None and tokenizer("a")["input_ids"][0] == first else []


def _rotations(identity: Identity, layers: int) -> list[Rotation | None]:
    """The rotation of each layer's keys, by one step of position."""
    result: list[Rotation | None] = [None] * layers
    for rope in identity.rope:
        if not rope.keys_rotated:
            continue
        for layer in rope.layers:
            result[layer] = _rotation(rope)
    return result


def _rotation(rope: Rope) -> Rotation:
    angles = np.frombuffer(bytes.fromhex(rope.inv_freq), ">f4").astype(np.float64)
    return Rotation(rope.pairing, np.cos(angles), np.sin(angles))


def _measure(
    model: Any,
    ids: list[int],
    *,
    cache_tokens: int,
    samples: int,
    rotations: list[Rotation | None],
    generator: torch.Generator,
) -> dict[int, Held]:
    """Prefill, then gradients of sampled continuations with respect to every cached row."""
    cache = DynamicCache(config=text_config(model))
    with torch.inference_mode():
        _forward(model, ids[:cache_tokens], cache)
    windows = _windows(cache)
    leaves = {
        number: tuple(
            part.clone().requires_grad_()
            for part in (cache.layers[number].keys, cache.layers[number].values)
        )
        for number in windows
    }
    fresh = DynamicCache(config=text_config(model))
    for number, pair in leaves.items():
        parts = dict(zip(ROLES, pair, strict=True))
        fill_layer(fresh.layers[number], number, parts, cache_tokens, pair[0].device)
    following = ids[cache_tokens:]
    drawn = _draw(model, following, fresh, leaves, samples=samples, generator=generator)
    return {
        number: _held(pair, drawn[number], rotations[number], cache_tokens, windows[number])
        for number, pair in leaves.items()
    }


def _windows(cache: Any) -> dict[int, int]:
    """The sliding window of each layer that holds a cache, 0 for full attention."""
    windows = {}
    for number, layer in enumerate(cache.layers):
        kind = type(layer).__name__
        if kind not in (FULL, SLIDING):
            raise UsageError(
                "usage.argument",
                "calibration does not know this kind of layer",
                where=f"layer {number}",
                expected=f"{FULL} or {SLIDING}",
                found=kind,
            )
        if layer.is_initialized:
            windows[number] = int(layer.sliding_window) if kind == SLIDING else 0
    return windows


def _draw(
    model: Any,
    ids: list[int],
    cache: Any,
    leaves: Mapping[int, tuple[torch.Tensor, ...]],
    *,
    samples: int,
    generator: torch.Generator,
) -> dict[int, list[list[torch.Tensor]]]:
    """By layer and role the gradients of ``samples`` continuations that the model itself draws."""
    flat = [leaf for pair in leaves.values() for leaf in pair]
    drawn: dict[int, list[list[torch.Tensor]]] = {number: [[], []] for number in leaves}
    with torch.enable_grad():
        likelihood = torch.log_softmax(_forward(model, ids, cache).logits[0].float(), -1)
        for sample in range(samples):
            tokens = torch.multinomial(likelihood.detach().exp(), 1, generator=generator)
            loss = likelihood.gather(1, tokens).sum()
            found = iter(torch.autograd.grad(loss, flat, retain_graph=sample < samples - 1))
            for number in leaves:
                for role in drawn[number]:
                    role.append(next(found))
    return drawn


def _forward(model: Any, ids: list[int], cache: Any) -> Any:
    return model(torch.tensor([ids]), use_cache=True, **{cache_argument(model): cache})


def _held(
    leaves: tuple[torch.Tensor, ...],
    drawn: list[list[torch.Tensor]],
    rotation: Rotation | None,
    cache_tokens: int,
    window: int,
) -> Held:
    """One layer's rows, gradients and features, keys un-rotated."""
    positions = np.arange(cache_tokens - leaves[0].shape[2], cache_tokens)
    after_sinks = max(0, SINK_TOKENS - int(positions[0]))
    rows: list[NDArray[np.float32]] = []
    gradients: list[NDArray[np.float32]] = []
    for leaf, samples, turn in zip(leaves, drawn, (rotation, None), strict=True):
        rows.append(_unrotated(leaf, turn, positions))
        gradients.append(np.stack([_unrotated(part, turn, positions) for part in samples]))
    return Held(
        tuple(item[after_sinks:] for item in rows),
        tuple(item[:, after_sinks:] for item in gradients),
        token_facts(rows[0], rows[1], window).matrix()[after_sinks:],
        window,
    )


def _unrotated(
    part: torch.Tensor, rotation: Rotation | None, positions: NDArray[np.int64]
) -> NDArray[np.float32]:
    """``[T, H, D]`` of a tensor ``[1, H, T, D]``."""
    array: NDArray[np.float32] = part.detach()[0].transpose(0, 1).float().contiguous().numpy()
    if rotation is not None:
        array = array.copy()
        rotation.turn(array, positions, back=True)
    return array


def _fit(
    found: Sequence[dict[int, Held]],
    identity: Identity,
    rotations: list[Rotation | None],
    steps: Mapping[str, float],
    tell: Progress,
) -> bytes:
    transforms: list[Transform] = []
    kept: dict[str, NDArray[Any]] = {}
    for layer in found[0]:
        held = [item[layer] for item in found]
        inputs = [item.features for item in held]
        for index, role in enumerate(ROLES):
            heads, dim = held[0].rows[index].shape[1:]
            rows = np.concatenate([item.rows[index].reshape(-1, heads * dim) for item in held])
            slopes = [
                item.gradients[index].reshape(*item.gradients[index].shape[:2], -1).astype(float)
                for item in held
            ]
            centre, coefficient = _fit_weights(inputs, slopes)
            name = f"{role}.{layer}.weights"
            kept[f"{name}.centre"], kept[f"{name}.coefficient"] = centre, coefficient
            kept[f"{name}.options"] = np.array([POWER, LIMIT, held[0].window])
            logs = [
                np.clip(POWER * ((item - centre) @ coefficient), -LIMIT, LIMIT) for item in inputs
            ]
            learnt = _learn(
                rows.astype(np.float64), np.concatenate(logs), _metric(slopes, logs, heads)
            )
            rotation = rotations[layer] if role == "key" else None
            forward = np.ascontiguousarray(learnt.forward.T.astype(np.float32))
            kept[f"{role}.{layer}.forward"] = forward
            for quality, step in steps.items():
                record = _record((quality, role, layer), (heads, dim), rotation)
                transform, slots = learnt.at_step(record, step, rotation)
                transforms.append(transform)
                for part, array in slots.items():
                    kept[f"{quality}.{role}.{layer}.{part}"] = array
        tell(f"layer {layer + 1} of {len(rotations)}")
    writer = safetensors.numpy.save(kept)
    return build(identity.model, transforms, writer=writer, generator=GENERATOR)


def _record(
    place: tuple[str, str, int], shape: tuple[int, int], rotation: Rotation | None
) -> TransformRecord:
    (quality, role, layer), (heads, head_dim) = place, shape
    pairing, pairs = ("none", 0)
    if rotation is not None:
        pairing, pairs = rotation.pairing, len(rotation.cosine)
    return TransformRecord(quality, role, layer, heads, heads, 0, head_dim, pairing, pairs, "int32")


def _fit_weights(inputs: Sequence[Float64], slopes: Sequence[Float64]) -> tuple[Float64, Float64]:
    """Ridge regression of the log energy of a token's gradient: centre and coefficient ``[F]``."""
    x = np.concatenate(inputs)
    energies = [(item**2).sum(-1).mean(0) for item in slopes]
    y = np.log(np.concatenate(energies) + 1e-14)
    centre, spread = x.mean(0), x.std(0) + 1e-6
    z = (x - centre) / spread
    gram = z.T @ z + RIDGE * np.eye(z.shape[1])
    coefficient: Float64 = np.linalg.solve(gram, z.T @ (y - y.mean())) / spread
    return centre, coefficient


def _metric(slopes: Sequence[Float64], logs: Sequence[Float64], heads: int) -> Float64:
    """Mean of g g' / weight ``[C, C]``, shrunk across heads, with a floor."""
    channels = slopes[0].shape[-1]
    total = np.zeros((channels, channels))
    rows = 0
    for g, log in zip(slopes, logs, strict=True):
        scaled = (g * np.exp(-0.5 * log)[:, None]).reshape(-1, channels)
        total += scaled.T @ scaled
        rows += len(scaled)
    total /= rows
    size = channels // heads
    block = np.kron(np.eye(heads), np.ones((size, size)))
    total *= block + ACROSS * (1 - block)
    floor: Float64 = FLOOR * np.trace(total) / channels * np.eye(channels)
    return total + floor


@dataclass(frozen=True, slots=True)
class _Learnt:
    """``forward`` ``[C, C]`` rows and ``backward`` columns are components, largest energy first."""

    mean: Float64
    forward: Float64
    backward: Float64
    variance: Float64

    def at_step(
        self, record: TransformRecord, step: float, rotation: Rotation | None
    ) -> tuple[Transform, dict[str, NDArray[Any]]]:
        """The integer matrix for a step, and what writers need to go the other way.

        A component that 127 steps cannot hold gets steps up to ``COARSEST`` times as long. Where
        that does not do, it gets a second slot, taken from the smallest component.
        """
        channels = len(self.variance)
        deviation = np.sqrt(np.maximum(self.variance, 0))
        needed = np.maximum(deviation * DEVIATIONS / (127 * step), 1)
        longer = 2 ** np.ceil(np.log2(needed)).astype(np.int64)
        wide = np.flatnonzero(longer > COARSEST)[: channels // 2]
        narrow = np.arange(channels - len(wide))
        component = np.concatenate([wide, narrow])
        own = np.where(longer > COARSEST, 1, longer)[narrow]
        multiple = np.concatenate([np.full(len(wide), WIDE), own])
        columns = self.backward[:, component] * multiple * step
        row_scale = np.abs(columns).sum(1) / (ROW_BUDGET - channels)
        row_scale = np.clip(row_scale, SCALE_RANGE[0], SCALE_RANGE[1]).astype(np.float32)
        matrix = np.rint(columns / row_scale[:, None].astype(np.float64)).astype(np.int32)
        empty = np.zeros(0)
        turn = (empty, empty) if rotation is None else (rotation.cosine, rotation.sine)
        mean = self.mean.astype(np.float32)
        stored = Transform(record, mean, row_scale, matrix, *turn)
        return stored, {
            "step": np.array([step]),
            "component": component.astype(np.int32),
            "multiple": multiple.astype(np.int32),
        }


def _learn(rows: Float64, logs: Float64, metric: Float64) -> _Learnt:
    """The transform of rows ``[N, C]`` with log weights ``[N]`` in a metric ``[C, C]``."""
    weight = np.exp(logs)
    mean = (rows * weight[:, None]).sum(0) / weight.sum()
    values, vectors = np.linalg.eigh(metric)
    root = (vectors * np.sqrt(values)) @ vectors.T
    back = (vectors / np.sqrt(values)) @ vectors.T
    y = ((rows - mean) * np.sqrt(weight)[:, None]) @ root
    energy, basis = np.linalg.eigh(y.T @ y / len(y))
    basis, energy = basis[:, ::-1], energy[::-1]
    return _Learnt(mean, basis.T @ root, back @ basis, energy)
