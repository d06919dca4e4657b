"""The scheduler's half of the connector: which prefix to load, when to save. Needs no vLLM.

A request is looked up once, in a thread: an answer that takes longer than ``PATIENCE_S`` is asked
for again in a later step, so that a slow store holds up nobody else. What was found is loaded at
most once per request: after a load that failed the engine asks again, and must not be told the
same. Requests whose KV depends on more than token ids (images, embeddings) are left alone.

KV that is computed on top of restored lossy KV is lossy too, also when it is found in the
engine's own prefix cache later. ``LossyPrefixes`` remembers where.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Any, Final

from kvformat.integrations.vllm.identity import Tenant, adapter_of
from kvformat.integrations.vllm.orders import LoadOrder, Orders, PartHit, SaveOrder
from kvformat.integrations.vllm.topology import Model, Topology
from kvformat.integrations.vllm.views import Views
from kvformat.tokens import BLOCK_TOKENS

PATIENCE_S: Final = 0.005
MOST_PREFIXES: Final = 1_000_000
_log = logging.getLogger("kvformat.vllm")


@dataclass(frozen=True, slots=True)
class Found:
    """The longest prefix that one topology stored, in all of its parts."""

    tokens: int
    parts: tuple[PartHit, ...]
    hashes: tuple[str, ...]


@dataclass(slots=True)
class Tracked:
    """What is known of a request between its arrival and its end."""

    tenant: Tenant
    token_ids: tuple[int, ...]
    prompt_tokens: int
    answer: Future[Found]
    local: int = 0
    loaded: bool = False
    lossy: bool = False
    settled: bool = False
    saved: bool = False
    block_ids: list[int] = field(default_factory=list)

    @property
    def found(self) -> Found | None:
        """The answer of the lookup, once there."""
        done = self.answer.done() and self.answer.exception() is None
        return self.answer.result() if done else None


class LossyPrefixes:
    """Prefixes of which the KV in the engine's own cache is lossy, by their chain hash.

    When there are too many to remember, every prefix that is not known counts as lossy.
    """

    def __init__(self, most: int = MOST_PREFIXES) -> None:
        self._most = most
        self._hashes: OrderedDict[str, None] = OrderedDict()
        self._overflowed = False

    def add(self, hashes: Sequence[str]) -> None:
        """The blocks with these hashes were loaded, or computed on top of such."""
        for item in hashes:
            self._hashes[item] = None
            self._hashes.move_to_end(item)
        while len(self._hashes) > self._most:
            self._hashes.popitem(last=False)
            self._overflowed = True

    def touches(self, hashes: Sequence[str]) -> bool:
        """Whether any of the blocks is lossy."""
        return bool(hashes) and (self._overflowed or any(item in self._hashes for item in hashes))


class Planner:
    """Called by the engine's scheduler, in one thread."""

    def __init__(
        self,
        views: Views,
        model: Model,
        topologies: Sequence[Topology],
        *,
        block_tokens: int,
        layerwise: bool,
        save: bool = True,
    ) -> None:
        self.views, self.model, self.topologies = views, model, tuple(topologies)
        self.block_tokens, self.layerwise, self.save = block_tokens, layerwise, save
        self.counts: Counter[str] = Counter()
        self._requests: dict[str, Tracked] = {}
        self._loads: list[LoadOrder] = []
        self._waiting: set[str] = set()
        options = views.store.options
        self._lossy_store = options.quality != "exact"
        self._mixed = options.mixed
        self._lossy = LossyPrefixes()
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="kvformat-lookup")

    def match(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Tokens behind ``computed`` that can be loaded; None: ask again."""
        tracked = self._tracked(request)
        if tracked is None or tracked.loaded:
            return 0, False
        try:
            found = tracked.answer.result(timeout=PATIENCE_S)
        except FutureTimeoutError:
            self.counts["lookups that took more than a step"] += 1
            return None, False
        except Exception:
            _log.exception("a lookup failed")
            self.counts["lookups that failed"] += 1
            return 0, False
        tracked.local = computed
        most = (tracked.prompt_tokens - 1) // self.block_tokens * self.block_tokens
        count = min(found.tokens, most) - computed
        return (count, not self.layerwise) if count > 0 else (0, False)

    def allocated(self, request: Any, block_ids: Sequence[int], external: int) -> None:
        """The engine gave the request blocks for ``external`` tokens to load."""
        tracked = self._requests.get(request.request_id)
        found = None if tracked is None else tracked.found
        if not external or tracked is None or found is None or tracked.loaded:
            return
        begin, end = tracked.local, tracked.local + external
        first, stop = begin // self.block_tokens, end // self.block_tokens
        tracked.loaded = True
        tracked.lossy = self._lossy_store
        self.counts["loads"] += 1
        self._loads.append(
            LoadOrder(
                request.request_id,
                tracked.tenant,
                found.parts,
                begin,
                end,
                tuple(block_ids[first:stop]),
                self.layerwise,
            )
        )

    def orders(self, step: Any) -> Orders:
        """Everything for the workers in this step."""
        for new in step.scheduled_new_reqs:
            self._blocks(new.req_id, new.block_ids, replace=True)
        cached = step.scheduled_cached_reqs
        computed = {item.req_id: item.num_computed_tokens for item in step.scheduled_new_reqs}
        for name, blocks, tokens in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            self._blocks(name, blocks, replace=name in cached.resumed_req_ids)
            computed[name] = tokens
        saves = self._saves(computed, step.num_scheduled_tokens)
        result = Orders(
            tuple(self._loads),
            tuple(saves),
            frozenset(self._waiting),
            frozenset(step.preempted_req_ids or ()),
        )
        self._loads.clear()
        self._waiting.clear()
        return result

    def load_failed(self, block_ids: set[int]) -> None:
        """Loads into these blocks failed; what was to be saved on top of them is wrong."""
        for tracked in self._requests.values():
            if tracked.loaded and not block_ids.isdisjoint(tracked.block_ids):
                tracked.settled = False

    def finished(self, request: Any) -> bool:
        """The request is over; whether its blocks must wait for its save."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return False
        tracked.answer.cancel()
        if tracked.saved:
            self._waiting.add(request.request_id)
        return tracked.saved

    def close(self) -> None:
        """Stop the lookups."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _tracked(self, request: Any) -> Tracked | None:
        known = self._requests.get(request.request_id)
        if known is not None:
            return known
        reason = _unsuitable(request)
        adapter = None
        if reason is None and getattr(request, "lora_request", None) is not None:
            adapter = adapter_of(request.lora_request)
            reason = "an adapter whose files cannot be read" if adapter is None else None
        whole = request.num_prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS
        if reason is None and not whole:
            reason = "short prompts"
        if reason is not None:
            self.counts[f"requests left alone: {reason}"] += 1
            return None
        token_ids = tuple(request.prompt_token_ids[:whole])
        tenant = Tenant(getattr(request, "cache_salt", None), adapter)
        answer = self._pool.submit(self._look_up, tenant, token_ids)
        tracked = Tracked(tenant, token_ids, request.num_prompt_tokens, answer)
        self._requests[request.request_id] = tracked
        return tracked

    def _look_up(self, tenant: Tenant, token_ids: tuple[int, ...]) -> Found:
        """In a thread: the longest prefix among the topologies, their own first."""
        best: Found | None = None
        for topology in self.topologies:
            parts = tuple(
                PartHit(part, self.views.get(tenant, part).probe(token_ids))
                for part in self.model.parts(topology)
            )
            tokens = min(item.hit.tokens for item in parts)
            if best is None or tokens > best.tokens:
                best = Found(tokens, parts, parts[0].hit.hashes)
            if best.tokens == len(token_ids):
                break
        if best is None:
            raise ValueError("no topology")
        return best

    def _blocks(self, name: str, blocks: Sequence[Sequence[int]] | None, *, replace: bool) -> None:
        tracked = self._requests.get(name)
        if tracked is None:
            return
        if replace:
            tracked.block_ids = []
        if blocks is not None:
            tracked.block_ids.extend(blocks[0])

    def _saves(self, computed: Mapping[str, int], scheduled: Mapping[str, int]) -> list[SaveOrder]:
        """Prompts whose last whole block is computed in this step."""
        saves = []
        for name, before in computed.items():
            tracked = self._requests.get(name)
            if tracked is None or tracked.settled:
                continue
            whole = len(tracked.token_ids)
            if before + scheduled.get(name, 0) < whole:
                continue
            found = tracked.found
            if found is None:
                continue  # still being looked up, or failed: the store is not well
            lossy = tracked.lossy or self._lossy.touches(_blocks_in(found.hashes, tracked.local))
            if lossy:
                self._lossy.add(found.hashes)
            tracked.settled = True
            tracked.saved = self.save and (self._mixed or not lossy)
            if not tracked.saved:
                self.counts["prompts not saved: computed on top of lossy KV"] += lossy
                continue
            # A topology of another deployment does not count as stored under ours.
            own = self.topologies[0]
            mine = tuple(item.part for item in found.parts) == self.model.parts(own)
            saves.append(
                SaveOrder(
                    name,
                    tracked.tenant,
                    tracked.token_ids,
                    tuple(tracked.block_ids[: whole // self.block_tokens]),
                    found.tokens if mine else 0,
                    lossy,
                )
            )
        self.counts["saves"] += len(saves)
        return saves


def _blocks_in(hashes: Sequence[str], tokens: int) -> Sequence[str]:
    """Hashes of all blocks that have a token among the first ``tokens``."""
    return hashes[: -(-tokens // BLOCK_TOKENS)]


def _unsuitable(request: Any) -> str | None:
    """Why the KV of a request is more than a function of its token ids."""
    if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
        return "embeddings in the prompt"
    if getattr(request, "mm_features", None):
        return "images or audio in the prompt"
    return None
