"""Which cells a request touches, and where they land in the result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvformat.errors import UsageError
from kvformat.groups import Cell, Grid, Group
from kvformat.segments import PartOfSegment

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class GroupSelection:
    """The part of one group that is wanted, in indices into the group.

    ``layers`` are indices into ``group.layers``; ``heads`` and ``tokens`` are half-open
    intervals of heads held and of token ordinals.
    """

    index: int
    group: Group
    layers: tuple[int, ...]
    heads: Range
    tokens: Range

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``[L, T, H, D]`` of the result."""
        return (
            len(self.layers),
            self.tokens[1] - self.tokens[0],
            self.heads[1] - self.heads[0],
            self.group.head_dim,
        )


@dataclass(frozen=True, slots=True)
class Landing:
    """One part of a segment and its place in the result: layer, token slice, head slice."""

    part: PartOfSegment
    layers: slice
    tokens: slice
    heads: slice


def _bad(message: str, expected: object, found: object) -> UsageError:
    return UsageError("usage.selection", message, expected=expected, found=found)


def _number(value: object, what: str) -> int:
    """A Python or numpy integer, and nothing that merely converts to one."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise _bad(f"{what} must be whole numbers", "an integer", ascii(value)[:60])
    return int(value)


def as_range(value: object, stop: int, what: str) -> Range:
    """A half-open interval from what callers pass; None means all, negative bounds are refused.

    Accepted are a pair ``(start, stop)``, a ``slice`` and a ``range`` with step 1.
    """
    if value is None:
        return (0, stop)
    if isinstance(value, (slice, range)):
        if value.step not in (None, 1):
            raise _bad(f"{what} must be contiguous", "step 1", value.step)
        pair: tuple[object, ...] = (
            0 if value.start is None else value.start,
            stop if value.stop is None else value.stop,
        )
    elif isinstance(value, (tuple, list)) and len(value) == 2:
        pair = tuple(value)
    else:
        raise _bad(f"{what} is not an interval", "(start, stop)", ascii(value)[:60])
    begin, end = (_number(item, what) for item in pair)
    if not 0 <= begin <= end <= stop:
        raise _bad(f"{what} outside the artifact", f"inside [0, {stop})", f"[{begin}, {end})")
    return (begin, end)


def select_layers(groups: Sequence[Group], layers: object) -> frozenset[int] | None:
    """Global layer numbers; None means all.

    A tuple of two numbers, a ``slice`` or a ``range`` is an interval; a list, set or array is
    taken member by member, in any order: the result is in ascending order of layers.
    """
    if layers is None:
        return None
    held = {layer for group in groups for layer in group.layers}
    if isinstance(layers, (slice, range)) or (isinstance(layers, tuple) and len(layers) == 2):
        begin, end = as_range(layers, max(held) + 1, "layers")
        wanted = frozenset(range(begin, end))
    elif isinstance(layers, (list, tuple, set, frozenset, np.ndarray)):
        wanted = frozenset(_number(item, "layers") for item in layers)
    else:
        raise _bad("layers are neither an interval nor a list", "(start, stop)", ascii(layers)[:60])
    missing = sorted(wanted - held)
    if missing:
        some = ", ".join(str(layer) for layer in sorted(held)[:12])
        found = ", ".join(str(layer) for layer in missing[:12])
        raise _bad("layers that the artifact does not hold", f"some of {some}", found)
    return wanted


def select(
    groups: Sequence[Group],
    token_count: int,
    *,
    tokens: Range | slice | range | None = None,
    layers: Iterable[int] | Range | slice | range | None = None,
    heads: Range | slice | range | None = None,
    roles: Iterable[str] | None = None,
) -> tuple[GroupSelection, ...]:
    """The selection of each group that has a wanted role and layer (PAR-4)."""
    held_roles = {group.role for group in groups}
    wanted_roles = held_roles if roles is None else set(_names(roles))
    if not wanted_roles <= held_roles:
        unknown = ", ".join(sorted(wanted_roles - held_roles))
        raise _bad("unknown roles", ", ".join(sorted(held_roles)), unknown)
    chosen = [group for group in groups if group.role in wanted_roles]
    wanted_layers = select_layers(chosen, layers)
    wanted_tokens = as_range(tokens, token_count, "tokens")
    result: list[GroupSelection] = []
    for index, group in enumerate(groups):
        members = tuple(
            position
            for position, layer in enumerate(group.layers)
            if wanted_layers is None or layer in wanted_layers
        )
        if group.role not in wanted_roles or not members:
            continue
        result.append(
            GroupSelection(
                index,
                group,
                members,
                _held_heads(group, heads),
                _held_tokens(group, wanted_tokens, token_count),
            )
        )
    if not result:
        raise _bad("nothing is selected", "at least one group", "none")
    return tuple(result)


def _names(roles: object) -> tuple[str, ...]:
    if isinstance(roles, str):
        return (roles,)
    if isinstance(roles, (list, tuple, set, frozenset)) and all(type(r) is str for r in roles):
        return tuple(roles)
    raise _bad("roles are no list of names", "key, value, ...", ascii(roles)[:60])


def _held_heads(group: Group, heads: Range | slice | range | None) -> Range:
    """Global head numbers to indices of heads held."""
    if heads is None:
        return (0, group.heads)
    begin, end = as_range(heads, group.heads_total, "heads")
    first, last = group.head_start, group.head_start + group.heads
    if begin < first or end > last:
        raise _bad(
            f"heads that group {group.name} does not hold",
            f"inside [{first}, {last})",
            f"[{begin}, {end})",
        )
    return (begin - first, end - first)


def _held_tokens(group: Group, wanted: Range, token_count: int) -> Range:
    if group.tokens.kind == "state":
        return (0, 1)
    start, stop = group.held(token_count)
    begin = min(max(wanted[0], start), stop)
    return (begin, max(begin, min(wanted[1], stop)))


def touched(grid: Grid, selection: GroupSelection) -> np.ndarray[Any, Any]:
    """Indices of the segments that hold a part of ``selection``, in table order."""
    fields = grid.fields
    mine = fields["group"] == selection.index
    for start, count, (begin, end) in (
        ("token_start", "token_count", selection.tokens),
        ("head_start", "head_count", selection.heads),
    ):
        mine &= (fields[start] < end) & (fields[start] + fields[count] > begin) & (begin < end)
    wanted = np.zeros(len(selection.group.layers) + 1, np.int64)
    wanted[1:][list(selection.layers)] = 1
    before = np.cumsum(wanted)
    first = np.where(mine, fields["layer_index"], 0)
    last = np.where(mine, first + fields["layer_count"], 0)
    return np.flatnonzero(mine & (before[last] > before[first]))


def landings(cell: Cell, selection: GroupSelection) -> Iterator[Landing]:
    """Where the wanted parts of a cell go: one landing per run of adjacent layers."""
    tokens, token_out = _overlap(cell.token_start, cell.token_count, selection.tokens)
    heads, head_out = _overlap(cell.head_start, cell.head_count, selection.heads)
    places = {layer: place for place, layer in enumerate(selection.layers)}
    run: list[int] = []
    for offset in range(cell.layer_count + 1):
        layer = cell.layer_index + offset
        if offset < cell.layer_count and layer in places:
            run.append(offset)
            continue
        if run:
            out = places[cell.layer_index + run[0]]
            yield Landing(
                PartOfSegment(slice(run[0], run[-1] + 1), tokens, heads),
                slice(out, out + len(run)),
                token_out,
                head_out,
            )
            run = []


def _overlap(start: int, count: int, wanted: Range) -> tuple[slice, slice]:
    begin, end = max(start, wanted[0]), min(start + count, wanted[1])
    return slice(begin - start, end - start), slice(begin - wanted[0], end - wanted[0])
