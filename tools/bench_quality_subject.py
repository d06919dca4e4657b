"""What ``bench_quality.py`` measures with: a model, its cache of a text, and what comes behind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import bench_quality_peers as peers
import models
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from kvformat.integrations.calibration import beginning_of
from kvformat.integrations.transformers import (
    cache_argument,
    cache_of,
    fill_layer,
    identity_of,
    text_config,
)

REPOSITORY: Final = Path(__file__).resolve().parent.parent
CACHED: Final = 1024
COMPARED: Final = 1000
CHUNK: Final = 250
TOPICS: Final = (
    "execmodel", "objects", "exceptions", "naming", "import", "classes",
    "dynamic-features", "try", "with", "types",
)  # fmt: skip
TEXTS: Final = ("specification", "source", "licence")
CALIBRATION: Final = "pydoc"
ROLES: Final = ("key", "value")

Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Part:
    """Layers of one kind: ``values`` float32 ``[2, L, T, H, D]`` of the tokens from ``first`` on.

    Keys have been turned by their positions with ``inv_freq``.
    """

    layers: tuple[int, ...]
    first: int
    values: Float32
    inv_freq: NDArray[np.float32]

    @property
    def sinks(self) -> int:
        """How many of the sequence's first tokens are the first of this part."""
        return max(0, peers.SINKS - self.first)

    @property
    def unrotated(self) -> Float32:
        """The values with keys turned back."""
        keys = peers.rotated(self.values[0], self.inv_freq, first=self.first, back=True)
        return np.stack([keys, self.values[1]])


Parts = tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """Like ``peers.Stored``, for all parts of a cache."""

    restored: tuple[Float32, ...] | None
    bits: float
    payload_bits: float
    encode_s: float
    decode_s: float


def over(parts: Parts, store: Callable[[Part], peers.Stored]) -> Result:
    """A method that knows layers of one kind only, part by part."""
    found = [store(part) for part in parts]
    sizes = np.array([part.values.size for part in parts], np.float64)
    share = sizes / sizes.sum()
    restored = [item.restored for item in found if item.restored is not None]
    return Result(
        tuple(restored) or None,
        float(share @ [item.bits for item in found]),
        float(share @ [item.payload_bits for item in found]),
        sum(item.encode_s for item in found),
        sum(item.decode_s for item in found),
    )


def text_of(name: str) -> str:
    """A text for measuring, or ``pydoc`` for calibration."""
    if name == CALIBRATION:
        topics = import_module("pydoc_data.topics").topics
        return "\n".join(topics[key] for key in TOPICS if key in topics)
    if name == "specification":
        return (REPOSITORY / "spec" / "kvformat.md").read_text(encoding="utf-8")
    if name == "licence":
        return (REPOSITORY / "LICENSE").read_text(encoding="utf-8")
    home = Path(os.__file__).parent
    parts = ("concurrent/futures/process.py", "bisect.py")
    return "".join((home / part).read_text(encoding="utf-8") for part in parts)


def tokens_of(loaded: models.Loaded, text: str, count: int) -> list[int]:
    """The first tokens of a text, without what begins a sequence."""
    ids = loaded.tokenizer(text_of(text), add_special_tokens=False)["input_ids"]
    if len(ids) < count:
        raise SystemExit(f"the text {text} has {len(ids)} tokens, {count} are needed")
    return [int(item) for item in ids[:count]]


def sequence(loaded: models.Loaded, text: str) -> list[int]:
    """``CACHED`` + ``COMPARED`` tokens as the model is given them."""
    begins = beginning_of(loaded.tokenizer)
    return begins + tokens_of(loaded, text, CACHED + COMPARED - len(begins))


class Subject:
    """The model, and a text of which the first tokens are cached and the others predicted."""

    def __init__(self, loaded: models.Loaded, ids: Sequence[int]) -> None:
        self.model = loaded.model
        self.identity = replace(
            identity_of(loaded.model, model_id=loaded.model_id), cache_dtype="bfloat16"
        )
        self.cached_ids, self.following = list(ids[:CACHED]), list(ids[CACHED:])
        self.parts = self._capture()
        self.values = sum(part.values.size for part in self.parts)
        whole = [part.values for part in self.parts]
        self.reference = self._log_probs(whole) if self.following else None

    def _capture(self) -> Parts:
        """The cache, values of bfloat16, by kinds of layers."""
        held = DynamicCache(config=text_config(self.model))
        for part in chunks(self.cached_ids, CHUNK):
            self._forward(part, held)
        tensors = cache_of(held)
        groups = {item.group.layers: item for item in tensors.groups if item.group.role == "key"}
        values = {item.group.layers: item for item in tensors.groups if item.group.role == "value"}
        found = []
        for layers, item in groups.items():
            roles = [np.stack(side.layers)
                     for side in (item, values[layers])]  # fmt: skip
            rope = next(rope for rope in self.identity.rope if layers[0] in rope.layers)
            frequencies = np.frombuffer(bytes.fromhex(rope.inv_freq), ">f4").astype(np.float32)
            first = item.group.held(CACHED)[0]
            found.append(Part(layers, first, peers.bfloat16(np.stack(roles)), frequencies))
        return tuple(found)

    def _forward(self, ids: Sequence[int], cache: Any) -> Any:
        """One pass that moves ``cache`` on."""
        with torch.inference_mode():
            options = {"use_cache": True, cache_argument(self.model): cache}
            return self.model(torch.tensor([list(ids)]), **options)

    def _log_probs(self, whole: Sequence[Float32]) -> torch.Tensor:
        held = DynamicCache(config=text_config(self.model))
        for part, values in zip(self.parts, whole, strict=True):
            tensors = torch.from_numpy(np.ascontiguousarray(values)).transpose(2, 3)
            for index, layer in enumerate(part.layers):
                pair = dict(zip(ROLES, tensors[:, index, None].contiguous(), strict=True))
                fill_layer(held.layers[layer], layer, pair, CACHED, torch.device("cpu"))
        return torch.cat([
            torch.log_softmax(self._forward(part, held).logits[0], -1)
            for part in chunks(self.following, CHUNK)
        ])  # fmt: skip

    def divergence(self, whole: Sequence[Float32]) -> tuple[float, float, float]:
        """KL mean and 99th percentile in nats per token, and top-1 agreement."""
        p, q = self.reference, self._log_probs(whole)
        if p is None:
            raise ValueError("there is nothing to predict")
        kl = torch.cat([
            (a.exp() * (a - b)).sum(-1, dtype=torch.float64)
            for a, b in zip(p.split(CHUNK), q.split(CHUNK), strict=True)
        ])  # fmt: skip
        same = (p.argmax(-1) == q.argmax(-1)).double().mean()
        return float(kl.mean()), float(torch.quantile(kl, 0.99)), float(same)


def chunks(ids: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """``ids`` in pieces."""
    return (ids[start : start + size] for start in range(0, len(ids), size))
