"""Fetching, decoding and restoring at the same time, in bounded memory, with results in order."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Generic, TypeVar, cast

from kvformat.errors import KvformatError, UsageError
from kvformat.fetching import Fetcher, Wish
from kvformat.storage import Data

R = TypeVar("R")
END: Final = object()
CLOSED: Final = "the read was closed or cancelled"


@dataclass(frozen=True, slots=True)
class Outcome(Generic[R]):
    """A segment's result, or why there is none."""

    wish: Wish
    value: R | None
    error: KvformatError | None = None


class Clock:
    """Seconds spent per stage, summed over threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.started = time.perf_counter()
        self.decode_s = 0.0
        self.restore_s = 0.0
        self.wait_s = 0.0
        self.first_block_s: float | None = None

    def worked(self, decode_s: float, restore_s: float) -> None:
        """One segment is done."""
        with self._lock:
            self.decode_s += decode_s
            self.restore_s += restore_s

    def waited(self, seconds: float) -> None:
        """The caller waited for a result."""
        self.wait_s += seconds
        if self.first_block_s is None:
            self.first_block_s = self.elapsed_s()

    def elapsed_s(self) -> float:
        """Since the start."""
        return time.perf_counter() - self.started


class Pipeline(Generic[R]):
    """Iterates over ``Outcome`` in the order of the wishes.

    A feeder thread takes stored bytes from the fetcher and gives them to a pool of ``workers``;
    at most ``2 * workers`` segments are between the two and the caller, so a caller that is slow
    holds back the network. ``start`` begins; ``close`` stops everything and returns when no
    thread of it is left.
    """

    def __init__(
        self, fetcher: Fetcher, work: Callable[[Wish, Data], R], workers: int, clock: Clock
    ) -> None:
        self._fetcher = fetcher
        self._work = work
        self._clock = clock
        self._slots = threading.Semaphore(2 * workers)
        self._stop = threading.Event()
        self._ended = False
        self._process = os.getpid()
        self._results: queue.SimpleQueue[tuple[Wish, Future[R]] | BaseException | object]
        self._results = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="kvformat")
        self._feeder = threading.Thread(target=self._feed, name="kvformat-feed", daemon=True)
        self._starting = threading.Lock()
        self._started = False

    def start(self) -> None:
        """Begin, unless this is closed. It is no part of the constructor, which an interruption
        would leave without anybody to close it.
        """
        with self._starting:
            if not self._stop.is_set():
                self._started = True
                self._feeder.start()

    def _feed(self) -> None:
        try:
            for wish, data in self._fetcher:
                self._slots.acquire()
                if self._stop.is_set():
                    break
                self._results.put((wish, self._submit(wish, data)))
            self._results.put(END)
        except BaseException as error:  # raised again in the caller's thread
            self._results.put(error)

    def _submit(self, wish: Wish, data: Data) -> Future[R]:
        try:
            return self._pool.submit(self._work, wish, data)
        except RuntimeError as error:  # the process ends, or this was closed just now
            raise UsageError("usage.argument", CLOSED) from error

    def __iter__(self) -> Pipeline[R]:
        return self

    def __next__(self) -> Outcome[R]:
        """The next outcome; raises what stopped the fetching, or that this was closed."""
        if self._ended:
            raise StopIteration
        try:
            outcome = self._take()
        except BaseException:
            self.close()
            raise
        if outcome is None:
            self._ended = True
            self.close()
            raise StopIteration
        return outcome

    def _take(self) -> Outcome[R] | None:
        started = time.perf_counter()
        self._require_running()
        item = self._results.get()
        self._require_running()
        if item is END:
            return None
        if isinstance(item, BaseException):
            raise item
        wish, future = cast("tuple[Wish, Future[R]]", item)
        value: R | None = None
        error: KvformatError | None = None
        try:
            value = future.result()
        except CancelledError:
            self._require_running()
        except KvformatError as failed:
            self._require_running()
            error = failed
        self._clock.waited(time.perf_counter() - started)
        self._slots.release()
        return Outcome(wish, value, error)

    def _require_running(self) -> None:
        if os.getpid() != self._process:
            raise UsageError("usage.argument", "the read belongs to another process")
        if self._stop.is_set():
            raise UsageError("usage.argument", CLOSED)

    def close(self) -> None:
        """Stop at once: nothing is decoded any more but what a thread has begun."""
        if os.getpid() != self._process:  # a fork has none of the threads, and locks as they were
            return
        with self._starting:
            self._stop.set()
            started = self._started
        self._fetcher.close()
        self._slots.release()
        self._results.put(END)
        if started and self._feeder is not threading.current_thread():
            with contextlib.suppress(RuntimeError):  # interrupted before it ran
                self._feeder.join()
        self._pool.shutdown(wait=True, cancel_futures=True)
