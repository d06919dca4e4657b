"""Restoring the extents of a hit: opened ahead, checked, read in order, cut at the first fault."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

from numpy.typing import NDArray

from kvformat.artifact import Artifact, choose_track, open_artifact
from kvformat.cancelling import Cancellation
from kvformat.choosing import Auto
from kvformat.errors import KvformatError, UsageError
from kvformat.identity import EXACT_LINEAGE, Lineage
from kvformat.report import ReadReport
from kvformat.store.backend import Backend
from kvformat.store.faults import MissError, miss_of
from kvformat.store.metrics import Metrics
from kvformat.store.options import StoreOptions
from kvformat.store.results import ExtentFault, ExtentRef, Hit, LoadReport, Miss
from kvformat.store.scope import Scope
from kvformat.tokens import BLOCK_TOKENS
from kvformat.tracks import EXACT, Track

OPEN_AHEAD: Final = 4
_log = logging.getLogger("kvformat.store")


@dataclass(slots=True)
class Account:
    """What a load did so far."""

    tokens: int = 0
    stored_bytes: int = 0
    faults: list[ExtentFault] = field(default_factory=list)
    lineage: Lineage = EXACT_LINEAGE
    predicted_s: float | None = None
    tracks: dict[str, None] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    def add(self, artifact: Artifact, track: Track, report: ReadReport | None = None) -> None:
        """An extent, or a part of it, is read."""
        lineage = artifact.lineage(track)
        if lineage.generations > self.lineage.generations:
            self.lineage = lineage
        self.tracks[track.name] = None
        if report is not None:
            self.stored_bytes += report.traffic.received_bytes

    def report(self, asked: int) -> LoadReport:
        """As the caller sees it."""
        return LoadReport(
            min(self.tokens, asked), asked, time.monotonic() - self.started, self.stored_bytes,
            tuple(self.faults), self.lineage, self.predicted_s, tuple(self.tracks),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Opened:
    """A checked artifact and the track to read."""

    extent: ExtentRef
    artifact: Artifact
    track: Track
    predicted_s: float | None


class Deadline:
    """Cancels what runs when the time is over; ``expired`` tells that afterwards."""

    def __init__(self, after_s: float | None) -> None:
        self.cancellation = Cancellation()
        self.expired = False
        self._timer: threading.Timer | None = None
        if after_s is not None:
            self._timer = threading.Timer(after_s, self._expire)
            self._timer.daemon = True
            self._timer.start()

    def _expire(self) -> None:
        self.expired = True
        self.cancellation.cancel()

    def stop(self) -> None:
        """Call it off."""
        if self._timer is not None:
            self._timer.cancel()


class Loader:
    """Opens and reads extents of one scope. Safe to share between threads."""

    def __init__(
        self, backend: Backend, scope: Scope, options: StoreOptions, metrics: Metrics
    ) -> None:
        self.backend, self.scope, self.options, self.metrics = backend, scope, options, metrics

    def open(self, extent: ExtentRef, hashes: Sequence[str]) -> Opened:
        """An extent whose identity and tokens are those of the request; raises."""
        return self._open(extent, lambda found: self.scope.check(found, extent, hashes))

    def open_key(self, extent: ExtentRef) -> Opened:
        """What is filed under an engine's key; raises."""
        return self._open(extent, lambda found: self.scope.check_key(found, extent.name))

    def _open(self, extent: ExtentRef, check: Callable[[Artifact], None]) -> Opened:
        artifact = open_artifact(
            self.backend.locate(extent.name),
            storage_options=self.options.storage_options or None,
            transport=self.options.transport,
        )
        try:
            check(artifact)
            track, predicted_s = self._choose(artifact)
        except BaseException:
            artifact.close()
            raise
        return Opened(extent, artifact, track, predicted_s)

    def _choose(self, artifact: Artifact) -> tuple[Track, float | None]:
        """The soonest track of the namespace's quality, and what the cost model expects of it."""
        tracks = artifact.manifest.tracks
        quality = self.scope.quality
        if not any(item.quality == quality for item in tracks):
            quality = EXACT  # nothing in the cache could be quantised
        mine = [item for item in tracks if item.quality == quality]
        decision = artifact.decide(Auto(quality=quality))
        if decision.track is None:
            return choose_track(artifact.manifest, mine), None
        predicted = next(e.total_s for e in decision.estimates if e.track == decision.track)
        return artifact.track(decision.track), predicted

    def opened_ahead(
        self, extents: Sequence[ExtentRef], hashes: Sequence[str]
    ) -> Generator[tuple[ExtentRef, Future[Opened]], None, None]:
        """Futures of the extents in order, a few of them opened before their turn."""
        pool = ThreadPoolExecutor(OPEN_AHEAD, thread_name_prefix="kvformat-store-open")
        pending: deque[tuple[ExtentRef, Future[Opened]]] = deque()
        rest = deque(extents)
        try:
            while rest or pending:
                while rest and len(pending) < OPEN_AHEAD:
                    extent = rest.popleft()
                    pending.append((extent, pool.submit(self.open, extent, hashes)))
                yield pending.popleft()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for _, future in pending:
                future.add_done_callback(_close_unused)

    def fault(
        self, account: Account, extent: ExtentRef, error: BaseException, *, late: bool = False
    ) -> Miss:
        """Enter, count and log a fault."""
        miss = Miss.SLOW if late else miss_of(error)
        if isinstance(error, UsageError) and not late:
            miss = Miss.OTHER_SHAPE
        account.faults.append(ExtentFault(extent, miss, str(error)))
        self.metrics.count("misses", miss.value)
        self.metrics.count("loads", miss.value, self.scope.quality, "none")
        text = "extent %s is not served (%s): %s"
        if miss is Miss.INTERNAL:
            _log.error(text, extent.name.path, miss.value, error, exc_info=error)
        else:
            _log.warning(text, extent.name.path, miss.value, error)
        return miss

    def succeeded(self, opened: Opened, tokens: int, stored_bytes: int, seconds: float) -> None:
        """Count a loaded extent."""
        quality, codec = opened.track.quality, opened.track.name.rpartition("/")[2]
        self.metrics.count("loads", "ok", quality, codec)
        self.metrics.count("loaded_tokens", quality, by=tokens)
        self.metrics.count("loaded_bytes", quality, codec, by=stored_bytes)
        self.metrics.observe("load_seconds", seconds, quality, codec)
        if opened.predicted_s:
            ratio = seconds / opened.predicted_s
            self.metrics.observe("load_actual_over_predicted", ratio, quality, codec)

    def load_into(
        self,
        hit: Hit,
        place: Callable[[int, int], NDArray[Any] | Mapping[str, NDArray[Any]]],
        tokens: tuple[int, int],
        selection: Mapping[str, Any],
    ) -> Account:
        """Restore positions ``tokens``; ``place(begin, end)`` gives the buffers of a part of them.

        Stops at the first fault. Nothing but ``KeyboardInterrupt`` and the like is raised.
        """
        account = Account(tokens=tokens[0])
        wanted = [
            item
            for item in hit.extents
            if item.tokens[0] < tokens[1] and item.tokens[1] > tokens[0]
        ]
        deadline = Deadline(self.options.load_deadline_s)
        ahead = self.opened_ahead(wanted, hit.hashes)
        try:
            for extent, future in ahead:
                begin, end = max(extent.tokens[0], tokens[0]), min(extent.tokens[1], tokens[1])
                try:
                    opened = future.result()
                    with opened.artifact:
                        good = self._read(
                            opened,
                            place(begin, end),
                            (begin, end),
                            selection,
                            account=account,
                            deadline=deadline,
                        )
                except Exception as error:
                    self.fault(account, extent, error, late=deadline.expired)
                    break
                account.tokens = good
                if good < end:
                    break
        finally:
            deadline.stop()
            ahead.close()
        return account

    def _read(
        self,
        opened: Opened,
        buffers: NDArray[Any] | Mapping[str, NDArray[Any]],
        span: tuple[int, int],
        selection: Mapping[str, Any],
        *,
        account: Account,
        deadline: Deadline,
    ) -> int:
        """The position up to which the extent is restored."""
        if deadline.expired:
            raise MissError(Miss.SLOW, "the time for this load is over")
        started = time.monotonic()
        first = opened.extent.tokens[0]
        report = opened.artifact.read_into(
            buffers,
            tokens=(span[0] - first, span[1] - first),
            track=opened.track.name,
            on_error="prefix",
            cancellation=deadline.cancellation,
            **selection,
        )
        seconds = time.monotonic() - started
        account.add(opened.artifact, opened.track, report)
        if opened.predicted_s is not None:
            account.predicted_s = (account.predicted_s or 0.0) + opened.predicted_s
        good = first + report.validity.valid_end
        if not report.validity.complete:
            failures = report.validity.failures
            error: KvformatError | MissError = (
                failures[0].error if failures else MissError(Miss.STORAGE, "the read broke off")
            )
            self.fault(account, opened.extent, error)
        else:
            self.succeeded(opened, span[1] - span[0], report.traffic.received_bytes, seconds)
        return good


def _close_unused(future: Future[Opened]) -> None:
    with contextlib.suppress(BaseException):
        future.result().artifact.close()


def cut_hit(hit: Hit, count: int) -> Hit:
    """A hit with its first ``count`` extents."""
    return Hit(hit.extents[:count], hit.hashes, hit.probes, hit.miss)


def whole_blocks(tokens: int) -> int:
    """Blocks that lie whole in so many tokens."""
    return tokens // BLOCK_TOKENS
