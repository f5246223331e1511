import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvtiers.chunks import Lookup
from kvtiers.errors import Kind
from kvtiers.events import ChunksFound, ChunksRemoved, Reason, TierReachable
from kvtiers.tiers.base import Capabilities, EmitsEvents, Entry, FollowsSteps, HasPendingWork
from tests.unit.tiers.tier_kit import CHUNK, SHARED, Bench, ScriptedStore, error, key

HIT, MISS, RETRY = Lookup.HIT, Lookup.MISS, Lookup.RETRY


def scanned(bench: Bench) -> None:
    bench.until(lambda: "complete" in repr(bench.tier._presence))


def test_it_has_the_optional_hooks() -> None:
    with Bench(ScriptedStore()) as bench:
        assert isinstance(bench.tier, FollowsSteps)
        assert isinstance(bench.tier, HasPendingWork)
        assert isinstance(bench.tier, EmitsEvents)


def test_exclusive_store_answers_from_memory_once_scanned() -> None:
    with Bench(ScriptedStore(stored=[1, 2])) as bench:
        scanned(bench)
        assert bench.lookup(1, 2, 3) == [HIT, HIT, MISS]
        assert bench.store.called("contains") == []
        assert not bench.tier.has_pending_work()


def test_scan_holds_up_neither_the_constructor_nor_lookups() -> None:
    store = ScriptedStore(stored=[1])
    gate = store.hold("scan")
    with Bench(store) as bench:
        assert store.entered.acquire(timeout=20)
        assert bench.lookup(1, 2) == [RETRY, RETRY]
        assert bench.resolve(1, 2) == [HIT, MISS]
        gate.set()
        scanned(bench)
        assert bench.lookup(1, 3) == [HIT, MISS]


def test_long_scans_arrive_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtiers.tiers.scanning.SCAN_PIECE", 3)
    with Bench(ScriptedStore(stored=range(9))) as bench:
        scanned(bench)
        assert bench.lookup(*range(10)) == [HIT] * 9 + [MISS]


def test_a_chunk_that_the_scan_did_not_come_to_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtiers.tiers.scanning.SCAN_PIECE", 2)
    store = ScriptedStore(stored=range(4))
    reached, gate = threading.Event(), threading.Event()

    def slow(_: Any) -> Iterator[Entry]:
        yield from (Entry(key(n), CHUNK, 0.0) for n in (0, 1))
        reached.set()
        assert gate.wait(30)
        yield from (Entry(key(n), CHUNK, 0.0) for n in (2, 3))

    store.answers["scan"] = slow
    with Bench(store) as bench:
        assert bench.inbox.wait(20)
        bench.tier.on_schedule_end()
        assert reached.wait(20)
        assert bench.lookup(0, 1, 2, 9) == [HIT, HIT, RETRY, RETRY]
        assert bench.resolve(2, 9) == [HIT, MISS]
        gate.set()
        scanned(bench)
        assert bench.lookup(3, 10) == [HIT, MISS]
        assert store.called("contains") == [(key(2), key(9))]


def test_a_hung_scan_loses_its_lane_and_chunks_are_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = ScriptedStore(stored=[1])
    gate = store.hold("scan")
    with Bench(store, scan_deadline_s=30) as bench:
        assert store.entered.acquire(timeout=20)
        bench.clock.advance(29)
        bench.tier.get_finished_jobs()
        assert "0 replaced" in repr(bench.tier._lanes)
        bench.clock.advance(1)
        bench.tier.get_finished_jobs()
        bench.tier.get_finished_jobs()
        assert "1 replaced" in repr(bench.tier._lanes)
        assert caplog.text.count("start-up scan hangs") == 1
        store.hold(key(5))
        bench.lookup(5)
        bench.tier.on_schedule_end()
        assert store.entered.acquire(timeout=20)
        assert bench.resolve(1, 2) == [HIT, MISS], "the other lane of two, besides the hung one"
        gate.set()
        scanned(bench)
        assert bench.lookup(1, 3) == [HIT, MISS]


def test_a_hung_scan_that_cannot_be_replaced_is_tried_again_later() -> None:
    store = ScriptedStore(stored=[1])
    store.hold("scan")
    with Bench(store, scan_deadline_s=30, max_replacement_threads=0) as bench:
        assert store.entered.acquire(timeout=20)
        bench.clock.advance(30)
        bench.tier.get_finished_jobs()
        assert bench.resolve(1) == [HIT]
        assert "under way" in repr(bench.tier._scan)


def fail(_: Any) -> Any:
    raise OSError(5, "told to fail")


def test_failed_scan_leaves_the_store_to_be_asked(caplog: pytest.LogCaptureFixture) -> None:
    store = ScriptedStore(stored=[1])
    store.answers["scan"] = fail
    with Bench(store) as bench:
        assert bench.resolve(1, 2) == [HIT, MISS]
        bench.clock.advance(10)
        assert bench.lookup(2) == [RETRY]
        assert "start-up scan failed" in caplog.text


