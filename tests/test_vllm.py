"""The connector in the real vLLM on a CPU: what it stores, what it loads, and every fault."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvformat
import kvformat.dtypes
from kvformat.store import ExtentRef

vllm = pytest.importorskip("vllm", reason="vllm is not installed")

from kvformat.integrations.vllm.identity import Tenant  # noqa: E402
from tests.vllm_engine import BLOCK, VOCABULARY, Engine, make_model  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # the engine's own, raised in this process
LONG, CELL, WHOLE = 1400, 1024, 1280
NOBODY = Tenant()


def prompt(count: int, seed: int) -> list[int]:
    ids = np.random.default_rng(seed).integers(0, VOCABULARY, count)
    return [int(item) for item in ids]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=["async", "layerwise"])
def engine(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    url = tmp_path_factory.mktemp("store")
    made = Engine(model, {"url": str(url), "quality": "exact", "load": request.param})
    yield made
    made.close()


class Stored:
    """A prompt of 1,400 tokens of which 1,280 are stored: a cell of 1,024 and one of 256."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine, self.ids = engine, prompt(LONG, seed)
        engine.empty_store()
        ((self.expected, cached),) = engine.run([self.ids])
        assert cached == 0
        engine.drain()
        self.view = engine.worker._saves._views.get(NOBODY, engine.worker._paged.part)
        self.extents = self.view.probe(self.ids).extents
        assert [item.tokens for item in self.extents] == [(0, CELL), (CELL, WHOLE)]

    def path(self, extent: ExtentRef) -> Path:
        return Path(self.view._store.backend.locate(extent.name))

    def again(self) -> tuple[list[int], dict[str, int]]:
        """The tokens of the same prompt, and what the connector counted meanwhile."""
        counts = self.engine.worker.counts
        before = dict(counts)
        ((tokens, _),) = self.engine.run([self.ids])
        self.engine.drain()
        return tokens, {key: counts[key] - before.get(key, 0) for key in counts}


LOADED, RECOMPUTED = "tokens loaded", "tokens computed anew after a failed load"


def test_what_one_engine_stores_another_loads(model: Path, tmp_path: Path) -> None:
    prompts = [prompt(LONG, 1), prompt(700, 2), prompt(100, 3)]
    plain = Engine(model)
    expected = [tokens for tokens, _ in plain.run(prompts)]
    plain.close()
    first = Engine(model, {"url": str(tmp_path), "quality": "exact"})
    assert first.run(prompts) == [(tokens, 0) for tokens in expected]
    first.drain()
    first.close()
    second = Engine(model, {"url": str(tmp_path), "quality": "exact"})
    assert second.run(prompts) == list(zip(expected, [WHOLE, 512, 0], strict=True))
    second.close()


def test_a_longer_prompt_loads_the_common_part_and_stores_the_rest(engine: Engine) -> None:
    stored = Stored(engine, 10)
    longer = stored.ids[:1200] + prompt(600, 11)
    ((tokens, cached),) = engine.run([longer])
    assert cached == CELL
    engine.drain()
    assert engine.run([longer]) == [(tokens, 1792)]


def test_a_prompt_of_whole_blocks_leaves_one_to_compute(engine: Engine) -> None:
    ids = prompt(512, 12)
    ((tokens, _),) = engine.run([ids])
    engine.drain()
    assert engine.run([ids]) == [(tokens, 512 - BLOCK)]


def test_the_engines_own_cache_and_the_store_complete_each_other(engine: Engine) -> None:
    stored = Stored(engine, 13)
    engine.run([stored.ids[:600]])
    before = engine.worker.counts[LOADED]
    ((tokens, cached),) = engine.run([stored.ids], forget=False)
    assert (tokens, cached) == (stored.expected, WHOLE)
    assert engine.worker.counts[LOADED] - before == WHOLE - 600 // BLOCK * BLOCK


def test_a_tenant_is_not_served_what_another_stored(engine: Engine) -> None:
    ids = prompt(600, 14)
    ((tokens, _),) = engine.run([ids], salt="one")
    engine.drain()
    assert engine.run([ids], salt="one") == [(tokens, 512)]
    assert engine.run([ids], salt="two") == [(tokens, 0)]
    engine.drain()
    assert engine.run([ids]) == [(tokens, 0)]


