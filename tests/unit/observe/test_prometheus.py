"""What a scrape shows is what was counted, and nothing else than what was declared."""

import threading

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from kvtiers.engines.vllm.metrics import StatsExporter
from kvtiers.events import (
    PRIMARY,
    ChunksCopied,
    ChunksDeclined,
    ChunksRemoved,
    ChunksStored,
    Hop,
    LookupTimed,
    Reason,
    StoreOffered,
)
from kvtiers.metrics import Metrics
from kvtiers.metrics.names import METRICS, Kind
from kvtiers.observe.gauges import Gauges
from kvtiers.observe.prometheus import TierCollector, exposition
from tests.unit.observe.observe_kit import REST, Tier


def scrape(metrics: Metrics, gauges: Gauges, **labels: str) -> dict[tuple[str, ...], float]:
    """Samples by name and the values of their labels, in the order of the labels' names."""
    text = exposition(metrics, gauges, labels).decode()
    samples = [s for f in text_string_to_metric_families(text) for s in f.samples]
    return {(s.name, *(s.labels[n] for n in sorted(s.labels))): s.value for s in samples}


def test_counters_gauges_and_histograms_under_the_names_that_an_engine_would_show() -> None:
    metrics = Metrics()
    gauges = Gauges(metrics, [Tier("1:fs")], 100)
    assert scrape(metrics, gauges) == {}
    metrics(ChunksStored(PRIMARY, (b"a", b"b")))  # type: ignore[arg-type]
    metrics(ChunksDeclined(Hop.STORE, PRIMARY, 4, Reason.THRESHOLD))
    metrics(StoreOffered(3))
    metrics(LookupTimed("1:fs", waited_s=0.07))
    metrics(LookupTimed("1:fs", waited_s=70.0))
    gauges.refresh(REST, 0.0)
    seen = scrape(metrics, gauges)
    assert seen["vllm:kvtiers_chunks_stored_total", PRIMARY] == 2
    assert seen["vllm:kv_offload_stores_skipped_total",] == 4
    assert seen["vllm:kvtiers_chunks_declined_total", "store", "threshold", PRIMARY] == 4
    assert seen["vllm:kvtiers_host_bytes", "resident"] == 400
    waited = "vllm:kv_offload_tiering_lookup_async_delay_seconds"
    assert seen[f"{waited}_bucket", "0.05", "1:fs"] == 0
    assert seen[f"{waited}_bucket", "0.1", "1:fs"] == 1
    assert seen[f"{waited}_bucket", "10.0", "1:fs"] == 1
    assert seen[f"{waited}_bucket", "+Inf", "1:fs"] == 2
    assert seen[f"{waited}_count", "1:fs"] == 2
    assert seen[f"{waited}_sum", "1:fs"] == 70.07


def test_bytes_of_copies_have_the_names_by_which_vllm_counts_them_where_it_runs() -> None:
    metrics = Metrics()
    gauges = Gauges(metrics, [], 100)
    metrics(ChunksCopied(Hop.STORE, 2, 0.5, bytes=8192))
    metrics(ChunksCopied(Hop.LOAD, 1, 0.5, bytes=4096))
    seen = scrape(metrics, gauges)
    assert seen["vllm:kv_offload_store_bytes_total",] == 8192
    assert seen["vllm:kv_offload_load_bytes_total",] == 4096
    stats = StatsExporter(metrics, gauges).take(REST, 0.0, quiet=True)
    assert stats is not None
    assert "kv_offload_store_bytes" not in repr(stats), "they would be counted twice"


def test_a_scrape_takes_nothing_away_from_an_engine_and_an_engine_nothing_from_it() -> None:
    metrics = Metrics()
    gauges = Gauges(metrics, [], 100)
    for _ in range(2):
        metrics(StoreOffered(3))
        metrics(ChunksRemoved("1:fs", (b"a",), Reason.CORRUPT))  # type: ignore[arg-type]
        metrics.take()
    metrics(StoreOffered(3))
    seen = scrape(metrics, gauges)
    assert seen["vllm:kv_offload_cpu_allocation_size_sum",] == 9
    assert seen["vllm:kvtiers_checksum_failures_total", "1:fs"] == 2
    assert metrics.take().observations["store_offered", ()] == [3]


def test_labels_of_the_engine_go_with_every_metric() -> None:
    metrics = Metrics()
    metrics(StoreOffered(1))
    gauges = Gauges(metrics, [Tier("1:fs")], 100)
    gauges.refresh(REST, 0.0)
    seen = scrape(metrics, gauges, model_name="m")
    assert all("m" in name for name in seen)
    assert ("vllm:kvtiers_tier_state", "m", "1:fs") in seen


def test_all_that_may_be_shown_can_be_registered_beside_nothing_of_the_same_name() -> None:
    metrics = Metrics()
    collector = TierCollector(metrics, Gauges(metrics, [], 100))
    CollectorRegistry(auto_describe=True).register(collector)
    described = {family.name: family.type for family in collector.describe()}
    assert described == {metric.name: metric.kind.value for metric in METRICS}
    assert all(m.buckets == tuple(sorted(set(m.buckets))) for m in METRICS)
    assert all(bool(m.buckets) == (m.kind is Kind.HISTOGRAM) for m in METRICS)


def test_it_may_be_scraped_while_the_engine_counts() -> None:
    metrics = Metrics()
    gauges = Gauges(metrics, [], 100)
    ended = threading.Event()

    def count() -> None:
        for n in range(3000):
            metrics(ChunksStored(f"{n}:fs", (b"a",)))  # type: ignore[arg-type]
            metrics(LookupTimed(f"{n}:fs", waited_s=0.1))
        ended.set()

    thread = threading.Thread(target=count)
    thread.start()
    while not ended.is_set():
        exposition(metrics, gauges)
    thread.join()
    seen = scrape(metrics, gauges)
    assert seen["vllm:kvtiers_chunks_stored_total", "2999:fs"] == 1
    assert sum(name[0].endswith("_count") for name in seen) == 3000
