"""One read: what to fetch, from which track, where it goes, and the account of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvformat.cancelling import Cancellation
from kvformat.choosing import LINKS, Auto, TrackSwitch, as_auto, decide, refusal, windows
from kvformat.errors import InvalidError, KvformatError, UsageError
from kvformat.fetching import Fetcher, Window, Wish
from kvformat.pipeline import Clock, Outcome, Pipeline
from kvformat.report import ReadReport
from kvformat.segments import Segment, SegmentContext, check_integers, decode_segment
from kvformat.selection import GroupSelection, Range, as_range, select, touched
from kvformat.sets_ahead import SetsAhead
from kvformat.storage import Beside, Data, Piece
from kvformat.tables import SegmentRecord
from kvformat.tracks import Track
from kvformat.validity import Ledger
from kvformat.workers import worker_count

if TYPE_CHECKING:
    from kvformat.artifact import Artifact

R = TypeVar("R")
S = TypeVar("S")
Order = Literal["stored", "token-major", "layer-major"]
ORDERS: Final = ("stored", "token-major", "layer-major")
Place = Callable[[Wish, Segment], R]


@dataclass(frozen=True, slots=True)
class Request:
    """What the caller asks for, in the words of ``Artifact.read``."""

    tokens: Range | slice | range | None = None
    layers: Any = None
    heads: Range | slice | range | None = None
    roles: Any = None
    track: str | Auto | None = None
    order: Order = "stored"
    check: bool = False
    allow_partial: bool = False
    workers: int | None = None


def choose_cells(
    artifact: Artifact, request: Request
) -> tuple[tuple[GroupSelection, ...], Range, NDArray[np.intp]]:
    """What is wanted of each group, the tokens, and the cells touched in the order of use."""
    count = artifact.manifest.tokens.count
    wanted = select(
        artifact.groups,
        count,
        tokens=request.tokens,
        layers=request.layers,
        heads=request.heads,
        roles=request.roles,
    )
    if request.order not in ORDERS:
        found = ascii(request.order)[:60]
        raise UsageError("usage.argument", "unknown order", expected=ORDERS, found=found)
    cells = np.unique(np.concatenate([touched(artifact.grid, item) for item in wanted]))
    if request.order != "stored" and len(cells):
        fields = artifact.grid.fields[cells]
        first = np.array(
            [artifact.groups[int(row["group"])].layers[int(row["layer_index"])] for row in fields]
        )
        keys = [fields["head_start"], fields["group"], first, fields["token_start"]]
        if request.order == "layer-major":
            keys = [fields["head_start"], fields["token_start"], fields["group"], first]
        cells = cells[np.lexsort(keys)]
    return wanted, as_range(request.tokens, count, "tokens"), cells


class Reading(Generic[R]):
    """A prepared read. ``start`` begins to fetch; outcomes come in the order asked for."""

    def __init__(
        self, artifact: Artifact, request: Request, cancellation: Cancellation | None = None
    ) -> None:
        artifact.require_open()
        self._beside = Beside(artifact.source)
        self._pipeline: Pipeline[R] | None = None
        self._forget: Callable[[], None] | None = None
        if cancellation is not None:
            self._forget = cancellation.register(self.stop)
        try:
            self._prepare(artifact, request)
        except BaseException:
            self.stop()
            raise

    def _prepare(self, artifact: Artifact, request: Request) -> None:
        self._artifact = artifact
        self._request = request
        self.wanted, self.tokens, self._cells = choose_cells(artifact, request)
        artifact.check_serving(self.tokens, allow_partial=request.allow_partial)
        self._switch: TrackSwitch | None = None
        self._traffic = artifact.source.meter.traffic()
        self.clock = Clock()
        self.track, self._windows = self._choose()
        # Sizes in the table are checked before anything is made.
        table = artifact.segment_table(self.track, self._beside.fetch)
        self._records = records = [table[int(cell)] for cell in self._cells]
        self._prepare_transforms(records)
        values = (record.cell.values(artifact.groups[record.cell.group]) for record in records)
        self.workers = worker_count(request.workers, 4 * max(values, default=1))
        lengths = None if request.allow_partial else artifact.manifest.valid_lengths
        self.ledger = Ledger(self.wanted, self.tokens, records, lengths)
        self._segments = 0
        self._needed_bytes = 0
        self._used: dict[str, None] = {}
        self._sets = SetsAhead(artifact, self._beside)

    def _prepare_transforms(self, records: list[SegmentRecord]) -> None:
        """A profile that is missing or does not fit is told before any segment is asked for."""
        if self._artifact.manifest.profile is not None:
            for record in records:
                self._artifact.transforms.of(self.track, record)

    def _choose(self) -> tuple[Track, Iterator[Window]]:
        artifact, auto = self._artifact, as_auto(self._request.track)
        if auto is None:
            name = self._request.track
            track = artifact.track(name if isinstance(name, str) else None)
            return track, self._one_window(track)
        tokens = self.tokens[1] - self.tokens[0]
        workers = self._request.workers
        decision, options, link, rates = decide(artifact, auto, self._cells, tokens, workers)
        if decision.track is None:
            raise refusal(decision, artifact.name)
        self._switch = TrackSwitch(
            artifact, decision, options, link=link, rates=rates, workers=workers
        )
        stored = {item.track: item.stored_bytes for item in options}
        cells = [int(cell) for cell in self._cells]
        return artifact.track(decision.track), windows(
            artifact, self._switch, cells, stored, link=link, fetch=self._beside.fetch
        )

    def _one_window(self, track: Track) -> Iterator[Window]:
        yield [Wish(track, record) for record in self._records]

    def start(self, place: Place[R]) -> Pipeline[R]:
        """Fetch and restore; ``place`` puts a decoded segment where it belongs."""
        artifact = self._artifact
        fetcher = Fetcher(
            artifact.source,
            artifact.front.prefix,
            artifact.front.data_start,
            self._windows,
            self._sets,
            alignment=artifact.manifest.segmentation.alignment,
        )

        def work(wish: Wish, data: Data) -> R:
            return self._restore(wish, data, place)

        self._pipeline = Pipeline(fetcher, work, self.workers, self.clock)
        self._pipeline.start()
        if self._beside.closed:  # cancelled before there was anything to stop
            self._pipeline.close()
        return self._pipeline

    def account(self, outcome: Outcome[R]) -> None:
        """Enter one outcome."""
        record = outcome.wish.record
        self._segments += 1
        self._needed_bytes += record.stored_bytes
        self._used[outcome.wish.track.name] = None
        if outcome.error is None:
            self.ledger.done(record)
        else:
            self.ledger.failed(outcome.wish.track.name, record, outcome.error)

    def broken_off(self, error: KvformatError) -> None:
        """Fetching failed: enter it for the first segment that is missing."""
        record = self.ledger.next_open()
        if record is not None:
            self.ledger.failed(self.track.name, record, error)

    def worthwhile(self) -> bool:
        """Whether what is still to come is of use: the prefix can grow, or layers count alone."""
        return self._request.order == "layer-major" or self.ledger.growing()

    def stop(self) -> None:
        """End threads and requests."""
        self._beside.close()
        if self._pipeline is not None:
            self._pipeline.close()
        if self._forget is not None:
            self._forget()

    def report(self) -> ReadReport:
        """The account so far."""
        artifact = self._artifact
        traffic = artifact.source.meter.traffic().since(self._traffic)
        LINKS.remember(artifact.source, traffic)
        return ReadReport(
            tuple(self._used) or (self.track.name,),
            self._segments,
            self._needed_bytes,
            traffic,
            self.workers,
            self.clock.decode_s,
            self.clock.restore_s,
            self.clock.wait_s,
            self.clock.first_block_s,
            self.clock.elapsed_s(),
            self.ledger.validity(),
            () if self._switch is None else self._switch.all_reasons(),
        )

    def _restore(self, wish: Wish, data: Data, place: Place[R]) -> R:
        started = time.perf_counter()
        segment = self._decode(wish, data)
        if self._request.check:
            check_integers(segment)
        decoded = time.perf_counter()
        value = place(wish, segment)
        ended = time.perf_counter()
        self.clock.worked(decoded - started, ended - decoded)
        if self._switch is not None:
            group = self._artifact.groups[wish.record.cell.group]
            self._switch.worked(wish, wish.record.cell.values(group), ended - started)
        return value

    def _decode(self, wish: Wish, data: Data) -> Segment:
        return self._attempt(wish, data, decode_segment)

    def _attempt(self, wish: Wish, data: Data, work: Callable[[SegmentContext, Data], S]) -> S:
        """Damage on the way is told from damage at rest by asking a remote storage once more.

        ``work`` checks the digest before it does anything else.
        """
        damaged = self._sets.damaged.get((wish.track.quality, wish.record.set_index))
        if damaged is not None:
            raise damaged
        context = self._artifact.context(wish.track, wish.record)
        try:
            return work(context, data)
        except InvalidError as error:
            source = self._artifact.source
            if error.code != "segment.digest" or not source.remote:
                raise
            source.meter.retry()
            offset = self._artifact.front.data_start + wish.record.offset
            (again,) = self._beside.fetch([Piece(offset, wish.record.stored_bytes)])
            return work(context, again)
