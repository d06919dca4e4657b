"""Calibration: a profile (spec 9.6) from a transformers model and text.

The divergence that an error e of a cached row causes is half of e' F e, with F the mean of g g'
over gradients g of the log likelihood of tokens that are sampled from the model itself. F splits
well into a weight per token, which a regression on the token's key and value predicts, and a
metric per layer and role. In that metric a Karhunen-Loeve transform of the un-rotated rows is
learnt; then one step fits all coefficients of all layers (rationale 22).
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

from kvformat.coefficients import WIDE, features
from kvformat.errors import UsageError
from kvformat.identity import Identity, Rope
from kvformat.integrations.transformers import FULL, cache_argument, identity_of, text_config
from kvformat.profiles import Transform, TransformRecord, build
from kvformat.sets import SCALE_RANGE
from kvformat.transforms import ROW_BUDGET, Rotation

GENERATOR: Final = "kvformat-python 0.9.0"
CACHE_TOKENS: Final = 1024
TEXT_TOKENS: Final = 1000
SINKS: Final = 4
POWER: Final = 0.7
LIMIT: Final = 4.0
ACROSS: Final = 0.8
"""Blocks of the metric between heads are shrunk by this: few samples estimate them."""
FLOOR: Final = 0.02
RIDGE: Final = 100.0
DEVIATIONS: Final = 8.0
STEPS: Final[Mapping[str, float]] = {
    "high": 0.0003,
    "near-lossless": 0.0006,
    "balanced": 0.0024,
    "small": 0.005,
}
"""In units of the root of the divergence, chosen on SmolLM2-135M (README)."""

Float64 = NDArray[np.float64]
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Window:
    """One stretch of text: keys and values un-rotated, ``[2, L, T, H, D]``, and ``samples``
    gradients ``[samples, 2, L, T, H, D]`` in the same basis."""

    rows: NDArray[np.float32]
    gradients: NDArray[np.float32]


def calibrate(
    model: Any,
    token_ids: Sequence[int],
    *,
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
    ``text_tokens``. ``steps`` names the qualities and their steps. Every layer must be of full
    attention. Raises ``usage.argument``.
    """
    known = identity or identity_of(model, model_id=model_id)
    tell = progress or (lambda line: print(line, file=sys.stderr))
    rotations = _rotations(known, int(text_config(model).num_hidden_layers))
    length = cache_tokens + text_tokens
    count = min(windows, len(token_ids) // length)
    if count < 1:
        raise UsageError(
            "usage.argument",
            "the calibration text is too short",
            expected=f"at least {length} tokens",
            found=len(token_ids),
        )
    found = []
    generator = torch.Generator().manual_seed(seed)
    for number in range(count):
        ids = list(token_ids[number * length : (number + 1) * length])
        started = time.monotonic()
        window = _window(
            model,
            ids,
            cache_tokens=cache_tokens,
            samples=samples,
            rotations=rotations,
            generator=generator,
        )
        found.append(window)
        tell(f"window {number + 1} of {count}: {time.monotonic() - started:.0f} s")
    return _fit(found, known, rotations, steps, tell)


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


def _window(
    model: Any,
    ids: list[int],
    *,
    cache_tokens: int,
    samples: int,
    rotations: list[Rotation | None],
    generator: torch.Generator,
) -> Window:
    """Prefill, then gradients of sampled continuations with respect to every cached row."""
    cache = DynamicCache(config=text_config(model))
    with torch.inference_mode():
        _forward(model, ids[:cache_tokens], cache)
    kinds = {type(layer).__name__ for layer in cache.layers}
    if kinds != {FULL}:
        raise UsageError(
            "usage.argument", "calibration knows layers of full attention only", found=sorted(kinds)
        )
    leaves = [
        part.clone().requires_grad_()
        for layer in cache.layers
        for part in (layer.keys, layer.values)
    ]
    fresh = DynamicCache(config=text_config(model))
    for number in range(len(cache.layers)):
        fresh.update(leaves[2 * number], leaves[2 * number + 1], number)
    with torch.enable_grad():
        logits = _forward(model, ids[cache_tokens:], fresh).logits[0]
        likelihood = torch.log_softmax(logits.float(), -1)
        drawn = []
        for sample in range(samples):
            tokens = torch.multinomial(likelihood.detach().exp(), 1, generator=generator)
            loss = likelihood.gather(1, tokens).sum()
            drawn.append(torch.autograd.grad(loss, leaves, retain_graph=sample < samples - 1))
    positions = np.arange(cache_tokens)
    gradients = np.stack([_rows(parts, rotations, positions) for parts in drawn])
    return Window(_rows([leaf.detach() for leaf in leaves], rotations, positions), gradients)


def _forward(model: Any, ids: list[int], cache: Any) -> Any:
    return model(torch.tensor([ids]), use_cache=True, **{cache_argument(model): cache})


def _rows(
    parts: Sequence[torch.Tensor], rotations: list[Rotation | None], positions: NDArray[np.int64]
) -> NDArray[np.float32]:
    """``[2, L, T, H, D]`` of keys and values, or of their gradients, keys un-rotated."""
    arrays = [part[0].transpose(0, 1).float().contiguous().numpy() for part in parts]
    keys = [array.copy() for array in arrays[0::2]]
    for array, rotation in zip(keys, rotations, strict=True):
        if rotation is not None:
            rotation.turn(array, positions, back=True)
    return np.stack([np.stack(keys), np.stack(arrays[1::2])])


def _fit(
    found: Sequence[Window],
    identity: Identity,
    rotations: list[Rotation | None],
    steps: Mapping[str, float],
    tell: Progress,
) -> bytes:
    layers, _, heads, head_dim = found[0].rows.shape[1:]
    transforms: list[Transform] = []
    kept: dict[str, NDArray[Any]] = {}
    for layer in range(layers):
        inputs = [features(item.rows[0, layer], item.rows[1, layer])[SINKS:] for item in found]
        for index, role in enumerate(("key", "value")):
            rows = [item.rows[index, layer].reshape(-1, heads * head_dim)[SINKS:] for item in found]
            shape = (-1, rows[0].shape[0] + SINKS, heads * head_dim)
            slopes = [
                item.gradients[:, index, layer].reshape(shape)[:, SINKS:].astype(np.float64)
                for item in found
            ]
            weights = _fit_weights(inputs, slopes)
            name = f"{role}.{layer}.weights"
            kept[f"{name}.centre"], kept[f"{name}.coefficient"] = weights
            kept[f"{name}.options"] = np.array([POWER, LIMIT])
            logs = [
                np.clip(POWER * ((item - weights[0]) @ weights[1]), -LIMIT, LIMIT)
                for item in inputs
            ]
            learnt = _learn(np.concatenate(rows).astype(np.float64), np.concatenate(logs),
                            _metric(slopes, logs, heads))  # fmt: skip
            rotation = rotations[layer] if role == "key" else None
            forward = np.ascontiguousarray(learnt.forward.T.astype(np.float32))
            kept[f"{role}.{layer}.forward"] = forward
            for quality, step in steps.items():
                record = _record((quality, role, layer), (heads, head_dim), rotation)
                transform, slots = learnt.at_step(record, step, rotation)
                transforms.append(transform)
                for part, array in slots.items():
                    kept[f"{quality}.{role}.{layer}.{part}"] = array
        tell(f"layer {layer + 1} of {layers}")
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

        Components that 127 steps cannot hold get a second slot, taken from the smallest ones.
        """
        channels = len(self.variance)
        deviation = np.sqrt(np.maximum(self.variance, 0))
        wide = np.flatnonzero(deviation * DEVIATIONS > 127 * step)[: channels // 2]
        narrow = np.arange(channels - len(wide))
        component = np.concatenate([wide, narrow])
        multiple = np.concatenate([np.full(len(wide), WIDE), np.ones(len(narrow), np.int64)])
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
