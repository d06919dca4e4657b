"""The engine's own way of putting new tokens into a layer's cache, for probing its layout."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import torch

from kvformat.errors import UsageError
from kvformat.integrations.vllm.layout import Write

_LAYER: Final = re.compile(r"(?:^|\.)layers\.(0|[1-9][0-9]*)\.")


def layer_number(name: str) -> int:
    """The global number in ``model.layers.3.self_attn.attn``; raises ``input.shape``."""
    found = _LAYER.findall(name)
    if len(found) != 1:
        raise UsageError(
            "input.shape", "a layer's name does not say its number", where=ascii(name)[:80],
            expected="one part layers.NUMBER", found=len(found),
        )  # fmt: skip
    return int(found[0])


def writer_of(layer: Any) -> Write:
    """How ``layer``, an attention module of vLLM, writes keys and values (or latents)."""
    impl = layer.impl

    def write(rows: Mapping[str, torch.Tensor], cache: torch.Tensor, slots: torch.Tensor) -> None:
        if "latent" in rows:
            # vLLM hands a latent over in two parts, of which the second is the rotary key.
            split = int(impl.kv_lora_rank)
            latent, rotary = rows["latent"][..., :split], rows["latent"][..., split:]
            impl.do_kv_cache_update(
                latent.squeeze(1), rotary, cache.squeeze(1), slots, layer.kv_cache_dtype,
                layer._k_scale,
            )  # fmt: skip
            return
        impl.do_kv_cache_update(layer, rows["key"], rows["value"], cache, slots)

    return write
