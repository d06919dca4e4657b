"""Fetching single objects beside a long transfer: tables, quantisation sets, second tries."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

from kvformat.errors import UsageError
from kvformat.storage.base import Data, Piece, Source, Transfer

Fetch = Callable[[Sequence[Piece]], list[Data]]


class Beside:
    """Fetches objects beside the runs of segments, from any thread, until it is closed."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._running: dict[int, Transfer] = {}
        self._closed = False
        self._process = os.getpid()

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def start(self, pieces: Sequence[Piece]) -> Transfer:
        """Begin to fetch objects that lie near each other, with one request; ``end`` it."""
        with self._lock:
            if self._closed:
                raise UsageError("usage.argument", "the read was closed or cancelled")
            transfer = self._source.transfer(pieces)
            self._running[id(transfer)] = transfer
        return transfer

    def end(self, transfer: Transfer) -> None:
        """Give back what ``start`` returned."""
        transfer.close()
        with self._lock:
            self._running.pop(id(transfer), None)

    def fetch(self, pieces: Sequence[Piece]) -> list[Data]:
        """Objects that lie near each other, with one request."""
        transfer = self.start(pieces)
        try:
            return [transfer.take() for _ in pieces]
        finally:
            self.end(transfer)

    def close(self) -> None:
        """Stop what is being fetched; whoever waits for it gets ``usage.argument``."""
        if os.getpid() != self._process:  # a fork has no thread that could answer, and locks
            return
        with self._lock:
            self._closed = True
            running = list(self._running.values())
        for transfer in running:
            transfer.close()
