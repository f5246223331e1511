"""Our metrics under vLLM's names: upstream's keep label and meaning, new facts get new names.

vLLM asserts that every metric it is sent was declared, in the API server's process: what
``StatsExporter`` sends and what ``definitions`` declares are therefore made from the same table.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from kvtiers.core.manager import HostUse
from kvtiers.events import Hop, Reason
from kvtiers.metrics import Metrics

_CPU = "vllm:kv_offload_cpu_"
_TIERING = "vllm:kv_offload_tiering_"
_OURS = "vllm:kvtiers_"

_FAST_S = (1e-5, 5e-5, 1e-4, 5e-4, 1e-3, 5e-3, 1e-2, 5e-2, 0.1, 0.5, 1.0)
_SLOW_S = (1e-4, 5e-4, 1e-3, 5e-3, 1e-2, 5e-2, 0.1, 0.5, 1.0, 5.0, 10.0)
_CHUNKS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0)


@dataclass(frozen=True, slots=True)
class _Counter:
    """One of our counters and the vLLM counter it feeds; ``pick`` selects labels to pass on."""

    ours: str
    theirs: str
    doc: str
    labels: tuple[str, ...]
    pick: tuple[int, ...]
    hop: Hop | None = None
    """Only events of this hop count."""


_COUNTERS = (
    _Counter(
        "lookups", _TIERING + "chunk_queries", "Chunk lookups a tier resolved.", ("tier",), (0,)
    ),
    _Counter("hits", _TIERING + "chunk_hits", "Chunk lookups a tier had.", ("tier",), (0,)),
    _Counter(
        "bytes",
        _TIERING + "read_bytes",
        "Bytes read from a secondary tier into host memory.",
        ("tier",),
        (1,),
        Hop.PROMOTE,
    ),
    _Counter(
        "seconds",
        _TIERING + "read_time",
        "Seconds spent reading from a secondary tier into host memory.",
        ("tier",),
        (1,),
        Hop.PROMOTE,
    ),
    _Counter(
        "bytes",
        _TIERING + "write_bytes",
        "Bytes written from host memory to a secondary tier.",
        ("tier",),
        (1,),
        Hop.CASCADE,
    ),
    _Counter(
        "seconds",
        _TIERING + "write_time",
        "Seconds spent writing from host memory to a secondary tier.",
        ("tier",),
        (1,),
        Hop.CASCADE,
    ),
    _Counter(
        "jobs_failed",
        _TIERING + "promotion_job_failures",
        "Promotion jobs of which at least one chunk failed.",
        ("tier",),
        (1,),
        Hop.PROMOTE,
    ),
    _Counter(
        "jobs_failed",
        _TIERING + "cascade_job_failures",
        "Cascade jobs of which at least one chunk failed.",
        ("tier",),
        (1,),
        Hop.CASCADE,
    ),
    _Counter("stored", _OURS + "chunks_stored", "Chunks that became resident.", ("tier",), (0,)),
    _Counter(
        "removed",
        _OURS + "chunks_removed",
        "Chunks that are resident no more, by reason.",
        ("tier", "reason"),
        (0, 1),
    ),
    _Counter(
        "declined",
        _OURS + "chunks_declined",
        "Chunks a hop did not take, by reason; they are offered again when they can be.",
        ("hop", "tier", "reason"),
        (0, 1, 2),
    ),
    _Counter(
        "chunks_failed",
        _OURS + "chunks_failed",
        "Chunks a job failed to move, by reason.",
        ("hop", "tier", "reason"),
        (0, 1, 2),
    ),
)
_OBSERVATIONS = {
    "lookup_seconds": (
        _TIERING + "lookup_sync_delay_seconds",
        "Seconds inside a chunk lookup (sampled).",
        ("tier",),
        _FAST_S,
    ),
    "lookup_waited_seconds": (
        _TIERING + "lookup_async_delay_seconds",
        "Seconds from a chunk lookup's first retry to its verdict.",
        ("tier",),
        _SLOW_S,
    ),
    "store_offered": (
        _CPU + "allocation_size",
        "Chunks that one store asked room for.",
        (),
        _CHUNKS,
    ),
}
_GAUGES = {
    _CPU + "cache_usage_perc": "Fraction of host slots pinned by transfers of any kind.",
    _CPU + "cache_write_usage_perc": "Fraction of host slots being filled.",
    _CPU + "cache_read_usage_perc": "Fraction of host slots being read by transfers.",
}
_TIER_GAUGES = {
    _TIERING + "primary_write_usage_perc": "Fraction of host slots promotions of a tier fill.",
    _TIERING + "primary_read_usage_perc": "Fraction of host slots cascades to a tier read.",
    _TIERING + "active_promotion_jobs": "Promotion jobs in flight.",
    _TIERING + "active_cascade_jobs": "Cascade jobs in flight.",
}
_HOST_BYTES = _OURS + "host_bytes"
_NO_ROOM = _TIERING + "promotion_allocation_failures"
_SKIPPED = "vllm:kv_offload_stores_skipped"
_DROPPED = _TIERING + "backpressure_blocks_dropped"
_DECLINED = {
    (Hop.PROMOTE.value, Reason.NO_ROOM.value): _NO_ROOM,
    (Hop.STORE.value, Reason.THRESHOLD.value): _SKIPPED,
    (Hop.CASCADE.value, Reason.EVICTED.value): _DROPPED,
}
"""vLLM's counters of declined chunks, by hop and reason."""


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """Every metric that ``StatsExporter`` may send."""
    found: dict[str, OffloadingMetricMetadata] = {
        c.theirs: OffloadingCounterMetadata(documentation=c.doc, labelnames=c.labels)
        for c in _COUNTERS
    }
    for name, doc, labels, buckets in _OBSERVATIONS.values():
        found[name] = OffloadingHistogramMetadata(
            documentation=doc, labelnames=labels, buckets=buckets
        )
    for name, doc in _GAUGES.items():
        found[name] = OffloadingGaugeMetadata(documentation=doc)
    for name, doc in _TIER_GAUGES.items():
        found[name] = OffloadingGaugeMetadata(documentation=doc, labelnames=("tier",))
    found[_HOST_BYTES] = OffloadingGaugeMetadata(
        documentation="Bytes of host memory: capacity, resident, pinned, filling.",
        labelnames=("state",),
    )
    found[_NO_ROOM] = OffloadingCounterMetadata(
        documentation="Promotions for which host memory had no room."
    )
    found[_SKIPPED] = OffloadingCounterMetadata(
        documentation="Stores skipped because store_threshold was not reached."
    )
    found[_DROPPED] = OffloadingCounterMetadata(
        documentation="Chunks that left host memory before a slow tier took them.",
        labelnames=("tier",),
    )
    return found


