"""Which objects go when the store is too large: the longest unused, tails of prefixes first."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kvformat.errors import KvformatError
from kvformat.store.backend import Backend, Entry

LEFTOVER_S: Final = 3600.0
_log = logging.getLogger("kvformat.store")


@dataclass(frozen=True, slots=True)
class Stored:
    """One object with all its names, the one of its end last."""

    entries: tuple[Entry, ...]

    @property
    def size_bytes(self) -> int:
        """Its size, counted once."""
        return self.entries[-1].size_bytes

    @property
    def order(self) -> tuple[int, int]:
        """Ascending order of eviction: time of use, then the later end first."""
        end = max(item.name.end if item.name else 0 for item in self.entries)
        return max(item.used_ns for item in self.entries), -end


@dataclass(frozen=True, slots=True)
class Collected:
    """What an eviction did."""

    objects: int = 0
    size_bytes: int = 0
    freed_bytes: int = 0
    removed: int = 0
    spared: int = 0
    unknown: int = 0
    leftovers: int = 0
    ran: bool = True


def group_entries(entries: Iterable[Entry]) -> tuple[list[Stored], list[Entry]]:
    """Objects that this release knows, and names that it must leave alone."""
    found: dict[object, list[Entry]] = {}
    strange: list[Entry] = []
    for entry in entries:
        if entry.name is None or not entry.name.namespace.known:
            strange.append(entry)
        else:
            found.setdefault(entry.key, []).append(entry)
    ordered = [
        Stored(tuple(sorted(names, key=lambda item: item.name.end if item.name else 0)))
        for names in found.values()
    ]
    return ordered, strange


def collect(
    backend: Backend,
    limit_bytes: int | None,
    low_water: float = 0.9,
    *,
    goal_bytes: int | None = None,
    leftover_s: float = LEFTOVER_S,
) -> Collected:
    """Evict down to ``low_water`` of the limit if the limit is passed; sweep leftovers.

    ``goal_bytes`` evicts down to that in any case. Held objects are spared, and the next ones go
    in their place. What is in the store under names or of versions that are not known here
    counts towards the size and is never deleted.
    """
    with backend.exclusive() as mine:
        if not mine:
            return Collected(ran=False)
        leftovers = backend.sweep(leftover_s)
        stored, strange = group_entries(backend.entries())
        total = sum(item.size_bytes for item in stored) + sum(item.size_bytes for item in strange)
        goal = goal_bytes
        if goal is None and limit_bytes is not None and total > limit_bytes:
            goal = int(limit_bytes * low_water)
        freed = removed = spared = 0
        if goal is not None:
            for item in sorted(stored, key=lambda item: item.order):
                if total - freed <= goal:
                    break
                if _remove(backend, item):
                    removed, freed = removed + 1, freed + item.size_bytes
                else:
                    spared += 1
        return Collected(
            len(stored), total - freed, freed, removed, spared, len(strange), leftovers
        )


def _remove(backend: Backend, item: Stored) -> bool:
    try:
        return backend.remove(item.entries)
    except KvformatError as error:
        _log.warning("cannot delete %s: %s", item.entries[-1].path, error)
        return False
