"""The storage plugin of LMCache's in-process engine.

``storage_plugins: [kvformat]`` with ``extra_config`` keys ``storage_plugin.kvformat.module_path``,
``.class_name`` and the settings under the same prefix. The engine does not catch what a backend
raises, so nothing here raises: a get that fails is a miss, a put that fails is counted. An object
is copied while it is put; encoding happens in the store's own process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

import kvformat
from kvformat.errors import KvformatError, UsageError
from kvformat.identity import EngineKey
from kvformat.integrations.lmcache.geometry import Form, Geometry
from kvformat.integrations.lmcache.objects import Filed, Objects, settings_of
from kvformat.store.backend import Hold

SETTING: Final = "storage_plugin."
SELECTORS: Final = ("module_path", "class_name")
READERS: Final = 4
MOST_LOOKUPS: Final = 1024
_log = logging.getLogger("kvformat.lmcache")


class KvformatStoragePlugin(StoragePluginInterface):
    """Raises ``UsageError`` for settings that cannot be used; LMCache then runs without it."""

    def __init__(
        self,
        config: Any = None,
        dst_device: str = "cpu",
        metadata: Any = None,
        local_cpu_backend: Any = None,
        loop: Any = None,
    ) -> None:
        super().__init__(
            dst_device=dst_device, config=config, metadata=metadata,
            local_cpu_backend=local_cpu_backend, loop=loop,
        )  # fmt: skip
        self._metadata, self._cpu = metadata, local_cpu_backend
        settings = settings_of(_own_settings(config.extra_config or {}))
        if getattr(config, "use_layerwise", False):
            raise UsageError("usage.argument", "LMCache's layerwise objects are not supported",
                             where="use_layerwise", expected="false")  # fmt: skip
        self._hash = settings.own.get("hash_algorithm") or str(
            getattr(config, "pre_caching_hash_algorithm", "unknown")
        )
        self._unfull = bool(getattr(config, "save_unfull_chunk", False))
        self._objects = Objects(settings, Geometry.parse(settings.own) or _geometry(metadata))
        self._chunk = int(metadata.chunk_size)
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="kvformat-read")
        self._lock = threading.Lock()
        self._lookups: dict[str, list[CacheEngineKey]] = {}
        self._pins: defaultdict[CacheEngineKey, list[Hold]] = defaultdict(list)

    def __str__(self) -> str:
        return "KvformatStoragePlugin"

    @property
    def _form(self) -> Form:
        """As the metadata say now: the engine completes them after the plugin is made."""
        return self._objects.form(
            self._metadata.get_shapes(self._chunk), self._metadata.get_dtypes()
        )

    def contains(self, key: CacheEngineKey, pin: bool = False) -> bool:
        """As the base class says; with ``pin``, it is also held."""
        try:
            filed = self._filed(key)
            found = self._objects.view(filed, self._form).contains_key(filed.key)
            return found and (not pin or self.pin(key))
        except Exception:
            _log.exception("a lookup failed")
            return False

    def exists_in_put_tasks(self, key: CacheEngineKey) -> bool:
        """As the base class says."""
        return self._objects.pending(self._filed(key), self._form)

    def batched_submit_put_task(
        self,
        keys: Sequence[CacheEngineKey],
        objs: Sequence[MemoryObj],
        transfer_spec: Any = None,  # noqa: ARG002
        on_complete_callback: Callable[[CacheEngineKey], None] | None = None,
    ) -> None:
        """As the base class says; objects are copied before it returns, so it has no futures."""
        for key, item in zip(keys, objs, strict=True):
            try:
                self._objects.put(self._filed(key), item)
            except Exception:
                _log.exception("an object cannot be stored")
                continue
            if on_complete_callback is not None:
                with contextlib.suppress(Exception):
                    on_complete_callback(key)

    async def async_batched_submit_put_task(
        self,
        keys: Sequence[CacheEngineKey],
        objs: Sequence[MemoryObj],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[CacheEngineKey], None] | None = None,
    ) -> None:
        """As the base class says."""
        self.batched_submit_put_task(keys, objs, transfer_spec, on_complete_callback)

    def get_blocking(self, key: CacheEngineKey) -> MemoryObj | None:
        """The object, or None for whatever reason it cannot be had."""
        try:
            return self._get(key)
        except Exception:
            _log.exception("an object cannot be loaded")
            return None

    def _get(self, key: CacheEngineKey) -> MemoryObj | None:
        filed = self._filed(key)
        tokens = self._tokens(filed)
        if tokens is None or self._cpu is None:
            return None
        item = self._cpu.allocate(
            self._metadata.get_shapes(tokens), self._metadata.get_dtypes(), self._format()
        )
        if item is None:
            return None
        good = False
        try:
            good = self._objects.fill(filed, item)
        finally:
            if not good:
                item.ref_count_down()
        return item if good else None

    def _tokens(self, filed: Filed) -> int | None:
        """How many tokens the object has; only a last, unfull chunk may have fewer."""
        view = self._objects.view(filed, self._form)
        if not self._unfull:
            return self._chunk
        if self._form.groups is None or not view.contains_key(filed.key):
            return self._chunk if self._form.groups is None else None
        place = self._objects.store.backend.locate(view.key_name(filed.key))
        try:
            with kvformat.open(place) as artifact:
                return min(artifact.manifest.tokens.count, self._chunk)
        except KvformatError:
            return self._chunk  # whatever is wrong with it is counted when it is loaded

    def _format(self) -> MemoryFormat:
        return MemoryFormat.KV_MLA_FMT if self._metadata.use_mla else MemoryFormat.KV_2LTD

    def get_non_blocking(
        self,
        key: CacheEngineKey,
        location: str | None = None,  # noqa: ARG002
    ) -> Future[MemoryObj | None]:
        """As the base class says."""
        return self._pool.submit(self.get_blocking, key)

    async def batched_async_contains(
        self,
        lookup_id: str,
        keys: list[CacheEngineKey],
        pin: bool = False,
    ) -> int:
        """How many of the first keys are there, in order; with ``pin``, held until they are got.

        LMCache gives no sign of its own that such a lookup is over.
        """
        loop = asyncio.get_running_loop()
        count = int(await loop.run_in_executor(self._pool, self.batched_contains, keys, pin))
        if pin and count:
            with self._lock:
                self._lookups[lookup_id] = list(keys[:count])
                oldest = next(iter(self._lookups)) if len(self._lookups) > MOST_LOOKUPS else None
            if oldest is not None:
                self.cancel_request(oldest)
        return count

    def cancel_request(self, req_id: str) -> None:
        """Let go of what a lookup holds."""
        with self._lock:
            keys = self._lookups.pop(req_id, [])
        for key in keys:
            self.unpin(key)

    async def batched_get_non_blocking(
        self,
        lookup_id: str,
        keys: list[CacheEngineKey],
        transfer_spec: Any = None,  # noqa: ARG002
    ) -> list[MemoryObj]:
        """The objects up to the first that cannot be had: LMCache pairs them with keys by place."""
        loop = asyncio.get_running_loop()
        found = await asyncio.gather(
            *[loop.run_in_executor(self._pool, self.get_blocking, key) for key in keys]
        )
        self.cancel_request(lookup_id)
        good: list[MemoryObj] = []
        for number, item in enumerate(found):
            if item is None:
                for rest in found[number + 1 :]:
                    if rest is not None:
                        rest.ref_count_down()
                break
            good.append(item)
        return good

    def pin(self, key: CacheEngineKey) -> bool:
        """Keep it from being evicted until as many ``unpin``; whether it is there."""
        filed = self._filed(key)
        hold = self._objects.view(filed, self._form).hold_key(filed.key)
        if hold is None:
            return False
        with self._lock:
            self._pins[key].append(hold)
        return True

    def unpin(self, key: CacheEngineKey) -> bool:
        """As the base class says; more often than ``pin`` does nothing."""
        with self._lock:
            holds = self._pins.get(key)
            hold = holds.pop() if holds else None
            if not holds:
                self._pins.pop(key, None)
        if hold is not None:
            hold.release()
        return True

    def remove(self, key: CacheEngineKey, force: bool = True) -> bool:  # noqa: ARG002
        """As the base class says; what a reader holds stays."""
        filed = self._filed(key)
        return self._objects.view(filed, self._form).remove_key(filed.key)

    def touch_cache(self) -> None:
        """Nothing: the store marks what is loaded as used."""

    def get_allocator_backend(self) -> Any:
        """As the base class says."""
        return self._cpu

    def close(self) -> None:
        """As the base class says."""
        self._pool.shutdown(wait=True)
        for key in list(self._pins):
            while key in self._pins:
                self.unpin(key)
        self._objects.close()

    def _filed(self, key: CacheEngineKey) -> Filed:
        world = max(int(self._metadata.world_size), 1)
        rank = min(max(int(self._metadata.worker_id), 0), world - 1)
        engine_key = EngineKey("lmcache", self._hash, key.to_string(), rank, world)
        return Filed(str(key.model_name), None, engine_key)


def _own_settings(extra: dict[str, Any]) -> dict[str, Any]:
    """Settings below ``storage_plugin.<name>.``, of the one plugin that names this class."""
    names = [
        key.removeprefix(SETTING).removesuffix(".class_name")
        for key, value in extra.items()
        if key.startswith(SETTING)
        and key.endswith(".class_name")
        and value == "KvformatStoragePlugin"
    ]
    if len(names) != 1:
        raise UsageError(
            "usage.argument", "one storage plugin must name this class",
            where="extra_config", expected=f"one {SETTING}<name>.class_name", found=len(names),
        )  # fmt: skip
    prefix = f"{SETTING}{names[0]}."
    return {
        key.removeprefix(prefix): value
        for key, value in extra.items()
        if key.startswith(prefix) and key.removeprefix(prefix) not in SELECTORS
    }


def _geometry(metadata: Any) -> Geometry | None:
    """What the engine's metadata says: ``kv_shape`` is (layers, planes, chunk, heads, head dim)."""
    if metadata.use_mla:
        return Geometry("latent")
    _, planes, _, heads, head_dim = metadata.kv_shape
    return Geometry("kv", int(heads), int(head_dim)) if planes == 2 else None
