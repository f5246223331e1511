import threading
from typing import Any

import pytest

from kvtiers.chunks import Lookup
from kvtiers.errors import Kind
from kvtiers.events import ChunksRemoved, ChunksStored, Reason
from kvtiers.tiers.base import Job, JobKind, JobOutcome, JobReleased
from kvtiers.tiers.views import ChunkViews
from tests.unit.tiers.tier_kit import CHUNK, SHARED, Bench, ScriptedStore, dead, error, key, payload

HIT, MISS, RETRY = Lookup.HIT, Lookup.MISS, Lookup.RETRY


def stored(bench: Bench, n: int) -> bool:
    return any(key(n) in event.keys for event in bench.changes())


def test_round_trip_with_events_and_dead_views() -> None:
    with Bench(ScriptedStore()) as bench:
        job = bench.store_job(1, 2)
        outcome = bench.run(job)
        assert set(outcome.done) == {key(1), key(2)}
        assert (outcome.failed, outcome.bytes, outcome.memory_in_use) == ({}, 2 * CHUNK, False)
        assert all(dead(view) for view in job.views)
        assert bench.lookup(1, 2) == [HIT, HIT]
        assert bench.changes() == [ChunksStored("1:fake", (key(1), key(2)))]

        load = bench.load_job(1, 2)
        kept = [view[:] for view in load.views]  # what the core sees of the region
        outcome = bench.run(load)
        assert set(outcome.done) == {key(1), key(2)}
        assert [bytes(k) for k in kept] == [payload(1), payload(2)]
        assert all(dead(view) for view in load.views)
        assert bench.changes() == []


def test_a_job_is_spread_over_the_lanes_and_told_once() -> None:
    store = ScriptedStore()
    with Bench(store, n_write_threads=4, min_slice_bytes=1) as bench:
        gate = store.hold("write")
        assert bench.tier.submit_store(bench.store_job(*range(8)))
        for _ in range(4):
            assert store.entered.acquire(timeout=20)
        assert sorted(len(keys) for keys in store.called("write")) == [2, 2, 2, 2]
        assert bench.tier.get_finished_jobs() == []
        gate.set()
        (outcome,) = bench.finished(1)
        assert isinstance(outcome, JobOutcome)
        assert set(outcome.done) == {key(n) for n in range(8)}
        assert bench.tier.get_finished_jobs() == []


def test_jobs_that_come_together_share_the_lanes() -> None:
    """Lanes that are busy anyway win nothing from small slices."""
    store = ScriptedStore()
    gate = store.hold("write")
    with Bench(store, n_write_threads=4, min_slice_bytes=1) as bench:
        for first in (0, 4, 8, 12):
            assert bench.tier.submit_store(bench.store_job(*range(first, first + 4)))
        gate.set()
        assert bench.tier.drain_jobs(20)
        assert sorted(map(len, store.called("write"))) == [1, 1, 1, 1, 2, 2, 4, 4]
        assert len(bench.tier.get_finished_jobs()) == 4


def test_chunks_that_are_there_are_not_stored_again() -> None:
    with Bench(ScriptedStore()) as bench:
        bench.run(bench.store_job(1))
        bench.changes()
        job = bench.store_job(1, 2)
        outcome = bench.run(job)
        assert set(outcome.done) == {key(1), key(2)}
        assert outcome.bytes == CHUNK
        assert bench.store.called("write") == [(key(1),), (key(2),)]
        assert bench.changes() == [ChunksStored("1:fake", (key(2),))]
        assert all(dead(view) for view in job.views)
        assert bench.run(bench.store_job(1, 2)).bytes == 0
        assert bench.run(bench.store_job()).done == ()


def test_submit_returns_while_the_store_is_held_and_pressure_is_in_bytes() -> None:
    store = ScriptedStore()
    gate = store.hold("write")
    with Bench(store, max_queued_store_bytes=3 * CHUNK) as bench:
        assert bench.tier.submit_store(bench.store_job(1, 2))
        assert bench.tier.submit_store(bench.store_job(3))
        refused = bench.store_job(4)
        assert not bench.tier.submit_store(refused)
        assert bytes(refused.views[0]) == payload(4), "nothing was taken"
        assert bench.tier.submit_load(bench.load_job(9)), "loads are not refused"
        assert bench.tier.has_pending_work()
        gate.set()
        assert bench.tier.drain_jobs(20)
        assert len(bench.tier.get_finished_jobs()) == 3
        assert bench.tier.submit_store(refused)
        assert bench.tier.drain_jobs(20)


def test_one_job_above_the_bound_is_taken_when_nothing_else_waits() -> None:
    with Bench(ScriptedStore(), max_queued_store_bytes=CHUNK) as bench:
        assert len(bench.run(bench.store_job(1, 2, 3)).done) == 3


