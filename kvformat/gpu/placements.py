"""Where a read goes: dense tensors of the caller, or the pages of a serving engine's cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from kvformat.cache import kv_pair
from kvformat.errors import UsageError
from kvformat.gpu.dtypes import ITEM_BYTES, dtype_name, torch_dtype
from kvformat.gpu.engine import Piece
from kvformat.gpu.libraries import load_torch
from kvformat.gpu.parameters import Tables
from kvformat.gpu.targets import Target
from kvformat.groups import Cell
from kvformat.selection import GroupSelection, Landing, Range, landings

Tensors = Any
PageLayout = Literal["NHD", "HND"]


class Placement(Protocol):
    """The destination of one read."""

    def pieces(self, cell: Cell) -> list[Piece]:
        """The wanted parts of a segment and their places."""


def allocate(
    wanted: Sequence[GroupSelection], device: Any, dtype: Any | None
) -> tuple[dict[str, Any], Any | None]:
    """New tensors per group, and the one ``[2, L, T, H, D]`` that they share where they match.

    ``dtype`` replaces that of the groups; ``usage.selection`` where memory does not hold them.
    """
    torch = load_torch()
    if dtype is not None:
        for item in wanted:
            check_conversion(item.group.dtype, dtype_name(dtype), f"group {item.group.name}")
    kinds = [torch_dtype(item.group.dtype) if dtype is None else dtype for item in wanted]
    try:
        base = None
        if kv_pair([item.group for item in wanted]):
            base = torch.empty((2, *wanted[0].shape), dtype=kinds[0], device=device)
        found = [
            torch.empty(item.shape, dtype=kind, device=device) if base is None else base[index]
            for index, (item, kind) in enumerate(zip(wanted, kinds, strict=True))
        ]
    except (RuntimeError, MemoryError) as error:  # torch has an error of its own for each device
        raise UsageError(
            "usage.selection",
            "the part asked for does not fit in the device's memory",
            found=str(error).splitlines()[0][:160],
            next_step="Ask for fewer tokens or layers at a time",
        ) from error
    return {item.group.name: made for item, made in zip(wanted, found, strict=True)}, base


def adopt(wanted: Sequence[GroupSelection], tensors: Tensors, device: Any) -> dict[str, Any]:
    """The caller's tensors, checked: one ``[2, L, T, H, D]``, or a mapping to ``[L, T, H, D]``.

    Any strides will do; another dtype receives converted values.
    """
    names = [item.group.name for item in wanted]
    if isinstance(tensors, Mapping):
        if sorted(tensors) != sorted(names):
            raise UsageError(
                "usage.argument",
                "there must be one tensor for each selected group",
                expected=", ".join(names),
                found=", ".join(map(ascii, tensors)) or "none",
            )
        given = [tensors[name] for name in names]
    elif getattr(tensors, "ndim", 0) == 5 and len(tensors) == len(wanted):
        given = list(tensors)
    else:
        raise UsageError(
            "usage.argument",
            "the destination is neither one tensor [2, L, T, H, D] nor a mapping of tensors",
            found=type(tensors).__name__,
        )
    for item, tensor in zip(wanted, given, strict=True):
        where = f"tensor of group {item.group.name}"
        check_tensor(where, tensor, item.shape, device, dtype=item.group.dtype)
    return dict(zip(names, given, strict=True))


def check_conversion(dtype: str, target: str, where: str) -> None:
    """Opaque bytes are not numbers: uint8 goes to uint8, and takes the bits of one-byte values."""
    opaque = "uint8" in (dtype, target)
    if opaque and (ITEM_BYTES[dtype] != 1 or (dtype == "uint8" and target != "uint8")):
        raise UsageError(
            "usage.argument",
            "values and opaque bytes are not converted into each other",
            where=where,
            expected=dtype,
            found=target,
        )


def check_tensor(where: str, tensor: Any, shape: Sequence[int], device: Any, *, dtype: str) -> None:
    """Shape, device, dtype and memory of one tensor of the caller; ``dtype`` is the group's."""
    torch = load_torch()
    if not isinstance(tensor, torch.Tensor):
        found = type(tensor).__name__
        raise UsageError("usage.argument", "not a torch tensor", where=where, found=found)
    check_conversion(dtype, dtype_name(tensor.dtype), where)
    if tuple(tensor.shape) != tuple(shape) or tensor.device != device:
        raise UsageError(
            "usage.argument",
            "a tensor does not fit what was asked for",
            where=where,
            expected=f"{list(shape)} on {device}",
            found=f"{list(tensor.shape)} on {tensor.device}",
        )
    if any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True)):
        raise UsageError("usage.argument", "elements of a tensor share memory", where=where)


