"""Counters and histograms of a store, kept in the process; ``prometheus`` shows them as text.

Names follow Prometheus: seconds, bytes, ``_total`` for counters. Labels are few and bounded: they
never hold a model, a tenant or a hash.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
BUCKETS_RATIO: Final = (0.1, 0.25, 0.5, 0.75, 0.9, 1.1, 1.5, 2, 4, 10)
BUCKETS_PROBES: Final = (1, 2, 4, 6, 8, 10, 12, 16, 24)

COUNTERS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "lookups": ("Lookups by result", ("result",)),
    "lookup_tokens": ("Tokens of lookups: asked in whole blocks, and found", ("kind",)),
    "loads": ("Extents loaded, by verdict, quality and codec", ("verdict", "quality", "codec")),
    "loaded_tokens": ("Tokens restored and verified", ("quality",)),
    "loaded_bytes": ("Stored bytes fetched for loads", ("quality", "codec")),
    "misses": ("Extents or lookups not served, by reason", ("reason",)),
    "puts": ("Extents given to the encoder", ()),
    "published": ("Extents published, by codec", ("codec",)),
    "refusals": ("Extents not stored, by reason", ("reason",)),
    "source_bytes": ("Bytes of tensors that were published", ()),
    "written_bytes": ("Bytes written to the store, all encodings", ()),
    "first_bytes": ("Of these, bytes of first encodings", ()),
    "evicted": ("Objects evicted", ()),
    "evicted_bytes": ("Bytes freed by eviction", ()),
    "encoder_restarts": ("Times that the encoder process had to be started again", ()),
    "breaker_opened": ("Times that the store was taken out of the path", ()),
}
HISTOGRAMS: Final[Mapping[str, tuple[str, tuple[str, ...], tuple[float, ...]]]] = {
    "lookup_seconds": ("Time of lookups", (), BUCKETS_S),
    "lookup_probes": ("Questions to the storage per lookup", (), BUCKETS_PROBES),
    "load_seconds": ("Time of loads by quality and codec", ("quality", "codec"), BUCKETS_S),
    "load_actual_over_predicted": ("Time of loads over what the cost model expected",
                                   ("quality", "codec"), BUCKETS_RATIO),
    "put_seconds": ("Time that put takes on the request path", (), BUCKETS_S),
    "encode_seconds": ("Time to encode and publish an extent", ("codec",), BUCKETS_S),
}  # fmt: skip
GAUGES: Final[Mapping[str, str]] = {
    "queue_bytes": "Bytes of tensors that wait for the encoder",
    "queue_extents": "Extents that wait for the encoder",
    "breaker_open": "1 while the store is out of the path",
    "store_bytes": "Size of the store at the last look of this process's encoder",
    "unknown_version_objects": "Objects of versions or names not known here, at that look",
}

Labels = tuple[str, ...]


@dataclass(slots=True)
class Distribution:
    """Observations in buckets; ``counts`` has one more element than ``bounds``."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def observe(self, value: float) -> None:
        """Add one."""
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def number(self) -> int:
        """How many."""
        return sum(self.counts)

    def copy(self) -> Distribution:
        """A snapshot."""
        return Distribution(self.bounds, list(self.counts), self.total)


class Metrics:
    """Safe to share between threads. Unknown names and wrong labels are a ``KeyError``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: dict[tuple[str, Labels], float] = {}
        self._histograms: dict[tuple[str, Labels], Distribution] = {}
        self._gauges: dict[str, float] = {}

    def count(self, name: str, *labels: str, by: float = 1) -> None:
        """Add to a counter."""
        if len(labels) != len(COUNTERS[name][1]):
            raise KeyError(name)
        with self._lock:
            key = (name, labels)
            self._counters[key] = self._counters.get(key, 0) + by

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Add to a histogram."""
        _, wanted, bounds = HISTOGRAMS[name]
        if len(labels) != len(wanted):
            raise KeyError(name)
        with self._lock:
            self._histograms.setdefault((name, labels), Distribution(bounds)).observe(value)

    def set(self, name: str, value: float) -> None:
        """Set a gauge."""
        if name not in GAUGES:
            raise KeyError(name)
        with self._lock:
            self._gauges[name] = value

    def value(self, name: str, *labels: str) -> float:
        """A counter or gauge, 0 if it was never touched; without labels the sum over all."""
        with self._lock:
            if name in GAUGES:
                return self._gauges.get(name, 0)
            if labels:
                return self._counters.get((name, labels), 0)
            return sum(value for (known, _), value in self._counters.items() if known == name)

    def by_label(self, name: str) -> dict[Labels, float]:
        """All values of a counter."""
        with self._lock:
            return {labels: v for (known, labels), v in self._counters.items() if known == name}

    def distributions(self) -> dict[tuple[str, Labels], Distribution]:
        """A snapshot of all histograms."""
        with self._lock:
            return {key: item.copy() for key, item in self._histograms.items()}

    @property
    def write_amplification(self) -> float | None:
        """Bytes written over what the first encoding of each extent took; None before the first.

        Extents are written once; what makes it more than 1 is a second encoding (``hevc`` of
        popular extents) and the repair of damaged ones.
        """
        written, fresh = self.value("written_bytes"), self.value("first_bytes")
        return written / fresh if fresh else None