def test_loads_overtake_queued_stores() -> None:
    store = ScriptedStore(stored=[50])
    write_gate, read_gate = store.hold("write"), store.hold(key(51))
    with Bench(store, n_read_threads=1, n_write_threads=1) as bench:
        for submit, job in (
            (bench.tier.submit_store, bench.store_job(1)),
            (bench.tier.submit_load, bench.load_job(51)),
        ):  # both lanes are busy
            assert submit(job)
            assert store.entered.acquire(timeout=20)
        for n in (2, 3):
            assert bench.tier.submit_store(bench.store_job(n))
        assert bench.tier.submit_load(bench.load_job(50))
        write_gate.set()
        assert len(bench.finished(4)) == 4
        moves = [(name, keys) for name, keys in store.calls if name in ("read", "write")]
        assert moves[2:] == [("read", (key(50),)), ("write", (key(2),)), ("write", (key(3),))]
        read_gate.set()
        bench.finished(1)


def test_a_failed_chunk_does_not_fail_its_neighbours() -> None:
    store = ScriptedStore()
    store.answers["write"] = lambda items: [
        error(Kind.FULL) if i.key == key(2) else None for i in items
    ]
    with Bench(store) as bench:
        outcome = bench.run(bench.store_job(1, 2, 3))
        assert set(outcome.done) == {key(1), key(3)}
        assert outcome.failed[key(2)].kind is Kind.FULL
        assert bench.changes() == [ChunksStored("1:fake", (key(1), key(3)))]


def test_deadline_of_a_hung_store() -> None:
    store = ScriptedStore(stored=[9])
    gate = store.hold(key(2))
    options = {"n_write_threads": 2, "min_slice_bytes": 1, "store_deadline_s": 60}
    with Bench(store, **options) as bench:
        job = bench.store_job(1, 2)
        assert bench.tier.submit_store(job)
        assert store.entered.acquire(timeout=20)
        bench.until(lambda: stored(bench, 1))
        bench.clock.advance(59)
        assert bench.tier.get_finished_jobs() == []
        bench.clock.advance(1)
        (outcome,) = bench.tier.get_finished_jobs()
        assert isinstance(outcome, JobOutcome)
        assert outcome.done == (key(1),)
        assert outcome.failed[key(2)].kind is Kind.TIMEOUT
        assert outcome.memory_in_use
        assert not dead(job.views[1])
        assert not bench.tier.has_pending_work(), "nothing an engine step could hasten"
        assert not bench.tier.drain_jobs(0)
        assert "1 hung" in repr(bench.tier)
        bench.tier.check()

        assert bench.tier.submit_load(bench.load_job(9))
        assert bench.tier.submit_store(bench.store_job(3))
        others = bench.finished(2)
        assert {k for o in others if isinstance(o, JobOutcome) for k in o.done} == {key(9), key(3)}

        gate.set()
        assert bench.finished(1) == [JobReleased(job.id)]
        assert dead(job.views[1])
        assert bench.lookup(2) == [HIT], "written in the end"
        assert bench.tier.get_finished_jobs() == []
        assert bench.tier.drain_jobs(20)


def test_queued_slices_of_a_late_job_are_cancelled_and_their_memory_is_free() -> None:
    store = ScriptedStore()
    gate = store.hold("write")
    with Bench(store, max_replacement_threads=0) as bench:
        first, second = bench.store_job(1), bench.store_job(2)
        assert bench.tier.submit_store(first)
        assert store.entered.acquire(timeout=20)
        assert bench.tier.submit_store(second)
        bench.clock.advance(60)
        outcomes = bench.tier.get_finished_jobs()
        assert [(o.job_id, o.memory_in_use) for o in outcomes if isinstance(o, JobOutcome)] == [
            (first.id, True),
            (second.id, False),
        ]
        assert dead(second.views[0])
        gate.set()
        assert bench.finished(1) == [JobReleased(first.id)]
        assert store.called("write") == [(key(1),)]


def test_hung_memory_counts_as_pressure_until_it_is_released() -> None:
    store = ScriptedStore()
    gate = store.hold(key(1))
    with Bench(store, max_queued_store_bytes=CHUNK) as bench:
        assert bench.tier.submit_store(bench.store_job(1))
        assert store.entered.acquire(timeout=20)
        bench.clock.advance(60)
        assert len(bench.tier.get_finished_jobs()) == 1
        assert not bench.tier.submit_store(bench.store_job(2))
        gate.set()
        bench.finished(1)
        assert bench.tier.submit_store(bench.store_job(2))


def test_late_load_is_denied_for_a_while_then_found_again() -> None:
    store = ScriptedStore(stored=[1])
    gate = store.hold("read")
    with Bench(store, load_deadline_s=10, negative_ttl_s=5) as bench:
        assert bench.resolve(1) == [HIT]
        assert bench.tier.submit_load(bench.load_job(1))
        assert store.entered.acquire(timeout=20)
        bench.clock.advance(10)
        (outcome,) = bench.tier.get_finished_jobs()
        assert isinstance(outcome, JobOutcome)
        assert outcome.memory_in_use
        assert bench.lookup(1) == [MISS]
        gate.set()
        bench.finished(1)
        bench.clock.advance(5)
        assert bench.lookup(1) == [HIT]


