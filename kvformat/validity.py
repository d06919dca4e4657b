"""Which part of what was asked for is restored and checked, and what is not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from kvformat.selection import GroupSelection, Range
from kvformat.tables import SegmentRecord

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvformat.errors import KvformatError


@dataclass(frozen=True, slots=True)
class Failure:
    """A segment that could not be restored: global layers and token ordinals it covers."""

    track: str
    group: str
    layers: tuple[int, ...]
    tokens: Range
    error: KvformatError


@dataclass(frozen=True, slots=True)
class Validity:
    """What is good of a read.

    All selected layers, heads and roles are restored for the token ordinals
    ``[tokens[0], valid_end)``: a serving engine computes the rest anew. ``layers`` gives the same
    end for each global layer alone. ``failures`` are the segments that were damaged or could
    not be fetched; others behind the first of them may simply not have been tried.
    """

    tokens: Range
    valid_end: int
    layers: Mapping[int, int]
    failures: tuple[Failure, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether all that was asked for is there."""
        return self.valid_end == self.tokens[1] and not self.failures


class Ledger:
    """Keeps account of segments during one read. Not safe to share between threads."""

    def __init__(
        self,
        wanted: Sequence[GroupSelection],
        tokens: Range,
        records: Iterable[SegmentRecord],
        valid_lengths: Sequence[int] | None,
    ) -> None:
        self._groups = {item.index: item for item in wanted}
        self._tokens = tokens
        self._lengths = valid_lengths
        self._open = {self._key(record): record for record in records}
        self._waiting = Counter(
            layer for record in self._open.values() for layer in self._layers(record)
        )
        self._failures: list[Failure] = []
        self._failed: set[tuple[int, int, int, int]] = set()
        self._limit: int | None = None
        self._below = 0

    @staticmethod
    def _key(record: SegmentRecord) -> tuple[int, int, int, int]:
        cell = record.cell
        return cell.group, cell.layer_index, cell.token_start, cell.head_start

    def done(self, record: SegmentRecord) -> None:
        """The segment is restored."""
        del self._open[self._key(record)]
        if self._limit is not None and self._start(record) < self._limit:
            self._below -= 1
        self._waiting.subtract(self._layers(record))

    def next_open(self) -> SegmentRecord | None:
        """The first segment that is neither restored nor failed."""
        untried = (item for key, item in self._open.items() if key not in self._failed)
        return next(untried, None)

    def failed(self, track: str, record: SegmentRecord, error: KvformatError) -> None:
        """The segment is not usable."""
        group = self._groups[record.cell.group].group
        cell = record.cell
        tokens = (cell.token_start, cell.token_start + cell.token_count)
        self._failures.append(Failure(track, group.name, self._layers(record), tokens, error))
        self._failed.add(self._key(record))
        start = self._start(record)
        if self._limit is None or start < self._limit:
            self._limit = start
            self._below = sum(self._start(item) < start for item in self._open.values())

    def _layers(self, record: SegmentRecord) -> tuple[int, ...]:
        item = self._groups[record.cell.group]
        start = record.cell.layer_index
        run = range(start, start + record.cell.layer_count)
        return tuple(item.group.layers[index] for index in run if index in item.layers)

    def _start(self, record: SegmentRecord) -> int:
        """The first selected token that this segment's absence takes away."""
        if self._groups[record.cell.group].group.tokens.kind == "state":
            return self._tokens[0]
        return min(max(record.cell.token_start, self._tokens[0]), self._tokens[1])

    def growing(self) -> bool:
        """Whether restoring what is open can still make the valid prefix longer."""
        return self._limit is None or self._below > 0

    def completed(self, record: SegmentRecord) -> tuple[int, ...]:
        """Layers of ``record`` of which no segment is open any more."""
        return tuple(layer for layer in self._layers(record) if not self._waiting[layer])

    def validity(self) -> Validity:
        """The account so far."""
        begin, end = self._tokens
        held = {layer for item in self._groups.values() for layer in self._held(item)}
        ends = dict.fromkeys(sorted(held), end)
        for record in self._open.values():
            for layer in self._layers(record):
                ends[layer] = min(ends[layer], self._start(record))
        valid_end = min(ends.values(), default=end)
        if self._lengths is not None and valid_end < end:
            served = [length for length in self._lengths if begin < length <= valid_end]
            valid_end = max(served, default=begin)
        return Validity(self._tokens, valid_end, MappingProxyType(ends), tuple(self._failures))

    @staticmethod
    def _held(item: GroupSelection) -> tuple[int, ...]:
        return tuple(item.group.layers[index] for index in item.layers)
