"""One engine at a glance, out of two scrapes of its ``/metrics``. Pure: no clock, no network.

Read are the names of docs/metrics.md, and some of vLLM itself; what an engine does not export is
None, or left out.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kvtiers.events import PRIMARY
from kvtiers.observe.exposition import Scrape, growth, quantile
from kvtiers.observe.state import STATES
from kvtiers.tiers.base import Circuit

DEVICE = "device"
"""Label of the accelerator's cache, which is vLLM's own."""

_OFFLOAD = "vllm:kv_offload_"
_TIERING = "vllm:kv_offload_tiering_"
_OURS = "vllm:kvtiers_"


@dataclass(frozen=True, slots=True)
class TierRow:
    """One tier. Rates are per second of the time between the scrapes; None: not known."""

    label: str
    hit_rate: float | None
    """Of the chunks (of the device: tokens) asked for between the scrapes."""
    hit_rate_ever: float | None
    """Of all since the engine started."""
    queries_s: float
    read_bytes_s: float | None
    """Towards the accelerator."""
    written_bytes_s: float | None
    """Away from it."""
    read_p50_s: float | None
    """Of one job that reads."""
    read_p99_s: float | None
    used_bytes: float | None
    capacity_bytes: float | None
    used_share: float | None
    removed_s: float | None
    jobs: float | None
    """In flight now."""
    waiting_chunks: float | None
    state: str | None


@dataclass(frozen=True, slots=True)
class Count:
    """A labelled counter: how fast it grows, and what it is."""

    labels: tuple[str, ...]
    per_s: float
    ever: float


@dataclass(frozen=True, slots=True)
class Board:
    """What ``kvtiers top`` shows."""

    seconds: float
    tiers: tuple[TierRow, ...]
    tokens: tuple[Count, ...]
    """Prompt tokens by source; ``computed`` are those that nobody had. Of an exporter that does not
    know of all of them those that tiers had, by tier."""
    misses: tuple[Count, ...]
    """Chunks by tier and reason."""
    trouble: tuple[Count, ...]
    """Chunks declined or failed, by hop, tier and reason."""
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    ceiling: float | None
    """The hit rate that unlimited capacity, empty at the start of the engine, would have given.
    Real ones are above it where tiers still have chunks of an earlier process."""

    @property
    def empty(self) -> bool:
        """Whether nothing of an engine was found."""
        return not self.tiers and not self.tokens


def board(before: Scrape, after: Scrape, seconds: float) -> Board:
    """What happened in the ``seconds`` (more than 0) between two scrapes."""
    grown = growth(before, after)
    view = _View(grown, after, seconds)
    ttft = "vllm:time_to_first_token_seconds"
    return Board(
        seconds=seconds,
        tiers=tuple(view.tiers()),
        tokens=tuple(view.tokens()),
        misses=view.counts(_OURS + "lookup_misses_total", "tier", "reason"),
        trouble=(
            *view.counts(_OURS + "chunks_declined_total", "hop", "tier", "reason"),
            *view.counts(_OURS + "chunks_failed_total", "hop", "tier", "reason"),
        ),
        ttft_p50_s=quantile(0.5, grown, ttft),
        ttft_p99_s=quantile(0.99, grown, ttft),
        ceiling=view.ceiling(),
    )


@dataclass(frozen=True, slots=True)
class _View:
    grown: Scrape
    now: Scrape
    seconds: float

    def tiers(self) -> Iterable[TierRow]:
        if "vllm:prefix_cache_queries_total" in self.now:
            yield self._device()
        labels = {PRIMARY} if _OURS + "host_bytes" in self.now else set()
        for name in (_TIERING + "chunk_queries_total", _TIERING + "active_cascade_jobs"):
            labels |= self.now.by(name, "tier").keys()
        for label in sorted(labels, key=_position):
            yield self._host() if label == PRIMARY else self._secondary(label)

    def tokens(self) -> Iterable[Count]:
        computed = "vllm:prompt_tokens_by_source_total"
        if computed in self.now:
            grown = self.grown.total(computed, source="local_compute")
            ever = self.now.total(computed, source="local_compute")
            yield Count(("computed",), grown / self.seconds, ever)
        cached = "vllm:prompt_tokens_cached_by_source_total"
        loaded = _OURS + "loaded_tokens_total"  # outside of vLLM's API server nobody knows more
        for count in self.counts(cached if cached in self.now else loaded, "source"):
            if count.ever:
                yield count

    def counts(self, name: str, *labels: str) -> tuple[Count, ...]:
        """A counter by some of its labels, the fastest first."""
        sums: dict[tuple[str, ...], list[float]] = {}
        for which, scrape in enumerate((self.grown, self.now)):
            for has, value in scrape.matching(name, {}):
                key = tuple(has.get(label, "") for label in labels)
                sums.setdefault(key, [0.0, 0.0])[which] += value
        found = [Count(key, grown / self.seconds, ever) for key, (grown, ever) in sums.items()]
        return tuple(sorted(found, key=lambda c: (-c.per_s, -c.ever, c.labels)))

    def ceiling(self) -> float | None:
        asked = self.now.total(_OURS + "asked_chunks_total")
        distinct = self.now.total(_OURS + "distinct_chunks")
        return max(0.0, 1 - distinct / asked) if asked and distinct else None

    def _device(self) -> TierRow:
        hits, queries = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"
        full = [value for _, value in self.now.matching("vllm:kv_cache_usage_perc", {})]
        return TierRow(
            label=DEVICE,
            hit_rate=_ratio(self.grown.total(hits), self.grown.total(queries)),
            hit_rate_ever=_ratio(self.now.total(hits), self.now.total(queries)),
            queries_s=self.grown.total(queries) / self.seconds,
            read_bytes_s=None,
            written_bytes_s=None,
            read_p50_s=None,
            read_p99_s=None,
            used_bytes=None,
            capacity_bytes=None,
            used_share=sum(full) / len(full) if full else None,
            removed_s=None,
            jobs=None,
            waiting_chunks=None,
            state=None,
        )

    def _host(self) -> TierRow:
        return self._tier(
            PRIMARY,
            read=self._rate(_OFFLOAD + "load_bytes_total"),
            written=self._rate(_OFFLOAD + "store_bytes_total"),
            seconds=_OURS + "load_seconds",
            used=self._gauge(_OURS + "host_bytes", state="resident"),
            capacity=self._gauge(_OURS + "host_bytes", state="capacity"),
        )

    def _secondary(self, label: str) -> TierRow:
        return self._tier(
            label,
            read=self._rate(_TIERING + "read_bytes_total", tier=label),
            written=self._rate(_TIERING + "write_bytes_total", tier=label),
            seconds=_OURS + "promotion_seconds",
            used=self._gauge(_OURS + "tier_bytes", tier=label, state="used"),
            capacity=self._gauge(_OURS + "tier_bytes", tier=label, state="capacity"),
        )

    def _tier(
        self,
        label: str,
        *,
        read: float | None,
        written: float | None,
        seconds: str,
        used: float | None,
        capacity: float | None,
    ) -> TierRow:
        hits, queries = _TIERING + "chunk_hits_total", _TIERING + "chunk_queries_total"
        host = label == PRIMARY  # it has no gauge of its own, for it is never left alone
        of_tier = {} if host else {"tier": label}
        state = Circuit.CLOSED if host else self._gauge(_OURS + "tier_state", tier=label)
        return TierRow(
            label=label,
            hit_rate=_ratio(self.grown.total(hits, tier=label), self._asked(self.grown, label)),
            hit_rate_ever=_ratio(self.now.total(hits, tier=label), self._asked(self.now, label)),
            queries_s=self.grown.total(queries, tier=label) / self.seconds,
            read_bytes_s=read,
            written_bytes_s=written,
            read_p50_s=quantile(0.5, self.grown, seconds, **of_tier),
            read_p99_s=quantile(0.99, self.grown, seconds, **of_tier),
            used_bytes=used,
            capacity_bytes=capacity,
            used_share=None if used is None else _ratio(used, capacity or 0.0),
            removed_s=self._rate(_OURS + "chunks_removed_total", tier=label),
            jobs=self._sum_of_gauges(
                label, _TIERING + "active_promotion_jobs", _TIERING + "active_cascade_jobs"
            ),
            waiting_chunks=self._gauge(_OURS + "backlog_chunks", tier=label),
            state=None if state is None else STATES.get(round(state)),
        )

    def _asked(self, scrape: Scrape, label: str) -> float:
        return scrape.total(_TIERING + "chunk_queries_total", tier=label)

    def _rate(self, name: str, **labels: str) -> float | None:
        """Per second; None if the engine exports no such counter."""
        return self.grown.total(name, **labels) / self.seconds if name in self.now else None

    def _gauge(self, name: str, **labels: str) -> float | None:
        found = [value for _, value in self.now.matching(name, labels)]
        return sum(found) if found else None

    def _sum_of_gauges(self, label: str, *names: str) -> float | None:
        found = [self._gauge(name, tier=label) for name in names]
        known = [value for value in found if value is not None]
        return sum(known) if known else None


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _position(label: str) -> tuple[int, str]:
    number, _, name = label.partition(":")
    return (int(number), name) if number.isdecimal() and len(number) < 10 else (1 << 30, label)
