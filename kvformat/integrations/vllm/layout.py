"""How an engine's attention kernel lays out one block of its paged cache: found out, not guessed.

A layer's cache is ``[blocks, heads, block_tokens, content]``, but what lies where inside a block
is the kernel's own business: vLLM's CPU kernels keep all keys of a block in front of its values,
and most of them keep keys transposed. So one block is written through the kernel itself with
numbers that name their own coordinates, and read back. The answer must be a permutation of the
block, the same for every head; the other layers must then agree with it. Anything else is refused
when the engine starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from kvformat.errors import UsageError

Write = Callable[[Mapping[str, torch.Tensor], torch.Tensor, torch.Tensor], None]
"""(role to rows ``[T, H, D]``, cache, slots ``[T]``): what the engine does with new tokens."""
DIGIT: Final = 16
PROBED_BLOCK: Final = 0
"""The null block of vLLM, which no request owns."""


@dataclass(frozen=True)
class Place:
    """Where one role's ``[block_tokens, width]`` lies in one head's part of a block.

    ``strides`` (offset, per token, per dim), counted in items, where it is that simple, else
    ``index`` into the items of the head, which are then without a gap.
    """

    tokens: int
    width: int
    strides: tuple[int, int, int] | None
    index: torch.Tensor

    @staticmethod
    def of(index: torch.Tensor) -> Place:
        """From offsets ``[block_tokens, width]``, in items."""
        tokens, width = index.shape
        offset = int(index[0, 0])
        per_token = int(index[1, 0]) - offset if tokens > 1 else 0
        per_dim = int(index[0, 1]) - offset if width > 1 else 0
        rows = torch.arange(tokens)[:, None] * per_token
        regular = offset + rows + torch.arange(width)[None] * per_dim
        strides = (offset, per_token, per_dim) if torch.equal(regular, index) else None
        return Place(tokens, width, strides, index.reshape(-1))


@dataclass(frozen=True)
class Layout:
    """The places of all roles in a block; ``content`` items per head and token."""

    places: Mapping[str, Place]
    heads: int
    content: int

    def describe(self) -> str:
        """For the log: (offset, per token, per dim) of each role, in items."""
        return ", ".join(
            f"{role} {place.strides or 'permuted'}" for role, place in self.places.items()
        )

    def read(self, cache: torch.Tensor, role: str, blocks: Sequence[int]) -> torch.Tensor:
        """``[T, H, D]`` of whole blocks, in CPU memory."""
        place = self.places[role]
        chosen = torch.tensor(list(blocks), dtype=torch.long, device=cache.device)
        if place.strides is not None:
            rows = self._window(cache, place)[chosen]
        else:
            flat = self._flat(cache)[chosen]
            rows = flat[:, :, place.index.to(cache.device)]
            rows = rows.reshape(len(chosen), self.heads, place.tokens, place.width)
        return rows.cpu().permute(0, 2, 1, 3).reshape(-1, self.heads, place.width)

    def write(
        self,
        cache: torch.Tensor,
        role: str,
        blocks: Sequence[int],
        rows: torch.Tensor,
        heads: tuple[int, int],
    ) -> None:
        """Put ``[T, H, D]`` of heads [``heads``) into whole blocks; T is a multiple of theirs."""
        place = self.places[role]
        chosen = torch.tensor(list(blocks), dtype=torch.long, device=cache.device)
        first, stop = heads
        shape = (len(chosen), place.tokens, stop - first, place.width)
        new = rows.to(cache.device).reshape(shape).permute(0, 2, 1, 3)
        if place.strides is not None:
            self._window(cache, place)[:, first:stop][chosen] = new
            return
        flat = self._flat(cache)[:, first:stop]
        index = place.index.to(cache.device)
        numbers = torch.arange(stop - first, device=cache.device)
        flat[chosen[:, None, None], numbers[None, :, None], index[None, None]] = new.reshape(
            len(chosen), stop - first, -1
        )

    def _flat(self, cache: torch.Tensor) -> torch.Tensor:
        """``[blocks, heads, items of a head's block]`` on the same memory."""
        tokens = next(iter(self.places.values())).tokens
        step = cache.stride()
        return cache.as_strided(
            (cache.shape[0], self.heads, tokens * self.content),
            (step[0], step[1], 1),
            cache.storage_offset(),
        )

    def _window(self, cache: torch.Tensor, place: Place) -> torch.Tensor:
        """``[blocks, heads, tokens, width]`` on the same memory."""
        offset, per_token, per_dim = place.strides or (0, 0, 0)
        step = cache.stride()
        return cache.as_strided(
            (cache.shape[0], self.heads, place.tokens, place.width),
            (step[0], step[1], per_token, per_dim),
            cache.storage_offset() + offset,
        )


def find_layout(
    caches: Mapping[str, torch.Tensor],
    writers: Mapping[str, Write],
    widths: Mapping[str, int],
    heads: int,
    block_tokens: int,
) -> Layout:
    """The layout of all layers; raises ``input.shape`` unless one explains them all."""
    content = sum(widths.values())
    layout: Layout | None = None
    for name, cache in caches.items():
        if tuple(cache.shape[1:]) != (heads, block_tokens, content):
            raise _strange(
                name, f"[blocks, {heads}, {block_tokens}, {content}]", str(list(cache.shape))
            )
        found = _probe(name, cache, writers[name], widths)
        layout = layout or found
        if any(
            not torch.equal(place.index, found.places[role].index)
            for role, place in layout.places.items()
        ):
            raise _strange(name, "the layout of the layers before it", "another one")
    if layout is None:
        raise _strange("the cache", "layers", "none")
    return layout


def _probe(
    name: str,
    cache: torch.Tensor,
    write: Write,
    widths: Mapping[str, int],
) -> Layout:
    """Write numbers digit by digit, which every dtype holds exactly, and see where they land."""
    _, heads, block_tokens, content = cache.shape
    items = block_tokens * content
    block = cache[PROBED_BLOCK]
    before = block.clone()
    seen = torch.zeros(heads, items, dtype=torch.long)
    try:
        scale = 1
        while scale < items:
            rows, base = {}, 0
            for role, width in widths.items():
                numbers = base + torch.arange(block_tokens * width).reshape(block_tokens, 1, width)
                digits = (numbers // scale % DIGIT).expand(-1, heads, -1)
                rows[role] = digits.to(cache.dtype).to(cache.device).contiguous()
                base += block_tokens * width
            first = PROBED_BLOCK * block_tokens
            slots = torch.arange(first, first + block_tokens, device=cache.device)
            write(rows, cache, slots)
            seen += block.cpu().to(torch.long).reshape(heads, items) * scale
            scale *= DIGIT
    finally:
        block.copy_(before)
    if not (seen == seen[0]).all() or not torch.equal(seen[0].sort().values, torch.arange(items)):
        raise _strange(name, "a permutation of the block, the same for each head", "another one")
    where = torch.empty(items, dtype=torch.long)
    _, _, per_token, per_item = cache.stride()
    lies = torch.arange(items)
    where[seen[0]] = lies // content * per_token + lies % content * per_item
    places, base = {}, 0
    for role, width in widths.items():
        size = block_tokens * width
        place = Place.of(where[base : base + size].reshape(block_tokens, width))
        if place.strides is None and (per_item != 1 or per_token != content):
            raise _strange(name, "a head's block without gaps", f"strides {list(cache.stride())}")
        places[role] = place
        base += size
    return Layout(places, heads, content)


def _strange(name: str, expected: str, found: str) -> UsageError:
    return UsageError(
        "input.shape",
        "the layout of this engine's cache is not understood",
        where=ascii(name)[:80],
        expected=expected,
        found=found,
        next_step="Report the engine's version and attention backend; nothing is stored until then",
    )
