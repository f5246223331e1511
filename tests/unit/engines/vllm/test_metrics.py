from itertools import count
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)

from bench.sides import ours
from kvtiers.engines.vllm.metrics import (
    ALL_GAUGES_INTERVAL_S,
    LOOKS_AT_REST,
    QUIET_INTERVAL_S,
    StatsExporter,
    definitions,
)
from kvtiers.events import (
    PRIMARY,
    ChunksDeclined,
    ChunksStored,
    EventsTold,
    Hop,
    LookupTimed,
    Reason,
    StoreOffered,
    TransferFinished,
    TransferStarted,
    WarmedUp,
)
from kvtiers.host.parts import HostUse
from kvtiers.metrics import Metrics, names
from kvtiers.observe.gauges import INTERVAL_S, Gauges
from kvtiers.tiers.base import Usage
from tests.unit.observe.observe_kit import BUSY, REST, Tier

USAGE, BYTES = "vllm:kv_offload_cpu_cache_usage_perc", "vllm:kvtiers_host_bytes"


class Exporter:
    """Over a fold, and what it sends by name and labels."""

    def __init__(self, *tiers: Tier) -> None:
        self.metrics = Metrics()
        self.gauges = Gauges(self.metrics, tiers, 100)
        self.exporter = StatsExporter(self.metrics, self.gauges)

    def sent(self, use: HostUse, now: float, *, quiet: bool = True) -> dict[str, dict[Any, Any]]:
        stats = self.exporter.take(use, now, quiet=quiet)
        if stats is None:
            return {}
        data = stats.data
        (values,) = (v for k, v in data.items() if "data" in str(k).lower())
        assert values.keys() <= definitions().keys()
        for name, by_labels in values.items():
            for labels in by_labels:
                assert len(labels) == len(definitions()[name].labelnames), name
        return dict(values)


@pytest.fixture
def exporter() -> Exporter:
    return Exporter(Tier("1:fs"))


def test_a_gauge_is_sent_when_it_moves(exporter: Exporter) -> None:
    assert exporter.sent(REST, 0.0)[BYTES] == {
        ("capacity",): 1000, ("resident",): 400, ("pinned",): 0, ("filling",): 0,
    }  # fmt: skip
    assert exporter.sent(REST, 0.0) == {}
    moved = exporter.sent(REST._replace(resident=5), QUIET_INTERVAL_S)
    assert moved == {BYTES: {("resident",): 500}}


def test_how_full_a_tier_is_is_sent_once_it_is_known() -> None:
    tier = Tier("1:fs")
    exporter = Exporter(tier, Tier("2:theirs"))
    name = "vllm:kvtiers_tier_bytes"
    assert name not in exporter.sent(REST, 0.0)
    tier.full = Usage(7, 10)
    assert exporter.sent(REST, INTERVAL_S) == {
        name: {("1:fs", "used"): 7, ("1:fs", "capacity"): 10}
    }  # fmt: skip
    tier.full = Usage(8, 10, 3)
    assert exporter.sent(REST, 2 * INTERVAL_S) == {
        name: {("1:fs", "used"): 8, ("1:fs", "resident"): 3}
    }  # fmt: skip
    tier.full = None
    assert exporter.sent(REST, 3 * INTERVAL_S) == {}


def test_all_gauges_are_sent_now_and_then(exporter: Exporter) -> None:
    first = exporter.sent(REST, 0.0)
    assert exporter.sent(REST, ALL_GAUGES_INTERVAL_S / 2) == {}
    assert exporter.sent(REST, ALL_GAUGES_INTERVAL_S) == first


def test_counters_go_to_every_counter_that_they_feed_as_plain_text(exporter: Exporter) -> None:
    exporter.sent(REST, 0.0)
    exporter.metrics(ChunksStored(PRIMARY, (b"a", b"b")))  # type: ignore[arg-type]
    exporter.metrics(ChunksDeclined(Hop.CASCADE, "1:fs", 3, Reason.EVICTED))
    payload = exporter.sent(REST, QUIET_INTERVAL_S)
    assert payload["vllm:kvtiers_chunks_stored"] == {("0:primary",): 2}
    assert payload["vllm:kvtiers_chunks_declined"] == {("cascade", "1:fs", "evicted"): 3}
    assert payload["vllm:kv_offload_tiering_backpressure_blocks_dropped"] == {("1:fs",): 3}
    texts = [type(t) for labels in payload.values() for label in labels for t in label]
    assert set(texts) == {str}, "an enum does not travel between processes as text"


