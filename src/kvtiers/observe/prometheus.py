"""Metrics for Prometheus where no engine exports them: a collector of ``prometheus_client``.

Names, labels and buckets are those that an engine would show. It may be scraped on any thread, also
beside an engine that exports the same metrics itself: it takes nothing away. Needs
``prometheus_client``, which ``kvtiers[metrics]`` brings.
"""

from collections.abc import Iterable, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from kvtiers.metrics import Metrics
from kvtiers.metrics.names import BY_NAME, METRICS, Labels, destinations
from kvtiers.metrics.names import Kind as Kinds
from kvtiers.observe.gauges import Gauges

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of ``exposition``."""

_FAMILIES = {
    Kinds.COUNTER: CounterMetricFamily,
    Kinds.GAUGE: GaugeMetricFamily,
    Kinds.HISTOGRAM: HistogramMetricFamily,
}


class TierCollector:
    """Give it to ``prometheus_client.REGISTRY.register``.

    Nothing is shown before the first event of its kind.
    """

    def __init__(
        self, metrics: Metrics, gauges: Gauges, labels: Mapping[str, str] | None = None
    ) -> None:
        """``labels`` go with every metric, such as the model's name."""
        self._metrics = metrics
        self._gauges = gauges
        self._names = tuple(labels or ())
        self._values = tuple((labels or {}).values())

    def describe(self) -> Iterable[Metric]:
        """All that may ever be shown."""
        return [self._family(name) for name in BY_NAME]

    def collect(self) -> Iterable[Metric]:
        """What there is now."""
        families: dict[str, Metric] = {}
        for name, labels, value in self._counted():
            self._at(families, name).add_metric((*self._values, *labels), value)
        for name, labels, counts in self._observed():
            bounds = [*map(str, BY_NAME[name].buckets), "+Inf"]
            buckets = list(zip(bounds, accumulate(counts[:-1]), strict=True))
            self._at(families, name).add_metric((*self._values, *labels), buckets, counts[-1])
        for (name, labels), value in self._gauges.values.items():
            self._at(families, name).add_metric((*self._values, *labels), value)
        return [families[metric.name] for metric in METRICS if metric.name in families]

    def _counted(self) -> Iterable[tuple[str, Labels, float]]:
        """Counters, added up where several of the fold feed one."""
        sums: dict[tuple[str, Labels], float] = {}
        for (fold, labels), value in self._metrics.totals.items():
            for shown in destinations(fold, labels):
                sums[shown] = sums.get(shown, 0.0) + value
        return [(name, labels, value) for (name, labels), value in sums.items()]

    def _observed(self) -> Iterable[tuple[str, Labels, list[float]]]:
        for (fold, labels), counts in self._metrics.histograms.items():
            for name, shown in destinations(fold, labels):
                yield name, shown, counts

    def _at(self, families: dict[str, Metric], name: str) -> Metric:
        if name not in families:
            families[name] = self._family(name)
        return families[name]

    def _family(self, name: str) -> Metric:
        metric = BY_NAME[name]
        return _FAMILIES[metric.kind](name, metric.doc, labels=(*self._names, *metric.labels))

    def __repr__(self) -> str:
        return f"<TierCollector {self._metrics!r} {self._gauges!r}>"


def exposition(metrics: Metrics, gauges: Gauges, labels: Mapping[str, str] | None = None) -> bytes:
    """One scrape, in Prometheus' text format (``CONTENT_TYPE``)."""
    registry = CollectorRegistry()
    registry.register(TierCollector(metrics, gauges, labels))
    return bytes(generate_latest(registry))
