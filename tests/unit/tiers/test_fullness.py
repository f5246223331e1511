"""How full a store is: what stands at rest is the truth, and asking is rare."""

import threading
from typing import Any

from kvtiers.chunks import Lookup
from kvtiers.tiers.base import JobKind, Usage
from kvtiers.tiers.fullness import AT_REST_S, EVERY_S, Fullness
from kvtiers.tiers.lanes import Inbox
from tests.unit.test_checks import broken
from tests.unit.tiers.tier_kit import (
    CHUNK,
    REQUEST,
    SHARED,
    Bench,
    ManualClock,
    ScriptedStore,
    error,
    key,
)


class Counting(ScriptedStore):
    """It knows what it holds."""

    def usage(self) -> Usage:
        self._enter("usage", ())
        return Usage(len(self.chunks) * CHUNK, 100 * CHUNK)


def rest(bench: Bench) -> None:
    """Until nothing is outstanding, however long that takes."""
    while bench.tier.has_pending_work():
        bench.clock.advance(AT_REST_S)
        bench.tier.get_finished_jobs()
        if bench.tier._fullness._piece is not None:
            assert bench.inbox.wait(20)


def test_it_is_measured_once_a_second_and_may_not_be_known() -> None:
    store = ScriptedStore()
    answers: list[Any] = [Usage(1, 10), Usage(2, 10), ZeroDivisionError("oops"), "full"]

    def usage() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    store.usage = usage  # type: ignore[attr-defined]
    fullness = Fullness(store, Inbox(), ManualClock(), 1.0)
    fullness.note(0.0)
    fullness.note(0.9 * EVERY_S)
    assert fullness.usage == Usage(1, 10)
    assert "stale" in repr(fullness)
    fullness.note(EVERY_S)
    assert "stale" not in repr(fullness)
    fullness.note(2 * EVERY_S)
    assert fullness.usage == Usage(2, 10), "what it raised is no answer"
    fullness.note(3 * EVERY_S)
    assert fullness.usage is None
    assert answers == []


def test_what_came_within_a_second_is_known_at_rest_and_once_it_is_nothing_is_to_be_done() -> None:
    with Bench(Counting()) as bench:
        for n in range(8):
            bench.run(bench.store_job(n))
        assert bench.tier.usage() != Usage(8 * CHUNK, 100 * CHUNK)
        before = len(bench.store.called("usage"))
        rest(bench)
        assert bench.tier.usage() == Usage(8 * CHUNK, 100 * CHUNK)
        assert len(bench.store.called("usage")) == before + 1
        bench.clock.advance(60.0)
        bench.tier.get_finished_jobs()
        assert not bench.tier.has_pending_work()


def test_what_left_by_itself_is_known_at_rest() -> None:
    with Bench(Counting(stored=[1, 2])) as bench:
        bench.scanned()
        rest(bench)
        assert bench.tier.usage() == Usage(2 * CHUNK, 100 * CHUNK)
        bench.inbox.removed(list(bench.store.chunks), None)  # type: ignore[arg-type]
        bench.store.chunks.clear()
        bench.tier.get_finished_jobs()
        rest(bench)
        assert bench.tier.usage() == Usage(0, 100 * CHUNK)


def test_a_store_that_hangs_when_it_is_asked_keeps_no_engine_awake() -> None:
    store = Counting()
    with Bench(store, lookup_deadline_s=0.5) as bench:
        bench.run(bench.store_job(1))
        store.hold("usage")
        bench.clock.advance(AT_REST_S)
        bench.tier.get_finished_jobs()
        assert store.entered.acquire(timeout=20)
        assert bench.tier.has_pending_work()
        bench.clock.advance(0.5)
        bench.tier.get_finished_jobs()
        assert not bench.tier.has_pending_work()
        assert bench.run(bench.store_job(2)).done, "another lane took its place"


