"""Running a read: all of it into arrays, or block by block to the caller."""

from __future__ import annotations

import _thread
import contextlib
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvformat.cache import RestoredGroup
from kvformat.choosing import Auto, decide
from kvformat.closing import ClosedOnExit
from kvformat.costs import Decision
from kvformat.errors import InvalidError, KvformatError, StorageError, UsageError
from kvformat.fetching import Wish
from kvformat.groups import Group
from kvformat.pipeline import Outcome
from kvformat.reading import Reading, Request, choose_cells
from kvformat.report import ReadReport
from kvformat.segments import Segment, restore_into
from kvformat.selection import GroupSelection, landings

if TYPE_CHECKING:
    from kvformat.artifact import Artifact


def restore_all(
    reading: Reading[None],
    groups: Mapping[str, RestoredGroup],
    *,
    prefix: bool = False,
) -> ReadReport:
    """Restore everything into ``groups``; raises the first error, or reports it with ``prefix``."""
    told = (InvalidError, StorageError) if prefix else ()

    def place(wish: Wish, segment: Segment) -> None:
        for selection in reading.wanted:
            if selection.index == wish.record.cell.group:
                target = groups[selection.group.name].array
                for landing in landings(wish.record.cell, selection):
                    out = target[landing.layers, :, landing.heads]
                    restore_into(segment, out, landing.tokens, landing.part)

    try:
        for outcome in reading.start(place):
            reading.account(outcome)
            if outcome.error is not None and not isinstance(outcome.error, told):
                raise outcome.error
            if not reading.worthwhile():
                break
    except KvformatError as error:
        if not isinstance(error, told):
            error.validity = reading.ledger.validity()
            raise
        reading.broken_off(error)
    finally:
        reading.stop()
    return reading.report()


@dataclass(frozen=True, slots=True)
class Block:
    """A restored part of one segment: ``array`` is ``[L, T, H, D]`` in the group's dtype.

    ``layers`` are global numbers, ``token_start`` is a token ordinal, ``head_start`` a global
    head. ``completed_layers`` are those of which this was the last block of the read.
    """

    group: Group
    array: NDArray[Any]
    layers: tuple[int, ...]
    token_start: int
    head_start: int
    track: str
    completed_layers: tuple[int, ...] = ()


def blocks_of(wanted: Sequence[GroupSelection], wish: Wish, segment: Segment) -> list[Block]:
    """The wanted parts of a segment, restored."""
    blocks = []
    cell = wish.record.cell
    for selection in wanted:
        if selection.index != cell.group:
            continue
        group = selection.group
        for landing in landings(cell, selection):
            part = landing.part
            tokens = part.tokens.stop - part.tokens.start
            heads = part.heads.stop - part.heads.start
            layers = range(part.layers.start, part.layers.stop)
            shape = (len(layers), tokens, heads, group.head_dim)
            array = np.empty(shape, group.numpy_dtype)
            restore_into(segment, array, slice(0, tokens), part)
            blocks.append(
                Block(
                    group,
                    array,
                    tuple(group.layers[cell.layer_index + layer] for layer in layers),
                    cell.token_start + part.tokens.start,
                    group.head_start + cell.head_start + part.heads.start,
                    wish.track.name,
                )
            )
    return blocks


class Stream(ClosedOnExit):
    """An iterator over ``Block``. After an error, ``report`` says what was good before it."""

    def __init__(self, reading: Reading[list[Block]]) -> None:
        self._reading = reading
        self._ready: list[Block] = []
        self._closed = False
        self._dropped = weakref.finalize(self, stop_later, reading)
        self._dropped.atexit = False
        wanted = reading.wanted  # nothing that runs may hold the stream, or it is never dropped
        self._outcomes = reading.start(lambda wish, segment: blocks_of(wanted, wish, segment))

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Block:
        while not self._ready:
            if self._closed:
                raise UsageError("usage.argument", "the stream is closed")
            try:
                outcome = next(self._outcomes)
                self._reading.account(outcome)
                if outcome.error is not None:
                    raise outcome.error
            except KvformatError as error:
                error.validity = self._reading.ledger.validity()
                self.close()
                raise
            except StopIteration:
                self._dropped.detach()
                raise
            self._ready = self._marked(outcome)
        return self._ready.pop(0)

    def _marked(self, outcome: Outcome[list[Block]]) -> list[Block]:
        """The blocks, the last one saying which layers are complete."""
        *before, last = outcome.value or []
        done = self._reading.ledger.completed(outcome.wish.record)
        return [*before, replace(last, completed_layers=done)]

    @property
    def report(self) -> ReadReport:
        """The account so far; ``validity`` counts blocks that were handed over."""
        return self._reading.report()

    def close(self) -> None:
        """Stop all of it: no thread, request or temporary memory is left when this returns."""
        self._closed = True
        self._ready.clear()
        self._reading.stop()
        self._dropped.detach()


def stop_later(reading: Reading[list[Block]]) -> None:
    """Stop a read in a thread of its own.

    A dropped stream may be collected in any thread: in one of the read's own, or in that of the
    event loop, which must go on for the read to end, or in the middle of a lock.
    """

    def stop() -> None:
        with contextlib.suppress(Exception):
            reading.stop()

    with contextlib.suppress(RuntimeError):  # the process ends
        _thread.start_new_thread(stop, ())


def decide_for(artifact: Artifact, auto: Auto, request: Request) -> Decision:
    """The decision of ``track="auto"`` for a request."""
    _, (begin, end), cells = choose_cells(artifact, request)
    return decide(artifact, auto, cells, end - begin, request.workers)[0]
