from dataclasses import dataclass
from typing import Any

from kvtiers.engines.vllm.metrics import (
    ALL_GAUGES_INTERVAL_S,
    GAUGE_INTERVAL_S,
    StatsExporter,
    definitions,
)
from kvtiers.events import (
    PRIMARY,
    ChunksDeclined,
    ChunksStored,
    Hop,
    Reason,
    TransferFinished,
    TransferStarted,
    WarmedUp,
)
from kvtiers.host.parts import HostUse
from kvtiers.metrics import Metrics
from kvtiers.tiers.base import Usage


@dataclass
class Tier:
    label: str
    full: Usage | None = None

    def usage(self) -> Usage | None:
        return self.full


FS = Tier("1:fs")
REST = HostUse(slots=10, resident=4, filling=0, pinned=0, orphaned=0)
BUSY = HostUse(slots=10, resident=4, filling=1, pinned=2, orphaned=0)
USAGE, BYTES = "vllm:kv_offload_cpu_cache_usage_perc", "vllm:kvtiers_host_bytes"


def sent(exporter: StatsExporter, use: HostUse, now: float) -> dict[str, dict[Any, float]]:
    """The payload: values by labels by name."""
    (values,) = (v for k, v in exporter.take(use, now).data.items() if "data" in str(k).lower())
    return dict(values)


def test_it_shows_whose_numbers_it_sends() -> None:
    assert repr(StatsExporter(Metrics(), [FS, Tier("2:memory")], 4096)) == (
        "<StatsExporter: 1:fs, 2:memory, slots of 4096 bytes>"
    )
    assert "no tiers" in repr(StatsExporter(Metrics(), [], 4096))


def test_a_gauge_is_sent_when_it_moves() -> None:
    exporter = StatsExporter(Metrics(), [FS], 100)
    first = sent(exporter, REST, 0.0)
    assert first[BYTES] == {
        ("capacity",): 1000, ("resident",): 400, ("pinned",): 0, ("filling",): 0,
    }  # fmt: skip
    assert sent(exporter, REST, 0.0) == {}
    assert sent(exporter, REST._replace(resident=5), 0.0) == {BYTES: {("resident",): 500}}


def test_how_full_a_tier_is_is_sent_once_it_is_known() -> None:
    tier = Tier("1:fs")
    exporter = StatsExporter(Metrics(), [tier, Tier("2:theirs")], 100)
    name = "vllm:kvtiers_tier_bytes"
    assert name not in sent(exporter, REST, 0.0)
    tier.full = Usage(7, 10)
    assert sent(exporter, REST, 0.0) == {
        name: {("1:fs", "used"): 7, ("1:fs", "capacity"): 10}
    }  # fmt: skip
    tier.full = Usage(8, 10)
    assert sent(exporter, REST, 0.0) == {name: {("1:fs", "used"): 8}}
    tier.full = None
    assert sent(exporter, REST, 0.0) == {}
    assert name in definitions()


def test_chunks_in_flight_take_their_average_part_of_host_memory() -> None:
    metrics = Metrics()
    exporter = StatsExporter(metrics, [FS], 100)
    metrics(TransferStarted(Hop.CASCADE, "1:fs", 2))
    read = sent(exporter, BUSY._replace(per_chunk=1.5), 0.0)
    assert read["vllm:kv_offload_tiering_primary_read_usage_perc"] == {("1:fs",): 0.3}


def test_all_gauges_are_sent_now_and_then() -> None:
    exporter = StatsExporter(Metrics(), [FS], 100)
    first = sent(exporter, REST, 0.0)
    assert sent(exporter, REST, ALL_GAUGES_INTERVAL_S / 2) == {}
    assert sent(exporter, REST, ALL_GAUGES_INTERVAL_S) == first


def test_gauges_in_motion_are_sampled_and_the_end_of_motion_is_sent_at_once() -> None:
    exporter = StatsExporter(Metrics(), [], 100)
    sent(exporter, REST, 0.0)
    assert sent(exporter, BUSY, GAUGE_INTERVAL_S / 2) == {}
    assert sent(exporter, BUSY, GAUGE_INTERVAL_S)[USAGE] == {(): 0.3}
    assert sent(exporter, BUSY._replace(pinned=3), GAUGE_INTERVAL_S * 1.5) == {}
    assert sent(exporter, REST, GAUGE_INTERVAL_S * 1.6)[USAGE] == {(): 0.0}


def test_slots_that_a_hung_lane_keeps_are_no_motion() -> None:
    metrics = Metrics()
    exporter = StatsExporter(metrics, [FS], 100)
    metrics(TransferStarted(Hop.CASCADE, "1:fs", 2))
    sent(exporter, BUSY, 0.0)
    metrics(TransferFinished(Hop.CASCADE, "1:fs", 0, 2, 0, 1.0, Reason.TIMEOUT))
    hung = BUSY._replace(filling=0)
    payload = sent(exporter, hung, 0.01)
    assert payload["vllm:kv_offload_tiering_active_cascade_jobs"] == {("1:fs",): 0}


def test_counters_go_to_every_counter_that_they_feed_as_plain_text() -> None:
    metrics = Metrics()
    exporter = StatsExporter(metrics, [FS], 100)
    sent(exporter, REST, 0.0)
    metrics(ChunksStored(PRIMARY, (b"a", b"b")))  # type: ignore[arg-type]
    metrics(ChunksDeclined(Hop.CASCADE, "1:fs", 3, Reason.EVICTED))
    payload = sent(exporter, REST, 0.0)
    assert payload["vllm:kvtiers_chunks_stored"] == {("0:primary",): 2}
    assert payload["vllm:kvtiers_chunks_declined"] == {("cascade", "1:fs", "evicted"): 3}
    assert payload["vllm:kv_offload_tiering_backpressure_blocks_dropped"] == {("1:fs",): 3}
    texts = [type(t) for labels in payload.values() for label in labels for t in label]
    assert set(texts) == {str}, "an enum does not travel between processes as text"
    assert payload.keys() <= definitions().keys()


def test_a_warm_up_is_counted_by_outcome() -> None:
    metrics = Metrics()
    exporter = StatsExporter(metrics, [], 100)
    metrics(WarmedUp(promoted=3))
    metrics(WarmedUp(promoted=1, missing=2))
    payload = sent(exporter, REST, 0.0)
    assert payload["vllm:kvtiers_warm_up_chunks"] == {("promoted",): 4, ("missing",): 2}
    assert payload.keys() <= definitions().keys()


def test_jobs_in_flight_are_shown_by_tier() -> None:
    metrics = Metrics()
    exporter = StatsExporter(metrics, [FS], 100)
    metrics(TransferStarted(Hop.CASCADE, "1:fs", 2))
    payload = sent(exporter, BUSY, 0.0)
    assert payload["vllm:kv_offload_tiering_active_cascade_jobs"] == {("1:fs",): 1}
    assert payload["vllm:kv_offload_tiering_primary_read_usage_perc"] == {("1:fs",): 0.2}
