"""Bounded parallel work with results in order: the same results for any number of workers."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, TypeVar

from threadpoolctl import OpenBLASController, ThreadpoolController

from kvformat.errors import UsageError

A = TypeVar("A")
R = TypeVar("R")

MEMORY_BUDGET_BYTES: Final = 160 * 2**20


class _SingleThreadedBlas:
    """Keeps matrix products on the thread that calls them, while anyone is inside.

    Our workers are the parallelism: products that spread over all cores as well make reads ten
    times slower. The limit holds for the whole process, and is lifted when the last one leaves,
    on whichever thread that is.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._limit: Any = None
        self._libraries: ThreadpoolController | None = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                if self._libraries is None:
                    self._libraries = ThreadpoolController()
                self._limit = self._libraries.limit(limits=1, user_api="blas")
                _let_any_thread_limit()
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._limit.restore_original_limits()
                _let_any_thread_limit()


def _let_any_thread_limit() -> None:
    """threadpoolctl 3.8 obeys only the first thread that it hears, until that lets others in."""
    release = getattr(OpenBLASController, "clear_controlling_thread", None)
    if release is not None:
        release()


single_threaded_blas: Final = _SingleThreadedBlas()


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def worker_count(requested: int | None, bytes_per_worker: int) -> int:
    """Workers allowed by the caller, the cores and ``MEMORY_BUDGET_BYTES``; at least one."""
    if requested is not None and (type(requested) is not int or requested < 1):
        found = ascii(requested)[:60]
        raise UsageError("usage.argument", "workers must be at least 1", found=found)
    wanted = requested or cores()
    return max(1, min(wanted, MEMORY_BUDGET_BYTES // max(bytes_per_worker, 1)))


def in_order(work: Callable[[A], R], items: Iterable[A], workers: int) -> Iterator[R]:
    """``map`` on ``workers`` threads with at most twice as many items in flight.

    The first error stops the rest and is raised. With one worker no thread is started.
    """
    if workers == 1:
        yield from map(work, items)
        return
    pending: deque[Future[R]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="kvformat")
    try:
        for item in items:
            pending.append(pool.submit(work, item))
            if len(pending) >= 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()
        pool.shutdown(wait=True, cancel_futures=True)
