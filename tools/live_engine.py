"""One engine run of ``live_demo``: a process of its own, told what to do in JSON, answering so.

The engine runs in this process and is stepped by hand, so that every token has a time.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

SETTINGS: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
}
ANSWER: Final = "RESULT "
ANSWER_TOKENS: Final = 16
DECODE_TOKENS: Final = 400
BEFORE: Final = 8
"""Tokens of the co-running request before the long one arrives."""


@dataclass
class Request:
    """When a request was added and when each of its tokens came."""

    added_s: float
    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    cached: int = 0
    finished: bool = False

    @property
    def first_token_s(self) -> float:
        """Time to the first token."""
        return self.times_s[0] - self.added_s


class Engine:
    """The engine, stepped by hand."""

    def __init__(self, model: str, most_tokens: int, extra: dict[str, Any] | None) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        options: dict[str, Any] = {}
        if extra is not None:
            options["kv_transfer_config"] = KVTransferConfig(
                kv_connector="KvformatConnector",
                kv_connector_module_path="kvformat.integrations.vllm",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config=extra,
            )
        self.llm = LLM(
            model=model, dtype="bfloat16", enforce_eager=True, max_model_len=most_tokens,
            max_num_seqs=8, block_size=32, enable_prefix_caching=False, **options,
        )  # fmt: skip
        self.requests: dict[str, Request] = {}

    def add(self, name: str, ids: Sequence[int], tokens: int) -> Request:
        """Add a request that generates so many tokens, greedily."""
        from vllm import SamplingParams

        made = self.requests[name] = Request(time.monotonic())
        parameters = SamplingParams(
            max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False
        )
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": list(ids)}, parameters)
        return made

    def step(self) -> None:
        """One step of the engine."""
        for output in self.llm.llm_engine.step():
            request = self.requests[output.request_id.rpartition("-")[0] or output.request_id]
            new = list(output.outputs[0].token_ids)
            if len(new) > len(request.tokens):
                request.times_s.append(time.monotonic())
            request.tokens, request.finished = new, output.finished
            request.cached = output.num_cached_tokens or request.cached

    def until(self, *requests: Request) -> None:
        """Step until they are finished."""
        while not all(item.finished for item in requests):
            self.step()

    def drain(self) -> None:
        """Until what was computed is in the store."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker = get_kv_transfer_group()._worker
        worker._saving.submit(int).result()
        worker._saves._views.store.drain(600)


def alone(engine: Engine, ids: Sequence[int], times: int, name: str) -> list[Request]:
    """The long request with nothing beside it."""
    found = []
    for number in range(times):
        found.append(engine.add(f"{name}{number}", ids, ANSWER_TOKENS))
        engine.until(found[-1])
    return found


def beside(engine: Engine, ids: Sequence[int], others: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The long request while one decodes and two short ones arrive with it."""
    decoding = engine.add("decoding", others[0], DECODE_TOKENS)
    while len(decoding.tokens) < BEFORE:
        engine.step()
    quiet = [b - a for a, b in pairwise(decoding.times_s[1:])]
    long = engine.add("long", ids, ANSWER_TOKENS)
    short = [engine.add(f"short{n}", item, ANSWER_TOKENS) for n, item in enumerate(others[1:])]
    while not long.tokens:
        engine.step()
    stop_s = time.monotonic()
    during = [t for t in decoding.times_s if long.added_s <= t <= stop_s]
    edges = [max((t for t in decoding.times_s if t < long.added_s), default=long.added_s), *during]
    gaps = [b - a for a, b in pairwise(edges)]
    engine.until(long, *short)
    engine.llm.llm_engine.abort_request(["decoding"])
    return {
        "long_s": long.first_token_s,
        "tokens": long.tokens,
        "short_s": median(item.first_token_s for item in short),
        "quiet_gap_s": median(quiet),
        "median_gap_s": median(gaps) if gaps else stop_s - long.added_s,
        "longest_gap_s": max(gaps) if gaps else stop_s - long.added_s,
    }


def main() -> None:
    """Do what the JSON in the first argument says, and print one line with the answer."""
    os.environ.update(SETTINGS)
    order = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    engine = Engine(order["model"], order["most_tokens"], order.get("extra"))
    warm = engine.add("warm", order["others"][0], 4)
    engine.until(warm)
    result: dict[str, Any] = {}
    if order["role"] == "store":
        first = alone(engine, order["ids"], 1, "store")[0]
        engine.drain()
        result = {"first_token_s": first.first_token_s, "tokens": first.tokens}
    else:
        found = alone(engine, order["ids"], order["times"], "long")
        result = {
            "first_token_s": min(item.first_token_s for item in found),
            "tokens": found[0].tokens,
            "cached": found[0].cached,
            "beside": beside(engine, order["ids"], order["others"]),
        }
    print(ANSWER + json.dumps(result), flush=True)
    engine.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
