"""Cutting a cache into extents: views of the caller's tensors, no copies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvformat.cache import Cache, GroupTensors
from kvformat.groups import Extent


def cut(
    cache: Cache, first: int, start: int, stop: int, window_tokens: int | None = None
) -> Cache | None:
    """Positions [``start``, ``stop``) of a cache that begins at position ``first``.

    None where a window or a state is not known at ``stop``: a state only at the end of the cache;
    a window there, and where the cache holds its last ``window_tokens`` tokens before ``stop``.
    """
    last = first + cache.token_count
    groups = []
    for item in cache.groups:
        part = _cut_group(item, first, (start, stop, last), window_tokens)
        if part is None:
            return None
        groups.append(part)
    return Cache(stop - start, tuple(groups))


def _cut_group(
    item: GroupTensors, first: int, places: tuple[int, int, int], window_tokens: int | None
) -> GroupTensors | None:
    start, stop, last = places
    extent = item.group.tokens
    if extent.kind == "state":
        return item if stop == last else None
    held = first + extent.held_start
    begin = start
    kind = Extent()
    if extent.kind == "window":
        begin = max(start, held)
        if stop != last:
            if window_tokens is None or held > max(start, stop - window_tokens):
                return None
            begin = max(start, stop - window_tokens)
        kind = Extent("window", held_start=begin - start, cumulative_tokens=stop)
    rows = slice(begin - held, stop - held)
    layers = tuple(array[rows] for array in item.layers)
    return GroupTensors(replace(item.group, tokens=kind), layers)


def source_bytes(cache: Cache) -> int:
    """Bytes of all tensors."""
    return sum(array.nbytes for item in cache.groups for array in item.layers)


def arrays_of(cache: Cache) -> Iterator[object]:
    """All arrays in order."""
    for item in cache.groups:
        yield from item.layers
