"""Streams of restored blocks over several extents, for engines that start layer by layer."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvformat.closing import ClosedOnExit
from kvformat.reading import Order
from kvformat.store.loading import Account, Deadline, Loader, Opened
from kvformat.store.results import ExtentRef, Hit, LoadReport
from kvformat.streaming import Block, Stream

LAYER_RUN: Final = 3
STREAMS_AHEAD: Final = 2


@dataclass(frozen=True, slots=True)
class PlacedBlock:
    """A restored block (``Block``) of one extent, and the position of its first token."""

    extent: ExtentRef
    block: Block
    position: int


class BlockStream(ClosedOnExit):
    """An iterator of ``PlacedBlock``; close it, or use it as a context manager.

    In ``layer-major`` order every extent gives its blocks of the lowest layers before any gives
    the next ones. A fault ends the extent at which it happens and all behind it, for all layers;
    blocks of them that came before must not be used: ``report.tokens`` is what counts.
    """

    def __init__(
        self,
        loader: Loader,
        hit: Hit,
        tokens: tuple[int, int],
        *,
        layers: Sequence[int] | None,
        heads: tuple[int, int] | None,
        order: Order,
        after: Callable[[Account], None],
    ) -> None:
        self._loader, self._hit, self._span = loader, hit, tokens
        self._layers, self._heads = layers, heads
        self._order, self._after = order, after
        self._account = Account(tokens=tokens[0])
        self._good = tokens[1] if hit else tokens[0]
        self._deadline = Deadline(loader.options.load_deadline_s)
        self._stack = contextlib.ExitStack()
        self._blocks = self._run()
        self._done = False

    @property
    def report(self) -> LoadReport:
        """The account so far; ``tokens`` is final once the iteration has ended."""
        return self._account.report(self._span[1])

    def close(self) -> None:
        """Stop everything at once."""
        self._blocks.close()
        self._finish()

    def _finish(self) -> None:
        if not self._done:
            self._done = True
            self._deadline.stop()
            self._stack.close()
            self._after(self._account)

    def __iter__(self) -> Iterator[PlacedBlock]:
        return self

    def __next__(self) -> PlacedBlock:
        try:
            return next(self._blocks)
        except StopIteration:
            self._finish()
            raise

    def _run(self) -> Generator[PlacedBlock, None, None]:
        opened = self._open()
        if not opened:
            return
        held = sorted({layer for group in opened[0].artifact.groups for layer in group.layers})
        wanted = held if self._layers is None else sorted(self._layers)
        runs = [wanted]
        if self._order == "layer-major":
            runs = _runs(held, wanted)
        plan = [(item, run) for run in runs for item in opened]
        started: deque[tuple[Opened, Stream]] = deque()
        try:
            while plan or started:
                while plan and len(started) <= STREAMS_AHEAD:
                    item, run = plan.pop(0)
                    if item.extent.tokens[0] < self._good:
                        self._start(item, run, started)
                if started:
                    yield from self._drain(*started.popleft())
        finally:
            for _, stream in started:
                stream.close()
        for item in opened:
            if item.extent.tokens[1] <= self._good:
                begin, end = self._part(item)
                self._account.names.append(item.extent.name)
                self._loader.succeeded(item, end - begin, 0, self.report.seconds)
        self._account.tokens = self._good

    def _open(self) -> list[Opened]:
        """All objects of the span, cut at the first that is bad."""
        begin, end = self._span
        wanted = [x for x in self._hit.extents if x.tokens[0] < end and x.tokens[1] > begin]
        found: list[Opened] = []
        ahead = self._loader.opened_ahead(wanted, self._hit.hashes)
        with contextlib.closing(ahead):
            for cell in ahead:
                self._stack.callback(cell.close)
                found += cell.pieces
                if cell.error is not None:
                    good = found[-1].extent.tokens[1] if found else begin
                    self._fail(cell.extent, good, cell.error)
                    break
        return [x for x in found if x.extent.tokens[0] < end and x.extent.tokens[1] > begin]

    def _part(self, item: Opened) -> tuple[int, int]:
        first, stop = item.extent.tokens
        return max(first, self._span[0]), min(stop, self._span[1])

    def _start(self, item: Opened, run: list[int], started: deque[tuple[Opened, Stream]]) -> None:
        first = item.extent.tokens[0]
        begin, end = self._part(item)
        try:
            stream = item.artifact.stream(
                tokens=(begin - first, end - first),
                layers=run,
                heads=self._heads,
                track=item.track.name,
                order=self._order,
            )
        except Exception as error:
            self._fail(item.extent, begin, error)
            return
        self._stack.callback(stream.close)
        self._deadline.cancellation.register(stream.close)
        started.append((item, stream))

    def _drain(self, item: Opened, stream: Stream) -> Iterator[PlacedBlock]:
        first = item.extent.tokens[0]
        try:
            for block in stream:
                if first + block.token_start < self._good:
                    yield PlacedBlock(item.extent, block, first + block.token_start)
        except Exception as error:
            validity = getattr(error, "validity", None)
            good = self._part(item)[0] if validity is None else first + validity.valid_end
            self._fail(item.extent, good, error)
            return
        self._account.add(item.artifact, item.track, stream.report)

    def _fail(self, extent: ExtentRef, good: int, error: Exception) -> None:
        """Everything from position ``good`` on must be computed anew."""
        self._loader.fault(self._account, extent, error, late=self._deadline.expired)
        self._good = min(self._good, max(good, self._span[0]))


def _runs(held: Sequence[int], wanted: Sequence[int]) -> list[list[int]]:
    """The wanted layers in the runs in which an artifact stores them: none is decoded twice."""
    place = {layer: number // LAYER_RUN for number, layer in enumerate(held)}
    found: dict[int, list[int]] = {}
    for layer in wanted:
        found.setdefault(place.get(layer, -1), []).append(layer)
    return list(found.values())