class Dense:
    """One tensor ``[L, T, H, D]`` per group, any strides."""

    def __init__(
        self, wanted: Sequence[GroupSelection], tensors: Mapping[str, Any], tables: Tables
    ) -> None:
        self._wanted, self._tensors, self._tables = wanted, tensors, tables

    def pieces(self, cell: Cell) -> list[Piece]:
        """See ``Placement``."""
        return [
            Piece(landing.part, self._target(self._tensors[selection.group.name], landing))
            for selection, landing in _landings(self._wanted, cell)
        ]

    def _target(self, whole: Any, landing: Landing) -> Target:
        by_token, by_head, by_dim = (int(stride) for stride in whole.stride()[1:])
        tokens = landing.tokens
        key = ("dense", tokens.start, tokens.stop, by_token)
        offsets = np.arange(tokens.start, tokens.stop, dtype=np.int64) * by_token
        heads = landing.heads.stop - landing.heads.start
        return Target(
            tuple(
                whole[layer].narrow(1, landing.heads.start, heads)
                for layer in range(landing.layers.start, landing.layers.stop)
            ),
            self._tables.one(key, lambda: offsets),
            by_head,
            by_dim,
            dtype_name(whole.dtype),
        )


def _landings(
    wanted: Sequence[GroupSelection], cell: Cell
) -> Iterator[tuple[GroupSelection, Landing]]:
    for selection in wanted:
        if selection.index == cell.group:
            for landing in landings(cell, selection):
                yield selection, landing


@dataclass(frozen=True, slots=True)
class Pages:
    """A paged cache: role to global layer number to tensor.

    With layout ``NHD`` a tensor is ``[blocks, block, heads, head_dim]``, with ``HND``
    ``[blocks, heads, block, head_dim]``, any strides; a latent may lack the head axis. ``heads``
    of the read must be as many as a tensor has.
    """

    tensors: Mapping[str, Mapping[int, Any]]
    layout: PageLayout = "NHD"

    @staticmethod
    def from_vllm(
        layers: Mapping[int, Any], *, layout: PageLayout = "NHD", kv_axis: int = 0
    ) -> Pages:
        """From one tensor per layer that holds keys and values.

        ``kv_axis`` is the axis of length 2: 0 in ``[2, blocks, block, heads, head_dim]``
        (FlashAttention), 1 in ``[blocks, 2, ...]`` (FlashInfer). ``layout`` is the order of axes of
        the tensors as given, views that vLLM permuted included.
        """
        for layer, tensor in layers.items():
            if tensor.ndim != 5 or kv_axis not in (0, 1) or tensor.shape[kv_axis] != 2:
                raise UsageError(
                    "usage.argument",
                    "not a cache of keys and values",
                    where=f"layer {layer}",
                    expected=f"five axes, axis {kv_axis} of length 2",
                    found=list(tensor.shape),
                )
        pairs = {layer: tensor.unbind(kv_axis) for layer, tensor in layers.items()}
        return Pages(
            {
                "key": {layer: pair[0] for layer, pair in pairs.items()},
                "value": {layer: pair[1] for layer, pair in pairs.items()},
            },
            layout,
        )

    def page(self, role: str, layer: int) -> Any:
        """A tensor as ``[blocks, block, heads, head_dim]``; raises ``usage.argument``."""
        tensor = self.tensors.get(role, {}).get(layer)
        if tensor is None:
            raise UsageError(
                "usage.argument", "the paged cache lacks a layer", where=f"{role} {layer}"
            )
        if tensor.ndim == 3:
            tensor = tensor.unsqueeze(2)
        elif self.layout == "HND" and tensor.ndim == 4:
            tensor = tensor.transpose(1, 2)
        if tensor.ndim != 4:
            found = list(tensor.shape)
            raise UsageError("usage.argument", "a page has three or four axes", found=found)
        return tensor


