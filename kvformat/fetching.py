"""From segments that are wanted to their stored bytes, in order, with requests ahead of use."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, Protocol

from kvformat.extents import plan_extents
from kvformat.storage import Data, Piece, Source, Transfer
from kvformat.tables import SegmentRecord
from kvformat.tracks import Track

LEAST_AHEAD_BYTES: Final = 262_144


@dataclass(frozen=True, slots=True)
class Wish:
    """One segment of one track that is to be restored."""

    track: Track
    record: SegmentRecord


Window = Sequence[Wish]


class FetchedBeside(Protocol):
    """What segments need besides their own bytes."""

    def begin(self, window: Window) -> None:
        """A window's turn is near."""

    def ready(self, wish: Wish) -> None:
        """Wait for what ``wish`` needs; raises ``StorageError``."""

    def close(self) -> None:
        """Stop; whoever waits in ``ready`` gets an error."""


class Run:
    """Wishes that one request serves, or that lie in the prefix."""

    def __init__(
        self, window: Window, wishes: Window, pieces: list[Piece], transfer: Transfer | None
    ) -> None:
        self.window = window
        self.wishes = wishes
        self.pieces = pieces
        self.transfer = transfer

    @property
    def outstanding_bytes(self) -> int:
        """Asked for and not yet received."""
        return 0 if self.transfer is None else self.transfer.outstanding_bytes

    def close(self) -> None:
        """Stop."""
        if self.transfer is not None:
            self.transfer.close()


class Fetcher:
    """Iterates over ``(wish, stored bytes)``; each window is asked for only when its turn is near.

    ``beside`` is told of a window once its first requests are out, and of each segment before it
    is handed over. ``close`` may be called from another thread.
    """

    def __init__(
        self,
        source: Source,
        prefix: bytes,
        data_start: int,
        windows: Iterable[Window],
        beside: FetchedBeside,
        *,
        alignment: int = 1,
    ) -> None:
        self._source = source
        self._prefix = memoryview(prefix)
        self._data_start = data_start
        self._windows = iter(windows)
        self._beside = beside
        self._alignment = alignment
        self._ahead: deque[Run] = deque()
        self._lock = threading.Lock()
        self._closed = False

    def __iter__(self) -> Iterator[tuple[Wish, Data]]:
        runs = self._runs()
        prepared: Window | None = None
        while True:
            self._open_ahead(runs)
            if not self._ahead:
                return
            run = self._ahead[0]
            if run.window is not prepared:
                prepared = run.window
                self._beside.begin(run.window)
            for wish, piece in zip(run.wishes, run.pieces, strict=True):
                data = self._take(run, piece)
                self._open_ahead(runs)
                self._beside.ready(wish)
                yield wish, data
            with self._lock:
                self._ahead.popleft()
            run.close()

    def _take(self, run: Run, piece: Piece) -> Data:
        if run.transfer is None:
            return self._prefix[piece.offset : piece.stop]
        return run.transfer.take()

    def _runs(self) -> Iterator[tuple[Window, Window, list[Piece], bool]]:
        """What each request fetches: window, wishes, pieces, and whether they are here already."""
        for window in self._windows:
            start = 0
            places = [self._piece(wish) for wish in window]
            for here, group in groupby(places, lambda item: item.stop <= len(self._prefix)):
                pieces = list(group)
                cut = self._source.transport.request_bytes
                extents = (
                    [pieces]
                    if here
                    else plan_extents(pieces, request_bytes=cut, alignment=self._alignment)
                )
                for extent in extents:
                    yield window, window[start : start + len(extent)], extent, here
                    start += len(extent)

    def _piece(self, wish: Wish) -> Piece:
        return Piece(self._data_start + wish.record.offset, wish.record.stored_bytes)

    def _open_ahead(self, runs: Iterator[tuple[Window, Window, list[Piece], bool]]) -> None:
        """Open requests until enough bytes are under way to keep the link busy.

        Not more: requests share the bandwidth, and the first one is waited for.
        """
        transport = self._source.transport
        while len(self._ahead) < transport.connections:
            under_way = sum(run.outstanding_bytes for run in self._ahead)
            if self._ahead and transport.request_bytes is None and under_way >= self._enough():
                return
            planned = next(runs, None)
            if planned is None:
                return
            window, wishes, pieces, here = planned
            with self._lock:
                if self._closed:
                    return
                transfer = None if here else self._source.transfer(pieces)
                self._ahead.append(Run(window, wishes, pieces, transfer))

    def _enough(self) -> int:
        """Twice what the link holds in one round trip."""
        traffic = self._source.meter.traffic()
        bytes_per_s, round_trip_s = traffic.bytes_per_s, traffic.first_byte_s
        if bytes_per_s is None or round_trip_s is None:
            return LEAST_AHEAD_BYTES
        held_bytes = int(2 * bytes_per_s * round_trip_s)
        return min(max(held_bytes, LEAST_AHEAD_BYTES), self._source.transport.buffer_bytes)

    def close(self) -> None:
        """Stop all requests, those beside the segments too: the feeder may wait for one."""
        with self._lock:
            self._closed = True
            running = list(self._ahead)
        for item in running:
            item.close()
        self._beside.close()
