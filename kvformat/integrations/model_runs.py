"""Runs of a transformers model on top of a given cache: logits, prefill, attention outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from transformers import DynamicCache

from kvformat.errors import UsageError
from kvformat.integrations.transformers import cache_argument, text_config

CHUNK: Final = 256
"""Tokens of a forward pass; bounds the memory that logits take."""
PREFILL_CHUNK: Final = 512


class Runner:
    """A causal model in evaluation mode; every call moves the cache that it is given on."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.attention = attention_modules(model)

    @property
    def vocabulary(self) -> int:
        """Logits per token."""
        return int(text_config(self.model).vocab_size)

    @property
    def context(self) -> int | None:
        """Positions of the model, None where its configuration does not say."""
        found = getattr(text_config(self.model), "max_position_embeddings", None)
        return None if found is None else int(found)

    def log_probs(self, ids: Sequence[int], cache: Any) -> torch.Tensor:
        """Log probabilities of the next token behind each of ``ids``, float32 ``[T, V]``."""
        output = self._call(self.model, ids, cache)
        return torch.log_softmax(output.logits[0].float(), dim=-1)

    def prefill(self, ids: Sequence[int], cache: Any = None, chunk: int = PREFILL_CHUNK) -> Any:
        """The cache of ``ids``, behind what ``cache`` holds; no logits are computed."""
        cache = DynamicCache(config=text_config(self.model)) if cache is None else cache
        for start in range(0, len(ids), chunk):
            self._call(self.model.base_model, ids[start : start + chunk], cache)
        return cache

    def greedy(self, first: int, cache: Any, count: int) -> list[int]:
        """The likeliest continuation of ``count`` tokens behind the token ``first``."""
        found: list[int] = []
        token = first
        for _ in range(count):
            token = int(self.log_probs([token], cache)[-1].argmax())
            found.append(token)
        return found

    def attention_outputs(
        self, ids: Sequence[int], cache: Any, inputs: dict[int, torch.Tensor] | None = None
    ) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """What goes into and comes out of each layer's attention, ``[1, T, width]``.

        With ``inputs`` of another run every layer sees those instead of its own: what differs then
        is the error of that layer's own cache, not what earlier layers passed on.
        """
        seen: dict[int, torch.Tensor] = {}
        out: dict[int, torch.Tensor] = {}
        with contextlib.ExitStack() as stack:
            for layer, module in self.attention.items():
                hooks = _hooks(layer, seen, out, inputs)
                handle = module.register_forward_pre_hook(hooks[0], with_kwargs=True)
                stack.callback(handle.remove)
                stack.callback(module.register_forward_hook(hooks[1]).remove)
            self._call(self.model.base_model, ids, cache)
        return seen, out

    def placed(self, cache: Any) -> Any:
        """``cache`` itself, each layer in the model's dtype and on the device of its attention."""
        for number, layer in enumerate(cache.layers):
            if not layer.is_initialized:
                continue
            module = self.attention.get(number)
            weight = None if module is None else next(module.parameters(), None)
            device = self.model.device if weight is None else weight.device
            layer.keys = layer.keys.to(device, self.model.dtype)
            layer.values = layer.values.to(device, self.model.dtype)
            layer.dtype, layer.device = self.model.dtype, device
        return cache

    def _call(self, module: Any, ids: Sequence[int], cache: Any) -> Any:
        part = torch.tensor([list(ids)], device=self.model.device)
        with torch.inference_mode():
            return module(input_ids=part, use_cache=True, **{cache_argument(module): cache})


def attention_modules(model: Any) -> dict[int, Any]:
    """The attention module of each layer that has one."""
    found: dict[int, Any] = {}
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if type(layer) is int and type(module).__name__.endswith("Attention"):
            found.setdefault(layer, module)
    return dict(sorted(found.items()))


def _hooks(
    layer: int,
    seen: dict[int, torch.Tensor],
    out: dict[int, torch.Tensor],
    inputs: dict[int, torch.Tensor] | None,
) -> tuple[Any, Any]:
    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        del module
        named = "hidden_states" in kwargs
        seen[layer] = kwargs["hidden_states"] if named else args[0]
        if inputs is None:
            return None
        given = inputs[layer]
        return (args, {**kwargs, "hidden_states": given}) if named else ((given, *args[1:]), kwargs)

    def after(module: Any, args: Any, output: Any) -> None:
        del module, args
        out[layer] = output[0] if isinstance(output, tuple) else output

    return before, after


@contextlib.contextmanager
def parameters_as(model: Any, dtype: torch.dtype) -> Iterator[None]:
    """The model with its parameters in another dtype; buffers, rotary ones too, stay."""
    kept = [(item, item.data) for item in model.parameters() if item.data.is_floating_point()]
    try:
        for item, data in kept:
            item.data = data.to(dtype)
        yield
    finally:
        for item, data in kept:
            item.data = data


def require_causal(model: Any) -> None:
    """Raise ``usage.argument`` for a model whose runs are not understood."""
    if not hasattr(model, "base_model") or not attention_modules(model):
        raise UsageError(
            "usage.argument",
            "this model cannot be evaluated",
            expected="a causal language model of transformers with attention layers",
            found=type(model).__name__,
        )
