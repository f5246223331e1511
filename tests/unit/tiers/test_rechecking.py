"""What others removed is told of within a stated time, though nobody asks for it."""

import itertools

import pytest

from kvtiers.events import ChunksRemoved, ChunksStored, Reason, TierReachable
from kvtiers.tiers import rechecking
from kvtiers.tiers.base import Key
from tests.unit.tiers.tier_kit import EXCLUSIVE, SHARED, Bench, ScriptedStore, error, key

PERIOD_S = 100.0


def bench_of(store: ScriptedStore, **options: object) -> Bench:
    """With chunks 0 to 9, of which it was told."""
    bench = Bench(store, told=True, **{"recheck_s": PERIOD_S, **options}).scanned()
    bench.run(bench.store_job(*range(10)))
    bench.tier.take_events()
    store.calls.clear()
    return bench


def answered(bench: Bench) -> bool:
    return bench.tier._rechecks is None or bench.tier._rechecks._piece is None


def pass_time(bench: Bench, seconds: float, every_s: float = 1.0) -> None:
    """Steps, each of which sees what the one before asked for."""
    for _ in range(int(seconds / every_s)):
        bench.clock.advance(every_s)
        bench.tier.on_schedule_end()
        if not answered(bench):
            bench.until(lambda: answered(bench))


def asked(store: ScriptedStore) -> list[Key]:
    return [k for operation, keys in store.calls if operation == "contains" for k in keys]


@pytest.mark.parametrize("least", [1, 256])
def test_every_chunk_is_asked_for_within_the_period_and_twice_at_most(
    monkeypatch: pytest.MonkeyPatch, least: int
) -> None:
    monkeypatch.setattr(rechecking, "LEAST_KEYS", least)
    store = ScriptedStore(SHARED)
    with bench_of(store) as bench:
        pass_time(bench, PERIOD_S / 2 + 1)  # a round that began with none
        store.calls.clear()
        for _ in range(3):
            pass_time(bench, PERIOD_S)
            seen = asked(store)
            assert set(seen) == {key(n) for n in range(10)}
            assert len(seen) <= 20
            store.calls.clear()
        assert bench.tier.take_events() == []


def test_what_is_gone_is_told_of_once_and_is_a_miss() -> None:
    store = ScriptedStore(SHARED)
    with bench_of(store) as bench:
        store.chunks.pop(key(3))
        pass_time(bench, PERIOD_S + 2)
        gone = ChunksRemoved("1:fake", (key(3),), Reason.VANISHED)
        assert bench.tier.take_events() == [gone]
        pass_time(bench, 2 * PERIOD_S)
        assert bench.tier.take_events() == []
        assert bench.tier.residents() == [key(n) for n in range(10) if n != 3]


def test_what_was_stored_anew_since_it_was_asked_for_stays() -> None:
    store = ScriptedStore(SHARED)
    with bench_of(store, n_write_threads=2) as bench:
        pass_time(bench, PERIOD_S / 2)
        store.chunks.pop(key(3))
        answer = store.hold("contains")
        bench.clock.advance(PERIOD_S / 2)
        bench.tier.on_schedule_end()
        assert store.entered.acquire(timeout=20)
        bench.inbox.removed([key(3)], Reason.VANISHED)
        bench.tier.on_schedule_end()
        assert bench.run(bench.store_job(3)).done == (key(3),)
        store.chunks.pop(key(3))  # as it was when it was asked for
        answer.set()
        pass_time(bench, 1)
        stored = ChunksStored("1:fake", (key(3),))
        assert bench.tier.take_events() == [
            ChunksRemoved("1:fake", (key(3),), Reason.VANISHED),
            stored,
        ]


def test_a_store_that_cannot_be_asked_is_left_alone_and_keeps_what_is_told() -> None:
    store = ScriptedStore(SHARED)
    with bench_of(store, breaker_failures=1) as bench:
        store.answers["contains"] = lambda keys: error()
        pass_time(bench, PERIOD_S + 2)
        assert bench.tier.take_events() == [TierReachable("1:fake", False)]
        store.calls.clear()
        pass_time(bench, PERIOD_S)
        assert asked(store) == [], "what is left alone is not asked"


def test_failures_with_an_answer_between_them_are_not_in_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rechecking, "LEAST_KEYS", 1)
    store = ScriptedStore(SHARED)
    with bench_of(store, breaker_failures=2) as bench:
        turns = itertools.cycle([lambda keys: error(), lambda keys: [True] * len(keys)])
        store.answers["contains"] = lambda keys: next(turns)(keys)
        pass_time(bench, 2 * PERIOD_S)
        assert len(store.called("contains")) > 10
        assert bench.tier.take_events() == []
        store.answers["contains"] = lambda keys: error()
        pass_time(bench, PERIOD_S)
        assert bench.tier.take_events() == [TierReachable("1:fake", False)]


def test_a_round_that_begins_is_no_answer_of_the_store() -> None:
    store = ScriptedStore(SHARED)
    with bench_of(store, breaker_failures=2) as bench:
        store.answers["contains"] = lambda keys: error()
        pass_time(bench, 2 * PERIOD_S)
        assert bench.tier.take_events() == [TierReachable("1:fake", False)]


def test_a_slice_that_hangs_is_waited_for_no_more() -> None:
    store = ScriptedStore(SHARED)
    with bench_of(store, scan_deadline_s=5.0, breaker_failures=9) as bench:
        pass_time(bench, PERIOD_S / 2)
        answer = store.hold("contains")
        bench.clock.advance(PERIOD_S / 2)
        bench.tier.on_schedule_end()
        assert store.entered.acquire(timeout=20)
        del store.gates["contains"]
        store.chunks.pop(key(3))
        bench.clock.advance(6)
        bench.tier.on_schedule_end()
        pass_time(bench, PERIOD_S)
        gone = ChunksRemoved("1:fake", (key(3),), Reason.VANISHED)
        assert bench.tier.take_events() == [gone]
        answer.set()


def test_a_slice_that_hangs_and_fails_in_the_end_failed_once() -> None:
    store, taken = ScriptedStore(SHARED), []
    with bench_of(store, scan_deadline_s=5.0, breaker_failures=2) as bench:
        rechecks = bench.tier._rechecks
        assert rechecks is not None
        took = rechecks.took
        rechecks.took = lambda piece: taken.append(piece) or took(piece)  # type: ignore
        store.answers["contains"] = lambda keys: error()
        pass_time(bench, PERIOD_S / 2)
        answer = store.hold("contains")
        bench.clock.advance(PERIOD_S / 2)
        bench.tier.on_schedule_end()
        piece = rechecks._piece
        assert store.entered.acquire(timeout=20)
        bench.clock.advance(6)
        bench.tier.on_schedule_end()
        answer.set()
        bench.until(lambda: piece in taken)
        assert bench.tier.take_events() == []


@pytest.mark.parametrize(
    "bench",
    [
        Bench(ScriptedStore(SHARED), told=False),
        Bench(ScriptedStore(SHARED), told=True, recheck_s=0.0),
        Bench(ScriptedStore(EXCLUSIVE), told=True),
    ],
)
def test_who_need_not_does_not_ask(bench: Bench) -> None:
    with bench:
        assert bench.tier._rechecks is None
