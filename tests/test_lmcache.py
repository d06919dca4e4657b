"""The L2 adapter in the real LMCache: round trips, and every fault. See also the plugin's tests."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvformat
from kvformat.errors import UsageError

pytest.importorskip("lmcache", reason="lmcache is not installed")

import torch

from tests.lmcache_damage import DAMAGES, Damage
from tests.lmcache_engine import (
    CHUNK,
    HEADS,
    LAYERS,
    WIDTH,
    Server,
    object_key,
    wait_for,
)
from tests.stores import stepwise_profile

pytestmark = pytest.mark.filterwarnings("ignore")  # of LMCache, raised in this process


@pytest.fixture(scope="module", autouse=True)
def collected() -> Iterator[None]:
    """LMCache leaves event loops open, which warn when they are collected: here, not later."""
    yield
    gc.collect()


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


def test_a_profile_makes_objects_that_any_server_with_it_loads(tmp_path: Path) -> None:
    """Values that are whole steps come back bit for bit."""
    keys = [object_key(number) for number in range(2)]
    data = [item.mul(8).round().clamp(-100, 100).div(8) for item in tensors(SHAPE, 2)]
    file = tmp_path / "own.kvp"
    file.write_bytes(stepwise_profile((LAYERS, HEADS, WIDTH), 1 / 8, model=keys[0].model_name))
    lossy = {"heads": HEADS, "head_dim": WIDTH, "quality": "near-lossless", "mixed": True}
    root = tmp_path / "store"
    first = Server(root, profile=str(file), **lossy)
    first.write(keys, data)
    wait_for(lambda: len(objects_in(root)) == 2)
    first.close()
    with kvformat.open(objects_in(root)[0]) as artifact:
        assert artifact.manifest.profile is not None
    second = Server(root, profiles=[str(tmp_path)], **lossy)
    found = second.read(keys, data[0])
    assert [torch.equal(a, b) for a, b in zip(found, data, strict=True)] == [True] * 2
    second.close()
    without = Server(root, **lossy)
    assert Direct(without).look_up(keys) == [True, True]
    assert Direct(without).load(keys)[0] == [False, False]
    assert without.adapter._objects.store.metrics.value("misses", "profile") == 2
    without.close()


def test_a_profile_for_rotated_keys_is_refused_at_the_start(tmp_path: Path) -> None:
    from kvformat.integrations.lmcache import KvformatL2Adapter

    file = tmp_path / "own.kvp"
    turns = torch.tensor([[1.0], [0.0]], dtype=torch.float64).numpy()
    file.write_bytes(stepwise_profile((LAYERS, HEADS, WIDTH), 1 / 8, model="m", turns=turns))
    settings = {"url": str(tmp_path), "quality": "high", "mixed": True, "profile": str(file)}
    with pytest.raises(UsageError, match="does not say at which positions"):
        KvformatL2Adapter(settings)


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