def test_a_tier_that_is_left_alone_is_not_measured() -> None:
    store = Counting(SHARED, stored=[5])
    with Bench(store, breaker_failures=1) as bench:
        store.answers["write"] = lambda items: [error()] * len(items)
        assert bench.run(bench.store_job(1)).failed
        asked = len(store.called("usage"))
        bench.clock.advance(AT_REST_S)
        bench.tier.get_finished_jobs()
        assert not bench.tier.has_pending_work()
        assert len(store.called("usage")) == asked
        store.chunks.clear()
        bench.clock.advance(60.0)
        assert bench.resolve(2) == [Lookup.MISS]
        rest(bench)
        assert bench.tier.usage() == Usage(0, 100 * CHUNK), "once it works again"


def busy(bench: Bench) -> threading.Event:
    """Both lanes are asked whether chunks are there, and a measurement at rest is queued."""
    let_go = bench.store.hold("contains")
    for n in (8, 9):
        bench.tier.lookup([key(n)], REQUEST)
        bench.tier.on_schedule_end()
        assert bench.store.entered.acquire(timeout=20)
    bench.clock.advance(AT_REST_S)
    bench.tier.get_finished_jobs()
    assert bench.tier._fullness._piece is not None
    return let_go


def test_lanes_that_are_busy_keep_no_engine_awake_and_what_waited_for_them_is_made() -> None:
    store = Counting(SHARED)
    limits = {"lookup_deadline_s": 0.5, "max_replacement_threads": 0}
    with Bench(store, **limits) as bench:
        for n in range(4):
            bench.run(bench.store_job(n))
        let_go = busy(bench)
        bench.clock.advance(0.5)
        bench.tier.get_finished_jobs()
        assert not bench.tier.has_pending_work()
        bench.tier.check()
        let_go.set()
        bench.until(lambda: bench.tier._fullness._piece is None)
        assert bench.tier.usage() == Usage(4 * CHUNK, 100 * CHUNK)
        assert not bench.tier.has_pending_work()


def test_a_store_has_its_time_from_when_it_was_asked() -> None:
    store = Counting(SHARED)
    with Bench(store, lookup_deadline_s=0.5) as bench:
        bench.run(bench.store_job(1))
        bench.run(bench.store_job(2))
        let_go = busy(bench)
        bench.clock.advance(0.3)
        answer = store.hold("usage")
        let_go.set()
        assert store.entered.acquire(timeout=20)
        bench.clock.advance(0.4)
        bench.tier.get_finished_jobs()
        assert bench.tier.has_pending_work(), "it was asked 0.4 s ago"
        bench.clock.advance(0.1)
        bench.tier.get_finished_jobs()
        assert not bench.tier.has_pending_work(), "it hangs"
        answer.set()


def test_an_answer_that_was_overtaken_does_not_stand_at_rest() -> None:
    store = ScriptedStore()

    def usage() -> Usage:
        fullness._measure = lambda: Usage(2, 10)
        fullness.note(EVERY_S)
        return Usage(1, 10)

    store.usage = usage  # type: ignore[attr-defined]
    fullness = Fullness(store, Inbox(), ManualClock(), 1.0)
    fullness.note(0.0)
    piece = fullness.due(2 * EVERY_S)
    assert piece is not None
    piece.run()
    fullness.took(piece)
    assert fullness.usage == Usage(2, 10)
    assert not fullness.pending


def test_it_waits_for_the_last_job() -> None:
    store = Counting()
    with Bench(store, n_write_threads=2) as bench:
        bench.run(bench.store_job(1))
        let_go = store.hold("read")
        assert bench.tier.submit_load(bench.job(JobKind.LOAD, [1]))
        bench.clock.advance(AT_REST_S)
        asked = len(store.called("usage"))
        bench.tier.get_finished_jobs()
        assert bench.tier._fullness._piece is None
        assert len(store.called("usage")) == asked
        let_go.set()
        bench.finished(1)


def test_a_store_that_says_nothing_is_never_asked() -> None:
    fullness = Fullness(ScriptedStore(), Inbox(), ManualClock(), 1.0)
    fullness.note(0.0)
    fullness.changed()
    assert not fullness.pending
    assert fullness.due(10.0) is None
    fullness._piece = object()  # type: ignore[assignment]
    with broken("says nothing"):
        fullness.check()
    fullness._piece, fullness._late = None, True
    with broken("what is late is not queued"):
        fullness.check()
