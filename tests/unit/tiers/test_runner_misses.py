"""A tier over a store says why it has missed."""

from typing import Any

from kvtiers.chunks import Lookup
from kvtiers.errors import Kind
from kvtiers.events import MissReason, Reason
from kvtiers.tiers.base import ExplainsMisses
from kvtiers.tiers.misses import MAX_DAMAGED, LostToDamage
from tests.unit.tiers.tier_kit import SHARED, Bench, ScriptedStore, error, key

MISS, RETRY = Lookup.MISS, Lookup.RETRY


def failing(kind: Kind) -> Any:
    return lambda items: [error(kind) for _ in items]


def raising(_: Any) -> Any:
    raise error()


def test_it_has_the_hook() -> None:
    with Bench(ScriptedStore()) as bench:
        assert isinstance(bench.tier, ExplainsMisses)


def test_what_was_never_there_is_absent() -> None:
    with Bench(ScriptedStore(SHARED)) as bench:
        assert bench.resolve(1) == [MISS]
        assert bench.tier.why_missed(key(1)) is MissReason.ABSENT


def test_a_damaged_chunk_is_corrupt_until_it_is_stored_again() -> None:
    with Bench(ScriptedStore(SHARED, stored=[1]), negative_ttl_s=1.0).scanned() as bench:
        bench.store.answers["read"] = failing(Kind.CORRUPT)
        bench.run(bench.load_job(1))
        bench.store.delete([key(1)])
        assert bench.tier.why_missed(key(1)) is MissReason.CORRUPT
        bench.clock.advance(5.0)  # the denial is over: the store is asked, and has it no more
        assert bench.resolve(1) == [MISS]
        assert bench.tier.why_missed(key(1)) is MissReason.CORRUPT
        bench.run(bench.store_job(1))
        bench.store.delete([key(1)])
        bench.inbox.removed([key(1)], Reason.EVICTED)
        bench.clock.advance(5.0)
        assert bench.resolve(1) == [MISS]
        assert bench.tier.why_missed(key(1)) is MissReason.ABSENT


def test_a_chunk_that_could_not_be_read_failed() -> None:
    with Bench(ScriptedStore(stored=[1])).scanned() as bench:
        bench.store.answers["read"] = failing(Kind.IO)
        bench.run(bench.load_job(1))
        assert bench.lookup(1) == [MISS]
        assert bench.tier.why_missed(key(1)) is MissReason.FAILED


def test_a_question_that_failed_is_a_failure_and_not_an_absence() -> None:
    store = ScriptedStore(SHARED)
    store.answers["contains"] = raising
    with Bench(store) as bench:
        assert bench.resolve(1) == [MISS]
        assert bench.tier.why_missed(key(1)) is MissReason.FAILED


def test_a_tier_behind_an_open_breaker_is_down() -> None:
    store = ScriptedStore(SHARED)
    store.answers["contains"] = raising
    with Bench(store, breaker_failures=1, breaker_cooldown_s=10.0) as bench:
        bench.resolve(1)
        assert bench.lookup(2) == [MISS]
        assert bench.tier.why_missed(key(2)) is MissReason.TIER_DOWN
        bench.clock.advance(11.0)
        del store.answers["contains"]
        assert bench.resolve(2) == [MISS]
        assert bench.tier.why_missed(key(2)) is MissReason.ABSENT


def test_a_tier_that_is_shut_is_down() -> None:
    with Bench(ScriptedStore()) as bench:
        bench.tier.shutdown(10)
        assert bench.lookup(1) == [MISS]
        assert bench.tier.why_missed(key(1)) is MissReason.TIER_DOWN


def test_an_answer_that_does_not_come_in_time_is_pending() -> None:
    store = ScriptedStore(SHARED)
    gate = store.hold("contains")
    with Bench(store, lookup_deadline_s=1.0) as bench:
        assert bench.lookup(1) == [RETRY]
        bench.tier.on_schedule_end()
        assert store.entered.acquire(timeout=20)
        bench.clock.advance(1.5)
        assert bench.lookup(1) == [MISS]
        assert bench.tier.why_missed(key(1)) is MissReason.PENDING
        bench.tier.get_finished_jobs()  # the question is given up
        assert bench.lookup(1) == [MISS]
        assert bench.tier.why_missed(key(1)) is MissReason.PENDING
        gate.set()


def test_damaged_chunks_are_remembered_up_to_a_bound() -> None:
    damaged = LostToDamage()
    damaged.add(map(key, range(MAX_DAMAGED + 1)))
    damaged.check()
    assert len(damaged) == MAX_DAMAGED
    assert key(0) not in damaged
    assert key(MAX_DAMAGED) in damaged
    assert repr(damaged) == f"<LostToDamage {MAX_DAMAGED} chunks>"
