"""Where a part of a segment goes: one tensor per layer, an element offset per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvformat.gpu.dtypes import ITEM_BYTES, bits_dtype, dtype_name
from kvformat.gpu.libraries import load_torch


@dataclass(frozen=True, slots=True)
class Target:
    """Memory for ``[layers, tokens, heads, head_dim]``.

    Element (l, t, h, d) is ``offsets[t] + h * head_stride + d * dim_stride`` elements behind the
    first one of ``layers[l]``; a token with a negative offset is skipped. ``offsets`` is int64
    ``[tokens]`` on the device.
    """

    layers: tuple[Any, ...]
    offsets: Any
    head_stride: int
    dim_stride: int
    dtype: str

    def bits(self, layer: int) -> Any:
        """The elements of a layer as integers of their size, a flat tensor of stride 1."""
        torch = load_torch()
        first = self.layers[layer].view(bits_dtype(ITEM_BYTES[self.dtype]))
        return torch.as_strided(first, (self._extent(first),), (1,), first.storage_offset())

    def _extent(self, first: Any) -> int:
        whole = first.untyped_storage().nbytes() // first.element_size()
        return int(whole) - int(first.storage_offset())

    def elements(self, heads: int, head_dim: int, tokens: Any) -> Any:
        """Flat element numbers int64 ``[tokens, heads, head_dim]`` of the tokens ``tokens``."""
        torch = load_torch()
        device = self.offsets.device
        h = torch.arange(heads, device=device)[:, None] * self.head_stride
        d = torch.arange(head_dim, device=device) * self.dim_stride
        return self.offsets[tokens][:, None, None] + h + d

    def store(self, layer: int, tokens: Any, values: Any) -> None:
        """Put ``values`` ``[tokens, heads, head_dim]`` at the token numbers ``tokens`` int64.

        Values of another dtype than the target's are converted as torch converts; a target of
        uint8 takes the bits of values of one byte.
        """
        kept = self.offsets[tokens] >= 0
        tokens, values = tokens[kept], values[kept]
        if self.dtype != "uint8" and dtype_name(values.dtype) != self.dtype:
            values = values.to(getattr(load_torch(), self.dtype))
        bits = values.contiguous().view(bits_dtype(ITEM_BYTES[self.dtype]))
        where = self.elements(values.shape[1], values.shape[2], tokens)
        self.bits(layer)[where.reshape(-1)] = bits.reshape(-1)