def test_store_without_scan_is_asked() -> None:
    store = ScriptedStore(Capabilities(persistent=True, shared=False, scan=False), [1])
    with Bench(store) as bench:
        assert bench.resolve(1, 2) == [HIT, MISS]
        assert store.called("scan") == []


def test_shared_store_is_asked_once_per_step_in_one_batch() -> None:
    store = ScriptedStore(SHARED)
    store.answers["scan"] = lambda _: []
    store.chunks = {key(1): b""}
    with Bench(store) as bench:
        assert bench.lookup(1, 2) == [RETRY, RETRY]
        assert bench.lookup(2, 3) == [RETRY, RETRY]
        assert bench.tier.has_pending_work()
        assert bench.resolve(1, 2, 3) == [HIT, MISS, MISS]
        assert store.called("contains") == [(key(1), key(2), key(3))]
        assert not bench.tier.has_pending_work()


def test_negative_answers_are_remembered_for_a_while() -> None:
    store = ScriptedStore(SHARED)
    store.answers["scan"] = lambda _: []
    with Bench(store, negative_ttl_s=5) as bench:
        assert bench.resolve(1) == [MISS]
        bench.store.chunks[key(1)] = b"by somebody else"
        bench.clock.advance(4.9)
        assert bench.lookup(1) == [MISS]
        bench.clock.advance(0.1)
        assert bench.resolve(1) == [HIT]


def test_lookup_returns_while_the_store_is_held_and_is_a_miss_at_its_deadline() -> None:
    store = ScriptedStore(SHARED)
    store.answers["scan"] = lambda _: []
    gate = store.hold("contains")
    with Bench(store, lookup_deadline_s=1, negative_ttl_s=5) as bench:
        store.chunks[key(1)] = b""
        assert bench.lookup(1) == [RETRY]
        bench.tier.on_schedule_end()
        assert store.entered.acquire(timeout=20)
        bench.clock.advance(0.9)
        assert bench.lookup(1) == [RETRY]
        bench.clock.advance(0.1)
        assert bench.lookup(1) == [MISS]
        assert bench.tier.get_finished_jobs() == []
        assert bench.lookup(1) == [MISS]
        assert not bench.tier.has_pending_work()
        gate.set()
        bench.until(lambda: bench.lookup(1) == [HIT])


def test_lanes_hung_in_lookups_are_replaced() -> None:
    store = ScriptedStore(SHARED, [7])
    gates = [store.hold(key(n)) for n in (1, 2)]
    with Bench(store, lookup_deadline_s=1) as bench:
        for n in (1, 2):  # both lanes
            bench.lookup(n)
            bench.tier.on_schedule_end()
            assert store.entered.acquire(timeout=20)
        bench.clock.advance(1)
        bench.tier.get_finished_jobs()
        assert bench.resolve(7) == [HIT]
        for gate in gates:
            gate.set()


def test_failed_contains_is_a_miss() -> None:
    store = ScriptedStore(SHARED)
    store.answers["contains"] = fail
    with Bench(store) as bench:
        assert bench.resolve(1) == [MISS]


def test_breaker_takes_the_tier_out_and_lets_one_probe_through(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "kvtiers")
    store = ScriptedStore(SHARED, [100])
    with Bench(store, breaker_failures=3, breaker_cooldown_s=5) as bench:
        assert bench.resolve(100) == [HIT]
        store.answers["contains"] = fail
        for n in range(3):
            bench.resolve(n)
        assert bench.lookup(100, 5) == [MISS, MISS]
        assert not bench.tier.submit_load(bench.load_job(100))
        assert not bench.tier.submit_store(bench.store_job(6))
        bench.clock.advance(5)
        assert bench.resolve(7) == [MISS]  # the probe fails: out for 10 s
        bench.clock.advance(5)
        assert bench.lookup(100) == [MISS]
        bench.clock.advance(5)
        del store.answers["contains"]
        assert bench.lookup(100) == [HIT]
        assert bench.resolve(8) == [MISS]
        assert bench.lookup(100, 9) == [HIT, RETRY]
        assert caplog.text.count("keeps failing") == 1
        assert caplog.text.count("works again") == 1


def test_only_one_probe_is_on_its_way() -> None:
    store = ScriptedStore(SHARED, [1, 2])
    with Bench(store, breaker_failures=1, breaker_cooldown_s=5) as bench:
        assert bench.resolve(1, 2) == [HIT, HIT]
        store.answers["read"] = lambda items: [error(Kind.IO)] * len(items)
        bench.run(bench.load_job(1))
        bench.clock.advance(6)
        del store.answers["read"]
        gate = store.hold("read")
        assert bench.tier.submit_load(bench.load_job(1))
        assert not bench.tier.submit_load(bench.load_job(2))
        assert bench.lookup(2) == [MISS]
        gate.set()
        bench.finished(1)
        assert bench.lookup(2) == [HIT]