def test_negative_control_other_kv_under_the_same_name_changes_the_tokens(engine: Engine) -> None:
    stored = Stored(engine, 15)
    with stored.view.lookup(stored.ids) as hit:
        kv = np.empty((2, 4, WHOLE, 2, 32), "V2").view(kvformat.dtypes.DTYPES["bfloat16"])
        stored.view.load_into(hit, kv)
    for extent in stored.extents:
        begin, end = extent.tokens
        wrong = np.array(kv[:, :, begin:end])
        wrong[1] = np.roll(wrong[1], 7, axis=1)  # values of other tokens than their keys
        rewrite(stored, extent, wrong)
    tokens, counted = stored.again()
    assert counted[LOADED] == WHOLE
    assert tokens != stored.expected


def rewrite(stored: Stored, extent: ExtentRef, kv: Any, **identity: Any) -> None:
    """Another artifact under the name of an extent."""
    begin, end = extent.tokens
    mine = stored.view.scope.identity
    fields = {name: getattr(mine, name) for name in mine.__dataclass_fields__}
    path = stored.path(extent)
    hashes = stored.view.hashes(stored.ids)
    for block in range(extent.start + 1, extent.end + 1):  # every block has a link of its own
        name = stored.view.scope.name(hashes, block)
        Path(stored.view._store.backend.locate(name)).unlink()
    kvformat.write(
        path, kv, identity=kvformat.Identity(**{**fields, **identity}), first_position=begin,
        token_ids=np.array(stored.ids[:end]), tracks=["exact/zstd"],
    )  # fmt: skip


def other_kv(extent: ExtentRef, dtype: str = "bfloat16") -> Any:
    begin, end = extent.tokens
    values = np.random.default_rng(0).standard_normal((2, 4, end - begin, 2, 32))
    return values.astype(kvformat.dtypes.DTYPES[dtype])


def truncate(stored: Stored, number: int) -> None:
    path = stored.path(stored.extents[number])
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def corrupt(stored: Stored, number: int) -> None:
    path = stored.path(stored.extents[number])
    with path.open("r+b") as file:  # in the last segment of 256 tokens
        file.seek(-100, 2)
        byte = file.read(1)
        file.seek(-100, 2)
        file.write(bytes([byte[0] ^ 0x40]))


def stale(stored: Stored, number: int) -> None:
    """What another prompt has at the same place."""
    kept = {stored.path(item): stored.path(item).read_bytes() for item in stored.extents}
    other = Stored(stored.engine, 99)
    wrong = other.path(other.extents[number]).read_bytes()
    stored.engine.empty_store()
    for path, content in kept.items():
        path.write_bytes(content)
    stored.path(stored.extents[number]).write_bytes(wrong)


def other_model(stored: Stored, number: int) -> None:
    extent = stored.extents[number]
    rewrite(stored, extent, other_kv(extent), model=kvformat.Model("other/model", "1"))


def other_dtype(stored: Stored, number: int) -> None:
    extent = stored.extents[number]
    rewrite(stored, extent, other_kv(extent, "float16"), cache_dtype="float16")


Damage = Callable[[Stored, int], None]


@pytest.mark.parametrize(
    ("damage", "number", "good"),
    [(truncate, 0, 0), (truncate, 1, CELL), (corrupt, 0, 768), (corrupt, 1, CELL), (stale, 0, 0),
     (stale, 1, CELL), (other_model, 0, 0), (other_model, 1, CELL), (other_dtype, 0, 0),
     (other_dtype, 1, CELL)],
)  # fmt: skip
def test_exactly_what_is_bad_and_all_behind_it_is_computed_anew(
    engine: Engine, damage: Damage, number: int, good: int
) -> None:
    stored = Stored(engine, 20)
    damage(stored, number)
    tokens, counted = stored.again()
    assert tokens == stored.expected
    assert (counted[LOADED], counted[RECOMPUTED]) == (good, WHOLE - good)


