"""Counting what goes over the wire: requests, bytes, repeats, and the time in which any ran.

Bandwidth is measured on transfers only until the reader first holds them back: what a full
buffer lets through later comes from the buffers of the kernel, at no speed of the network.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Traffic:
    """Totals of a source, or the difference of two.

    ``transfer_s`` is the time during which at least one request was in flight and not held back
    by a full buffer; ``free_bytes`` and ``free_s`` are what came, and how long it took, over
    transfers never held back so far; ``first_byte_s`` is the least time from a request to its
    first byte.
    """

    requests: int = 0
    retries: int = 0
    received_bytes: int = 0
    transfer_s: float = 0.0
    free_bytes: int = 0
    free_s: float = 0.0
    first_byte_s: float | None = None

    def since(self, earlier: Self) -> Traffic:
        """What came after ``earlier``."""
        return Traffic(
            self.requests - earlier.requests,
            self.retries - earlier.retries,
            self.received_bytes - earlier.received_bytes,
            self.transfer_s - earlier.transfer_s,
            self.free_bytes - earlier.free_bytes,
            self.free_s - earlier.free_s,
            self.first_byte_s,
        )

    @property
    def bytes_per_s(self) -> float | None:
        """Measured bandwidth, None before anything was measured."""
        if self.free_s <= 0 or not self.free_bytes:
            return None
        return self.free_bytes / self.free_s

    @property
    def wire_s(self) -> float:
        """How long the wire alone takes for these bytes: the longer of two measures."""
        bytes_per_s = self.bytes_per_s
        alone_s = self.received_bytes / bytes_per_s if bytes_per_s else 0.0
        return max(self.transfer_s, alone_s)


class Meter:
    """The counters of one source; safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy = _Union()
        self._free = _Union()
        self._requests = 0
        self._retries = 0
        self._received_bytes = 0
        self._free_bytes = 0
        self._first_byte_s: float | None = None

    def request(self) -> None:
        """A request goes out."""
        with self._lock:
            self._requests += 1

    def retry(self) -> None:
        """A request failed and is repeated."""
        with self._lock:
            self._retries += 1

    def answered(self, seconds: float) -> None:
        """A reply began after this time."""
        with self._lock:
            if self._first_byte_s is None or seconds < self._first_byte_s:
                self._first_byte_s = seconds

    @contextmanager
    def flow(self) -> Iterator[Flow]:
        """Something is in flight."""
        flow = Flow(self)
        with self._lock:
            self._busy.enter()
            self._free.enter()
        try:
            yield flow
        finally:
            with self._lock:
                self._busy.leave()
                if flow.free:
                    self._free.leave()

    def _received(self, size_bytes: int, *, free: bool) -> None:
        with self._lock:
            self._received_bytes += size_bytes
            self._free_bytes += size_bytes if free else 0

    @contextmanager
    def _held(self, flow: Flow) -> Iterator[None]:
        with self._lock:
            self._busy.leave()
            if flow.free:
                self._free.leave()
        flow.free = False
        try:
            yield
        finally:
            with self._lock:
                self._busy.enter()

    def traffic(self) -> Traffic:
        """The totals so far."""
        with self._lock:
            return Traffic(
                self._requests,
                self._retries,
                self._received_bytes,
                self._busy.seconds(),
                self._free_bytes,
                self._free.seconds(),
                self._first_byte_s,
            )


class Flow:
    """One transfer as the meter sees it."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self.free = True

    def received(self, size_bytes: int) -> None:
        """Bytes of a body arrived."""
        self._meter._received(size_bytes, free=self.free)

    def held(self) -> AbstractContextManager[None]:
        """The reader, not the wire, is what is waited for."""
        return self._meter._held(self)


class _Union:
    """The time during which at least one of several things was going on."""

    def __init__(self) -> None:
        self._count = 0
        self._since = 0.0
        self._sum_s = 0.0

    def enter(self) -> None:
        if not self._count:
            self._since = time.perf_counter()
        self._count += 1

    def leave(self) -> None:
        self._count -= 1
        if not self._count:
            self._sum_s += time.perf_counter() - self._since

    def seconds(self) -> float:
        return self._sum_s + (time.perf_counter() - self._since if self._count else 0.0)
