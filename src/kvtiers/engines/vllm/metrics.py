"""Our metrics as vLLM wants them declared and sent.

vLLM asserts that every metric it is sent was declared, in the API server's process: both are made
from one table, :mod:`kvtiers.metrics.names`.
"""

import math
from collections.abc import Sequence

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from kvtiers.host.parts import HostUse
from kvtiers.metrics import Metrics
from kvtiers.metrics.names import METRICS, SENT_BY_VLLM, Kind, Labels, Metric, destinations
from kvtiers.observe.gauges import INTERVAL_S, Gauges, Values

QUIET_INTERVAL_S = 0.02
"""The least time between two statistics of an engine that has nothing else to do."""
LOOKS_AT_REST = 2
"""How often gauges are read at most before an engine may rest that has nothing else to do: the step
of the first look may change them once more, and one that never stands still wakes nobody."""
ALL_GAUGES_INTERVAL_S = 5.0
"""How often all are sent: of several API servers each gets the statistics of some steps only."""


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """Every metric that ``StatsExporter`` may send."""
    return {metric.name: _declared(metric) for metric in METRICS if not metric.sent_by_vllm}


def _declared(metric: Metric) -> OffloadingMetricMetadata:
    if metric.kind is Kind.HISTOGRAM:
        return OffloadingHistogramMetadata(
            documentation=metric.doc, labelnames=metric.labels, buckets=metric.buckets
        )
    counter = metric.kind is Kind.COUNTER
    kind = OffloadingCounterMetadata if counter else OffloadingGaugeMetadata
    return kind(documentation=metric.doc, labelnames=metric.labels)


def _observe(
    stats: OffloadingConnectorStats, name: str, values: Sequence[float], labels: Labels
) -> None:
    """Have vLLM observe all of these; its method takes one, and is most of what sending costs."""
    first, *others = values
    stats.observe_histogram(name, first, labels)
    stats._values[name][labels] += others


class StatsExporter:
    """Turns what ``Metrics`` gathered into one vLLM stats payload."""

    def __init__(self, metrics: Metrics, gauges: Gauges) -> None:
        self._metrics = metrics
        self._gauges = gauges
        self._sent: Values = {}
        """Gauges as last sent: one that stands still is not sent again in every step."""
        self._taken_at = self._all_sent_at = -math.inf
        self._withheld = False
        """Whether something is known that was not sent."""
        self._looks = LOOKS_AT_REST
        """How often gauges may still be read because they moved."""

    def take(self, use: HostUse, now: float, *, quiet: bool) -> OffloadingConnectorStats | None:
        """What gathered since the last call, and gauges that moved since they were last read.

        None if that is to wait for another step: vLLM asks in every step, and would pay for it in
        every step. It waits less when all is ``quiet``: then the engine steps for this alone.
        """
        waits_s = QUIET_INTERVAL_S if quiet else INTERVAL_S
        self._withheld = now - self._taken_at < waits_s
        if not quiet:
            self.expect()
        if self._withheld:
            return None
        self._taken_at = now
        stats = OffloadingConnectorStats()
        sample = self._metrics.take()
        for (name, labels), value in sample.counters.items():
            for theirs, picked in destinations(name, labels):
                if theirs not in SENT_BY_VLLM:
                    stats.increase_counter(theirs, value, picked)
        for (name, labels), values in sample.observations.items():
            for theirs, picked in destinations(name, labels):
                _observe(stats, theirs, values, picked)
        if self._gauges.refresh(use, now):
            self._looks = max(0, self._looks - 1)
            self._send_gauges(stats, now)
        return stats

    def expect(self) -> None:
        """More is going on than statistics: gauges may move until it is over."""
        self._looks = LOOKS_AT_REST

    def counted(self) -> None:
        """Something was counted after this step's ``take``."""
        self._withheld = True

    def owes(self, use: HostUse) -> bool:
        """Whether a further step is needed, so that what stands at rest is what was sent.

        It is asked when there would be none.
        """
        return self._withheld or (self._looks > 0 and self._gauges.moved(use))

    def _send_gauges(self, stats: OffloadingConnectorStats, now: float) -> None:
        if now - self._all_sent_at >= ALL_GAUGES_INTERVAL_S:
            self._sent, self._all_sent_at = {}, now
        standing = self._gauges.values
        for (name, labels), value in standing.items():
            if self._sent.get((name, labels)) != value:
                stats.set_gauge(name, value, labels)
        self._sent = standing

    def __repr__(self) -> str:
        return f"<StatsExporter {self._metrics!r} {self._gauges!r}>"
