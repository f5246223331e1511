"""Every metric by its exported name: kind, labels, meaning, and what of the fold feeds it.

One table for all exporters, so that none sends what another does not declare. Names that vLLM's
offloading has keep their labels, buckets and meaning; new facts have names of their own.
"""

import functools
from dataclasses import dataclass, replace
from enum import Enum

from kvtiers.events import Hop, Reason

Labels = tuple[str, ...]

_CPU = "vllm:kv_offload_cpu_"
_TIERING = "vllm:kv_offload_tiering_"
_OURS = "vllm:kvtiers_"

FAST_S = (1e-5, 5e-5, 1e-4, 5e-4, 1e-3, 5e-3, 1e-2, 5e-2, 0.1, 0.5, 1.0)
SLOW_S = (1e-4, 5e-4, 1e-3, 5e-3, 1e-2, 5e-2, 0.1, 0.5, 1.0, 5.0, 10.0)
_JOB_S = (
    *(1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
_STAY_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0, 604800.0)
_DISTANCES = (64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0)
_CHUNKS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0)


class Kind(Enum):
    """What a metric is to Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One exported metric."""

    name: str
    kind: Kind
    doc: str
    labels: Labels = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, ascending, without infinity."""
    fold: str = ""
    """What of ``Metrics`` feeds it; of gauges nothing does."""
    pick: tuple[int, ...] = ()
    """Which labels of that are passed on."""
    only: tuple[tuple[int, str], ...] = ()
    """(label, value) that what counts must have."""
    sent_by_vllm: bool = False
    """Whether vLLM's connector counts it by itself, so that only other exporters send it."""

    def takes(self, labels: Labels) -> bool:
        """Whether what the fold has under ``labels`` counts."""
        return all(labels[i] == value for i, value in self.only)


def _counter(
    name: str, fold: str, doc: str, *labels: str, pick: Labels | None = None, **only: str
) -> Metric:
    """A counter whose fold has the labels ``pick``, by default those that are exported."""
    there = labels if pick is None else pick
    return Metric(
        name,
        Kind.COUNTER,
        doc,
        labels,
        fold=fold,
        pick=tuple(there.index(label) for label in labels),
        only=tuple((there.index(label), value) for label, value in only.items()),
    )


def _histogram(name: str, fold: str, doc: str, buckets: tuple[float, ...], *labels: str) -> Metric:
    pick = tuple(range(len(labels)))
    return Metric(name, Kind.HISTOGRAM, doc, labels, buckets, fold, pick)


def _gauge(name: str, doc: str, *labels: str) -> Metric:
    return Metric(name, Kind.GAUGE, doc, labels)


_MOVED = ("hop", "tier")
_DECLINED = ("hop", "tier", "reason")

USED_FRACTION = _CPU + "cache_usage_perc"
FILLING_FRACTION = _CPU + "cache_write_usage_perc"
PINNED_FRACTION = _CPU + "cache_read_usage_perc"
PROMOTED_FRACTION = _TIERING + "primary_write_usage_perc"
CASCADED_FRACTION = _TIERING + "primary_read_usage_perc"
PROMOTIONS = _TIERING + "active_promotion_jobs"
CASCADES = _TIERING + "active_cascade_jobs"
HOST_BYTES = _OURS + "host_bytes"
TIER_BYTES = _OURS + "tier_bytes"
BACKLOG = _OURS + "backlog_chunks"
QUEUE_JOBS = _OURS + "queue_jobs"
QUEUE_BYTES = _OURS + "queue_bytes"
DISTINCT = _OURS + "distinct_chunks"
TIER_STATE = _OURS + "tier_state"
PEERS = _OURS + "peers"
EVENT_QUEUE = _OURS + "event_queue_chunks"

