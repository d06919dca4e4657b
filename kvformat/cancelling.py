"""Stopping a read from another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Cancellation:
    """Give it to ``read`` or ``read_into``; ``cancel`` from any thread then stops that read.

    The read raises ``usage.argument`` ("the read was closed or cancelled") when all of its
    threads and requests have ended. One may be given to several reads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = False
        self._stops: dict[int, Callable[[], None]] = {}
        self._next = 0

    @property
    def cancelled(self) -> bool:
        """Whether ``cancel`` was called."""
        return self._cancelled

    def cancel(self) -> None:
        """Stop the reads that have this, and those that will get it."""
        with self._lock:
            self._cancelled = True
            stops = list(self._stops.values())
        for stop in stops:
            stop()

    def register(self, stop: Callable[[], None]) -> Callable[[], None]:
        """Have ``stop`` called on ``cancel``; returns a function that takes it back."""
        with self._lock:
            self._next += 1
            number = self._next
            self._stops[number] = stop
            late = self._cancelled
        if late:
            stop()

        def forget() -> None:
            with self._lock:
                self._stops.pop(number, None)

        return forget
