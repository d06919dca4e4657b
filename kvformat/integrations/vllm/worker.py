"""The workers' half of the connector: runs the orders of each step and reports what is done."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Final

import torch

from kvformat.integrations.vllm.orders import Orders
from kvformat.integrations.vllm.transfers import LoadJob, Loads, Paged, Saves
from kvformat.integrations.vllm.views import Views

LOADS_AT_ONCE: Final = 4
GRACE_S: Final = 5.0
"""How long a load may outlive the store's own deadline before it is abandoned."""
_log = logging.getLogger("kvformat.vllm")


class Worker:
    """Called by the engine's worker, in one thread."""

    def __init__(
        self, views: Views, paged: Paged, *, writes: bool, patience_s: float | None
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._paged, self._writes = paged, writes
        self._limit_s = None if patience_s is None else patience_s + GRACE_S
        self._loads = Loads(views, paged)
        self._saves = Saves(views, paged, self.counts)
        self._loading = ThreadPoolExecutor(LOADS_AT_ONCE, thread_name_prefix="kvformat-load")
        self._saving = ThreadPoolExecutor(1, thread_name_prefix="kvformat-save")
        self._jobs: dict[str, LoadJob] = {}
        self._needed: list[LoadJob] = []
        self._saved: dict[str, Future[None]] = {}
        self._waiting: set[str] = set()
        self._over: set[str] = set()
        self._bad: set[int] = set()

    def start_loads(self, orders: Orders) -> None:
        """Start them all; none is waited for."""
        for order in orders.loads:
            job = LoadJob(order, order.begin)
            self._jobs[order.request_id] = job
            if order.layerwise:
                self._needed.append(job)
            self._loading.submit(self._loads.run, job, self._ordering())

    def wait_for_layer(self, layer: int) -> None:
        """Until all loads of this step have it, or have failed."""
        for job in self._needed:
            self._await(job, layer)

    def _await(self, job: LoadJob, layer: int | None) -> None:
        limit_s = threading.TIMEOUT_MAX if self._limit_s is None else self._limit_s
        if not job.wait(layer, limit_s):
            self._abandon(job)

    def start_saves(self, orders: Orders) -> None:
        """Start the copies of prompts whose last block this step computed."""
        self._waiting |= orders.waiting
        for job in self._needed:
            self._await(job, None)
        failed = {job.order.request_id for job in self._needed if job.good_end < job.order.end}
        self._needed.clear()
        for order in orders.saves:
            known = self._jobs.get(order.request_id)
            if not self._writes or order.request_id in failed:
                continue  # what was computed on top of a failed load is computed again
            if known is not None and known.lineage.generations:
                self._saves.lossy_seen = known.lineage
            self._saved[order.request_id] = self._saving.submit(
                self._saves.run, order, known, self._ordering()
            )

    def preempted(self, orders: Orders) -> None:
        """Before blocks of these requests are overwritten: their copies must be made."""
        for name in orders.preempted:
            future = self._saved.get(name)
            if future is not None:
                future.result()

    def finished(self, finished: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose blocks are copied, and those whose loads are over."""
        received = set()
        for name, job in self._jobs.items():
            if job.reported:
                continue
            if self._limit_s is not None and not job.done and job.age_s > self._limit_s:
                self._abandon(job)
            if job.done:
                job.reported = True
                self._report(job)
                if not job.order.layerwise:
                    received.add(name)
        sent = {name for name in self._waiting if self._copied(name)}
        self._waiting -= sent
        self._over |= finished
        for name in [name for name in self._over if self._settled(name)]:
            self._over.discard(name)
            self._jobs.pop(name, None)
            self._saved.pop(name, None)
        return sent or None, received or None

    def _settled(self, name: str) -> bool:
        job = self._jobs.get(name)
        return name not in self._waiting and self._copied(name) and (job is None or job.reported)

    def _abandon(self, job: LoadJob) -> None:
        _log.error("a load is abandoned after %.1f s", job.age_s)
        self.counts["loads abandoned"] += 1
        job.abandon()

    def _copied(self, name: str) -> bool:
        future = self._saved.get(name)
        return future is None or future.done()

    def _report(self, job: LoadJob) -> None:
        order = job.order
        bad = job.bad_blocks(self._paged.block_tokens)
        self._bad.update(bad)
        lost = len(bad) * self._paged.block_tokens
        self.counts["tokens loaded"] += order.end - order.begin - lost
        self.counts["tokens computed anew after a failed load"] += lost
        if bad:
            _log.warning(
                "loaded %d of %d tokens; the rest is computed",
                order.end - order.begin - lost, order.end - order.begin,
            )  # fmt: skip

    def take_bad_blocks(self) -> set[int]:
        """Blocks whose loads failed since the last call."""
        found, self._bad = self._bad, set()
        return found

    def close(self) -> None:
        """Wait for the copies, give up the loads."""
        for job in self._jobs.values():
            job.abandon()
        self._loading.shutdown(wait=False, cancel_futures=True)
        self._saving.shutdown(wait=True)

    def _ordering(self) -> Callable[[], AbstractContextManager[None]]:
        """A context for copies that come after what the engine has queued on its device so far."""
        device = next(iter(self._paged.caches.values())).device
        if device.type != "cuda":
            return contextlib.nullcontext
        event = torch.cuda.current_stream(device).record_event()

        @contextlib.contextmanager
        def ordered() -> Iterator[None]:
            stream = torch.cuda.Stream(device)
            stream.wait_event(event)
            with torch.cuda.stream(stream):
                yield
            stream.synchronize()

        return ordered