_UPSTREAM = (
    _counter(_TIERING + "chunk_queries", "lookups", "Chunk lookups a tier resolved.", "tier"),
    _counter(_TIERING + "chunk_hits", "hits", "Chunk lookups a tier had.", "tier"),
    _counter(
        _TIERING + "read_bytes",
        "bytes",
        "Bytes read from a secondary tier into host memory.",
        "tier",
        pick=_MOVED,
        hop=Hop.PROMOTE,
    ),
    _counter(
        _TIERING + "read_time",
        "seconds",
        "Seconds spent reading from a secondary tier into host memory.",
        "tier",
        pick=_MOVED,
        hop=Hop.PROMOTE,
    ),
    _counter(
        _TIERING + "write_bytes",
        "bytes",
        "Bytes written from host memory to a secondary tier.",
        "tier",
        pick=_MOVED,
        hop=Hop.CASCADE,
    ),
    _counter(
        _TIERING + "write_time",
        "seconds",
        "Seconds spent writing from host memory to a secondary tier.",
        "tier",
        pick=_MOVED,
        hop=Hop.CASCADE,
    ),
    _counter(
        _TIERING + "promotion_job_failures",
        "jobs_failed",
        "Promotion jobs of which at least one chunk failed.",
        "tier",
        pick=_DECLINED,
        hop=Hop.PROMOTE,
    ),
    _counter(
        _TIERING + "cascade_job_failures",
        "jobs_failed",
        "Cascade jobs of which at least one chunk failed.",
        "tier",
        pick=_DECLINED,
        hop=Hop.CASCADE,
    ),
    _counter(
        _TIERING + "promotion_allocation_failures",
        "declined",
        "Promotions for which host memory had no room.",
        pick=_DECLINED,
        hop=Hop.PROMOTE,
        reason=Reason.NO_ROOM,
    ),
    _counter(
        "vllm:kv_offload_stores_skipped",
        "declined",
        "Stores skipped because store_threshold was not reached.",
        pick=_DECLINED,
        hop=Hop.STORE,
        reason=Reason.THRESHOLD,
    ),
    _counter(
        _TIERING + "backpressure_blocks_dropped",
        "declined",
        "Chunks that left host memory before a slow tier took them.",
        "tier",
        pick=_DECLINED,
        hop=Hop.CASCADE,
        reason=Reason.EVICTED,
    ),
    _histogram(
        _TIERING + "lookup_sync_delay_seconds",
        "lookup_seconds",
        "Seconds inside a chunk lookup (sampled).",
        FAST_S,
        "tier",
    ),
    _histogram(
        _TIERING + "lookup_async_delay_seconds",
        "lookup_waited_seconds",
        "Seconds from a chunk lookup's first retry to its verdict.",
        SLOW_S,
        "tier",
    ),
    _histogram(
        _CPU + "allocation_size",
        "store_offered",
        "Chunks that one store asked room for.",
        _CHUNKS,
    ),
    _gauge(USED_FRACTION, "Fraction of host slots pinned by transfers of any kind."),
    _gauge(FILLING_FRACTION, "Fraction of host slots being filled."),
    _gauge(PINNED_FRACTION, "Fraction of host slots being read by transfers."),
    _gauge(PROMOTED_FRACTION, "Fraction of host slots promotions of a tier fill.", "tier"),
    _gauge(CASCADED_FRACTION, "Fraction of host slots cascades to a tier read.", "tier"),
    _gauge(PROMOTIONS, "Promotion jobs in flight.", "tier"),
    _gauge(CASCADES, "Cascade jobs in flight.", "tier"),
)
"""Names that vLLM's offloading has."""

