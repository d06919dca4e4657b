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
        if any(item.group.tokens.kind != "all" for item in source.groups):
            begin, end = first, first + source.token_count  # windows are of the whole cache
            part: Cache | None = source
        else:
            part = cut(source, first, begin, end)
        if part is None:
            return Receipt((), (*refused, (None, Refusal.WINDOW)))
        job = EncodeJob(
            plan(part),
            self._scope.identity,
            self._scope.salt,
            self._track(part),
            tuple(targets),
            np.ascontiguousarray(ids[:end], "<u4").tobytes(),
            begin,
            content,
            lineage,
            self._scope.window_tokens,
        )
        return self._submit(job, part, refused)

    def _targets(
        self, source: Cache, hashes: Sequence[str], first: int, blocks: int
    ) -> tuple[list[Target], list[tuple[ExtentRef | None, Refusal]]]:
        """The extents that are worth writing, in ascending order."""
        grid, queue = self._scope.grid, self._store.queue

        def present(end: int) -> bool:
            name = self._scope.name(hashes, end)
            return queue.pending(name.path) or self._store.backend.present(name)

        stored = longest_prefix(blocks, grid, present)
        size = grid.cell_blocks
        start = stored // size * size
        targets: list[Target] = []
        refused: list[tuple[ExtentRef | None, Refusal]] = []
        if start * BLOCK_TOKENS < first:
            # The tensors before ``first`` are not here: begin with the next cell, if its parent is.
            start = -(-first // (size * BLOCK_TOKENS)) * size
            if start > stored:
                reason = Refusal.NO_PARENT if start < blocks else Refusal.SHORT
                return [], [(None, reason)]
        while start < blocks:
            end = grid.longest_end(start, blocks)
            there = max(stored, start)
            name = self._scope.name(hashes, end)
            extent = ExtentRef(name, start, end)
            replaces = self._store.is_damaged(name)
            if end <= there and not replaces:
                refused.append((extent, Refusal.PRESENT))
            elif not grid.worth_writing(start, end, there) and not replaces:
                refused.append((extent, Refusal.SHORT))
            elif cut(source, first, *extent.tokens, self._scope.window_tokens) is None:
                refused.append((extent, Refusal.WINDOW))
                break
            else:
                fresh = (end - min(there, end)) * BLOCK_TOKENS
                targets.append(self._target(hashes, extent, fresh, replace=replaces))
            start += size
        targets = self._heal(hashes, first, stored) + targets
        if not targets and not refused:
            refused.append((None, Refusal.PRESENT if stored else Refusal.SHORT))
        return targets, refused

    def _heal(self, hashes: Sequence[str], first: int, stored: int) -> list[Target]:
        """Damaged extents in the stored part of which the tensors are at hand again."""
        size = self._scope.grid.cell_blocks
        whole = self._scope.extents(hashes, stored // size * size) if stored >= size else ()
        return [
            self._target(hashes, item, 0, replace=True)
            for item in whole
            if item.tokens[0] >= first and self._store.is_damaged(item.name)
        ]

    def _target(
        self, hashes: Sequence[str], extent: ExtentRef, fresh: int, *, replace: bool
    ) -> Target:
        scope = self._scope
        first = extent.start + 1 if scope.grid.dense else extent.end
        names = tuple(scope.name(hashes, end) for end in range(first, extent.end + 1))
        ends = scope.grid.ends(extent.start) if extent.start else ()
        ancestors = tuple(scope.name(hashes, end) for end in ends)
        return Target(extent, names, ancestors, fresh, replace)

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
        if (
            barred is None
            and not self._store.is_damaged(name)
            and (self._store.queue.pending(name.path) or self._store.backend.present(name))
        ):
            barred = Refusal.PRESENT
        if barred is not None:
            return Receipt((), ((extent, barred),))
        target = Target(extent, (name,), (), 0, self._store.is_damaged(name))
        job = EncodeJob(
            plan(source),
            replace(self._scope.identity, engine_key=key),
            self._scope.salt,
            self._track(source),
            (target,),
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
            if target.replace:
                self._store.repaired(target.names[-1])
        return Receipt(tuple(extents), tuple(refused))
