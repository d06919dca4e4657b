"""The storage plugin and the L2 adapter in the real LMCache: round trips, and every fault."""

from __future__ import annotations

import asyncio
import gc
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvformat

pytest.importorskip("lmcache", reason="lmcache is not installed")

import torch
from lmcache.utils import CacheEngineKey

from kvformat.integrations.lmcache.objects import settings_of
from tests.lmcache_engine import (
    CHUNK,
    COUNT,
    HEADS,
    LAYERS,
    WIDTH,
    Engine,
    Server,
    object_key,
    same,
    wait_for,
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


def corrupt(path: Path, other: Path) -> None:
    del other
    content = bytearray(path.read_bytes())
    content[-20] ^= 0x10
    path.write_bytes(content)


def truncate(path: Path, other: Path) -> None:
    del other
    path.write_bytes(path.read_bytes()[:-1])


def remove(path: Path, other: Path) -> None:
    del other
    path.unlink()


def another_key(path: Path, other: Path) -> None:
    path.unlink()
    shutil.copy(other, path)


def another_model(path: Path, other: Path) -> None:
    del other
    with kvformat.open(path) as artifact:
        key, kv = artifact.manifest.identity.engine_key, artifact.read()
    path.unlink()
    identity = kvformat.Identity(
        kvformat.Model("org/other", None), LAYERS, "bfloat16", kind="engine_key", engine_key=key
    )
    kvformat.write(path, kv.kv, identity=identity, tracks=["exact/zstd"])


Damage = Callable[[Path, Path], None]
DAMAGES = [corrupt, truncate, remove, another_key, another_model]


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


# The L2 adapter of the multi-process mode.

SHAPES = [
    ({"heads": HEADS, "head_dim": WIDTH}, (2, LAYERS, CHUNK, HEADS * WIDTH), ["key", "value"]),
    ({"latent": True}, (LAYERS, CHUNK, 48), ["latent"]),
    ({}, (2, LAYERS, CHUNK, HEADS * WIDTH), ["opaque"]),
    ({"heads": 3, "head_dim": WIDTH}, (LAYERS, CHUNK, 2 * WIDTH), ["opaque"]),
]


def tensors(shape: tuple[int, ...], count: int, seed: int = 0) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(torch.bfloat16) for _ in range(count)]


def objects_in(root: Path) -> list[Path]:
    return sorted(root.rglob("*.kvf"))


@pytest.mark.parametrize(("settings", "shape", "roles"), SHAPES)
def test_a_restarted_server_loads_what_the_first_stored(
    tmp_path: Path, settings: dict[str, Any], shape: tuple[int, ...], roles: list[str]
) -> None:
    keys, data = [object_key(number) for number in range(3)], tensors(shape, 3)
    first = Server(tmp_path, **settings)
    first.write(keys, data)
    wait_for(lambda: len(objects_in(tmp_path)) == 3)
    wait_for(lambda: first.adapter.get_usage().total_bytes_used)
    used = first.adapter.get_usage().total_bytes_used
    assert used == sum(path.stat().st_size for path in objects_in(tmp_path))
    first.close()
    with kvformat.open(objects_in(tmp_path)[0]) as artifact:
        assert sorted(group.role for group in artifact.groups) == roles
        assert artifact.manifest.identity.engine_key is not None
    second = Server(tmp_path, **settings)
    found = second.read(keys, data[0])
    assert [torch.equal(a, b) for a, b in zip(found, data, strict=True)] == [True] * 3
    wait_for(lambda: not second.adapter._holds)
    second.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    root = tmp_path_factory.mktemp("store")
    made = Server(root, heads=HEADS, head_dim=WIDTH, limit_bytes=2**30)
    yield made, root
    made.close()


SHAPE = (2, LAYERS, CHUNK, HEADS * WIDTH)


class Direct:
    """The adapter driven as LMCache's controllers do, on buffers of its own L1."""

    def __init__(self, server: Server) -> None:
        from lmcache.v1.distributed.api import MemoryLayoutDesc

        self.server, self.adapter = server, server.adapter
        self.layout = MemoryLayoutDesc([torch.Size(SHAPE)], [torch.bfloat16])

    def look_up(self, keys: list[Any]) -> list[bool]:
        task = self.adapter.submit_lookup_and_lock_task(keys, {0: self.layout})
        return bits(self.adapter.query_lookup_and_lock_result, task, len(keys))

    def load(self, keys: list[Any]) -> tuple[list[bool], list[Any]]:
        """Into buffers under other keys, so that L1 does not answer itself."""
        Direct.spare = getattr(Direct, "spare", 100) + len(keys)
        places = [object_key(Direct.spare - number) for number in range(len(keys))]
        items = self.server.manager.reserve_write(places, self.layout)
        buffers = [items[place] for place in places]
        task = self.adapter.submit_load_task(keys, buffers)
        good = bits(self.adapter.query_load_result, task, len(keys))
        return good, [item.get_tensor(0).clone() for item in buffers]


def bits(query: Callable[[int], Any], task: int, count: int) -> list[bool]:
    results: list[Any] = []
    wait_for(lambda: results.append(query(task)) or results[-1] is not None)
    assert query(task) is None  # an answer is given once
    return [results[-1].test(number) for number in range(count)]


def stored(server: Server, root: Path, first: int, count: int = 3) -> tuple[list[Any], list[Any]]:
    keys, data = [object_key(first + n) for n in range(count)], tensors(SHAPE, count, first)
    server.write(keys, data)
    wait_for(lambda: all(key in server.adapter._sizes for key in keys))
    del root
    return keys, data


