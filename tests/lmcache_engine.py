"""The real LMCache on a CPU: an in-process engine, and the storage manager of its server."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import queue
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what LMCache imports; tests end at a warning
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata

    try:
        from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface

        ENGINE = "lmcache.v1.cache_engine"
    except ModuleNotFoundError:  # from 0.5.7 on
        from lmcache.inprocess.v1.gpu_connector.gpu_connectors import GPUConnectorInterface

        ENGINE = "lmcache.inprocess.v1.cache_engine"

LAYERS, HEADS, WIDTH, CHUNK, COUNT = 4, 2, 16, 16, 56
MODEL = "org/demo-model"
PARTS = list[tuple[Any, ...]]


class Dense(GPUConnectorInterface):  # type: ignore[misc]  # LMCache has no connector for CPUs
    """The engine's cache is a list of layers, each (K, V) or (latent,) ``[T, C]``."""

    def __init__(self, metadata: Any) -> None:
        self.metadata, self.kvcaches = metadata, None

    def from_gpu(self, memory_obj: Any, start: int, end: int, **more: Any) -> None:
        tensor = memory_obj.get_tensor(0)
        for layer, parts in enumerate(more["kvcaches"]):
            for plane, part in enumerate(parts):
                tensor[plane, layer].copy_(part[start:end])

    def to_gpu(self, memory_obj: Any, start: int, end: int, **more: Any) -> None:
        tensor = memory_obj.get_tensor(0)
        for layer, parts in enumerate(more["kvcaches"]):
            for plane, part in enumerate(parts):
                part[start:end].copy_(tensor[plane, layer])

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **more: Any) -> None:
        for item, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(item, start, end, **more)

    def batched_to_gpu(self, memory_objs: Any, starts: Any, ends: Any, **more: Any) -> None:
        for item, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(item, start, end, **more)

    def get_shape(self, num_tokens: int) -> Any:
        return self.metadata.get_shapes(num_tokens)[0]


def nothing(*_: Any) -> None:
    """One rank has nobody to tell."""


def unchanged(item: Any, *_: Any) -> Any:
    """One rank has nobody to hear from."""
    return item


class Engine:
    """An in-process engine with the plugin as its only storage."""

    number = 0

    def __init__(self, root: Path, *, mla: bool = False, dtype: Any = None, **settings: Any):
        Engine.number += 1
        self.name, self.mla = f"engine-{Engine.number}", mla
        self.dtype = dtype or torch.bfloat16
        own = {"module_path": "kvformat.integrations.lmcache",
               "class_name": "KvformatStoragePlugin", "url": str(root), **settings}  # fmt: skip
        self.loading = bool(own.pop("enable_async_loading", False))
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK, local_cpu=False, max_local_cpu_size=0.05, save_unfull_chunk=True,
            lmcache_instance_id=self.name, storage_plugins=["kvf"],
            enable_async_loading=self.loading,
            extra_config={f"storage_plugin.kvf.{key}": value for key, value in own.items()},
        )  # fmt: skip
        metadata = LMCacheMetadata(
            model_name=MODEL, world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
            kv_dtype=self.dtype, kv_shape=(LAYERS, 1 if mla else 2, CHUNK, 1 if mla else HEADS,
            WIDTH), use_mla=mla, role="worker", chunk_size=CHUNK,
        )  # fmt: skip
        self.builder = importlib.import_module(ENGINE).LMCacheEngineBuilder
        self.engine = self.builder.get_or_create(
            self.name, config, metadata, Dense(metadata), nothing, unchanged
        )
        self.answers: queue.Queue[int] = queue.Queue()
        if self.loading:  # the engine sends answers to a scheduler: here is its end of the wire
            answer = SimpleNamespace(send_response_to_scheduler=lambda _, n: self.answers.put(n))
            self.engine.post_init(async_lookup_server=answer)
        else:
            self.engine.post_init()
        # LMCache only logs that a plugin cannot be made, and runs without it.
        self.plugin = self.engine.storage_manager.storage_backends["kvf"]

    def kv(self, seed: int = 0) -> PARTS:
        generator = torch.Generator().manual_seed(seed)
        width, planes = (WIDTH, 1) if self.mla else (HEADS * WIDTH, 2)
        return [
            tuple(
                torch.randn(COUNT, width, generator=generator).to(self.dtype) for _ in range(planes)
            )
            for _ in range(LAYERS)
        ]

    def store(self, tokens: Any, kv: PARTS) -> None:
        self.engine.store(tokens, kvcaches=kv)
        assert self.plugin._objects.store.drain(60)

    def retrieve(self, tokens: Any) -> tuple[int, PARTS]:
        out = [tuple(torch.zeros_like(part) for part in parts) for parts in self.kv()]
        if not self.loading:
            return int(self.engine.retrieve(tokens, kvcaches=out).sum()), out
        Engine.number += 1
        name = f"request-{Engine.number}"
        self.engine.async_lookup_and_prefetch(name, tokens=tokens, pin=True)
        promised = self.answers.get(timeout=60)
        count = 0
        if promised:
            count = int(self.engine.retrieve(tokens, kvcaches=out, req_id=name).sum())
        assert count == promised
        return count, out

    def keys(self, tokens: Any) -> list[Any]:
        return [key for _, _, key in self.engine.token_database.process_tokens(tokens=tokens)]

    def path(self, key: Any) -> Path:
        filed = self.plugin._filed(key)
        view = self.plugin._objects.view(filed, self.plugin._form)
        return Path(self.plugin._objects.store.backend.locate(view.key_name(filed.key)))

    def close(self) -> None:
        assert self.engine.storage_manager.memcheck()
        self.builder.destroy(self.name)


