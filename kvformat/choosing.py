"""``track="auto"``: from an artifact, a link and rates to the track to read."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from kvformat.costs import Candidate, Decision, Link, Rates, Switcher, choose, rate_name, work_of
from kvformat.errors import UnsupportedError, UsageError
from kvformat.fetching import Window, Wish
from kvformat.rates import load_rates
from kvformat.storage import Fetch, Source, Traffic
from kvformat.tracks import EXACT, Track

if TYPE_CHECKING:
    from kvformat.artifact import Artifact

WINDOW_BYTES: Final = 8 * 2**20
WINDOW_S: Final = 0.25
"""A decision holds for so much of the link's time at least: each window is a request."""
ENOUGH_BYTES: Final = 2**20
SLOWEST: Final = 1e4


@dataclass(frozen=True, slots=True)
class Auto:
    """Let the reader choose the track by a cost model.

    ``quality`` names the accepted quality or qualities; by default the best one present. ``link``
    is what the caller knows of the way to the storage; by default what earlier reads from there
    measured. ``rates`` are those of this machine (``kvformat doctor --measure``). With
    ``prefill_tokens_per_s`` the answer may be to compute the cache anew, with ``deadline_s`` that
    nothing is in time: then reading raises ``track.none``.
    """

    quality: str | Sequence[str] | None = None
    link: Link | None = None
    rates: Rates | None = None
    prefill_tokens_per_s: float | None = None
    deadline_s: float | None = None