def test_removal_reports_correct_the_table_and_are_told_once() -> None:
    with Bench(ScriptedStore(stored=[1, 2])) as bench:
        scanned(bench)
        thread = threading.Thread(
            target=lambda: [bench.inbox.removed([key(1), key(9)], Reason.EVICTED)] * 2
        )
        thread.start()
        thread.join(20)
        bench.inbox.removed([key(1)], Reason.VANISHED)
        assert bench.lookup(1, 2) == [MISS, HIT]
        assert bench.changes() == [ChunksRemoved("1:fake", (key(1),), Reason.EVICTED)]
        assert bench.changes() == []


def test_touch_reaches_the_store_and_its_failure_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Bench(ScriptedStore(stored=[1])) as bench:
        bench.tier.touch([key(1)])
        assert bench.store.called("touch") == [(key(1),)]
        bench.store.answers["touch"] = fail
        bench.tier.touch([key(1)])
        bench.tier.touch([key(1)])
        assert caplog.text.count("touch failed") == 1


def test_after_shutdown_everything_is_a_miss() -> None:
    bench = Bench(ScriptedStore(stored=[1]))
    scanned(bench)
    bench.tier.shutdown(20)
    bench.tier.shutdown(20)
    assert bench.store.closed == 1
    assert bench.lookup(1) == [MISS]
    assert not bench.tier.submit_store(bench.store_job(2))
    assert not bench.tier.submit_load(bench.load_job(1))
    bench.tier.touch([key(1)])
    bench.tier.on_schedule_end()
    bench.tier.check()
    assert not [t for t in threading.enumerate() if t.name.startswith("kvtiers-1:fake")]


def test_a_chunk_that_was_lost_is_not_brought_back_by_older_news() -> None:
    store = ScriptedStore(SHARED, stored=[1, 2])
    listed = list(store.scan())
    gate = store.hold("contains")
    reached, scan_on = threading.Event(), threading.Event()

    def slow(_: Any) -> Iterator[Entry]:
        yield from listed
        reached.set()
        assert scan_on.wait(30)

    store.answers["scan"] = slow
    with Bench(store, n_read_threads=2) as bench:
        assert reached.wait(20)
        assert bench.lookup(1, 2) == [RETRY, RETRY]
        bench.tier.on_schedule_end()
        assert store.entered.acquire(timeout=20)
        bench.inbox.removed([key(1)], Reason.CORRUPT)
        gate.set()
        bench.until(lambda: bench.lookup(2) == [HIT])
        assert not bench.tier._presence.holds(key(1)), "the answer was given before the loss"
        scan_on.set()
        bench.until(lambda: bench.tier._scan.complete)
        assert not bench.tier._presence.holds(key(1)), "it was listed before the loss"
        outcome = bench.run(bench.store_job(1))
        assert outcome.done == (key(1),)
        assert store.called("write") == [(key(1),)], "it is not taken for stored"


def test_what_was_there_before_is_told_once() -> None:
    with Bench(ScriptedStore(stored=[1, 2])) as bench:
        bench.scanned()
        assert bench.resolve(1, 2) == [HIT] * 2
        bench.run(bench.store_job(1, 3))
        found, stored = bench.tier.take_events()
        assert (found, {*stored.keys}) == (found, {key(3)})
        assert isinstance(found, ChunksFound)
        assert ({*found.keys}, found.complete) == ({key(1), key(2)}, True)


def test_what_a_question_finds_in_shared_storage_is_told() -> None:
    store = ScriptedStore(capabilities=SHARED)
    with Bench(store) as bench:
        bench.scanned()
        store.chunks[key(5)] = b""
        assert bench.resolve(5, 6) == [HIT, MISS]
        assert bench.tier.take_events() == [ChunksFound("1:fake", (key(5),))]
        assert bench.resolve(5) == [HIT]
        assert bench.tier.take_events() == []


def test_a_tier_that_is_left_alone_is_told_of() -> None:
    store = ScriptedStore(stored=[1])
    with Bench(store, breaker_failures=1, breaker_cooldown_s=5, transfer_retries=0) as bench:
        bench.scanned()
        store.answers["read"] = lambda items: [error(Kind.IO) for _ in items]
        bench.run(bench.load_job(1))
        assert bench.tier.take_events()[-1] == TierReachable("1:fake", False)
        del store.answers["read"]
        bench.clock.advance(10)
        bench.run(bench.load_job(1))
        assert bench.tier.take_events() == [TierReachable("1:fake", True)]
