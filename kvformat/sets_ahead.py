"""Quantisation sets for a read: fetched beside the segments, waited for only where needed."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kvformat.choosing import LINKS
from kvformat.errors import InvalidError
from kvformat.extents import plan_extents
from kvformat.fetching import Window, Wish
from kvformat.storage import Beside, Data, Piece, Transfer
from kvformat.tables import NO_SET

if TYPE_CHECKING:
    from kvformat.artifact import Artifact

Key = tuple[str, int]


class Batch:
    """Sets that one request fetches, in the order in which they come."""

    def __init__(self, keys: list[Key], pieces: list[Piece]) -> None:
        self.keys = deque(keys)
        self.pieces = pieces
        self.transfer: Transfer | None = None

    @property
    def size_bytes(self) -> int:
        """All of them."""
        return sum(piece.size_bytes for piece in self.pieces)


class SetsAhead:
    """What ``Fetcher`` asks before it hands a segment over.

    ``damaged`` holds the sets that failed their checks, by quality and index. All calls but
    ``close`` come from the feeder's thread.
    """

    def __init__(self, artifact: Artifact, beside: Beside) -> None:
        self._artifact = artifact
        self._beside = beside
        self._waiting: dict[Key, Batch] = {}
        self._deferred: list[Batch] = []
        self.damaged: dict[Key, InvalidError] = {}

    def begin(self, window: Window) -> None:
        """Plan the requests for a window's sets.

        They go out at once where the first segment needs one, or where the link is idle for
        longer than they take. Elsewhere they would only delay the first segment, and follow it.
        """
        keys = {key for wish in window if (key := key_of(wish)) is not None}
        batches = self._plan([key for key in keys if self._missing(key)])
        if not batches:
            return
        link = LINKS.of(self._artifact.source)
        wire_s = sum(batch.size_bytes for batch in batches) / link.bytes_per_s
        if wire_s <= link.round_trip_s or key_of(window[0]) in self._waiting:
            self._start(batches)
        else:
            self._deferred.extend(batches)

    def ready(self, wish: Wish) -> None:
        """Have the set of ``wish``; raises ``StorageError``. Damage is kept for the worker."""
        self._start(self._deferred)
        self._deferred = []
        key = key_of(wish)
        if key is None or not self._missing(key):
            return
        if key not in self._waiting:
            piece = self._piece(key)
            data = self._artifact.front.prefix[piece.offset : piece.stop]
            self._keep(key, data, again=self._artifact.source.remote)
        while key in self._waiting:
            self._take(self._waiting[key])

    def close(self) -> None:
        """Stop: sets that came another way may have left a request unread."""
        self._beside.close()

    def _missing(self, key: Key) -> bool:
        return key not in self.damaged and not self._artifact.has_set(*key)

    def _piece(self, key: Key) -> Piece:
        record = self._artifact.set_table(key[0])[key[1]]
        return Piece(self._artifact.front.data_start + record.offset, record.size_bytes)

    def _plan(self, keys: list[Key]) -> list[Batch]:
        """Requests for those outside the prefix that no request is out for."""
        end = len(self._artifact.front.prefix)
        places = {key: self._piece(key) for key in keys if key not in self._waiting}
        far = sorted((piece.offset, key) for key, piece in places.items() if piece.stop > end)
        batches = []
        at = 0
        alignment = self._artifact.manifest.segmentation.alignment
        for extent in plan_extents([places[key] for _, key in far], alignment=alignment):
            batch = Batch([key for _, key in far[at : at + len(extent)]], extent)
            at += len(extent)
            batches.append(batch)
            self._waiting.update(dict.fromkeys(batch.keys, batch))
        return batches

    def _start(self, batches: list[Batch]) -> None:
        for batch in batches:
            batch.transfer = self._beside.start(batch.pieces)

    def _take(self, batch: Batch) -> None:
        """Receive the next set of a request."""
        assert batch.transfer is not None  # noqa: S101 - for the type checker; ready started it
        data = batch.transfer.take()
        key = batch.keys.popleft()
        del self._waiting[key]
        if not batch.keys:
            self._beside.end(batch.transfer)
        self._keep(key, data, again=self._artifact.source.remote)

    def _keep(self, key: Key, data: Data, *, again: bool) -> None:
        """Check a set; with ``again`` the storage is asked once more for a damaged one."""
        try:
            self._artifact.quantisation_set(*key, bytes(data))
        except InvalidError as error:
            if again and error.code == "set.digest":
                self._artifact.source.meter.retry()
                (data,) = self._beside.fetch([self._piece(key)])
                self._keep(key, data, again=False)
            else:
                self.damaged[key] = error


def key_of(wish: Wish) -> Key | None:
    """Quality and index of the set that a segment needs, None if it needs none."""
    if wish.record.set_index == NO_SET:
        return None
    return wish.track.quality, wish.record.set_index