class Links:
    """What the reads of this process measured, by storage."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, Link] = {}

    def remember(self, source: Source, traffic: Traffic) -> None:
        """Keep the bandwidth of a read that moved enough to tell."""
        if source.remote and traffic.free_bytes >= ENOUGH_BYTES and traffic.bytes_per_s:
            link = Link(max(traffic.bytes_per_s, SLOWEST), traffic.first_byte_s or 0.0)
            with self._lock:
                self._known[_host(source)] = link

    def of(self, source: Source) -> Link:
        """The best guess: measured before, measured while opening, or without limit."""
        if not source.remote:
            return Link(math.inf)
        with self._lock:
            known = self._known.get(_host(source))
        traffic = source.meter.traffic()
        round_trip_s = traffic.first_byte_s or 0.0
        if known is not None:
            return Link(known.bytes_per_s, min(round_trip_s or math.inf, known.round_trip_s))
        moving_s = traffic.free_s - traffic.requests * round_trip_s
        if not traffic.free_bytes or moving_s <= 0:
            return Link(math.inf, round_trip_s)
        return Link(max(traffic.free_bytes / moving_s, SLOWEST), round_trip_s)


LINKS: Final = Links()


def _host(source: Source) -> str:
    parts = urlsplit(source.name)
    return f"{parts.scheme}://{parts.netloc}"


def accepted(artifact: Artifact, quality: str | Sequence[str] | None) -> tuple[Track, ...]:
    """The tracks of the accepted qualities; raises ``track.none`` or ``usage.selection``.

    Those that need a calibration profile which is not at hand are left out, if others are there.
    """
    tracks = artifact.manifest.tracks
    if quality is None:
        best = artifact.track().quality
        return tuple(track for track in tracks if track.quality == best)
    names = (quality,) if isinstance(quality, str) else tuple(quality)
    found = tuple(track for track in tracks if track.quality in names)
    if not found:
        raise UnsupportedError(
            "track.none",
            "no track has an accepted quality",
            expected=" or ".join(ascii(name) for name in names) or "a quality",
            found=", ".join(artifact.tracks),
            next_step="Accept another quality, or compute the cache anew",
        )
    restorable = tuple(track for track in found if artifact.transforms.at_hand(track))
    return restorable or found  # reading then says which profile is missing


def candidates(
    artifact: Artifact, tracks: Sequence[Track], cells: NDArray[np.intp]
) -> list[Candidate]:
    """The cost of reading ``cells`` of the grid from each track, without its table."""
    fields = artifact.grid.fields
    dims = np.array([group.head_dim for group in artifact.groups], np.int64)
    values = dims[fields["group"]]
    for name in ("layer_count", "token_count", "head_count"):
        values = values * fields[name].astype(np.int64)
    part = int(values[cells].sum()) / max(int(values.sum()), 1)
    group_of = fields["group"][cells]
    blocks = max(1, len(np.unique(fields["token_start"][cells])))
    result = []
    for track in tracks:
        encodings = artifact.manifest.quality(track.quality).encodings
        parts = [
            (codec, encodings[number] == EXACT, int(values[cells][mine].sum()), int(mine.sum()))
            for number, codec in enumerate(track.codecs)
            if (mine := group_of == number).any()
        ]
        stored_bytes = int(part * (track.data_stop - track.data_start))
        result.append(Candidate(track.name, track.quality, stored_bytes, work_of(parts), blocks))
    return result


def decide(
    artifact: Artifact,
    auto: Auto,
    cells: NDArray[np.intp],
    tokens: int,
    workers: int | None,
) -> tuple[Decision, list[Candidate], Link, Rates]:
    """The decision for a read of ``cells``, and what it came from."""
    tracks = accepted(artifact, auto.quality)
    options = candidates(artifact, tracks, cells)
    link = auto.link or LINKS.of(artifact.source)
    rates = auto.rates or load_rates()
    decision = choose(
        options,
        link,
        rates,
        workers=workers,
        prefill_tokens_per_s=auto.prefill_tokens_per_s,
        tokens=tokens,
        deadline_s=auto.deadline_s,
    )
    return decision, options, link, rates


def refusal(decision: Decision, where: str) -> UnsupportedError:
    """The error of a decision that names no track."""
    return UnsupportedError(
        "track.none",
        decision.reasons[-1],
        where=where,
        next_step="Compute the cache anew" if decision.answer else "Allow more time",
    )


class TrackSwitch:
    """Decides window by window; safe to share between the feeder and the workers."""

    def __init__(
        self,
        artifact: Artifact,
        decision: Decision,
        options: Sequence[Candidate],
        *,
        link: Link,
        rates: Rates,
        workers: int | None,
    ) -> None:
        chosen = artifact.track(decision.track)
        same = [item for item in options if item.quality == chosen.quality]
        self._artifact = artifact
        self._lock = threading.Lock()
        self._switcher = Switcher(same, link, rates, workers=workers)
        self._before = artifact.source.meter.traffic()
        self.reasons: tuple[str, ...] = decision.reasons

    def next(self, number: int) -> Track:
        """The track of the next window, after what was observed so far."""
        now = self._artifact.source.meter.traffic()
        with self._lock:
            came = now.since(self._before)
            if self._artifact.source.remote and came.free_bytes >= ENOUGH_BYTES:
                self._switcher.observe(came.free_bytes, came.free_s)
                self._before = now
            name = self._switcher.next(number)
        return self._artifact.track(name)

    def worked(self, wish: Wish, values: int, seconds: float) -> None:
        """A worker restored a segment."""
        group = wish.record.cell.group
        encoding = self._artifact.manifest.quality(wish.track.quality).encodings[group]
        name = rate_name(wish.track.codecs[group], exact=encoding == EXACT)
        with self._lock:
            self._switcher.observe_decode(name, values, seconds)

    def all_reasons(self) -> tuple[str, ...]:
        """Those of the first decision and of each change."""
        with self._lock:
            return (*self.reasons, *self._switcher.reasons[1:])


def windows(
    artifact: Artifact,
    switch: TrackSwitch,
    cells: Sequence[int],
    stored: Mapping[str, int],
    *,
    link: Link,
    fetch: Fetch,
) -> Iterator[Window]:
    """Windows of whole token blocks, each of the track that is best when its turn comes.

    ``stored`` are the bytes of all cells per track. Cells are in the order of use. ``fetch`` gets
    tables that are not in the prefix.
    """
    fields = artifact.grid.fields
    least = min(stored.values(), default=0)
    held_bytes = WINDOW_S * link.bytes_per_s if math.isfinite(link.bytes_per_s) else 0
    count = max(1, min(len(cells), int(least / max(WINDOW_BYTES, held_bytes))))
    size = math.ceil(len(cells) / count)
    start = number = 0
    while start < len(cells):
        stop = min(start + size, len(cells))
        while stop < len(cells) and (
            fields["token_start"][cells[stop]] == fields["token_start"][cells[stop - 1]]
        ):
            stop += 1
        track = switch.next(number)
        table = artifact.segment_table(track, fetch)
        yield [Wish(track, table[int(cell)]) for cell in cells[start:stop]]
        start, number = stop, number + 1


def as_auto(track: str | Auto | None) -> Auto | None:
    """``Auto`` where the caller asks for it."""
    if isinstance(track, Auto):
        return track
    if track is not None and not isinstance(track, str):
        raise UsageError(
            "usage.argument", "track is neither a name nor kvformat.Auto", found=ascii(track)[:60]
        )
    return Auto() if track == "auto" else None
