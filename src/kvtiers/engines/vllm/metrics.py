"""Our metrics under vLLM's names: upstream's keep label and meaning, new facts get new names.

vLLM asserts that every metric it is sent was declared, in the API server's process: what
``StatsExporter`` sends and what ``definitions`` declares are therefore made from the same table.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from kvtiers.events import Hop, Reason
from kvtiers.host.parts import HostUse
from kvtiers.metrics import Labels, Metrics
from kvtiers.tiers.base import Usage

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
        "Chunks a hop did not take, by reason; all but the evicted are offered again.",
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
    _Counter(
        "warmed_up",
        _OURS + "warm_up_chunks",
        "Chunks of the hot list: promoted, missing, or not_asked for want of room or time.",
        ("outcome",),
        (0,),
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
_HOST_STATES = ("capacity", "resident", "pinned", "filling")
_TIER_BYTES = _OURS + "tier_bytes"
_TIER_STATES = ("used", "capacity")
_NO_JOBS = (0, 0)
_NOT_KNOWN = (None, None)

GAUGE_INTERVAL_S = 0.1
"""How often gauges in motion are sent; nobody scrapes them more often than that."""
ALL_GAUGES_INTERVAL_S = 5.0
"""How often all are sent: of several API servers each gets the statistics of some steps only."""
_NO_ROOM = _TIERING + "promotion_allocation_failures"
_SKIPPED = "vllm:kv_offload_stores_skipped"
_DROPPED = _TIERING + "backpressure_blocks_dropped"
_DECLINED: dict[tuple[str, str], str] = {
    (Hop.PROMOTE, Reason.NO_ROOM): _NO_ROOM,
    (Hop.STORE, Reason.THRESHOLD): _SKIPPED,
    (Hop.CASCADE, Reason.EVICTED): _DROPPED,
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
        documentation=f"Bytes of host memory: {', '.join(_HOST_STATES)}.",
        labelnames=("state",),
    )
    found[_TIER_BYTES] = OffloadingGaugeMetadata(
        documentation="Bytes of a bounded tier: used, other namespaces included, and capacity.",
        labelnames=("tier", "state"),
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


class LabelledTier(Protocol):
    """What the gauges of a tier are made of."""

    @property
    def label(self) -> str:
        """Its name in metrics."""

    def usage(self) -> Usage | None:
        """How full it is, if that is known."""


class StatsExporter:
    """Turns what ``Metrics`` gathered into one vLLM stats payload."""

    def __init__(self, metrics: Metrics, tiers: Sequence[LabelledTier], slot_bytes: int) -> None:
        self._metrics = metrics
        self._tiers = tuple(tiers)
        self._slot_bytes = slot_bytes
        self._gauges = (
            *((name, ()) for name in _GAUGES),
            *((_HOST_BYTES, (state,)) for state in _HOST_STATES),
            *((name, (tier.label,)) for tier in tiers for name in _TIER_GAUGES),
            *((_TIER_BYTES, (tier.label, state)) for tier in tiers for state in _TIER_STATES),
        )
        self._sent: list[float | None] = [None] * len(self._gauges)
        """Their values as last sent: one that stands still is not sent again in every step."""
        self._sent_at = self._all_sent_at = -math.inf

    def take(self, use: HostUse, now: float) -> OffloadingConnectorStats:
        """What gathered since the last call, and gauges that moved.

        While transfers are in flight gauges move in every step: then they are sampled.
        """
        stats = OffloadingConnectorStats()
        sample = self._metrics.take()
        for (name, labels), value in sample.counters.items():
            for theirs, picked in _destinations(name, labels):
                stats.increase_counter(theirs, value, picked)
        for (name, labels), values in sample.observations.items():
            for value in values:
                stats.observe_histogram(_OBSERVATIONS[name][0], value, labels)
        at_rest = not any(jobs for jobs, _ in self._metrics.active.values()) and not use.filling
        if at_rest or now - self._sent_at >= GAUGE_INTERVAL_S:
            self._send_gauges(stats, self._standing(use), now)
        return stats

    def _send_gauges(
        self, stats: OffloadingConnectorStats, standing: list[float | None], now: float
    ) -> None:
        if now - self._all_sent_at >= ALL_GAUGES_INTERVAL_S:
            self._sent, self._all_sent_at = [None] * len(standing), now
        if standing == self._sent:
            return
        for (name, labels), value, sent in zip(self._gauges, standing, self._sent, strict=True):
            if value is not None and value != sent:
                stats.set_gauge(name, value, labels)
        self._sent, self._sent_at = standing, now

    def _standing(self, use: HostUse) -> list[float | None]:
        """The values of the gauges, in their order."""
        slots, size = use.slots or 1, self._slot_bytes
        values: list[float | None] = [
            (use.pinned + use.filling) / slots,
            use.filling / slots,
            use.pinned / slots,
            use.slots * size,
            use.resident * size,
            use.pinned * size,
            use.filling * size,
        ]
        for tier in self._tiers:
            promoting = self._metrics.active.get((Hop.PROMOTE, tier.label), _NO_JOBS)
            cascading = self._metrics.active.get((Hop.CASCADE, tier.label), _NO_JOBS)
            filled, read = (n * use.per_chunk / slots for n in (promoting[1], cascading[1]))
            values += (filled, read, promoting[0], cascading[0])
        for tier in self._tiers:
            values += tier.usage() or _NOT_KNOWN
        return values

    def __repr__(self) -> str:
        tiers = ", ".join(tier.label for tier in self._tiers) or "no tiers"
        return f"<StatsExporter: {tiers}, slots of {self._slot_bytes} bytes>"


@functools.cache
def _destinations(name: str, labels: Labels) -> tuple[tuple[str, Labels], ...]:
    """Counters of vLLM, with their labels, that a counter of ours feeds."""
    found = [
        (counter.theirs, tuple(str(labels[i]) for i in counter.pick))
        for counter in _COUNTERS
        if counter.ours == name and (counter.hop is None or counter.hop == labels[0])
    ]
    if name == "declined":
        hop, tier, reason = labels
        theirs = _DECLINED.get((hop, reason))
        if theirs is not None:
            found.append((theirs, (tier,) if theirs == _DROPPED else ()))
    return tuple(found)