def place(server: Server, key: Any) -> Path:
    adapter = server.adapter
    filed, form = adapter._filed(key), adapter._form(key)
    view = adapter._objects.view(filed, form)
    return Path(view._store.backend.locate(view.key_name(filed.key)))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_object_is_not_loaded_and_the_others_are(
    server: tuple[Server, Path], damage: Damage
) -> None:
    made, root = server
    keys, data = stored(made, root, 1 + 3 * DAMAGES.index(damage))
    direct = Direct(made)
    assert direct.look_up(keys) == [True] * 3
    damage(place(made, keys[1]), place(made, keys[2]))
    good, buffers = direct.load(keys)
    assert good == [True, False, True]
    assert torch.equal(buffers[0], data[0])
    assert torch.equal(buffers[2], data[2])
    direct.adapter.submit_unlock(keys)
    assert not direct.adapter._holds


def test_what_is_locked_is_not_deleted_and_deletion_is_accounted(
    server: tuple[Server, Path],
) -> None:
    made, root = server
    keys, _ = stored(made, root, 30)
    direct, adapter = Direct(made), made.adapter
    assert direct.look_up(keys) == [True] * 3
    sizes = {key: place(made, key).stat().st_size for key in keys}
    before = adapter.get_usage().total_bytes_used
    adapter.delete(keys)
    assert direct.look_up(keys) == [True] * 3
    adapter.submit_unlock(keys)
    adapter.delete(keys[:1])
    assert adapter.get_usage().total_bytes_used == before
    adapter.submit_unlock(keys)
    adapter.delete(keys[:2])
    assert direct.look_up(keys) == [False, False, True]
    assert adapter.get_usage().total_bytes_used == before - sizes[keys[0]] - sizes[keys[1]]
    adapter.submit_unlock(keys)
    adapter.submit_unlock(keys)


def test_tenants_and_models_do_not_meet(server: tuple[Server, Path]) -> None:
    made, root = server
    keys, _ = stored(made, root, 40, 1)
    others = [object_key(40, salt="other"), object_key(40, model="org/other")]
    direct = Direct(made)
    assert direct.look_up([*keys, *others]) == [True, False, False]
    data = tensors(SHAPE, 2, 77)
    for key, item in zip(others, data, strict=True):
        made.write([key], [item])
    wait_for(lambda: all(key in made.adapter._sizes for key in others))
    assert direct.look_up(others) == [True, True]
    good, buffers = direct.load(others)
    assert good == [True, True]
    assert all(torch.equal(a, b) for a, b in zip(buffers, data, strict=True))
    assert set(made.adapter.get_usage().bytes_by_cache_salt) >= {"", "other"}
    made.adapter.submit_unlock([*keys, *others])


def test_an_object_of_another_size_is_a_miss(server: tuple[Server, Path]) -> None:
    made, root = server
    keys, _ = stored(made, root, 41, 1)
    direct = Direct(made)
    direct.look_up(keys)
    direct.layout.shapes[0] = torch.Size((2, LAYERS, CHUNK // 2, HEADS * WIDTH))
    assert direct.load(keys)[0] == [False]
    direct.layout.shapes[0] = torch.Size((2, LAYERS, CHUNK * 2, HEADS * WIDTH))
    assert direct.load(keys)[0] == [False]
    made.adapter.submit_unlock(keys)


def test_a_store_that_hangs_does_not_hold_up_lookups(
    server: tuple[Server, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, root = server
    keys, _ = stored(made, root, 42, 1)
    direct, released = Direct(made), threading.Event()
    fill = made.adapter._objects.fill
    monkeypatch.setattr(
        made.adapter._objects, "fill", lambda *a: bool(released.wait(60)) and fill(*a)
    )
    items = made.manager.reserve_write([object_key(250)], direct.layout)
    task = made.adapter.submit_load_task(keys, list(items.values()))
    assert direct.look_up(keys) == [True]
    assert made.adapter.query_load_result(task) is None
    released.set()
    assert bits(made.adapter.query_load_result, task, 1) == [True]
    made.adapter.submit_unlock(keys)


def test_a_full_disk_fails_the_store_task_and_nothing_else(
    server: tuple[Server, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = server
    direct, key = Direct(made), object_key(251)

    def full(*_: Any) -> Any:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr("kvformat.store.storing.SharedMemory.make", full)
    items = made.manager.reserve_write([key], direct.layout)
    assert not made.adapter._store([key], list(items.values())).is_successful()
    assert direct.look_up([key]) == [False]
    made.adapter._objects.store.breaker.succeeded()


def test_descriptors_are_three_and_tags_are_ready(
    server: tuple[Server, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    from lmcache.v1.distributed import api

    adapter = server[0].adapter
    descriptors = {
        adapter.get_store_event_fd(), adapter.get_lookup_and_lock_event_fd(),
        adapter.get_load_event_fd(),
    }  # fmt: skip
    assert len(descriptors) == 3
    if not hasattr(api, "MemoryTags"):  # 0.5.6
        monkeypatch.setattr(api, "MemoryTags", lambda *tags: tags, raising=False)
        kinds = SimpleNamespace(STORAGE="storage", LOCAL="local", REMOTE="remote")
        monkeypatch.setattr(api, "MemorySegment", kinds, raising=False)
        monkeypatch.setattr(api, "MemoryResidency", kinds, raising=False)
    assert adapter.get_memory_tags() == api.MemoryTags(
        api.MemorySegment.STORAGE, api.MemoryResidency.LOCAL
    )
    assert adapter.report_status()["is_healthy"]