_NEW = (
    _counter(
        _OURS + "lookup_misses",
        "misses",
        "Chunks a request asked for and a tier did not give it, by reason.",
        "tier",
        "reason",
    ),
    _counter(
        _OURS + "loaded_tokens",
        "loaded_tokens",
        "Tokens of prefixes that were loaded, by the tier they were found in.",
        "source",
        pick=("source",),
    ),
    _counter(
        _OURS + "saved_seconds",
        "saved_seconds",
        "Estimate of the seconds that computing the loaded tokens would have taken.",
    ),
    _counter(_OURS + "chunks_stored", "stored", "Chunks that became resident.", "tier"),
    _counter(
        _OURS + "chunks_copied",
        "copied",
        "Chunks copied between host memory and accelerator, by hop: store or load.",
        "hop",
    ),
    _counter(
        _OURS + "chunks_removed",
        "removed",
        "Chunks that are resident no more, by reason.",
        "tier",
        "reason",
    ),
    _counter(
        _OURS + "checksum_failures",
        "removed",
        "Chunks that were found damaged, short, or not to be the chunk they should be.",
        "tier",
        pick=("tier", "reason"),
        reason=Reason.CORRUPT,
    ),
    _counter(
        _OURS + "chunks_declined",
        "declined",
        "Chunks a hop did not take, by reason; all but the evicted are offered again.",
        *_DECLINED,
    ),
    _counter(
        _OURS + "chunks_failed",
        "chunks_failed",
        "Chunks a job failed to move, by reason.",
        *_DECLINED,
    ),
    _histogram(
        _OURS + "store_seconds",
        "store_seconds",
        "Seconds of a store, accelerator to host memory: from the slots' reservation to its end.",
        _JOB_S,
    ),
    _histogram(
        _OURS + "cascade_seconds",
        "cascade_seconds",
        "Seconds of a cascade job, host memory to tier: from being handed over to its end.",
        _JOB_S,
        "tier",
    ),
    _histogram(
        _OURS + "promotion_seconds",
        "promote_seconds",
        "Seconds of a promotion job, tier to host memory: from being handed over to its end.",
        _JOB_S,
        "tier",
    ),
    _histogram(
        _OURS + "load_seconds",
        "load_seconds",
        "Seconds of a load, host memory to accelerator: from the chunks' pins to its end.",
        _JOB_S,
    ),
    _histogram(
        _OURS + "request_wait_seconds",
        "request_wait_seconds",
        "Seconds from the first lookup that a request had to wait for, to the end of its load.",
        _JOB_S,
    ),
    _histogram(
        _OURS + "evicted_age_seconds",
        "evicted_age",
        "Seconds that an evicted chunk was resident (sampled).",
        _STAY_S,
        "tier",
    ),
    _histogram(
        _OURS + "reuse_distance_chunks",
        "reuse_distance",
        "Other chunks used between two prompts that have the same chunk (of one chunk in 64).",
        _DISTANCES,
    ),
    _counter(
        _OURS + "asked_chunks",
        "prompted",
        "Chunks of the prompts of new requests, whether they were looked up or not.",
    ),
    _gauge(DISTINCT, "Those of them that were never seen before: no room would have had them."),
    _counter(
        _OURS + "events_emitted",
        "told",
        "KV events about tiers that were handed on, by type and medium.",
        "type",
        "medium",
    ),
    _gauge(EVENT_QUEUE, "Chunks there is news of, about, of which no KV event was handed on yet."),
    _counter(
        _OURS + "events_dropped",
        "untold",
        "Chunks whose tokens are in no KV event, since too many waited to be told of.",
    ),
    _counter(
        _OURS + "warm_up_chunks",
        "warmed_up",
        "Chunks of the hot list: promoted, missing, or not_asked for want of room or time.",
        "outcome",
    ),
    _counter(
        _OURS + "peer_chunks",
        "peer_chunks",
        "Chunks that came whole from other engines (in), and that went out to them (out).",
        "direction",
    ),
    _counter(
        _OURS + "peer_bytes",
        "peer_bytes",
        "Bytes of chunks that came whole from other engines (in), and that went out to them (out).",
        "direction",
    ),
    _gauge(
        PEERS,
        "Other engines: connected, dialling, left_alone after failures, idle; served: that ask us.",
        "state",
    ),
    _gauge(HOST_BYTES, "Bytes of host memory: capacity, resident, pinned, filling.", "state"),
    _gauge(
        TIER_BYTES,
        "Bytes of a tier. used, other namespaces included, and capacity: where it is bounded;"
        " resident: of this namespace's chunks, as far as this engine knows of them.",
        "tier",
        "state",
    ),
    _gauge(BACKLOG, "Chunks in host memory that wait for a cascade to a tier.", "tier"),
    _gauge(QUEUE_JOBS, "Jobs that a tier took and has not ended.", "tier"),
    _gauge(
        QUEUE_BYTES,
        "Bytes of host memory that the jobs hold which a tier took and has not ended.",
        "tier",
    ),
    _gauge(
        TIER_STATE,
        "0: in use. 1: being tried again. 2: left alone after failures in a row.",
        "tier",
    ),
)
"""Names of our own."""

_COPIES = (
    _counter(
        "vllm:kv_offload_load_bytes",
        "copied_bytes",
        "Bytes of chunks copied from host memory to the accelerator.",
        pick=("hop",),
        hop=Hop.LOAD,
    ),
    _counter(
        "vllm:kv_offload_store_bytes",
        "copied_bytes",
        "Bytes of chunks copied from the accelerator to host memory.",
        pick=("hop",),
        hop=Hop.STORE,
    ),
)
"""Names that vLLM's connector has, whatever is offloaded and how."""

METRICS: tuple[Metric, ...] = (
    *_UPSTREAM,
    *_NEW,
    *(replace(metric, sent_by_vllm=True) for metric in _COPIES),
)
"""All there are."""

SENT_BY_VLLM = frozenset(metric.name for metric in METRICS if metric.sent_by_vllm)

BY_NAME = {metric.name: metric for metric in METRICS}

BUCKETS = {metric.fold: metric.buckets for metric in METRICS if metric.kind is Kind.HISTOGRAM}
"""Of observations, by what the fold calls them."""

COUNTED = frozenset(metric.fold for metric in METRICS if metric.kind is Kind.COUNTER)
"""What the fold counts."""


@functools.cache
def destinations(fold: str, labels: Labels) -> tuple[tuple[str, Labels], ...]:
    """The exported metrics, with their labels, that the fold's ``fold`` under ``labels`` feeds."""
    return tuple(
        (metric.name, tuple(str(labels[i]) for i in metric.pick))
        for metric in METRICS
        if metric.fold == fold and metric.takes(labels)
    )