def slots_of_blocks(block_table: Any, tokens: int, block_tokens: int) -> Any:
    """The slot of each of ``tokens`` tokens, int64, from the numbers of their blocks in order."""
    torch = load_torch()
    table = torch.as_tensor(block_table, dtype=torch.int64).cpu()
    position = torch.arange(tokens)
    if tokens and (tokens - 1) // block_tokens >= len(table):
        needed = -(-tokens // block_tokens)
        raise UsageError(
            "usage.argument", "the block table is too short", expected=needed, found=len(table)
        )
    found = table[position // block_tokens] * block_tokens + position % block_tokens
    return torch.where(table[position // block_tokens] < 0, -1, found)


class Paged:
    """Pages, and the slot of each token of the read; -1 skips one."""

    def __init__(
        self,
        wanted: Sequence[GroupSelection],
        tokens: Range,
        pages: Pages,
        slots: Any,
        tables: Tables,
    ) -> None:
        torch = load_torch()
        self._wanted, self._tables = wanted, tables
        self._pages: dict[tuple[int, int], Any] = {}
        self._first = tokens[0]
        self._slots = torch.as_tensor(slots).to("cpu", torch.int64).numpy()
        if self._slots.shape != (tokens[1] - tokens[0],):
            raise UsageError(
                "usage.argument",
                "there must be one slot for each token of the read",
                expected=[tokens[1] - tokens[0]],
                found=list(self._slots.shape),
            )
        used = self._slots[self._slots >= 0]
        if len(np.unique(used)) != len(used):
            raise UsageError("usage.argument", "two tokens have the same slot")
        for selection in wanted:
            for position in selection.layers:
                layer = selection.group.layers[position]
                page = pages.page(selection.group.role, layer)
                self._pages[selection.index, position] = page
            self._check(selection, int(used.max(initial=-1)))

    def _check(self, selection: GroupSelection, highest: int) -> None:
        if selection.group.tokens.kind == "state":
            raise UsageError(
                "usage.argument",
                "a state has no tokens to page",
                where=f"group {selection.group.name}",
                next_step="Choose roles=('key', 'value') and read the state apart",
            )
        for position in selection.layers:
            layer = selection.group.layers[position]
            page = self._pages[selection.index, position]
            where = f"{selection.group.role} of layer {layer}"
            shape = (*page.shape[:2], *selection.shape[2:])
            check_tensor(where, page, shape, self._tables.device, dtype=selection.group.dtype)
            if highest >= page.shape[0] * page.shape[1]:
                raise UsageError(
                    "usage.argument",
                    "a slot beyond the cache",
                    where=where,
                    expected=f"below {page.shape[0] * page.shape[1]}",
                    found=highest,
                )

    def pieces(self, cell: Cell) -> list[Piece]:
        """See ``Placement``: layers of unlike strides or dtypes are pieces of their own."""
        found: list[Piece] = []
        for selection, landing in _landings(self._wanted, cell):
            first = cell.layer_index
            for layer in range(landing.part.layers.start, landing.part.layers.stop):
                part = landing.part
                page = self._pages[selection.index, first + layer]
                single = type(part)(slice(layer, layer + 1), part.tokens, part.heads)
                found.append(Piece(single, self._target(selection, landing, page)))
        return found

    def _target(self, selection: GroupSelection, landing: Landing, page: Any) -> Target:
        by_block, by_position, by_head, by_dim = (int(stride) for stride in page.stride())
        block = int(page.shape[1])
        start = selection.tokens[0] - self._first + landing.tokens.start
        stop = selection.tokens[0] - self._first + landing.tokens.stop
        slots = self._slots[start:stop]

        def offsets() -> Any:
            return np.where(slots < 0, -1, slots // block * by_block + slots % block * by_position)

        key = ("paged", id(self), start, stop, by_block, by_position, block)
        heads = landing.heads.stop - landing.heads.start
        return Target(
            (page[0, 0].narrow(0, landing.heads.start, heads),),
            self._tables.one(key, offsets),
            by_head,
            by_dim,
            dtype_name(page.dtype),
        )
