"""The integer sum of a segment (INT-3), computed where the integers are."""

from __future__ import annotations

from typing import Any

from kvformat.gpu.libraries import load_torch
from kvformat.gpu.sources import Source
from kvformat.sums import FACTOR, ROW


def factor(number: Any) -> Any:
    """h of INT-3 for an int64 tensor."""
    mixed = number * FACTOR & 0xFFFFFFFF
    return (mixed ^ (mixed >> 15)) | 1


class DeviceSum:
    """Adds up the integers of one segment, source by source, in any order.

    ``offsets`` int32 ``[n, heads, head_dim]`` are where a token's samples lie, by original dim.
    """

    def __init__(self, offsets: Any, tokens: int, *, fused: bool) -> None:
        self._offsets = offsets.reshape(offsets.shape[0], -1).contiguous()
        self._tokens = tokens
        self._fused = fused
        self._words: Any = None

    def add(self, source: Source) -> None:
        """The integers of a source that belong to tokens of the segment."""
        if self._fused:
            self._launch(source)
        else:
            self._reference(source)

    def _reference(self, source: Source) -> None:
        torch = load_torch()
        numbers = source.numbers + source.shift
        wanted = (numbers >= 0) & (numbers < self._tokens)
        numbers = numbers[wanted].long()
        offsets = source.token_offsets[wanted].long()[:, None]
        layers, channels = self._offsets.shape
        total = torch.zeros((), dtype=torch.int64, device=self._offsets.device)
        for layer in range(layers):
            plane = source.planes[layer]
            extent = plane.untyped_storage().nbytes() - plane.storage_offset()
            flat = torch.as_strided(plane, (extent,), (1,), plane.storage_offset())
            q = flat[offsets + self._offsets[layer].long()].long()
            index = (layer * self._tokens + numbers)[:, None] * channels
            index = index + torch.arange(channels, device=index.device)
            weight = factor(index % ROW) * factor(index // ROW + ROW)
            total = total + (q * weight).sum()
        self._words = total if self._words is None else self._words + total

    def _launch(self, source: Source) -> None:
        import triton

        from kvformat.gpu.kernel import (
            BLOCK_CHANNELS,
            BLOCK_TOKENS,
            LAUNCH,
            OPTIONS,
            distances,
            sum_kernel,
        )

        torch = load_torch()
        layers, channels = self._offsets.shape
        grid = (
            triton.cdiv(len(source.numbers), BLOCK_TOKENS),
            triton.cdiv(channels, BLOCK_CHANNELS),
            layers,
        )
        if self._words is None:
            count = grid[0] * grid[1] * grid[2]
            self._words = torch.zeros(count, dtype=torch.int64, device=self._offsets.device)
        with LAUNCH:
            sum_kernel[grid](
                source.planes[0], *distances(source.planes), source.token_offsets, source.numbers,
                source.shift, len(source.numbers), self._offsets, self._tokens, self._words,
                channels,
                FACTOR=FACTOR, ROW=ROW, TOKENS=BLOCK_TOKENS, CHANNELS=BLOCK_CHANNELS, **OPTIONS,
            )  # fmt: skip

    def value(self) -> int:
        """The sum modulo 2^64; waits for the device."""
        return 0 if self._words is None else int(self._words.sum().item()) % 2**64
