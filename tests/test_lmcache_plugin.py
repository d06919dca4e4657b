"""The storage plugin in the real engine of LMCache: round trips, and every fault."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvformat

pytest.importorskip("lmcache", reason="lmcache is not installed")

import torch
from lmcache.utils import CacheEngineKey

from kvformat.integrations.lmcache.objects import settings_of
from tests.lmcache_damage import DAMAGES, Damage, corrupt
from tests.lmcache_engine import (
    CHUNK,
    COUNT,
    HEADS,
    LAYERS,
    WIDTH,
    Engine,
    same,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # of LMCache, raised in this process


@pytest.fixture(scope="module", autouse=True)
def collected() -> Iterator[None]:
    """LMCache leaves event loops open, which warn when they are collected: here, not later."""
    yield
    gc.collect()


TOKENS = torch.arange(1000, 1000 + COUNT)
CASES = [(False, torch.bfloat16), (True, torch.float16), (False, torch.float8_e4m3fn)]


# The in-process plugin.


@pytest.mark.parametrize(("mla", "dtype"), CASES, ids=str)
def test_what_one_engine_stores_another_retrieves_bit_by_bit(
    tmp_path: Path, mla: bool, dtype: Any
) -> None:
    first = Engine(tmp_path, mla=mla, dtype=dtype, quality="exact")
    kv = first.kv()
    assert first.engine.lookup(TOKENS) == 0
    first.store(TOKENS, kv)
    first.close()
    second = Engine(tmp_path, mla=mla, dtype=dtype, quality="exact")
    assert second.engine.lookup(TOKENS, lookup_id="r", pin=True) == COUNT
    assert second.plugin._pins
    count, out = second.retrieve(TOKENS)
    second.engine.lookup_unpin("r")
    assert not second.plugin._pins
    assert count == COUNT
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for x, y in zip(kv, out, strict=True)
        for a, b in zip(x, y, strict=True)
    )
    second.close()


def test_keys_and_values_of_a_plugin_are_what_the_artifact_says(tmp_path: Path) -> None:
    engine = Engine(tmp_path, quality="exact")
    kv = engine.kv()
    engine.store(TOKENS, kv)
    path = engine.path(engine.keys(TOKENS)[1])
    with kvformat.open(path) as artifact:
        identity = artifact.manifest.identity
        restored = artifact.read()
    assert identity.kind == "engine_key"
    assert identity.engine_key is not None
    assert identity.engine_key.engine == "lmcache"
    assert restored.kv.shape == (2, LAYERS, CHUNK, HEADS, WIDTH)
    expected = kv[2][1][CHUNK : 2 * CHUNK].reshape(CHUNK, HEADS, WIDTH).float().numpy()
    assert (restored.kv[1, 2].astype("float32") == expected).all()
    engine.close()


@pytest.fixture(scope="module", params=[False, True], ids=["blocking", "async-loading"])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    root = tmp_path_factory.mktemp("store")
    made = Engine(root, quality="exact", enable_async_loading=request.param)
    yield made
    made.close()


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_chunk_ends_the_prefix_in_front_of_it(engine: Engine, damage: Damage) -> None:
    tokens = TOKENS + 1000 * (1 + DAMAGES.index(damage))
    kv = engine.kv(7)
    engine.store(tokens, kv)
    keys = engine.keys(tokens)
    damage(engine.path(keys[1]), engine.path(keys[2]))
    count, out = engine.retrieve(tokens)
    assert count == CHUNK
    assert same(kv, out, CHUNK)
    assert all(not part[CHUNK:].any() for parts in out for part in parts)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_hole_between_lookup_and_load_is_not_closed_by_what_follows(
    engine: Engine, damage: Damage
) -> None:
    """The earlier plugin left out what was missing, so chunk 2 came into the place of chunk 1."""
    tokens = TOKENS + 20_000 + 1000 * DAMAGES.index(damage)
    engine.store(tokens, engine.kv(8))
    keys = engine.keys(tokens)
    assert engine.plugin.batched_contains(keys) == len(keys)
    damage(engine.path(keys[1]), engine.path(keys[2]))
    found = asyncio.run(engine.plugin.batched_get_non_blocking("r", keys))
    assert len(found) == 1
    expected = torch.stack([key_part for key_part, _ in engine.kv(8)])[:, :CHUNK]
    assert torch.equal(found[0].get_tensor(0)[0], expected)
    for item in found:
        item.ref_count_down()
    assert engine.engine.storage_manager.memcheck()


def test_a_damaged_chunk_is_replaced_by_the_next_store(engine: Engine) -> None:
    tokens = TOKENS + 40_000
    kv = engine.kv(9)
    engine.store(tokens, kv)
    corrupt(engine.path(engine.keys(tokens)[1]), Path())
    assert engine.retrieve(tokens)[0] == CHUNK
    engine.plugin.batched_submit_put_task(*objects(engine, engine.keys(tokens)[1:2], kv))
    assert engine.plugin._objects.store.drain(60)
    count, out = engine.retrieve(tokens)
    assert (count, same(kv, out, COUNT)) == (COUNT, True)


def objects(engine: Engine, keys: list[Any], kv: Any) -> tuple[list[Any], list[Any]]:
    """Chunk 1 as LMCache would put it."""
    item = engine.plugin._cpu.allocate(
        engine.plugin._metadata.get_shapes(CHUNK), engine.plugin._metadata.get_dtypes(),
        engine.plugin._format(),
    )  # fmt: skip
    for layer, parts in enumerate(kv):
        for plane, part in enumerate(parts):
            item.get_tensor(0)[plane, layer].copy_(part[CHUNK : 2 * CHUNK])
    return keys, [item]


def test_wrong_kv_under_the_right_key_comes_back_wrong(engine: Engine) -> None:
    """The control: what is retrieved is what the store holds, and nothing else."""
    tokens = TOKENS + 41_000
    kv = engine.kv(10)
    engine.store(tokens, kv)
    path = engine.path(engine.keys(tokens)[0])
    with kvformat.open(path) as artifact:
        identity, content = artifact.manifest.identity, artifact.read().kv.copy()
    path.unlink()
    content[1] = content[1][:, ::-1]
    kvformat.write(path, content, identity=identity, tracks=["exact/zstd"])
    count, out = engine.retrieve(tokens)
    assert count == COUNT
    assert not same(kv, out, CHUNK)


def test_a_store_that_takes_nothing_does_not_reach_the_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = TOKENS + 42_000
    store = engine.plugin._objects.store

    def full(*_: Any) -> Any:
        raise OSError(28, "no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("kvformat.store.storing.SharedMemory.make", full)
        engine.engine.store(tokens, kvcaches=engine.kv())
    assert engine.retrieve(tokens)[0] == 0
    assert store.metrics.value("refusals", "storage") > 0
    store.breaker.succeeded()


def test_infinities_are_kept_or_refused_never_spread(tmp_path: Path) -> None:
    for quality, expected in (("exact", COUNT), ("near-lossless", CHUNK)):
        made = Engine(tmp_path / quality, quality=quality, mixed=True)
        kv = made.kv(11)
        kv[1][0][CHUNK + 3, 5] = float("inf")
        made.store(TOKENS, kv)
        count, out = made.retrieve(TOKENS)
        assert count == expected
        finite = sum(int((~torch.isfinite(part[:count])).sum()) for p in out for part in p)
        assert finite == (quality == "exact")
        made.close()


def test_two_engines_on_one_root_lose_nothing_of_each_other(tmp_path: Path) -> None:
    one, two = Engine(tmp_path, quality="exact"), Engine(tmp_path, quality="exact")
    kv = one.kv()
    one.store(TOKENS, kv)
    two.store(TOKENS + 5000, kv)
    one.close()
    two.close()
    third = Engine(tmp_path, quality="exact")
    assert third.engine.lookup(TOKENS) == third.engine.lookup(TOKENS + 5000) == COUNT
    third.close()


def test_other_qualities_and_dtypes_do_not_meet(tmp_path: Path) -> None:
    exact = Engine(tmp_path, quality="exact")
    exact.store(TOKENS, exact.kv())
    exact.close()
    lossy = Engine(tmp_path, quality="near-lossless", mixed=True)
    for made in (lossy, Engine(tmp_path, dtype=torch.float16, quality="exact")):
        assert made.engine.lookup(TOKENS) == 0
        made.close()


def test_what_a_lossy_store_takes_says_that_it_may_be_on_top_of_lossy_kv(tmp_path: Path) -> None:
    made = Engine(tmp_path, quality="near-lossless", mixed=True)
    made.store(TOKENS, made.kv())
    with kvformat.open(made.path(made.keys(TOKENS)[0])) as artifact:
        assert artifact.manifest.lineage.generations == 1
    assert made.retrieve(TOKENS)[0] == COUNT
    made.close()
    with pytest.raises(kvformat.UsageError, match="computed on top of"):
        settings_of({"url": str(tmp_path), "quality": "near-lossless"})


def test_looking_up_and_unpinning_leaves_nothing_behind(engine: Engine) -> None:
    tokens = TOKENS + 43_000
    engine.store(tokens, engine.kv())
    before = len(engine.plugin._objects._views)
    for number in range(50):
        engine.engine.lookup(tokens, lookup_id=f"r{number}", pin=True)
        engine.engine.lookup_unpin(f"r{number}")
    engine.plugin.unpin(engine.keys(tokens)[0])
    engine.retrieve(tokens)
    assert not engine.plugin._pins
    assert not engine.plugin._lookups
    assert len(engine.plugin._objects._views) == before


def test_keys_with_negative_hashes_and_slashes_are_names_too(engine: Engine) -> None:
    key = CacheEngineKey("org/../demo", 1, 0, -3, torch.bfloat16)
    assert not engine.plugin.contains(key)
    assert engine.plugin.get_blocking(key) is None
    assert engine.plugin.remove(key)