def test_a_counter_without_labels_has_no_labels_of_the_fold(exporter: Exporter) -> None:
    exporter.metrics(ChunksDeclined(Hop.PROMOTE, "1:fs", 1, Reason.NO_ROOM))
    exporter.metrics(ChunksDeclined(Hop.STORE, PRIMARY, 4, Reason.THRESHOLD))
    payload = exporter.sent(REST, 0.0)
    assert payload["vllm:kv_offload_tiering_promotion_allocation_failures"] == {(): 1}
    assert payload["vllm:kv_offload_stores_skipped"] == {(): 4}


def test_every_value_that_was_observed_is_sent_once(exporter: Exporter) -> None:
    for seconds in (0.5, 0.25):
        exporter.metrics(LookupTimed("1:fs", waited_s=seconds))
    name = "vllm:kv_offload_tiering_lookup_async_delay_seconds"
    assert exporter.sent(REST, 0.0)[name] == {("1:fs",): [0.5, 0.25]}
    assert name not in exporter.sent(REST, QUIET_INTERVAL_S)


def test_a_warm_up_is_counted_by_outcome(exporter: Exporter) -> None:
    exporter.metrics(WarmedUp(promoted=3))
    exporter.metrics(WarmedUp(promoted=1, missing=2))
    payload = exporter.sent(REST, 0.0)
    assert payload["vllm:kvtiers_warm_up_chunks"] == {("promoted",): 4, ("missing",): 2}


def test_the_end_of_motion_is_sent_soon(exporter: Exporter) -> None:
    exporter.metrics(TransferStarted(Hop.CASCADE, "1:fs", 2))
    jobs = "vllm:kv_offload_tiering_active_cascade_jobs"
    assert exporter.sent(BUSY, 0.0)[jobs] == {("1:fs",): 1}
    exporter.metrics(TransferFinished(Hop.CASCADE, "1:fs", 0, 2, 0, 1.0, Reason.TIMEOUT))
    hung = BUSY._replace(filling=0)
    assert exporter.sent(hung, QUIET_INTERVAL_S)[jobs] == {("1:fs",): 0}


def test_while_there_will_be_another_step_what_happened_is_gathered(exporter: Exporter) -> None:
    offered = "vllm:kv_offload_cpu_allocation_size"
    for now in (0.0, INTERVAL_S / 2, INTERVAL_S):
        exporter.metrics(StoreOffered(3))
        sent = exporter.sent(REST, now, quiet=False)
        assert sent.get(offered) == {0.0: {(): [3]}, INTERVAL_S: {(): [3, 3]}}.get(now)
    exporter.metrics(StoreOffered(3))
    assert exporter.sent(REST, INTERVAL_S, quiet=True) == {}
    soon = INTERVAL_S + QUIET_INTERVAL_S
    assert exporter.sent(REST, soon, quiet=True)[offered] == {(): [3]}


def test_many_values_at_once_are_what_vllm_makes_of_them_one_by_one() -> None:
    metrics, theirs = Metrics(), OffloadingConnectorStats()
    for seconds in (0.5, 0.25, 4.0):
        metrics(LookupTimed("1:fs", waited_s=seconds))
        name = "vllm:kv_offload_tiering_lookup_async_delay_seconds"
        theirs.observe_histogram(name, seconds, ("1:fs",))
    ours = StatsExporter(metrics, Gauges(metrics, [], 100)).take(REST, 0.0, quiet=True)
    assert ours is not None
    for part, values in theirs.data.items():
        assert ours.data[part][name] == values[name]


def test_it_shows_whose_numbers_it_sends() -> None:
    assert "1 known" not in repr(Exporter(Tier("1:fs")).exporter)
    assert "1:fs, slots of 100 bytes" in repr(Exporter(Tier("1:fs")).exporter)


