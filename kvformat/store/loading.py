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
from kvformat.profile_shelf import ProfileShelf, Transforms
from kvformat.report import ReadReport
from kvformat.store.backend import Backend
from kvformat.store.faults import MissError, miss_of
from kvformat.store.metrics import Metrics
from kvformat.store.names import ObjectName
from kvformat.store.options import StoreOptions
from kvformat.store.results import ExtentFault, ExtentRef, Hit, LoadReport, Miss
from kvformat.store.scope import Scope
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
    names: list[ObjectName] = field(default_factory=list)
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
    """A checked artifact, the blocks that it is to serve, and the track to read."""

    extent: ExtentRef
    artifact: Artifact
    track: Track
    predicted_s: float | None


@dataclass(frozen=True, slots=True)
class OpenedCell:
    """The objects of a cell, ascending and without a gap, and why they are not all of it."""

    pieces: tuple[Opened, ...]
    extent: ExtentRef
    error: Exception | None = None

    def close(self) -> None:
        """Close all."""
        for piece in self.pieces:
            piece.artifact.close()


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
        self,
        backend: Backend,
        scope: Scope,
        options: StoreOptions,
        metrics: Metrics,
        profiles: ProfileShelf,
    ) -> None:
        self.backend, self.scope, self.options, self.metrics = backend, scope, options, metrics
        self.profiles = profiles

    def open_cell(self, cell: ExtentRef, hashes: Sequence[str]) -> OpenedCell:
        """The objects that lead to the end of a cell's stored part; never raises.

        From each object to its parent, as long as that is in the cell. Where one is bad, the
        objects that lead to the last good state before are what is left.
        """
        first: Exception | None = None
        for end in reversed(self.scope.grid.names_in_cell(cell.end)):
            try:
                pieces = self._open_back(cell, end, hashes)
            except Exception as error:
                first = first or error
                continue
            return OpenedCell(pieces, cell, first)
        return OpenedCell((), cell, first)

    def _open_back(self, cell: ExtentRef, end: int, hashes: Sequence[str]) -> tuple[Opened, ...]:
        found: list[Opened] = []
        try:
            while end > cell.start:
                wanted = ExtentRef(self.scope.name(hashes, end), cell.start, end)
                found.append(self._open(wanted, lambda a: self.scope.check(a, wanted, hashes)))  # noqa: B023
                end = found[-1].extent.start
        except BaseException:
            for item in found:
                item.artifact.close()
            raise
        return tuple(reversed(found))

    def open_key(self, extent: ExtentRef) -> Opened:
        """What is filed under an engine's key; raises."""

        def check(artifact: Artifact) -> int:
            self.scope.check_key(artifact, extent.name)
            return 0

        return self._open(extent, check)

    def _open(self, extent: ExtentRef, check: Callable[[Artifact], int]) -> Opened:
        artifact = open_artifact(
            self.backend.locate(extent.name),
            storage_options=self.options.storage_options or None,
            transport=self.options.transport,
        )
        try:
            artifact.transforms = Transforms(artifact.manifest, self.profiles)
            start = check(artifact)
            track, predicted_s = self._choose(artifact)
        except BaseException:
            artifact.close()
            raise
        return Opened(ExtentRef(extent.name, start, extent.end), artifact, track, predicted_s)

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
        self, cells: Sequence[ExtentRef], hashes: Sequence[str]
    ) -> Generator[OpenedCell, None, None]:
        """The cells in order, a few of them opened before their turn.

        Whoever takes one closes it.
        """
        pool = ThreadPoolExecutor(OPEN_AHEAD, thread_name_prefix="kvformat-store-open")
        pending: deque[Future[OpenedCell]] = deque()
        rest = deque(cells)
        try:
            while rest or pending:
                while rest and len(pending) < OPEN_AHEAD:
                    pending.append(pool.submit(self.open_cell, rest.popleft(), hashes))
                yield pending.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for future in pending:
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
        wanted = [x for x in hit.extents if x.tokens[0] < tokens[1] and x.tokens[1] > tokens[0]]
        deadline = Deadline(self.options.load_deadline_s)
        ahead = self.opened_ahead(wanted, hit.hashes)
        try:
            for cell in ahead:
                whole = self._read_cell(
                    cell, place, tokens, selection, account=account, deadline=deadline
                )
                if not whole:
                    break
        finally:
            deadline.stop()
            ahead.close()
        return account

    def _read_cell(
        self,
        cell: OpenedCell,
        place: Callable[[int, int], NDArray[Any] | Mapping[str, NDArray[Any]]],
        tokens: tuple[int, int],
        selection: Mapping[str, Any],
        *,
        account: Account,
        deadline: Deadline,
    ) -> bool:
        """Read the pieces of a cell; whether all that is wanted of it is there."""
        with contextlib.closing(cell):
            for piece in cell.pieces:
                begin = max(piece.extent.tokens[0], tokens[0])
                end = min(piece.extent.tokens[1], tokens[1])
                if begin >= end:
                    continue
                try:
                    buffers = place(begin, end)
                    good = self._read(
                        piece, buffers, (begin, end), selection, account=account, deadline=deadline
                    )
                except Exception as error:
                    self.fault(account, piece.extent, error, late=deadline.expired)
                    return False
                account.tokens = good
                if good < end:
                    return False
            if cell.error is not None:
                self.fault(account, cell.extent, cell.error, late=deadline.expired)
        return cell.error is None

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
        account.names.append(opened.extent.name)
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


def _close_unused(future: Future[OpenedCell]) -> None:
    with contextlib.suppress(BaseException):
        future.result().close()


def cut_hit(hit: Hit, count: int) -> Hit:
    """A hit with its first ``count`` cells."""
    return Hit(hit.extents[:count], hit.hashes, hit.probes, hit.miss)