class StatsExporter:
    """Turns what ``Metrics`` gathered into one vLLM stats payload."""

    def __init__(self, metrics: Metrics, tiers: Sequence[str], slot_bytes: int) -> None:
        """``tiers``: labels of the secondary tiers."""
        self._metrics = metrics
        self._tiers = tuple(tiers)
        self._slot_bytes = slot_bytes

    def take(self, use: HostUse) -> OffloadingConnectorStats:
        """What gathered since the last call, and how things stand now."""
        stats = OffloadingConnectorStats()
        sample = self._metrics.take()
        for (name, labels), value in sample.counters.items():
            self._count(stats, name, labels, value)
        for (name, labels), values in sample.observations.items():
            for value in values:
                stats.observe_histogram(_OBSERVATIONS[name][0], value, labels)
        self._stand(stats, use)
        return stats

    def _count(
        self, stats: OffloadingConnectorStats, name: str, labels: tuple[str, ...], value: float
    ) -> None:
        for counter in _COUNTERS:
            if counter.ours == name and counter.hop in (None, _hop(labels)):
                picked = tuple(labels[i] for i in counter.pick)
                stats.increase_counter(counter.theirs, value, picked)
        if name == "declined":
            hop, tier, reason = labels
            theirs = _DECLINED.get((hop, reason))
            if theirs is not None:
                stats.increase_counter(theirs, value, (tier,) if theirs == _DROPPED else ())

    def _stand(self, stats: OffloadingConnectorStats, use: HostUse) -> None:
        slots = use.slots or 1
        for name, used in zip(
            _GAUGES, (use.pinned + use.filling, use.filling, use.pinned), strict=True
        ):
            stats.set_gauge(name, used / slots)
        for state, used in (
            ("capacity", use.slots),
            ("resident", use.resident),
            ("pinned", use.pinned),
            ("filling", use.filling),
        ):
            stats.set_gauge(_HOST_BYTES, used * self._slot_bytes, (state,))
        for tier in self._tiers:
            promoting = self._metrics.active.get((Hop.PROMOTE, tier), (0, 0))
            cascading = self._metrics.active.get((Hop.CASCADE, tier), (0, 0))
            values = (promoting[1] / slots, cascading[1] / slots, promoting[0], cascading[0])
            for name, value in zip(_TIER_GAUGES, values, strict=True):
                stats.set_gauge(name, value, (tier,))

    def __repr__(self) -> str:
        tiers = ", ".join(self._tiers) or "no tiers"
        return f"<StatsExporter: {tiers}, slots of {self._slot_bytes} bytes>"


def _hop(labels: tuple[str, ...]) -> Hop | None:
    return Hop(labels[0]) if labels[0] in (h.value for h in Hop) else None
