"""The request-path half of ``put``: decide what to write, copy it, queue it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvformat.cache import Cache
from kvformat.errors import KvformatError, UsageError
from kvformat.identity import EngineKey, Lineage
from kvformat.planning import parse_tracks, plan_tracks
from kvformat.store.cutting import cut
from kvformat.store.faults import miss_of
from kvformat.store.handover import SharedMemory, copy_cache, plan
from kvformat.store.jobs import EncodeJob, Target
from kvformat.store.lookup import longest_prefix
from kvformat.store.names import ObjectName
from kvformat.store.results import ExtentRef, Receipt, Refusal
from kvformat.store.scope import Scope
from kvformat.tokens import BLOCK_TOKENS, ContentSpan
from kvformat.tracks import EXACT
from kvformat.writer import as_cache

if TYPE_CHECKING:
    from kvformat.store.store import Store

Input = Cache | NDArray[Any] | Mapping[str, NDArray[Any]]
_log = logging.getLogger("kvformat.store")


class Putter:
    """Puts of one scope. Safe to share between threads."""

    def __init__(self, store: Store, scope: Scope) -> None:
        self._store, self._scope = store, scope

    def put(
        self,
        cache: Input,
        ids: NDArray[np.uint32],
        hashes: Sequence[str],
        *,
        first: int,
        content: tuple[ContentSpan, ...],
        lineage: Lineage,
    ) -> Receipt:
        """As ``View.put``; ``hashes`` are those of the request's whole blocks."""
        source = as_cache(cache, first)
        if first < 0 or first + source.token_count > len(ids):
            raise UsageError(
                "usage.argument", "the token ids do not reach the end of the cache",
                expected=f"{first + source.token_count} ids, from position 0 on", found=len(ids),
            )  # fmt: skip
        return self._timed(
            lambda: self._put(source, ids, hashes, first, content=content, lineage=lineage)
        )

    def put_key(self, key: EngineKey, name: ObjectName, cache: Input, lineage: Lineage) -> Receipt:
        """As ``View.put_key``."""
        if self._scope.identity.kind != "engine_key":
            raise UsageError(
                "usage.argument", "this view's identity is not of kind engine_key",
                found=self._scope.identity.kind,
            )  # fmt: skip
        source = as_cache(cache)
        return self._timed(lambda: self._put_key(key, name, source, lineage))

    def _timed(self, work: Callable[[], Receipt]) -> Receipt:
        started = time.monotonic()
        try:
            receipt = work()
        except Exception as error:
            miss = miss_of(error)
            self._store.told(miss)
            refusal = Refusal.STORAGE if isinstance(error, (KvformatError, OSError)) else None
            if refusal is None:
                _log.exception("a put failed")
            else:
                _log.warning("a put failed: %s", error)
            receipt = Receipt((), ((None, refusal or Refusal.INTERNAL),))
        for _, refusal in receipt.refused:
            self._store.metrics.count("refusals", refusal.value)
        self._store.metrics.observe("put_seconds", time.monotonic() - started)
        return receipt

    def _barred(self, lineage: Lineage) -> Refusal | None:
        if self._store.refuses() is not None:
            return Refusal.CLOSED if self._store.closed else Refusal.BREAKER
        if lineage.generations and not self._scope.namespace.mixed:
            return Refusal.LINEAGE
        return None

    def _put(
        self,
        source: Cache,
        ids: NDArray[np.uint32],
        hashes: Sequence[str],
        first: int,
        *,
        content: tuple[ContentSpan, ...],
        lineage: Lineage,
    ) -> Receipt:
        barred = self._barred(lineage)
        if barred is not None:
            return Receipt((), ((None, barred),))
        stop = min(first + source.token_count, len(hashes) * BLOCK_TOKENS)
        targets, refused = self._targets(source, hashes, first, stop // BLOCK_TOKENS)
        if not targets:
            return Receipt((), tuple(refused))
        begin = targets[0].extent.tokens[0]
        end = targets[-1].extent.tokens[1]
        part: Cache | None = source
        if any(item.group.tokens.kind != "all" for item in source.groups):
            begin, end = first, first + source.token_count  # windows are of the whole cache
        else:
            part = cut(source, first, begin, end)
        if part is None:
            return Receipt((), (*refused, (None, Refusal.WINDOW)))
        job = EncodeJob(
            plan(part),
            self._scope,
            self._track(part),
            tuple(targets),
            np.ascontiguousarray(ids[:end], "<u4").tobytes(),
            tuple(hashes[: end // BLOCK_TOKENS]),
            begin,
            content,
            lineage,
        )
        return self._submit(job, part, refused)

    def _targets(
        self, source: Cache, hashes: Sequence[str], first: int, blocks: int
    ) -> tuple[list[Target], list[tuple[ExtentRef | None, Refusal]]]:
        """The extents to write, in ascending order: what is behind the stored part."""
        scope, queue = self._scope, self._store.queue

        def present(end: int) -> bool:
            name = scope.name(hashes, end)
            return queue.pending(name.path) or self._store.backend.present(name)

        stored = longest_prefix(blocks, scope.grid, present)
        targets = self._repairs(hashes, first, stored)
        refused: list[tuple[ExtentRef | None, Refusal]] = []
        start = stored
        if start * BLOCK_TOKENS < first and start < blocks:
            return targets, [(None, Refusal.NO_PARENT)]
        while start < blocks:
            end = scope.grid.next_end(start, blocks)
            if end == start:
                break
            extent = ExtentRef(scope.name(hashes, end), start, end)
            if cut(source, first, *extent.tokens, scope.window_tokens) is None:
                refused.append((extent, Refusal.WINDOW))
                break
            targets.append(Target(extent))
            start = end
        if not targets and not refused:
            refused.append((None, Refusal.PRESENT if stored == blocks > 0 else Refusal.SHORT))
        return targets, refused

    def _repairs(self, hashes: Sequence[str], first: int, stored: int) -> list[Target]:
        """Cells of the stored part in which a reader found damage, where their tensors are here."""
        if not self._store.knows_damage():
            return []
        found = []
        for cell in self._scope.cells(hashes, stored) if stored else ():
            bad = [
                name
                for name in self._scope.names_in_cell(hashes, cell.end)
                if self._store.is_damaged(name)
            ]
            if bad and cell.tokens[0] >= first:
                found.append(Target(cell, bad[-1]))
        return found

    def _track(self, cache: Cache) -> str:
        """The track to write; caches with nothing to quantise are exact."""
        quality = self._scope.quality
        codec = self._store.options.codec
        if quality == EXACT and codec == "hevc":
            codec = "zstd"
        plans = parse_tracks([f"{quality}/{codec}"])
        return plan_tracks(plans, [item.group for item in cache.groups])[0].name

    def _put_key(
        self, key: EngineKey, name: ObjectName, source: Cache, lineage: Lineage
    ) -> Receipt:
        barred = self._barred(lineage)
        extent = ExtentRef(name, 0, 0)
        damaged = self._store.is_damaged(name)
        there = self._store.queue.pending(name.path) or self._store.backend.present(name)
        if barred is None and there and not damaged:
            barred = Refusal.PRESENT
        if barred is not None:
            return Receipt((), ((extent, barred),))
        job = EncodeJob(
            plan(source),
            replace(self._scope, identity=replace(self._scope.identity, engine_key=key)),
            self._track(source),
            (Target(extent, name if damaged else None),),
            None,
            lineage=lineage,
        )
        return self._submit(job, source, [])

    def _submit(
        self, job: EncodeJob, part: Cache, refused: list[tuple[ExtentRef | None, Refusal]]
    ) -> Receipt:
        """Copy and queue, or say why not."""
        queue = self._store.queue
        extents = [item.extent for item in job.targets]
        refusal = queue.reserve(job.spec.size_bytes)
        if refusal is None:
            memory: SharedMemory | None = None
            try:
                memory = SharedMemory.make(job.spec.size_bytes)
                copy_cache(part, job.spec, memory)
            except BaseException:
                queue.cancel(job.spec.size_bytes)
                if memory is not None:
                    memory.close()
                raise
            refusal = None if queue.submit(job, memory) else Refusal.CLOSED
        if refusal is not None:
            return Receipt((), (*refused, *((item, refusal) for item in extents)))
        for target in job.targets:
            if target.suspect is not None:
                self._store.repaired(target.suspect)
        return Receipt(tuple(extents), tuple(refused))
