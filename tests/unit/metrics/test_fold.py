import sys
from threading import Thread

import pytest

from kvtiers.events import (
    ChunksCopied,
    ChunksGenerated,
    ChunksPrompted,
    ChunksRemoved,
    ChunksStored,
    Hop,
    LookupsSettled,
    MissReason,
    PrefillTimed,
    Reason,
    StoreOffered,
    TransferFinished,
    TransferStarted,
)
from kvtiers.metrics import Metrics
from tests.unit.metrics.test_distinct import digests
from tests.unit.tiers.tier_kit import ManualClock

KEYS = tuple(digests(1, 4000))


def test_ages_are_told_of_what_was_evicted_and_of_nothing_else() -> None:
    clock = ManualClock()
    metrics = Metrics(clock)
    metrics(ChunksStored("1:fs", KEYS))
    assert metrics.totals["stored", ("1:fs",)] == 4000
    clock.advance(90.0)
    metrics(ChunksRemoved("1:fs", KEYS[:2000], Reason.CORRUPT))
    assert ("evicted_age", ("1:fs",)) not in metrics.histograms
    metrics(ChunksRemoved("1:fs", KEYS[2000:], Reason.EVICTED))
    ages = metrics.take().observations["evicted_age", ("1:fs",)]
    assert set(ages) == {90.0}
    assert len(ages) == pytest.approx(2000 / 32, abs=1)
    metrics.check()


def test_prompts_tell_what_is_new_and_how_far_apart_uses_are() -> None:
    metrics = Metrics()
    keys = digests(1, 40_000)
    assert metrics.distinct is None
    metrics(ChunksPrompted(keys))
    assert metrics.distinct == pytest.approx(40_000, rel=0.1)
    assert metrics.take().observations == {}
    metrics(ChunksPrompted(keys))
    assert metrics.totals["prompted", ()] == 80_000
    assert metrics.distinct == pytest.approx(40_000, rel=0.1)
    distances = metrics.take().observations["reuse_distance", ()]
    assert sum(distances) / len(distances) == pytest.approx(40_000, rel=0.2)
    metrics.check()


def test_an_answer_is_not_new_as_part_of_the_next_prompt() -> None:
    metrics = Metrics()
    metrics(ChunksGenerated(KEYS[2000:]))
    metrics(ChunksPrompted(KEYS))
    assert metrics.distinct == pytest.approx(2000, rel=0.06)


def test_a_job_is_timed_if_something_of_it_arrived() -> None:
    metrics = Metrics()
    for done, failed in ((0, 2), (1, 1)):
        metrics(TransferStarted(Hop.PROMOTE, "1:fs", 2))
        metrics(TransferFinished(Hop.PROMOTE, "1:fs", done, failed, 8, 0.5, Reason.FAILED, 0.75))
    assert metrics.take().observations == {("promote_seconds", ("1:fs",)): [0.75]}


def test_copies_are_timed_by_hop_and_loads_with_what_was_waited_for() -> None:
    metrics = Metrics()
    metrics(ChunksCopied(Hop.STORE, 3, 0.25, bytes=300))
    metrics(ChunksCopied(Hop.LOAD, 3, 0.5, bytes=300))
    metrics(ChunksCopied(Hop.LOAD, 3, 0.75, 2.0, 400))
    assert metrics.take().observations == {
        ("store_seconds", ()): [0.25],
        ("load_seconds", ()): [0.5, 0.75],
        ("request_wait_seconds", ()): [2.0],
    }
    assert metrics.totals == {
        ("copied", (Hop.STORE,)): 3,
        ("copied_bytes", (Hop.STORE,)): 300,
        ("copied", (Hop.LOAD,)): 6,
        ("copied_bytes", (Hop.LOAD,)): 700,
    }


def test_where_nobody_takes_values_are_bounded_and_none_is_lost_to_the_histogram() -> None:
    metrics = Metrics()
    for _ in range(5000):
        metrics(StoreOffered(3))
    metrics.check()
    assert len(metrics.take().observations["store_offered", ()]) == 4096
    *counts, total = metrics.histograms["store_offered", ()]
    assert (sum(counts), total) == (5000, 15000)
    assert counts[1] == 5000, "3 lies between 1 and 4"


def test_an_event_that_nothing_is_counted_of_passes_by() -> None:
    metrics = Metrics()
    metrics("of a kind that comes later")  # type: ignore[arg-type]
    assert metrics.totals == {}


def settled(**loaded: int) -> LookupsSettled:
    missed = {("1:fs", MissReason.ABSENT): 2, ("1:fs", MissReason.PENDING): 1}
    return LookupsSettled("r", 9, {}, missed, loaded, 0.0, {})


def test_misses_are_counted_by_reason_and_loaded_tokens_by_source() -> None:
    metrics = Metrics()
    metrics(settled(disk=32))
    metrics(settled(disk=16, host=16))
    assert metrics.take().counters == {
        ("misses", ("1:fs", "absent")): 4,
        ("misses", ("1:fs", "pending")): 2,
        ("loaded_tokens", ("disk",)): 48,
        ("loaded_tokens", ("host",)): 16,
    }


def test_what_a_load_saves_is_told_by_the_usual_pace_once_there_is_one() -> None:
    metrics = Metrics()
    metrics(settled(disk=100))
    assert ("saved_seconds", ()) not in metrics.totals
    for seconds in (1.0, 1.1, 50.0):  # the engine had nothing to do after the last
        metrics(PrefillTimed(1000, seconds))
    metrics(settled(disk=100, host=400))
    assert metrics.totals["saved_seconds", ()] == pytest.approx(500 * 1.1 / 1000)
    metrics(settled())
    assert metrics.totals["saved_seconds", ()] == pytest.approx(500 * 1.1 / 1000)


def test_who_reads_on_another_thread_loses_no_event() -> None:
    metrics = Metrics()
    told = Thread(target=lambda: [metrics(StoreOffered(1)) for _ in range(20_000)])
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        told.start()
        while told.is_alive():
            assert metrics.totals == {}, "and what was gathered is folded meanwhile"
    finally:
        sys.setswitchinterval(interval)
        told.join()
    *counts, total = metrics.histograms["store_offered", ()]
    assert (sum(counts), total) == (20_000, 20_000)
