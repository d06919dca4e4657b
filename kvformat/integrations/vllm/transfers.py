"""Loads and saves of a worker, in threads beside the engine's own.

A load writes restored blocks into the engine's cache as they arrive, each under the job's lock.
``abandon`` takes the same lock, so that nothing is written after it: the blocks may then be given
to somebody else. What was not restored and verified is reported as failed, and the engine computes
it anew. Nothing is raised into the engine.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvformat.cache import Cache
from kvformat.dtypes import name_of
from kvformat.identity import EXACT_LINEAGE, Lineage
from kvformat.integrations.torch_arrays import as_array, as_tensor
from kvformat.integrations.vllm.layout import Layout
from kvformat.integrations.vllm.orders import LoadOrder, PartHit, SaveOrder
from kvformat.integrations.vllm.topology import Part
from kvformat.integrations.vllm.views import Views
from kvformat.store import PlacedBlock
from kvformat.tokens import BLOCK_TOKENS

SAVE_TOKENS: Final = 4096
Ordered = Callable[[], AbstractContextManager[None]]
"""Makes the context in which copies to and from the engine's device run."""
_log = logging.getLogger("kvformat.vllm")


@dataclass(frozen=True)
class Paged:
    """A worker's part of the model in the engine's paged cache; ``caches`` by layer number."""

    part: Part
    caches: Mapping[int, torch.Tensor]
    layout: Layout
    block_tokens: int


@dataclass
class LoadJob:
    """One load and how far it is. ``good_end`` is final once ``done``."""

    order: LoadOrder
    good_end: int
    lineage: Lineage = EXACT_LINEAGE
    started: float = field(default_factory=time.monotonic)
    done: bool = False
    reported: bool = False
    ready_layers: int = 0
    abandoned: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def age_s(self) -> float:
        """Seconds since it was ordered."""
        return time.monotonic() - self.started

    def abandon(self) -> None:
        """Write nothing any more; all of it counts as failed."""
        with self.changed:
            if not self.done:
                self.abandoned = self.done = True
                self.good_end = self.order.begin
                self.changed.notify_all()

    def wait(self, layer: int | None, timeout_s: float) -> bool:
        """Until ``layer`` is there, or everything; False after the time."""
        with self.changed:
            return self.changed.wait_for(
                lambda: self.done or (layer is not None and layer < self.ready_layers), timeout_s
            )

    def bad_blocks(self, block_tokens: int) -> tuple[int, ...]:
        """Blocks of the engine that must be computed anew."""
        good = max(self.good_end - self.order.begin, 0) // block_tokens
        return self.order.block_ids[good:]


class Loads:
    """Fills blocks of the engine's cache from the store."""

    def __init__(self, views: Views, paged: Paged) -> None:
        self._views, self._paged = views, paged

    def run(self, job: LoadJob, ordered: Ordered) -> None:
        """The whole load, in a thread."""
        good = job.order.begin
        try:
            with ordered():
                good = self._all_parts(job)
        except Exception:
            _log.exception("a load failed; its tokens are computed anew")
        with job.changed:
            if not job.abandoned:
                job.good_end = max(good, job.order.begin)
                job.done = True
            job.changed.notify_all()

    def _all_parts(self, job: LoadJob) -> int:
        """The position up to which all parts are good."""
        mine = [
            (item, common)
            for item in job.order.parts
            if (common := item.part.common(self._paged.part)) is not None
        ]
        good = job.order.end if mine else job.order.begin
        for item, common in mine:
            if job.abandoned or good <= job.order.begin:
                break
            good = min(good, self._part(job, item, common, alone=len(mine) == 1))
        return good

    def _part(self, job: LoadJob, item: PartHit, common: Part, *, alone: bool) -> int:
        """Load what ``common`` has of ``item``; the position up to which it is good."""
        order = job.order
        view = self._views.get(order.tenant, item.part)
        with view.hold(item.hit) as held:
            end = min(order.end, held.tokens)
            if end <= order.begin:
                return order.begin
            stream = view.blocks(
                held,
                tokens=(order.begin, end),
                layers=range(*common.layers),
                heads=common.heads,
                order="layer-major" if order.layerwise else "token-major",
            )
            with stream:
                for placed in stream:
                    lowest = min(placed.block.layers)
                    with job.changed:
                        if job.abandoned:
                            return order.begin
                        if alone and lowest > job.ready_layers:
                            # In layer-major order nothing below this block is to come.
                            job.ready_layers = lowest
                            job.changed.notify_all()
                        self._place(order, placed, common)
            report = stream.report
            if report.lineage.generations > job.lineage.generations:
                job.lineage = report.lineage
            return int(report.tokens)

    def _place(self, order: LoadOrder, placed: PlacedBlock, common: Part) -> None:
        block, paged = placed.block, self._paged
        first = max(block.head_start, common.heads[0])
        stop = min(block.head_start + block.array.shape[2], common.heads[1])
        if first >= stop:
            return
        begin, count = placed.position - order.begin, block.array.shape[1]
        if begin % paged.block_tokens or count % paged.block_tokens:
            raise ValueError("a segment does not end at a block of the engine")
        numbers = order.block_ids[
            begin // paged.block_tokens : (begin + count) // paged.block_tokens
        ]
        own = paged.part.heads[0]
        part = block.array[:, :, first - block.head_start : stop - block.head_start]
        for index, layer in enumerate(block.layers):
            if common.layers[0] <= layer < common.layers[1]:
                rows = as_tensor(part[index], name_of(block.array.dtype))
                paged.layout.write(
                    paged.caches[layer], block.group.role, numbers, rows, (first - own, stop - own)
                )