def same(one: PARTS, other: PARTS, count: int) -> bool:
    return all(
        torch.equal(a[:count], b[:count])
        for x, y in zip(one, other, strict=True)
        for a, b in zip(x, y, strict=True)
    )


class Server:
    """The storage manager of ``lmcache server`` with the L2 adapter."""

    def __init__(self, root: Path, **settings: Any) -> None:
        from lmcache.v1.distributed.config import (
            EvictionConfig,
            L1ManagerConfig,
            L1MemoryManagerConfig,
            StorageManagerConfig,
        )
        from lmcache.v1.distributed.l2_adapters.config import (
            add_l2_adapters_args,
            parse_args_to_l2_adapters_config,
        )
        from lmcache.v1.distributed.storage_manager import StorageManager

        adapter = {
            "type": "plugin", "module_path": "kvformat.integrations.lmcache",
            "class_name": "KvformatL2Adapter",
            "adapter_params": {"url": str(root), "quality": "exact", **settings},
        }  # fmt: skip
        parser = argparse.ArgumentParser()
        add_l2_adapters_args(parser)
        chosen = parser.parse_args(["--l2-adapter", json.dumps(adapter)])
        memory = L1MemoryManagerConfig(64 << 20, use_lazy=False, shm_name="")
        self.manager = StorageManager(
            StorageManagerConfig(
                l1_manager_config=L1ManagerConfig(memory),
                eviction_config=EvictionConfig("LRU"),
                l2_adapter_config=parse_args_to_l2_adapters_config(chosen),
            )
        )

    @property
    def adapter(self) -> Any:
        (found,) = self.manager._l2_adapters.values()
        return found

    def write(self, keys: list[Any], tensors: list[Any]) -> None:
        """Into L1, from there to the store, and out of L1 again."""
        from lmcache.v1.distributed.api import MemoryLayoutDesc

        layout = MemoryLayoutDesc([tensors[0].shape], [tensors[0].dtype])
        for key, item in self.manager.reserve_write(keys, layout).items():
            item.get_tensor(0).copy_(tensors[keys.index(key)])
        self.manager.finish_write(keys)

    def forget(self, keys: list[Any]) -> None:
        """Delete from L1 once L1 lets go of them."""
        wait_for(lambda: self.manager.delete_l1_keys(keys, force=True) or True)

    def read(self, keys: list[Any], like: Any) -> list[Any]:
        """The first of ``keys`` that come back from the store, as tensors."""
        from lmcache.v1.distributed import api

        layout = api.MemoryLayoutDesc([like.shape], [like.dtype])
        group = api.GroupedObjectKeys(keys=keys, object_group_id=0, layout_desc=layout)
        handle = self.manager.submit_prefetch_task(api.PrefetchTaskSpec(key_groups=[group]))
        assert self.manager.wait_prefetch_status(handle, 60)
        status = self.manager.query_prefetch_status(handle)
        count = sum(cell.popcount() for cell in status.hit_cells)
        if not count:
            return []
        with self.manager.read_prefetched_results(keys[:count]) as found:
            tensors = [item.get_tensor(0).clone() for item in found]
        self.manager.finish_read_prefetched(keys[:count])
        return tensors

    def close(self) -> None:
        self.manager.close()


def wait_for(ready: Callable[[], Any], limit_s: float = 60.0) -> None:
    """Until something that other threads do is done."""
    end = time.monotonic() + limit_s
    while not ready():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.02)


def object_key(number: int, *, salt: str = "", model: str = MODEL) -> Any:
    from lmcache.v1.distributed.api import ObjectKey

    rank = ObjectKey.ComputeKVRank(1, 0, 1, 0)
    return ObjectKey(bytes([number] * 8), model, rank, cache_salt=salt)
