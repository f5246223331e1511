"""Faults as values, and what the laws and a tier make of each."""

import itertools
import random
import threading

import pytest

from kvtiers.chunks import Lookup, key_group
from kvtiers.errors import Kind, KVTiersError
from kvtiers.testing import (
    Fault,
    FaultyStore,
    LawBroken,
    ManualClock,
    Slots,
    StoreTierLaws,
    What,
    When,
    chunk,
    run,
)
from kvtiers.testing.bench import Environment
from kvtiers.testing.rig import must_be_right
from kvtiers.testing.values import NAMESPACE, key
from kvtiers.tiers.base import Item, JobReleased
from tests.laws.honest import HonestLaws, HonestStore

A, B = key("a", 1), key("b", 0)


@pytest.fixture
def store(tmp_path):
    return HonestStore(tmp_path, Environment(NAMESPACE).context())


def items(names, writable):
    slots = Slots(names) if writable else Slots.filled(names)
    views = slots.views(writable=writable)
    return slots, [Item(k, v) for k, v in zip(names, views, strict=True)]


def write(store, *names):
    return [e and e.kind for e in store.write(items(names, writable=False)[1])]


def read(store, *names):
    """What came back: the bytes, or the kind of error."""
    slots, some = items(names, writable=True)
    errors = store.read(some)
    return [slots.holds(i) if e is None else e.kind for i, e in enumerate(errors)]


# -- errors ---------------------------------------------------------------------------------------


def test_a_fault_before_leaves_nothing_done_and_one_after_is_a_late_success(store):
    faults = [Fault(operation="write", nth=1), Fault(operation="write", nth=2, when=When.AFTER)]
    faulty = FaultyStore(store, faults)
    for name, done in ((A, False), (B, True)):
        assert write(faulty, name) == [Kind.IO]
        assert store.contains([name]) == [done]
    assert write(faulty, A) == [None]
    assert [operation for operation, _ in faulty.struck] == ["write", "write"]
    assert "3 calls, 2 struck" in repr(faulty)


@pytest.mark.parametrize("sticky", [False, True])
def test_the_nth_fault_is_transient_and_a_sticky_one_stays(store, sticky):
    faulty = FaultyStore(store, [Fault(Kind.FULL, "write", nth=2, sticky=sticky)])
    expected = [None, Kind.FULL, Kind.FULL if sticky else None]
    assert [write(faulty, key(n))[0] for n in range(3)] == expected


def test_a_fault_of_any_operation_counts_all_calls_and_can_raise(store):
    faulty = FaultyStore(store, [Fault(nth=3, raises=True)])
    faulty.contains([])
    faulty.touch([])
    with pytest.raises(KVTiersError, match="before write"):
        write(faulty, A)
    faulty.delete([])
    assert list(faulty.scan()) == []


@pytest.mark.parametrize("when", When)
def test_a_fault_of_some_chunks_spares_the_others(store, when):
    of_group_0 = Fault(operation="write", when=when, chunks=lambda k: key_group(k) == 0)
    faulty = FaultyStore(store, [of_group_0])
    assert write(faulty, A, B, A) == [None, Kind.IO, None]
    assert store.contains([A, B]) == [True, when is When.AFTER]
    assert faulty.contains([B]) == [when is When.AFTER], "a fault of another operation"


def test_a_store_is_closed_even_if_its_close_fails(store):
    with pytest.raises(KVTiersError, match="close"):
        FaultyStore(store, [Fault(operation="close")]).close()
    assert store.closed


def test_random_faults_follow_the_generator_they_are_given(store):
    def struck(seed):
        faulty = FaultyStore(store, [Fault(probability=0.5)], random.Random(seed))
        return [write(faulty, A) == [None] for _ in range(64)]

    assert struck(1) == struck(1) != struck(2)
    assert 16 < sum(struck(1)) < 48


# -- what is worse than an error ------------------------------------------------------------------


@pytest.mark.parametrize("what", [What.SHORT, What.FLIP])
def test_damage_on_the_way_in_and_out_is_called_a_success(store, what):
    assert write(FaultyStore(store, [Fault(what=what, operation="write")]), A) == [None]
    (found,) = read(store, A)
    assert found == Kind.CORRUPT if what is What.SHORT else found != chunk(A)
    store.delete([A])
    write(store, A)
    (found,) = read(FaultyStore(store, [Fault(what=what, operation="read")]), A)
    assert isinstance(found, bytes)
    assert found != chunk(A)
    assert found[:4096] == chunk(A)[:4096]
    assert read(store, A) == [chunk(A)]


@pytest.mark.parametrize("when", When)
def test_chunks_vanish_before_a_call_or_after_it(store, when):
    write(store, A, B)
    faulty = FaultyStore(
        store, [Fault(what=What.VANISH, operation="read", when=when, chunks=lambda k: k == A)]
    )
    first = Kind.VANISHED if when is When.BEFORE else chunk(A)
    assert read(faulty, A, B) == [first, chunk(B)]
    assert store.contains([A, B]) == [False, True]