class Saves:
    """Copies finished prompts out of the engine's cache and gives them to the store."""

    def __init__(self, views: Views, paged: Paged, counts: Counter[str]) -> None:
        self._views, self._paged, self._counts = views, paged, counts
        self.lossy_seen = EXACT_LINEAGE

    def run(self, order: SaveOrder, job: LoadJob | None, ordered: Ordered) -> None:
        """Store what is not stored yet, in a thread; ``job`` is the load of the same request."""
        try:
            with ordered():
                self._save(order, job)
        except Exception:
            self._counts["saves that failed"] += 1
            _log.exception("a prompt could not be saved")

    def _save(self, order: SaveOrder, job: LoadJob | None) -> None:
        lineage = EXACT_LINEAGE
        if job is not None:
            lineage = job.lineage
        if order.lossy and not lineage.generations:
            lineage = self.lossy_seen
            if not lineage.generations:
                self._counts["prompts not saved: lineage is not known"] += 1
                return
        view = self._views.get(order.tenant, self._paged.part)
        cell = view.scope.grid.cell_blocks * BLOCK_TOKENS
        begin = order.stored
        if job is not None and job.good_end < job.order.end:
            begin = min(begin, job.good_end) // cell * cell  # what was bad is replaced
        ids = np.asarray(order.token_ids, np.uint32)
        for first, stop in _spans(begin, len(ids), max(SAVE_TOKENS, cell)):
            cache = Cache.from_tensors(
                dict(self._tensors(order, first, stop)),
                token_count=stop - first,
                first_position=first,
                head_start=self._paged.part.heads[0],
                heads_total=self._paged.part.heads_total,
            )
            receipt = view.put(cache, ids[:stop], first_position=first, lineage=lineage)
            self._counts["tokens given to the store"] += receipt.tokens
            for _, refusal in receipt.refused:
                self._counts[f"extents not stored: {refusal.value}"] += 1

    def _tensors(
        self, order: SaveOrder, first: int, stop: int
    ) -> Iterator[tuple[str, NDArray[Any]]]:
        paged = self._paged
        numbers = order.block_ids[first // paged.block_tokens : stop // paged.block_tokens]
        for layer, cache in paged.caches.items():
            for role in paged.layout.places:
                rows = paged.layout.read(cache, role, numbers)
                yield f"layers.{layer}.{role}", as_array(rows)


def _spans(begin: int, end: int, step: int) -> Iterator[tuple[int, int]]:
    """[begin, end) in pieces that end at multiples of ``step``."""
    while begin < end:
        stop = min((begin // step + 1) * step, end)
        yield begin, stop
        begin = stop
