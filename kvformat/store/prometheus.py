"""The metrics of a store for Prometheus, through ``prometheus-client`` (extra ``metrics``)."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvformat.store.metrics import COUNTERS, GAUGES, HISTOGRAMS, Metrics

PREFIX = "kvformat_store_"


class StoreCollector(Collector):
    """Register it: ``REGISTRY.register(StoreCollector(store.metrics))``."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """All families, also those without a value yet."""
        for name, (text, labels) in COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=labels)
            values = self._metrics.by_label(name) or ({} if labels else {(): 0.0})
            for found, value in values.items():
                counter.add_metric(found, value)
            yield counter
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(PREFIX + name, text, value=self._metrics.value(name))
        amplification = self._metrics.write_amplification
        if amplification is not None:
            text = "Bytes written over bytes of first encodings"
            yield GaugeMetricFamily(PREFIX + "write_amplification", text, value=amplification)
        yield from self._histograms()

    def _histograms(self) -> Iterator[Metric]:
        found = self._metrics.distributions()
        for name, (text, labels, bounds) in HISTOGRAMS.items():
            family = HistogramMetricFamily(PREFIX + name, text, labels=labels)
            for (known, values), item in found.items():
                if known != name:
                    continue
                below, buckets = 0, []
                for bound, count in zip((*map(str, bounds), "+Inf"), item.counts, strict=True):
                    below += count
                    buckets.append((bound, below))
                family.add_metric(values, buckets, item.total)
            yield family


def prometheus_text(metrics: Metrics) -> bytes:
    """The metrics in the text format of Prometheus."""
    registry = CollectorRegistry()
    registry.register(StoreCollector(metrics))
    return generate_latest(registry)