def test_statistics_that_cannot_be_made_up_cost_no_offloading(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = ours(slots=4)

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(StatsExporter, "take", broken)
    assert manager.get_stats() is None
    assert manager.get_stats() is None
    assert not manager.inert
    assert caplog.text.count("sends none any more") == 1


def test_what_is_held_back_keeps_the_engine_stepping_until_it_is_sent() -> None:
    manager, exporter = ours(slots=4), Exporter()
    manager._stats = exporter.exporter
    use = manager.core.use
    assert exporter.sent(use, 10.0, quiet=False)
    assert not manager.has_pending_work()
    assert exporter.sent(use, 10.0 + INTERVAL_S / 2, quiet=False) == {}
    assert manager.has_pending_work()
    exporter.sent(use, 10.0 + INTERVAL_S / 2, quiet=True)
    assert not manager.has_pending_work()


def test_a_gauge_that_moved_since_it_was_read_keeps_the_engine_stepping_until_it_is_sent() -> None:
    backlogs, metrics = {"1:fs": 4}, Metrics()
    gauges = Gauges(metrics, [Tier("1:fs")], 100, lambda: backlogs)
    exporter = StatsExporter(metrics, gauges)
    exporter.take(REST, 0.0, quiet=True)
    assert not exporter.owes(REST)
    backlogs["1:fs"] = 0
    soon = QUIET_INTERVAL_S * 1.5
    assert exporter.take(REST, soon, quiet=True) is not None
    assert exporter.owes(REST), "they are not read so soon again, so a step later"
    exporter.take(REST, INTERVAL_S, quiet=True)
    assert gauges.values[names.BACKLOG, ("1:fs",)] == 0
    assert not exporter.owes(REST)


def test_a_gauge_that_never_stands_still_does_not_keep_an_engine_awake() -> None:
    metrics, ticks = Metrics(), count()
    gauges = Gauges(metrics, [], 100)
    gauges.watch(names.EVENT_QUEUE, (), lambda: next(ticks))
    exporter = StatsExporter(metrics, gauges)

    def steps_to_rest(now: float) -> int:
        for step in range(100):
            if not exporter.owes(REST):
                return step
            exporter.take(REST, now + step * INTERVAL_S, quiet=True)
        raise AssertionError("it never rests")

    exporter.take(REST, 0.0, quiet=False)
    assert steps_to_rest(INTERVAL_S) == LOOKS_AT_REST - 1
    assert steps_to_rest(60.0) == 0
    exporter.take(REST, 120.0, quiet=False)
    assert steps_to_rest(121.0) > 0, "what is going on moves gauges again"


def test_events_told_of_after_a_steps_statistics_are_counted_and_shown_at_rest() -> None:
    """The queue is shorter when vLLM has taken events, which is after it took statistics."""
    manager, exporter = ours(slots=4), Exporter()
    manager._stats, manager.sink = exporter.exporter, exporter.metrics
    queued = [5]
    exporter.gauges.watch(names.EVENT_QUEUE, (), lambda: queued[0])
    use = manager.core.use
    assert exporter.sent(use, 0.0)[names.EVENT_QUEUE] == {(): 5}
    queued[0] = 0
    manager.note_told(EventsTold("BlockStored", "CPU", 2))
    assert manager.has_pending_work()
    sent = exporter.sent(use, INTERVAL_S)
    assert sent[names.EVENT_QUEUE] == {(): 0}
    assert sent["vllm:kvtiers_events_emitted"] == {("BlockStored", "CPU"): 2}
    assert not manager.has_pending_work()


def test_gauges_that_cannot_be_read_cost_no_offloading(caplog: pytest.LogCaptureFixture) -> None:
    manager, exporter = ours(slots=4), Exporter()
    manager._stats = exporter.exporter
    exporter.gauges.watch(names.EVENT_QUEUE, (), lambda: 1 / 0)
    assert not manager.has_pending_work()
    assert not manager.inert
    assert manager.get_stats() is None
    assert caplog.text.count("sends none any more") == 1
