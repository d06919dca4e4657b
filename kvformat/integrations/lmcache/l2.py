"""The L2 adapter of LMCache's multi-process mode (``lmcache server``).

LMCache calls from two threads and never waits: every call starts a task, whose end an event file
descriptor announces. A store task ends when its objects are published or refused, since LMCache
then gives up its own copy. Lookups hold what they find until ``submit_unlock``, so that eviction
spares it. Objects have the form that LMCache said last for their model and group, so that keys
alone lead to a namespace.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Generic, TypeVar

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.platform import create_event_notifier

from kvformat.identity import EngineKey
from kvformat.integrations.lmcache.geometry import Form, Geometry
from kvformat.integrations.lmcache.objects import Filed, Objects, settings_of
from kvformat.store.backend import Hold

T = TypeVar("T")
LOADERS: Final = 4
STORE_LIMIT_S: Final = 120.0
_log = logging.getLogger("kvformat.lmcache")


class Tasks(Generic[T]):
    """Tasks of one kind in threads, their results, and the descriptor that announces them."""

    def __init__(self, threads: int, name: str) -> None:
        self._notifier = create_event_notifier()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"kvformat-{name}")
        self._lock = threading.Lock()
        self._next = 0
        self._results: dict[int, T] = {}

    def fileno(self) -> int:
        """The event descriptor."""
        return int(self._notifier.fileno())

    def submit(self, work: Callable[[], T], otherwise: T) -> int:
        """Start ``work``; if it raises, the result is ``otherwise``."""
        with self._lock:
            number = self._next
            self._next += 1

        def run() -> None:
            try:
                result = work()
            except Exception:
                _log.exception("a task failed")
                result = otherwise
            with self._lock:
                self._results[number] = result
            self._notifier.notify()

        self._pool.submit(run)
        return number

    def take(self, number: int) -> T | None:
        """The result of one task, once."""
        with self._lock:
            return self._results.pop(number, None)

    def take_all(self) -> dict[int, T]:
        """All results that were not taken."""
        with self._lock:
            found, self._results = self._results, {}
            return found

    def close(self) -> None:
        """Wait for what runs."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._notifier.close()