@pytest.mark.parametrize(("number", "cached"), [(0, 0), (1, CELL)])
def test_a_missing_extent_is_not_even_tried(engine: Engine, number: int, cached: int) -> None:
    stored = Stored(engine, 21)
    for block in range(*((0, 4) if number == 0 else (4, 5))):
        name = stored.view.scope.name(stored.view.hashes(stored.ids), block + 1)
        Path(stored.view._store.backend.locate(name)).unlink()
    tokens, counted = stored.again()
    assert tokens == stored.expected
    assert (counted.get(LOADED, 0), counted.get(RECOMPUTED, 0)) == (cached, 0)


@pytest.mark.parametrize(("number", "good"), [(0, 0), (1, CELL)])
def test_evicted_between_lookup_and_load(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, number: int, good: int
) -> None:
    stored = Stored(engine, 22)
    allocated = engine.planner.allocated

    def evict(request: Any, block_ids: Any, external: int) -> None:
        if external:
            stored.path(stored.extents[number]).unlink()
        allocated(request, block_ids, external)

    monkeypatch.setattr(engine.planner, "allocated", evict)
    tokens, counted = stored.again()
    assert tokens == stored.expected
    assert (counted[LOADED], counted[RECOMPUTED]) == (good, WHOLE - good)
    monkeypatch.undo()


def test_a_damaged_extent_is_written_again_and_then_served(engine: Engine) -> None:
    stored = Stored(engine, 23)
    corrupt(stored, 0)
    assert stored.again()[0] == stored.expected
    tokens, counted = stored.again()
    assert (tokens, counted[LOADED]) == (stored.expected, WHOLE)


def test_a_store_that_hangs_is_given_up_and_writes_nothing_afterwards(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = Stored(engine, 24)
    released, place = threading.Event(), engine.worker._loads._place
    view = engine.worker._loads._views.get(NOBODY, engine.worker._paged.part)
    written: list[Any] = []
    hold = view.hold

    def hanging(hit: Any) -> Any:
        released.wait(60)
        return hold(hit)

    def noted(*arguments: Any) -> None:
        written.append(arguments)
        place(*arguments)

    monkeypatch.setattr(view, "hold", hanging)
    monkeypatch.setattr(engine.worker._loads, "_place", noted)
    monkeypatch.setattr(engine.worker, "_limit_s", 0.2)
    tokens, counted = stored.again()
    released.set()
    engine.worker._loading.submit(int).result()
    assert tokens == stored.expected
    assert (counted[LOADED], counted[RECOMPUTED]) == (0, WHOLE)
    assert counted["loads abandoned"] == 1
    assert not written


@pytest.mark.parametrize("engine", ["async"], indirect=True)
def test_a_request_that_waits_for_its_load_holds_up_no_other(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = Stored(engine, 25)
    released = threading.Event()
    view = engine.worker._loads._views.get(NOBODY, engine.worker._paged.part)
    hold = view.hold

    def hanging(hit: Any) -> Any:
        released.wait(60)
        return hold(hit)

    monkeypatch.setattr(view, "hold", hanging)
    core = engine.llm.llm_engine
    engine.forget()
    core.add_request("slow", {"prompt_token_ids": stored.ids}, engine.parameters())
    core.add_request("quick", {"prompt_token_ids": prompt(200, 26)}, engine.parameters())
    finished: dict[str, list[int]] = {}
    while core.has_unfinished_requests():
        for output in core.step():
            if output.finished:
                finished[output.request_id.partition("-")[0]] = list(output.outputs[0].token_ids)
                released.set()
    assert list(finished) == ["quick", "slow"]
    assert finished["slow"] == stored.expected


def test_a_store_that_takes_nothing_only_counts(engine: Engine) -> None:
    """A file where the folder should be, as with a full disk: every publication fails."""
    root = Path(engine.worker._saves._views.store.backend.url)
    shutil.rmtree(root / "shared")
    (root / "shared").write_text("in the way")
    store = engine.worker._saves._views.store
    ids = prompt(LONG, 27)
    ((tokens, _),) = engine.run([ids])
    engine.drain()
    assert engine.run([ids]) == [(tokens, 0)]
    engine.drain()
    assert store.metrics.value("refusals", "storage") > 0
    (root / "shared").unlink()
    store.breaker.succeeded()
