"""One tenant's KV of one model in a store: what an engine integration talks to."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvformat.artifact import Artifact
from kvformat.cache import Cache, RestoredGroup
from kvformat.errors import KvformatError, UsageError
from kvformat.expectations import token_array
from kvformat.identity import EXACT_LINEAGE, EngineKey, Lineage
from kvformat.reading import Order
from kvformat.store.backend import Hold
from kvformat.store.faults import BLAMED, DAMAGED, MissError, miss_of
from kvformat.store.layerwise import BlockStream
from kvformat.store.loading import Account, Loader, cut_hit
from kvformat.store.lookup import longest_prefix
from kvformat.store.names import ObjectName, key_digest
from kvformat.store.results import ExtentRef, Hit, LoadReport, Miss, Receipt
from kvformat.store.scope import Scope
from kvformat.store.storing import Putter
from kvformat.store.windows import load_all
from kvformat.tokens import BLOCK_TOKENS, ContentSpan, chain_hashes, checked_spans

if TYPE_CHECKING:
    from kvformat.store.store import Store

Buffers = NDArray[Any] | Mapping[str, NDArray[Any]]
FAULTS: Final = (KvformatError, OSError, MissError)
_log = logging.getLogger("kvformat.store")


class HeldHit:
    """A hit whose extents no eviction deletes until ``release`` (or the end of a ``with`` block).

    What is held where: ``backend``. It can be given wherever a ``Hit`` is wanted. A process that
    dies gives its holds back.
    """

    def __init__(self, hit: Hit, holds: Sequence[Hold] = ()) -> None:
        self.hit = hit
        self._holds = list(holds)

    @property
    def tokens(self) -> int:
        """Tokens of the stored prefix, 0 for a miss."""
        return self.hit.tokens

    @property
    def extents(self) -> tuple[ExtentRef, ...]:
        """The extents, in ascending order."""
        return self.hit.extents

    @property
    def miss(self) -> Miss | None:
        """Why it is not longer; None if nothing went wrong and the whole request is stored."""
        return self.hit.miss

    def __bool__(self) -> bool:
        return bool(self.hit)

    def release(self) -> None:
        """Let go. May be called twice."""
        while self._holds:
            self._holds.pop().release()

    def __enter__(self) -> HeldHit:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


@dataclass(frozen=True, slots=True)
class Loaded:
    """New arrays with a restored prefix, by group name, and the report.

    ``RestoredGroup.token_start`` is a *position* here: a window holds the last tokens of the
    prefix, a state one pseudo-token. Arrays end at position ``report.tokens``.
    """

    groups: dict[str, RestoredGroup]
    report: LoadReport


class View:
    """Lookups, loads and puts in one namespace. Safe to share between threads.

    Made by ``Store.view``. Storage faults never raise here; wrong arguments raise
    ``UsageError``.
    """

    def __init__(self, store: Store, scope: Scope) -> None:
        self._store = store
        self.scope = scope
        self._loader = Loader(store.backend, scope, store.options, store.metrics, store.profiles)
        self._putter = Putter(store, scope)

    def lookup(self, token_ids: ArrayLike, *, content: tuple[ContentSpan, ...] = ()) -> HeldHit:
        """The longest stored prefix of a request, held.

        ``token_ids`` are those of the request from position 0 on; only whole blocks of 256 count.
        At most ``lookup.probe_limit`` questions to the storage, no listing.
        """
        return self.hold(self.probe(token_ids, content=content))

    def probe(self, token_ids: ArrayLike, *, content: tuple[ContentSpan, ...] = ()) -> Hit:
        """``lookup`` without holding: for a scheduler that plans while another process loads.

        A ``Hit`` can be pickled and given to ``load_into`` of the same view elsewhere.
        """
        started = time.monotonic()
        hashes = self.hashes(token_ids, content=content)
        hit = self._search(hashes, started)
        metrics = self._store.metrics
        metrics.count("lookups", "hit" if hit else (hit.miss or Miss.ABSENT).value)
        metrics.count("lookup_tokens", "asked", by=len(hashes) * BLOCK_TOKENS)
        metrics.count("lookup_tokens", "found", by=hit.tokens)
        metrics.observe("lookup_seconds", time.monotonic() - started)
        metrics.observe("lookup_probes", hit.probes)
        if hit.miss is not None:
            metrics.count("misses", hit.miss.value)
        return hit

    def hashes(
        self, token_ids: ArrayLike, *, content: tuple[ContentSpan, ...] = ()
    ) -> tuple[str, ...]:
        """h(1), h(2), ... of the whole blocks of a request (spec 6.2)."""
        ids = token_array(token_ids)
        whole = len(ids) // BLOCK_TOKENS * BLOCK_TOKENS
        spans = checked_spans(content)
        return chain_hashes(self.scope.identity, ids[:whole], self.scope.salt, content=spans)

    def _search(self, hashes: tuple[str, ...], started: float) -> Hit:
        probes = 0
        limit_s = self._store.options.lookup_deadline_s

        def present(end: int) -> bool:
            nonlocal probes
            if limit_s is not None and time.monotonic() - started > limit_s:
                raise MissError(Miss.SLOW, "the time for this lookup is over")
            probes += 1
            return self._store.backend.present(self.scope.name(hashes, end))

        refused = self._store.refuses()
        if refused is not None:
            return Hit((), hashes, 0, refused)
        try:
            found = longest_prefix(len(hashes), self.scope.grid, present)
        except FAULTS as error:
            return Hit((), hashes, probes, self._blame(error, "a lookup failed"))
        self._store.breaker.succeeded()
        miss = None if found == len(hashes) else Miss.ABSENT
        return Hit(self.scope.cells(hashes, found), hashes, probes, miss)

    def _blame(self, error: BaseException, text: str) -> Miss:
        """Log a fault of the storage and tell the breaker."""
        miss = miss_of(error)
        self._store.told(miss)
        _log.warning("%s (%s): %s", text, miss.value, error)
        return miss

    def hold(self, hit: Hit) -> HeldHit:
        """Hold what a ``probe`` found, as far as it is still there; the rest is cut off."""
        holds: list[Hold] = []
        for number, cell in enumerate(hit.extents):
            found: Sequence[Hold] = ()
            try:
                found = self._store.backend.hold(self.scope.names_in_cell(hit.hashes, cell.end))
            except FAULTS as error:
                self._blame(error, "an extent cannot be held")
            if not found:
                self._store.metrics.count("misses", Miss.EVICTED.value)
                cut = cut_hit(hit, number)
                return HeldHit(Hit(cut.extents, hit.hashes, hit.probes, Miss.EVICTED), holds)
            holds += found
        return HeldHit(hit, holds)

    def load_into(
        self,
        hit: Hit | HeldHit,
        buffers: Buffers,
        *,
        tokens: tuple[int, int] | None = None,
        layers: Sequence[int] | None = None,
        heads: tuple[int, int] | None = None,
    ) -> LoadReport:
        """Restore positions ``tokens`` of a hit, by default [0, hit.tokens), into memory.

        ``buffers`` is ``[2, L, T, H, D]`` or a mapping of group names to ``[L, T, H, D]``, where
        index 0 of the token axis is position ``tokens[0]``; strides are free but for the last
        axis. ``layers`` and ``heads`` are global numbers. For windows and states use ``load``.
        """
        hit = hit.hit if isinstance(hit, HeldHit) else hit
        begin, end = (0, hit.tokens) if tokens is None else tokens
        if not 0 <= begin <= end <= hit.tokens:
            raise UsageError(
                "usage.argument", "the hit does not hold these tokens",
                expected=f"inside [0, {hit.tokens})", found=f"[{begin}, {end})",
            )  # fmt: skip
        place = _placer(buffers, begin, end)
        if self._store.refuses() is not None or begin == end:
            return Account(tokens=begin).report(end)
        self._mark(hit)
        selection = {"layers": None if layers is None else list(layers), "heads": heads}
        account = self._loader.load_into(hit, place, (begin, end), selection)
        self._after(account)
        return account.report(end)

    def load(self, hit: Hit | HeldHit) -> Loaded:
        """Restore the whole hit into new arrays; windows and states of its end included."""
        hit = hit.hit if isinstance(hit, HeldHit) else hit
        if self._store.refuses() is not None or not hit:
            return Loaded({}, Account().report(hit.tokens))
        self._mark(hit)
        groups, account = load_all(self._loader, hit)
        self._after(account)
        return Loaded(groups, account.report(hit.tokens))

    def _mark(self, hit: Hit) -> None:
        """Before reading: the system then has no reason to set times in an order of its own."""
        if hit and self._store.backend.dense:
            ends = range(1, hit.extents[-1].end + 1)
            self._store.backend.mark([self.scope.name(hit.hashes, end) for end in ends])

    def _after(self, account: Account) -> None:
        """Tell breaker, eviction and the converter what a load was like."""
        if not self._store.backend.dense:
            self._store.backend.mark(account.names)
        self._store.loaded(account.names)
        for fault in account.faults:
            self._store.told(fault.miss)
            if fault.miss in DAMAGED:
                self._store.damaged(fault.extent.name)
        if not any(fault.miss in BLAMED for fault in account.faults):
            self._store.breaker.succeeded()

    def blocks(
        self,
        hit: Hit | HeldHit,
        *,
        tokens: tuple[int, int] | None = None,
        layers: Sequence[int] | None = None,
        heads: tuple[int, int] | None = None,
        order: Order = "token-major",
    ) -> BlockStream:
        """Restored blocks while later ones download, for engines that start layer by layer.

        ``layers`` and ``heads`` are global numbers. With ``layer-major`` all extents give the
        lowest layers first. Iteration ends at the first fault of an extent; ``report`` of the
        stream then says how many tokens are good.
        """
        hit = hit.hit if isinstance(hit, HeldHit) else hit
        begin, end = (0, hit.tokens) if tokens is None else tokens
        usable = hit if self._store.refuses() is None else cut_hit(hit, 0)
        self._mark(usable)
        return BlockStream(
            self._loader,
            usable,
            (begin, end),
            layers=layers,
            heads=heads,
            order=order,
            after=self._after,
        )

    @contextlib.contextmanager
    def opened(
        self, hit: Hit | HeldHit, cell: ExtentRef
    ) -> Iterator[tuple[tuple[ExtentRef, Artifact], ...]]:
        """The objects of a cell of a hit, in ascending order, up to the first fault.

        Identity and chain are compared with the hit's. Each comes with the blocks that it is to
        serve; the artifact may hold more.
        """
        account = Account()
        hashes = hit.hit.hashes if isinstance(hit, HeldHit) else hit.hashes
        with contextlib.closing(self._loader.open_cell(cell, hashes)) as found:
            if found.error is not None:
                self._loader.fault(account, cell, found.error)
            yield tuple((item.extent, item.artifact) for item in found.pieces)
        account.names += [item.extent.name for item in found.pieces]
        self._after(account)

    def put(
        self,
        cache: Cache | NDArray[Any] | Mapping[str, NDArray[Any]],
        token_ids: ArrayLike,
        *,
        first_position: int = 0,
        content: tuple[ContentSpan, ...] = (),
        lineage: Lineage = EXACT_LINEAGE,
    ) -> Receipt:
        """Store the KV of a request: copied to shared memory now, encoded and published later.

        ``cache`` is what ``kvformat.write`` takes, for positions [``first_position``,
        ``first_position`` + T) of ``token_ids``. Only what is behind the stored part is copied,
        in whole blocks: give the tensors behind a hit, with its ``tokens`` as
        ``first_position``. ``lineage`` is that of the tensors: after a load from a lossy store,
        ``LoadReport.lineage``. After a fault, give the tensors from the start of its cell on
        (``hit.extents[i].tokens[0]``): what was damaged is then replaced.

        With windows or states in the cache, an extent can end only where they are known: at T,
        and, if the view knows ``window_tokens``, where the cache holds enough. An engine with such
        layers should put at the ends of cells (chunked prefill).
        """
        hashes = self.hashes(token_ids, content=content)
        ids = token_array(token_ids)
        return self._putter.put(
            cache, ids, hashes, first=first_position, content=content, lineage=lineage
        )

    def contains_key(self, key: EngineKey) -> bool:
        """Whether something is filed under an engine's own key; one probe."""
        if self._store.refuses() is not None:
            return False
        try:
            found = self._store.backend.present(self.key_name(key))
        except FAULTS as error:
            self._store.metrics.count("misses", self._blame(error, "a lookup failed").value)
            return False
        self._store.breaker.succeeded()
        return found

    def key_name(self, key: EngineKey) -> ObjectName:
        """The object of an engine's key."""
        return ObjectName(self.scope.namespace, key_digest(key, self.scope.salt))

    def hold_key(self, key: EngineKey) -> Hold | None:
        """Keep it from being deleted until ``release``; None if it is not there."""
        try:
            return next(iter(self._store.backend.hold([self.key_name(key)])), None)
        except FAULTS as error:
            self._blame(error, "an object cannot be held")
            return None

    def load_key(self, key: EngineKey, buffers: Buffers) -> LoadReport:
        """Restore all of what is filed under ``key``; tokens are not verified (spec 6.3)."""
        account = Account()
        extent = ExtentRef(self.key_name(key), 0, 0)
        if self._store.refuses() is not None:
            return account.report(0)
        asked = 0
        try:
            opened = self._loader.open_key(extent)
            with opened.artifact:
                asked = opened.artifact.manifest.tokens.count
                started = time.monotonic()
                report = opened.artifact.read_into(buffers, track=opened.track.name)
                account.add(opened.artifact, opened.track, report)
                account.tokens = asked
                self._loader.succeeded(
                    opened, asked, report.traffic.received_bytes, time.monotonic() - started
                )
        except Exception as error:
            miss = self._loader.fault(account, extent, error)
            asked = max(asked, 1)
            self._store.told(miss)
            if miss in DAMAGED:
                self._store.damaged(extent.name)
        else:
            self._store.backend.mark([extent.name])
            self._store.loaded([extent.name])
            self._store.breaker.succeeded()
        return account.report(asked)

    def put_key(
        self,
        key: EngineKey,
        cache: Cache | NDArray[Any] | Mapping[str, NDArray[Any]],
        *,
        lineage: Lineage = EXACT_LINEAGE,
    ) -> Receipt:
        """Store under an engine's own key. The view's identity must be of kind ``engine_key``."""
        return self._putter.put_key(key, self.key_name(key), cache, lineage)

    def remove_key(self, key: EngineKey) -> bool:
        """Delete it unless a reader holds it; whether it is gone."""
        try:
            return self._store.backend.remove_name(self.key_name(key))
        except FAULTS as error:
            self._blame(error, "an object cannot be deleted")
            return False


def _placer(buffers: Buffers, begin: int, end: int) -> Any:
    """Buffers of positions [start, stop), given those of [begin, end)."""
    axis = 1 if isinstance(buffers, Mapping) else 2
    arrays = list(buffers.values()) if isinstance(buffers, Mapping) else [buffers]
    for array in arrays:
        if (
            not isinstance(array, np.ndarray)
            or array.ndim != axis + 3
            or (array.shape[axis] < end - begin)
        ):
            raise UsageError(
                "usage.argument",
                "a buffer does not hold the tokens asked for",
                expected=f"an array with at least {end - begin} on token axis {axis}",
                found=list(getattr(array, "shape", ())) or type(array).__name__,
            )

    def place(start: int, stop: int) -> Buffers:
        rows = slice(start - begin, stop - begin)
        if isinstance(buffers, Mapping):
            return {name: array[:, rows] for name, array in buffers.items()}
        return buffers[:, :, rows]

    return place