@pytest.mark.parametrize("kind", [Kind.IO, Kind.BROKEN])
def test_chunk_that_fails_to_load_is_not_found_again_at_once(kind: Kind) -> None:
    store = ScriptedStore(stored=[1])
    store.answers["read"] = lambda items: [error(kind)]
    with Bench(store, negative_ttl_s=5) as bench:
        assert bench.resolve(1) == [HIT]
        assert bench.run(bench.load_job(1)).failed[key(1)].kind is kind
        assert bench.lookup(1) == [MISS]
        bench.clock.advance(5)
        assert bench.lookup(1) == [HIT]


def test_vanished_and_corrupt_leave_the_table_even_if_the_store_forgets_to_say_so() -> None:
    store = ScriptedStore(stored=[1, 2, 3])
    with Bench(store) as bench:
        assert bench.resolve(1, 2, 3) == [HIT] * 3
        store.answers["read"] = lambda items: [
            {key(1): error(Kind.VANISHED), key(2): error(Kind.CORRUPT)}.get(i.key) for i in items
        ]
        outcome = bench.run(bench.load_job(1, 2, 3))
        assert outcome.done == (key(3),)
        assert bench.lookup(1, 2, 3) == [MISS, MISS, HIT]
        assert bench.changes() == [
            ChunksRemoved("1:fake", (key(1),), Reason.VANISHED),
            ChunksRemoved("1:fake", (key(2),), Reason.CORRUPT),
        ]


def test_stored_and_removed_alternate_per_residency() -> None:
    with Bench(ScriptedStore()) as bench:
        for _ in range(3):
            bench.run(bench.store_job(1))
            bench.run(bench.store_job(1))
            bench.inbox.removed([key(1)], Reason.EVICTED)
            bench.inbox.removed([key(1)], Reason.EVICTED)
            bench.lookup()
        names = [type(event).__name__ for event in bench.changes()]
        assert names == ["ChunksStored", "ChunksRemoved"] * 3


def test_a_broken_store_ends_in_failures_not_in_dead_lanes() -> None:
    def exit_(_: Any) -> Any:
        raise SystemExit("no")

    store = ScriptedStore(SHARED)
    with Bench(store, breaker_failures=1000) as bench:
        for answer in (exit_, lambda _: None, lambda _: [None] * 7, lambda _: [3]):
            for method in ("write", "read", "contains"):
                store.answers[method] = answer
            for _ in range(3):  # more often than there are lanes
                for job in (bench.store_job(1), bench.load_job(1)):
                    assert bench.run(job).failed[key(1)].kind is Kind.BROKEN
                bench.clock.advance(10)
                assert bench.resolve(1) == [MISS]
        store.answers.clear()
        assert bench.run(bench.store_job(1)).done == (key(1),)


def test_a_full_store_goes_on_serving_loads() -> None:
    store = ScriptedStore(stored=[1])
    store.answers["write"] = lambda items: [error(Kind.FULL)] * len(items)
    with Bench(store, breaker_failures=2) as bench:
        for n in range(10, 15):
            bench.run(bench.store_job(n))
        assert bench.run(bench.load_job(1)).done == (key(1),)


def test_shutdown_with_a_hung_lane_keeps_its_deadline(caplog: pytest.LogCaptureFixture) -> None:
    store = ScriptedStore()
    gate = store.hold("write")
    bench = Bench(store)
    running, queued = bench.store_job(1), bench.store_job(2)
    assert bench.tier.submit_store(running)
    assert store.entered.acquire(timeout=20)
    assert bench.tier.submit_store(queued)
    bench.tier.shutdown(0.01)
    assert "still hangs" in caplog.text
    assert dead(queued.views[0])
    assert not dead(running.views[0])
    assert bench.tier.get_finished_jobs() == []
    bench.tier.check()
    gate.set()
    for thread in threading.enumerate():
        if thread.name.startswith("kvtiers-1:fake"):
            thread.join(20)
    assert dead(running.views[0])
    assert store.called("write") == [(key(1),)]


def test_a_job_whose_memory_is_gone_ends_all_the_same() -> None:
    def cut(i: int) -> memoryview:
        raise ValueError("the region is closed")

    with Bench(ScriptedStore()) as bench:
        job = Job(7, JobKind.STORE, (key(1),), (0,), ChunkViews(cut, [CHUNK]))
        assert bench.tier.submit_store(job)
        (outcome,) = bench.finished(1)
        assert isinstance(outcome, JobOutcome)
        assert outcome.failed[key(1)].kind is Kind.BROKEN
        assert not outcome.memory_in_use
        assert not bench.tier.has_pending_work()