class KvformatL2Adapter(L2AdapterInterface):
    """``adapter_params``: ``url``, options of the store, ``heads`` and ``head_dim`` of a rank.

    Without a geometry objects are stored as opaque bytes. ``limit_bytes`` is also the capacity
    that LMCache's own eviction sees. Raises ``UsageError`` for settings that cannot be used.
    """

    def __init__(self, adapter_params: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        del l1_memory_desc
        settings = settings_of(adapter_params)
        super().__init__(max_capacity_bytes=settings.options.limit_bytes or 0)
        self._objects = Objects(settings, Geometry.parse(settings.own))
        self._hash = settings.own.get("hash_algorithm", "unknown")
        self._storing: Tasks[L2StoreResult] = Tasks(1, "store")
        self._looking: Tasks[Any] = Tasks(1, "lookup")
        self._loading: Tasks[Any] = Tasks(1, "load")
        self._readers = ThreadPoolExecutor(LOADERS, thread_name_prefix="kvformat-read")
        self._lock = threading.Lock()
        self._forms: dict[tuple[str, int], Form] = {}
        self._holds: defaultdict[ObjectKey, list[Hold]] = defaultdict(list)
        self._sizes: dict[ObjectKey, int] = {}
        self._closed = False

    def get_store_event_fd(self) -> int:
        """As the base class says."""
        return self._storing.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        """As the base class says."""
        return self._looking.fileno()

    def get_load_event_fd(self) -> int:
        """As the base class says."""
        return self._loading.fileno()

    def get_memory_tags(self) -> Any:
        """Demanded from LMCache 0.5.7 on, which has the types."""
        from lmcache.v1.distributed import api

        remote = "://" in self._objects.settings.url
        residency = api.MemoryResidency.REMOTE if remote else api.MemoryResidency.LOCAL
        return api.MemoryTags(api.MemorySegment.STORAGE, residency)

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """As the base class says; succeeds if every object is in the store afterwards."""
        return self._storing.submit(
            lambda: self._store(list(keys), list(objects)), L2StoreResult(False, 0)
        )

    def _store(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> L2StoreResult:
        forms = []
        for key, item in zip(keys, objects, strict=True):
            form = self._learn(key, self._objects.form_of_object(item))
            forms.append(form)
            self._objects.put(self._filed(key), item)
        self._objects.store.drain(STORE_LIMIT_S)
        stored, sizes, transferred, there = [], [], 0, 0
        for key, form, item in zip(keys, forms, objects, strict=True):
            filed = self._filed(key)
            if not self._objects.view(filed, form).contains_key(filed.key):
                continue
            size = self._objects.stored_bytes(filed, form) or len(item.byte_array)
            transferred += size
            there += 1
            with self._lock:
                known = self._sizes.get(key)
                self._sizes[key] = size
            if known is None:
                stored.append(key)
                sizes.append(size)
        if stored:
            self._notify_keys_stored(stored, sizes)
        return L2StoreResult(there == len(keys), transferred)

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """As the base class says."""
        return self._storing.take_all()

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """As the base class says: what is found is held until ``submit_unlock``."""
        forms = {
            group: self._objects.form(layout.shapes, layout.dtypes)
            for group, layout in (group_layout_descs or {}).items()
        }
        return self._looking.submit(lambda: self._look_up(list(keys), forms), Bitmap(len(keys)))

    def _look_up(self, keys: Sequence[ObjectKey], forms: Mapping[int, Form]) -> Any:
        found = Bitmap(len(keys))
        for number, key in enumerate(keys):
            if key.object_group_id in forms:
                self._learn(key, forms[key.object_group_id])
            form = self._form(key)
            filed = self._filed(key)
            if form is None:
                continue
            view = self._objects.view(filed, form)
            hold = view.hold_key(filed.key) if view.contains_key(filed.key) else None
            if hold is None:
                continue
            with self._lock:
                self._holds[key].append(hold)
            found.set(number)
        return found

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """As the base class says."""
        return self._looking.take(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """As the base class says; unlocking more often than locking does nothing."""
        for key in keys:
            with self._lock:
                holds = self._holds.get(key)
                hold = holds.pop() if holds else None
                if not holds:
                    self._holds.pop(key, None)
            if hold is not None:
                hold.release()

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """As the base class says."""
        return self._loading.submit(
            lambda: self._load(list(keys), list(objects)), Bitmap(len(keys))
        )

    def _load(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> Any:
        loaded = Bitmap(len(keys))
        results = self._readers.map(self._fill, keys, objects)
        good = [number for number, result in enumerate(results) if result]
        for number in good:
            loaded.set(number)
        if good:
            self._notify_keys_accessed([keys[number] for number in good])
        return loaded

    def _fill(self, key: ObjectKey, item: MemoryObj) -> bool:
        try:
            return self._objects.fill(self._filed(key), item)
        except Exception:
            _log.exception("an object cannot be loaded")
            return False

    def query_load_result(self, task_id: int) -> Any:
        """As the base class says."""
        return self._loading.take(task_id)

    def delete(self, keys: list[ObjectKey]) -> None:
        """As the base class says; what a reader holds stays."""
        gone, sizes = [], []
        for key in keys:
            form, filed = self._form(key), self._filed(key)
            if form is None:
                continue
            size = self._objects.stored_bytes(filed, form)
            if not self._objects.view(filed, form).remove_key(filed.key):
                continue
            with self._lock:
                known = self._sizes.pop(key, None)
            if known is not None:
                gone.append(key)
                sizes.append(known)
            elif size is not None:
                _log.debug("deleted an object of %d bytes that another process stored", size)
        if gone:
            self._notify_keys_deleted(gone, sizes)

    def report_status(self) -> dict[str, Any]:
        """As the base class says, with the counters of the store."""
        store = self._objects.store
        return {
            "is_healthy": store.breaker.allows() and not store.closed,
            "objects_held": sum(len(holds) for holds in self._holds.values()),
            "misses": store.metrics.value("misses"),
            "refusals": store.metrics.value("refusals"),
        }

    def close(self) -> None:
        """As the base class says."""
        if self._closed:
            return
        self._closed = True
        for tasks in (self._storing, self._looking, self._loading):
            tasks.close()
        self._readers.shutdown(wait=True)
        self.submit_unlock([key for key, holds in list(self._holds.items()) for _ in holds])
        self._objects.close()

    def _learn(self, key: ObjectKey, form: Form) -> Form:
        with self._lock:
            self._forms[key.model_name, key.object_group_id] = form
        return form

    def _form(self, key: ObjectKey) -> Form | None:
        with self._lock:
            return self._forms.get((key.model_name, key.object_group_id))

    def _filed(self, key: ObjectKey) -> Filed:
        """``kv_rank`` is world size, rank, local world size and local rank, 8 bits each."""
        world, rank = key.kv_rank >> 24 & 0xFF, key.kv_rank >> 16 & 0xFF
        if rank >= world:
            world, rank = 1, 0
        text = f"{key.chunk_hash.hex()}@{key.object_group_id}@{key.kv_rank:08x}"
        return Filed(
            key.model_name,
            key.cache_salt or None,
            EngineKey("lmcache-mp", self._hash, text, rank, world),
        )
