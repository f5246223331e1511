"""What peers get, and when: the server alone, with an engine whose every answer a test decides."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.chunks import Lookup
from kvtiers.tiers.p2p.notes import Demand, Finished, Gone, Local, Query, Sent, Stopped
from kvtiers.tiers.p2p.options import P2POptions
from kvtiers.tiers.p2p.protocol import Code, Role, Verdict
from kvtiers.tiers.p2p.serving import Server
from kvtiers.tiers.p2p.wants import Wants
from kvtiers.tiers.views import ChunkViews
from tests.unit.tiers.p2p.engines import keys

NAMES = tuple(keys(4))
A, B, C, D = NAMES
OPTIONS = P2POptions(
    lookup_deadline_s=4.0, load_deadline_s=40.0, park_deadline_s=60.0, hold_deadline_s=30.0
)


class Pin:
    def __init__(self, names) -> None:
        self.keys = names
        self.views = ChunkViews.of([memoryview(bytes(name)) for name in names])


class Parent:
    """An engine: what it has, what is below, what it never says."""

    def __init__(self) -> None:
        self.resident: set = set()
        self.verdicts: dict = {}
        self.most = 100
        self.max_keys = 3
        self.pins: list[Pin] = []
        self.asking: set[str] = set()
        self.advanced = 0

    @property
    def room(self) -> int:
        return self.most - len({key for pin in self.pins for key in pin.keys})

    def ask(self, names, request):
        self.asking.add(request)
        return [
            Lookup.HIT if name in self.resident else self.verdicts.get(name, Lookup.MISS)
            for name in names
        ]

    def end(self, request) -> None:
        self.asking.discard(request)

    def pin(self, names):
        assert len(names) <= self.max_keys
        there = [name for name in names if name in self.resident][: self.room]
        if not there:
            return None
        self.pins.append(Pin(there))
        return self.pins[-1]

    def release(self, pin) -> None:
        self.pins.remove(pin)
        pin.views.release_all()

    def advance(self) -> None:
        self.advanced += 1

    def listen(self, changed) -> None:
        pass


class Bench:
    """A server, and what it says."""

    def __init__(self) -> None:
        self.parent = Parent()
        self.now = 100.0
        self.answers: dict[int, dict[int, Verdict]] = {}
        self.pushed: dict[int, list[int]] = {}
        self.ended: dict[int, dict[int, Code]] = {}
        self.server = Server(self.parent, self, OPTIONS)

    def answer(self, session, question, verdicts, last):
        known = self.answers.setdefault(question, {})
        assert not known.keys() & verdicts.keys(), "answered twice"
        known.update(verdicts)

    def push(self, session, transfer, chunks):
        for place, view in chunks:
            assert bytes(view), "dead memory is pushed"
            self.pushed.setdefault(transfer, []).append(place)

    def done(self, session, transfer, failed):
        assert transfer not in self.ended, "ended twice"
        self.ended[transfer] = failed

    def take(self, *notes, seconds: float = 0.0) -> float:
        self.now += seconds
        for note in notes:
            self.server.take(note, self.now)
        again = self.server.step(self.now)
        self.server.check()
        assert again > self.now
        return again

    def sent(self, transfer, *places):
        return self.take(Sent(1, transfer, places or tuple(self.pushed[transfer])))

    def must_be_free(self) -> None:
        assert not self.parent.pins
        assert not self.parent.asking
        assert "for 0 requests" in repr(self.server)


@pytest.fixture
def bench():
    return Bench()


def query(number=1, names=NAMES, role=Role.SOURCE, session=1):
    return Query(session, number, "r", role, names)


def demand(number=1, names=NAMES, role=Role.SOURCE, session=1):
    return Demand(session, number, "r", role, names)


def test_what_is_there_is_pinned_for_the_fetch(bench):
    bench.parent.resident = {A, C}
    bench.take(query())
    places = [Verdict.PRESENT, Verdict.ABSENT, Verdict.PRESENT, Verdict.ABSENT]
    assert bench.answers[1] == dict(enumerate(places))
    bench.parent.resident.clear()
    bench.take(demand(2, (A, C)))
    assert bench.pushed == {2: [0, 1]}
    assert bench.ended == {}
    bench.sent(2, 0)
    bench.sent(2, 1)
    assert bench.ended == {2: {}}
    bench.must_be_free()


def test_what_is_found_below_is_coming_and_brought_when_it_came(bench):
    bench.parent.verdicts = {A: Lookup.HIT_PENDING, B: Lookup.RETRY}
    again = bench.take(query(1, (A, B)))
    assert bench.answers[1] == {0: Verdict.COMING}
    assert again == pytest.approx(bench.now + 0.002)
    assert bench.parent.advanced == 1
    bench.take(demand(2, (A,)))
    bench.parent.verdicts[B] = Lookup.HIT_PENDING
    bench.take()
    assert bench.answers[1] == {0: Verdict.COMING, 1: Verdict.COMING}
    bench.parent.resident = {A, B}
    bench.take()
    assert bench.pushed == {2: [0]}
    bench.sent(2)
    assert bench.ended == {2: {}}
    assert len(bench.parent.pins) == 1  # B, for the fetch that may follow
    bench.take(Finished(1, "r"))
    bench.must_be_free()


def test_a_promotion_that_fails_there_is_a_miss_here(bench):
    bench.parent.verdicts = {A: Lookup.HIT_PENDING}
    bench.take(query(1, (A,)), demand(2, (A,)))
    bench.parent.verdicts.clear()
    bench.take()
    assert bench.ended == {2: {0: Code.ABSENT}}
    bench.must_be_free()


def test_a_tier_that_never_answers_is_absent_before_the_consumers_deadline(bench):
    bench.parent.verdicts = dict.fromkeys(NAMES, Lookup.RETRY)
    bench.take(query())
    bench.take(seconds=2.9)
    assert bench.answers.get(1, {}) == {}
    bench.take(seconds=0.2)
    assert set(bench.answers[1].values()) == {Verdict.ABSENT}
    bench.must_be_free()


def test_a_fetch_of_what_never_comes_ends_before_the_consumers_deadline(bench):
    bench.parent.verdicts = {A: Lookup.HIT_PENDING}
    bench.take(demand(1, (A,)))
    bench.take(seconds=29.0)
    assert not bench.ended
    bench.take(seconds=1.5)
    assert bench.ended == {1: {0: Code.DEADLINE}}


def test_pins_that_nobody_fetches_end(bench):
    bench.parent.resident = set(NAMES)
    again = bench.take(query())
    assert again == bench.now + 30.0
    bench.take(seconds=29.0)
    assert bench.parent.pins
    bench.take(seconds=1.5)
    bench.must_be_free()


def test_prefill_is_parked_without_looking_all_the_time(bench):
    bench.take(Local("r", True), query(role=Role.PREFILL))
    assert set(bench.answers[1].values()) == {Verdict.COMING}
    again = bench.take(demand(2, role=Role.PREFILL))
    assert again == bench.now + 60.0
    bench.parent.resident = {B}
    bench.take()
    assert bench.pushed == {2: [1]}
    bench.parent.resident = {A, B}
    bench.take()
    assert bench.pushed == {2: [1, 0]}
    bench.take(Local("r", False))
    assert bench.ended == {}
    bench.sent(2)
    assert bench.ended == {2: {2: Code.ABSENT, 3: Code.ABSENT}}
    bench.must_be_free()


def test_a_store_under_way_when_prefill_ends_is_waited_for(bench):
    bench.take(Local("r", True), demand(2, (A,), role=Role.PREFILL))
    bench.parent.verdicts = {A: Lookup.HIT_PENDING}
    bench.take(Local("r", False))
    assert not bench.ended
    bench.parent.resident = {A}
    bench.take()
    assert bench.pushed == {2: [0]}


def test_prefill_that_is_over_is_not_waited_for(bench):
    bench.take(Local("r", True), Local("r", False), query(role=Role.PREFILL))
    assert set(bench.answers[1].values()) == {Verdict.ABSENT}


def test_what_is_stopped_ends_when_nothing_of_it_is_read(bench):
    bench.parent.resident = {A}
    bench.take(demand(1, (A, B), role=Role.PREFILL))
    bench.take(Stopped(1, 1))
    assert bench.ended == {}
    bench.sent(1)
    assert bench.ended == {1: {}}
    bench.must_be_free()


def test_a_session_that_ends_lets_go_of_everything(bench):
    bench.parent.resident = {A}
    bench.parent.verdicts = {B: Lookup.HIT_PENDING}
    bench.take(query(), demand(2), demand(3, session=2))
    bench.take(Gone(1))
    assert len(bench.parent.pins) == 1
    bench.take(Gone(2), Gone(3))
    bench.must_be_free()


def test_no_more_is_promised_than_there_is_room_for(bench):
    bench.parent.most = 2
    bench.parent.resident = set(NAMES)
    bench.take(query())
    assert Counter(bench.answers[1].values()) == {Verdict.PRESENT: 2, Verdict.ABSENT: 2}


def test_a_fetch_waits_for_room(bench):
    bench.parent.most = 2
    bench.parent.resident = set(NAMES)
    bench.take(demand())
    assert len(bench.pushed[1]) == 2
    bench.sent(1)
    bench.take()
    assert sorted(bench.pushed[1]) == [0, 1, 2, 3]
    bench.take(Sent(1, 1, (0, 1, 2, 3)))
    assert bench.ended == {1: {}}
    bench.must_be_free()


def test_two_fetches_of_a_chunk_read_it_both(bench):
    bench.parent.resident = {A}
    bench.take(demand(1, (A,)), demand(2, (A,)))
    assert bench.pushed == {1: [0], 2: [0]}
    bench.sent(1)
    assert bench.parent.pins
    bench.sent(2)
    bench.must_be_free()


def test_a_consumer_that_wants_chunks_for_too_many_requests_has_none_for_the_rest(
    bench, monkeypatch
):
    """Each has a request of the core, and one chunk may be pinned for all of them."""
    monkeypatch.setattr("kvtiers.tiers.p2p.serving._MAX_REQUESTS", 2)
    bench.parent.resident = {A}
    for number in range(1, 4):
        bench.take(Query(1, number, f"r{number}", Role.SOURCE, (A,)))
    assert bench.answers == {
        1: {0: Verdict.PRESENT},
        2: {0: Verdict.PRESENT},
        3: {0: Verdict.ABSENT},
    }
    bench.take(Demand(1, 1, "r4", Role.SOURCE, (A, B)))
    assert bench.ended == {1: {0: Code.BUSY, 1: Code.BUSY}}
    bench.take(Query(2, 4, "r1", Role.SOURCE, (A,)))  # another consumer's
    assert bench.answers[4] == {0: Verdict.PRESENT}
    bench.take(seconds=31.0)
    bench.must_be_free()


def test_what_only_waits_for_its_time_is_not_looked_at(bench, monkeypatch):
    """Else thousands of requests for which something is kept would cost each step."""
    bench.parent.resident = {A}
    for number in range(50):
        bench.take(Query(1, number, f"r{number}", Role.SOURCE, (A,)))
    looked, expire = [], Wants.expire
    monkeypatch.setattr(Wants, "expire", lambda w, now: (looked.append(w), expire(w, now)))
    again = bench.take(Finished(1, "r7"))
    assert len(looked) == 1
    assert again == bench.now + OPTIONS.hold_deadline_s
    bench.take(seconds=31.0)
    bench.must_be_free()


NOTES = st.one_of(
    st.builds(
        Query,
        st.integers(1, 2),
        st.none(),
        st.sampled_from("rs"),
        st.sampled_from(Role),
        st.lists(st.sampled_from(NAMES), min_size=1, unique=True).map(tuple),
    ),
    st.builds(
        Demand,
        st.integers(1, 2),
        st.none(),
        st.sampled_from("rs"),
        st.sampled_from(Role),
        st.lists(st.sampled_from(NAMES), min_size=1, unique=True).map(tuple),
    ),
    st.builds(Finished, st.integers(1, 2), st.sampled_from("rs")),
    st.builds(Gone, st.integers(1, 2)),
    st.builds(Local, st.sampled_from("rs"), st.booleans()),
    st.builds(Stopped, st.integers(1, 2), st.integers(1, 30)),
    st.builds(lambda *change: change, st.sampled_from(NAMES), st.sampled_from(Lookup)),
    st.just("sent"),
    st.floats(0.0, 40.0),
)


class Model(Bench):
    """Does what it is told, in any order; the peers send what they are brought."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0
        self.flying: list[tuple[int, int, int]] = []
        self.parent.most = 3

    def push(self, session, transfer, chunks):
        super().push(session, transfer, chunks)
        self.flying += [(session, transfer, place) for place, _ in chunks]

    def do(self, step) -> None:
        if isinstance(step, float):
            self.take(seconds=step)
        elif isinstance(step, tuple):
            name, verdict = step
            self.parent.resident.discard(name)
            if verdict is Lookup.HIT:
                self.parent.resident.add(name)
            self.parent.verdicts[name] = Lookup.MISS if verdict is Lookup.HIT else verdict
            self.take()
        elif step == "sent":
            flying, self.flying = self.flying, []
            self.take(*(Sent(s, t, (p,)) for s, t, p in flying))
        elif isinstance(step, Query | Demand):
            self.numbers += 1
            made = (step.session, self.numbers, step.request, step.role, step.keys)
            self.take(type(step)(*made))
        else:
            if isinstance(step, Gone):
                self.flying = [f for f in self.flying if f[0] != step.session]
            self.take(step)


@given(st.lists(NOTES, max_size=30))
def test_whatever_happens_all_is_let_go_in_the_end(steps):
    model = Model()
    for step in steps:
        model.do(step)
    for _ in range(12):  # peers go on sending; everything has a deadline
        model.do("sent")
        model.do(40.0)
    model.parent.verdicts.clear()
    model.do(40.0)
    model.do("sent")
    model.do(40.0)
    model.must_be_free()