def test_a_delay_lets_time_pass_on_the_clock_it_is_given(store):
    clock = ManualClock(0.0)
    seen = []
    store.context = Environment(NAMESPACE).context()
    faults = [Fault(what=What.DELAY, operation="contains", seconds=3.0, when=w) for w in When]
    for fault in faults:
        faulty = FaultyStore(store, [fault], let_pass=clock.advance)
        store.refuse_if_closed = lambda: seen.append(clock.now)
        faulty.contains([A])
    assert seen == [3.0, 3.0], "before the first call, after the second"
    assert clock.now == 6.0


@pytest.mark.parametrize("when", When)
def test_a_call_hangs_until_it_is_released(store, when):
    faulty = FaultyStore(store, [Fault(what=What.HANG, operation="write", when=when)])
    lane = threading.Thread(target=lambda: write(faulty, A), daemon=True)
    lane.start()
    faulty.wait_until_held()
    assert store.contains([A]) == [when is When.AFTER]
    faulty.release()
    lane.join(20)
    assert store.contains([A]) == [True]
    assert write(faulty, B) == [None], "released for good"
    faulty.check()
    with pytest.raises(LawBroken, match="0 of 1 calls"):
        faulty.wait_until_held(patience_s=0.0)


@pytest.mark.parametrize(
    ("what", "operation"), [(What.FLIP, None), (What.SHORT, "scan"), (What.VANISH, "close")]
)
def test_a_fault_that_cannot_strike_is_refused(what, operation):
    with pytest.raises(ValueError, match=f"{what.value} strikes in"):
        Fault(what=what, operation=operation)


# -- under the laws -------------------------------------------------------------------------------


def laws_on(fault, family=HonestLaws):
    def make(self, place, context):
        return FaultyStore(HonestStore(place, context), [fault])

    def peek(self, store, name):
        return HonestLaws().peek(store.inner, name)

    def seed(self, store, name, record):
        HonestLaws().seed(store.inner, name, record)

    return type(family)("On", (HonestLaws,), {"make": make, "peek": peek, "seed": seed})


SEEN = [
    (Fault(operation="write"), "S1"),
    (Fault(operation="write", when=When.AFTER), "S1"),
    (Fault(operation="write", raises=True), "S1"),
    (Fault(Kind.FULL, "write", nth=2), "S1"),
    (Fault(Kind.IO, "read", chunks=lambda k: key_group(k) == 7), "S1"),
    (Fault(what=What.SHORT, operation="write"), "S1"),
    (Fault(what=What.SHORT, operation="read"), "S1"),
    (Fault(what=What.FLIP, operation="write"), "S1"),
    (Fault(what=What.FLIP, operation="read"), "S1"),
    (Fault(what=What.VANISH, operation="write", when=When.AFTER), "S1"),
    (Fault(what=What.VANISH, operation="contains", when=When.BEFORE), "S1"),
    (Fault(operation="delete"), "S12"),
    (Fault(operation="scan"), "S13"),
    (Fault(operation="touch"), "S16"),
    (Fault(operation="close"), "S15"),
]


@pytest.mark.parametrize(("fault", "number"), SEEN)
def test_no_fault_goes_unseen(fault, number, tmp_path):
    assert isinstance(run(laws_on(fault)(), number, tmp_path), LawBroken | KVTiersError)


def tier_on(*faults):
    stores = []

    def make(self, place, context):
        stores.append(FaultyStore(HonestStore(place, context), faults))
        return stores[-1]

    laws = type(HonestLaws)("On", (HonestLaws,), {"make": make})
    return type(StoreTierLaws)("OnTier", (StoreTierLaws,), {"store_laws": laws})(), stores


def test_under_a_tier_a_hanging_read_times_out_and_its_memory_comes_back(tmp_path):
    laws, stores = tier_on(Fault(what=What.HANG, operation="read"))
    with laws._open(tmp_path) as rig:
        rig.store([A])
        job = rig.load_job([A])
        rig.take(job)
        stores[0].wait_until_held()
        rig.clock.advance(laws.deadline_s)
        (outcome,) = rig.finished()
        assert outcome.memory_in_use
        assert outcome.failed[A].kind is Kind.TIMEOUT
        stores[0].release()
        assert rig.await_finished(1) == [JobReleased(job.job.id)]


@pytest.mark.parametrize("operation", ["contains", "write", "read"])
@pytest.mark.parametrize("when", When)
def test_under_a_tier_what_vanishes_is_a_miss_and_never_wrong(operation, when, tmp_path):
    for nth in itertools.count(1):
        assert nth < 50, f"{operation} is called without end"
        fault = Fault(operation=operation, what=What.VANISH, when=when, nth=nth)
        laws, stores = tier_on(fault)
        with laws._open(tmp_path / str(nth)) as rig:
            rig.store([A, B])
            rig.resolve([A, B, key("absent")])
            for last in (False, False, True):
                if last:
                    stores[0].faults.clear()
                given = rig.load_job([A, B])
                outcome = rig.run(given)
                must_be_right(given, outcome)
                assert {e.kind for e in outcome.failed.values()} <= {Kind.VANISHED}
            there = stores[0].inner.contains([A, B])
            assert rig.resolve([A, B]) == [Lookup.HIT if t else Lookup.MISS for t in there]
            rig.clock.advance(600)
            rig.store([A, B])
            rig.tier.check()
        if not stores[0].struck:
            return
