"""The store itself: backend, encoder process, counters, breaker, and views on it."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Final

from kvformat.closing import ClosedOnExit
from kvformat.groups import Group
from kvformat.identity import Identity
from kvformat.storage import as_text
from kvformat.store.backend import Backend
from kvformat.store.breaker import Breaker
from kvformat.store.faults import BLAMED
from kvformat.store.jobs import ConvertJob
from kvformat.store.lookup import Grid
from kvformat.store.metrics import Metrics
from kvformat.store.names import (
    KEYED,
    WHOLE,
    Namespace,
    ObjectName,
    checked_part,
    model_name,
    quality_name,
    tenant_name,
)
from kvformat.store.options import StoreOptions
from kvformat.store.profiles import StoreProfiles
from kvformat.store.publishing import open_backend
from kvformat.store.queueing import EncoderQueue
from kvformat.store.results import Miss
from kvformat.store.scope import Scope
from kvformat.store.view import View
from kvformat.tracks import EXACT

MOST_REMEMBERED: Final = 100_000
VIDEO: Final = "hevc"


class Store(ClosedOnExit):
    """A directory or object-store prefix, shared by any number of processes and machines.

    Make one per process with ``open_store``; it starts the encoder process at the first ``put``.
    """

    def __init__(self, backend: Backend, options: StoreOptions) -> None:
        self.backend = backend
        self.options = options
        self.profiles = StoreProfiles(options)
        self.metrics = Metrics()
        self.breaker = Breaker(options.breaker_failures, options.breaker_s)
        self.queue = EncoderQueue(backend.url, options, self.metrics, self._next_conversion)
        self.closed = False
        self._lock = threading.Lock()
        self._damaged: OrderedDict[str, None] = OrderedDict()
        self._loads: Counter[ObjectName] = Counter()
        self._converted: set[ObjectName] = set()

    def view(
        self,
        identity: Identity,
        *,
        salt: bytes = b"",
        part: str = WHOLE,
        groups: Sequence[Group] | None = None,
        windowed: bool = False,
        window_tokens: int | None = None,
    ) -> View:
        """The KV of one model for one tenant.

        ``identity`` is compared whole with that of each artifact. ``salt`` is the tenant's secret
        (PRV-1). ``part`` labels which layers and heads an engine's rank holds
        (``names.part_name``); ranks of another topology open other parts. ``groups``, where
        given, must agree with each artifact's in role, dtype, layers, heads and head dim.
        ``windowed`` is for models with sliding windows or states, ``window_tokens`` the largest
        window; only ends that were put can then be served.
        """
        options = self.options
        grid = Grid(options.cell_blocks, self.backend.dense and not windowed)
        keyed = identity.kind == "engine_key"
        namespace = Namespace(
            tenant_name(salt),
            model_name(identity),
            quality_name(options.quality, mixed=options.mixed),
            KEYED if keyed else grid.label,
            checked_part(part),
            options.write_version,
        )
        return View(
            self,
            Scope(
                namespace,
                grid,
                identity,
                salt,
                options.quality,
                None if groups is None else tuple(groups),
                windowed,
                window_tokens,
            ),
        )

    def require_profile(self, identity: Identity, groups: Sequence[Group]) -> None:
        """For engines that want to know while they start: ``options.profile`` fits ``groups``.

        Raises ``profile.missing``, ``profile.content`` or ``usage.argument``; without a profile it
        does nothing. Later the same faults are refusals.
        """
        self.profiles.require(self.options.quality, identity, groups)

    def refuses(self) -> Miss | None:
        """Why nothing may go to the storage now."""
        if self.closed:
            return Miss.CLOSED
        return None if self.breaker.allows() else Miss.BREAKER

    def told(self, miss: Miss) -> None:
        """A fault happened: the breaker counts it if the storage is to blame."""
        if miss not in BLAMED:
            self.breaker.succeeded()
            return
        before = self.breaker.opened
        self.breaker.failed()
        if self.breaker.opened > before:
            self.metrics.count("breaker_opened")

    def loaded(self, names: Sequence[ObjectName]) -> None:
        """Extents were loaded: how popular each is decides what is converted when idle."""
        if self.options.popular_loads is None or self.options.quality == EXACT:
            return
        with self._lock:
            self._loads.update(names)
            if len(self._loads) > MOST_REMEMBERED:
                self._loads = Counter(dict(self._loads.most_common(MOST_REMEMBERED // 2)))

    def _next_conversion(self) -> ConvertJob | None:
        """The most popular extent that has no video yet."""
        least = self.options.popular_loads
        if least is None:
            return None
        with self._lock:
            for name, count in self._loads.most_common():
                if count < least:
                    return None
                if name not in self._converted:
                    self._converted.add(name)
                    return ConvertJob(name, VIDEO)
        return None

    def damaged(self, name: ObjectName) -> None:
        """A reader found it damaged: the next writer of this process may replace it."""
        with self._lock:
            self._damaged[name.path] = None
            if len(self._damaged) > MOST_REMEMBERED:
                self._damaged.popitem(last=False)

    def knows_damage(self) -> bool:
        """Whether a reader of this process complained of anything."""
        return bool(self._damaged)

    def is_damaged(self, name: ObjectName) -> bool:
        """Whether a reader of this process complained of it."""
        with self._lock:
            return name.path in self._damaged

    def repaired(self, name: ObjectName) -> None:
        """It is being replaced."""
        with self._lock:
            self._damaged.pop(name.path, None)

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was put is written or refused; False after the time."""
        return self.queue.drain(timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop the encoder. What is queued is written in the given time, or dropped and counted."""
        self.closed = True
        self.queue.close(timeout_s)


def open_store(url: str, options: StoreOptions | None = None) -> Store:
    """A store at a directory, which is made, or at an fsspec URL of an object store.

    Raises ``UsageError`` and, where the directory cannot be made, ``StorageError``.
    """
    chosen = options or StoreOptions()
    return Store(open_backend(as_text(url), chosen), chosen)
