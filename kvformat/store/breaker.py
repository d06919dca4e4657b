"""A circuit breaker: a store that keeps failing is left alone for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, Literal

LONGEST: Final = 32
"""Times ``cool_s``: the longest that a store is left alone."""


class Breaker:
    """Closed: everything passes. After ``failures`` in a row it is open for ``cool_s``, and
    nothing passes; then one call may try. If that fails it is open for twice as long.

    Misses are no failures; errors of the storage and missed deadlines are. Thread-safe.
    """

    def __init__(
        self, failures: int, cool_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit, self._cool_s, self._clock = failures, cool_s, clock
        self._lock = threading.Lock()
        self._failures = 0
        self._factor = 1
        self._until: float | None = None
        self._trial = False
        self.opened = 0

    @property
    def state(self) -> Literal["closed", "open", "half-open"]:
        """For metrics."""
        with self._lock:
            if self._until is None:
                return "closed"
            return "open" if self._clock() < self._until else "half-open"

    def allows(self) -> bool:
        """Whether a call may go to the store now.

        A trial whose outcome nobody tells counts for nothing: another may follow it after
        ``cool_s``.
        """
        with self._lock:
            if self._until is None:
                return True
            if self._clock() < self._until:
                return False
            self._until, self._trial = self._clock() + self._cool_s, True
            return True

    def succeeded(self) -> None:
        """The store answered."""
        with self._lock:
            self._failures, self._factor = 0, 1
            self._until, self._trial = None, False

    def failed(self) -> None:
        """The store did not, or too late."""
        with self._lock:
            self._failures += 1
            if self._until is not None:
                if not self._trial:
                    return  # a call from before it opened
                self._factor = min(2 * self._factor, LONGEST)
            elif self._failures < self._limit:
                return
            self._until, self._trial = self._clock() + self._cool_s * self._factor, False
            self.opened += 1
