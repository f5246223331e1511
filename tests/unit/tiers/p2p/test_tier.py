"""The tier alone: what it says of an endpoint that answers, answers late, or never."""

import pytest

from kvtiers.chunks import Lookup, OffloadPolicy, RequestContext
from kvtiers.errors import Kind
from kvtiers.events import ChunksExchanged, Direction, MissReason
from kvtiers.testing import ManualClock
from kvtiers.tiers.base import (
    Circuit,
    ExplainsMisses,
    Job,
    JobKind,
    JobOutcome,
    JobReleased,
    KnowsStanding,
    Peers,
    Standing,
)
from kvtiers.tiers.lanes import Mailbox
from kvtiers.tiers.p2p.notes import (
    Answered,
    Ask,
    Failure,
    Load,
    Loaded,
    Moved,
    Over,
    Released,
)
from kvtiers.tiers.p2p.options import P2POptions
from kvtiers.tiers.p2p.protocol import Role
from kvtiers.tiers.p2p.tier import P2PTier
from kvtiers.tiers.views import ChunkViews
from tests.unit.tiers.p2p.engines import keys, source

A, B, C = NAMES = tuple(keys(3))
SHORT = Failure(Kind.IO, "it failed")


class Endpoint:
    """Notes what it is told."""

    port = 5710
    gave = Moved()
    knows = Peers(0, 0, 0, 0, 0)

    def __init__(self) -> None:
        self.told = []

    def ask(self, ask: Ask) -> None:
        self.told.append(ask)

    load = over = ask

    def local(self, request: str, begins: bool) -> None:
        self.told.append((request, begins))

    def peers(self) -> Peers:
        return self.knows

    def close(self, deadline_s: float) -> bool:
        self.told.append("closed")
        return True


class Bench:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.endpoint = Endpoint()
        self.mailbox = Mailbox()
        self.options = P2POptions()
        self.tier = P2PTier("1:p2p", self.options, self.endpoint, self.mailbox, self.clock)
        self.request = RequestContext("r", source(5710))

    def follow(self, params=None) -> RequestContext:
        if params is not None:
            self.request = RequestContext("r", params)
        self.tier.on_new_request(self.request)
        return self.request

    def job(self, number=1, names=NAMES) -> Job:
        views = ChunkViews.of([memoryview(bytearray(4)) for _ in names])
        return Job(number, JobKind.LOAD, names, (0,) * len(names), views, self.request)

    def post(self, *notes) -> list:
        for note in notes:
            self.mailbox.post(note)
        ended = self.tier.get_finished_jobs()
        self.tier.check()
        return ended


@pytest.fixture
def bench():
    return Bench()


def test_a_request_that_names_nobody_misses_and_asks_nobody(bench):
    other = RequestContext("other")
    assert bench.tier.on_new_request(other) is OffloadPolicy.CHUNK
    assert bench.tier.lookup(NAMES, other) == [Lookup.MISS] * 3
    bench.tier.on_schedule_end()
    assert not bench.tier.submit_load(bench.job())
    assert bench.endpoint.told == []
    assert not bench.tier.has_pending_work()


def test_what_a_step_looks_up_is_one_question(bench):
    request = bench.follow()
    assert bench.tier.lookup([A, B], request) == [Lookup.RETRY] * 2
    assert bench.tier.lookup([B, C], request) == [Lookup.RETRY] * 2
    assert bench.tier.has_pending_work()
    bench.tier.on_schedule_end()
    (ask,) = bench.endpoint.told
    assert (ask.keys, ask.source.role) == (NAMES, Role.SOURCE)
    assert ask.deadline == bench.clock() + bench.options.lookup_deadline_s
    assert bench.tier.lookup(NAMES, request) == [Lookup.RETRY] * 3
    bench.tier.on_schedule_end()
    assert len(bench.endpoint.told) == 1
    bench.mailbox.post(Answered(ask.number, {A: True}))
    assert bench.tier.lookup(NAMES, request) == [Lookup.HIT, Lookup.RETRY, Lookup.RETRY]
    bench.post(Answered(ask.number, {B: False, C: True}))
    assert bench.tier.lookup(NAMES, request) == [Lookup.HIT, Lookup.MISS, Lookup.HIT]
    assert not bench.tier.has_pending_work()


def test_an_endpoint_that_never_answers_is_a_miss_in_the_end(bench):
    request = bench.follow()
    bench.tier.lookup(NAMES, request)
    bench.tier.on_schedule_end()
    bench.clock.advance(60.0)
    bench.post()
    assert bench.tier.lookup(NAMES, request) == [Lookup.MISS] * 3
    assert not bench.tier.has_pending_work()


@pytest.mark.parametrize("why", MissReason)
def test_why_a_peer_did_not_give_a_chunk_is_what_the_endpoint_says(bench, why):
    assert isinstance(bench.tier, ExplainsMisses)
    request = bench.follow()
    bench.tier.lookup(NAMES, request)
    bench.tier.on_schedule_end()
    (ask,) = bench.endpoint.told
    bench.post(Answered(ask.number, {A: True, B: False, C: False}, why))
    assert bench.tier.lookup([A, B, C], request) == [Lookup.HIT, Lookup.MISS, Lookup.MISS]
    assert [bench.tier.why_missed(name) for name in (B, C)] == [why] * 2
    other = RequestContext("other")
    bench.tier.on_new_request(other)
    bench.tier.lookup([B], other)
    assert bench.tier.why_missed(B) is MissReason.ABSENT, "it names nobody"


def test_who_never_answers_is_too_late_and_who_is_shut_is_down(bench):
    request = bench.follow()
    bench.tier.lookup(NAMES, request)
    bench.tier.on_schedule_end()
    bench.clock.advance(60.0)
    bench.post()
    assert bench.tier.lookup([A], request) == [Lookup.MISS]
    assert bench.tier.why_missed(A) is MissReason.PENDING
    bench.tier.shutdown(1.0)
    bench.tier.lookup([A], request)
    assert bench.tier.why_missed(A) is MissReason.TIER_DOWN


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Kind.VANISHED, MissReason.ABSENT),
        (Kind.TIMEOUT, MissReason.PENDING),
        (Kind.IO, MissReason.FAILED),
    ],
)
def test_why_a_chunk_that_was_there_did_not_come(bench, kind, why):
    request = bench.follow()
    bench.tier.submit_load(bench.job())
    bench.post(Loaded(1, (A, B), {C: Failure(kind, "it failed")}, 8))
    bench.tier.lookup([C], request)
    assert bench.tier.why_missed(C) is why


def test_its_jobs_and_the_memory_they_hold(bench):
    assert isinstance(bench.tier, KnowsStanding)
    assert bench.tier.standing() == Standing(Circuit.CLOSED, 0, 0)
    bench.follow()
    bench.tier.submit_load(bench.job(1))
    bench.tier.submit_load(bench.job(2, (A,)))
    assert bench.tier.standing() == Standing(Circuit.CLOSED, 2, 16)
    bench.post(Loaded(1, NAMES, {}, 12), Loaded(2, (), {A: SHORT}, 0, memory_in_use=True))
    assert bench.tier.standing() == Standing(Circuit.CLOSED, 0, 4)
    bench.post(Released(2))
    assert bench.tier.standing() == Standing(Circuit.CLOSED, 0, 0)


@pytest.mark.parametrize(
    ("peers", "circuit"),
    [
        (Peers(0, 0, 0, 0, served=3), Circuit.CLOSED),
        (Peers(0, 0, 2, 0, served=3), Circuit.OPEN),
        (Peers(1, 0, 2, 0, served=0), Circuit.CLOSED),
        (Peers(0, 1, 2, 0, served=0), Circuit.CLOSED),
        (Peers(0, 0, 2, 1, served=0), Circuit.CLOSED),
    ],
)
def test_it_is_left_alone_when_all_whom_it_could_ask_are(bench, peers, circuit):
    bench.endpoint.knows = peers
    assert bench.tier.standing().circuit is circuit


def test_a_job_ends_when_all_its_parts_have(bench):
    bench.follow()
    assert bench.tier.submit_load(bench.job())
    (load,) = bench.endpoint.told
    assert isinstance(load, Load)
    assert bench.post(Loaded(1, (A,), {}, 4)) == []
    assert bench.tier.has_pending_work()
    (outcome,) = bench.post(Loaded(1, (B,), {C: SHORT}, 4))
    assert (set(outcome.done), set(outcome.failed), outcome.bytes) == ({A, B}, {C}, 8)
    assert outcome.failed[C].kind is Kind.IO
    assert not outcome.memory_in_use
    assert bench.tier.lookup([C], bench.request) == [Lookup.MISS]  # it is not asked for again
    assert bench.post(Loaded(1, (A,), {}, 4)) == []
    assert not bench.tier.has_pending_work()


def test_what_came_and_what_went_is_said_once(bench):
    bench.follow()
    bench.tier.submit_load(bench.job())
    assert bench.tier.take_events() == []
    bench.post(Loaded(1, (A,), {C: SHORT}, 4), Loaded(1, (B,), {}, 8))
    bench.endpoint.gave = Moved(7, 70)
    assert bench.tier.take_events() == [
        ChunksExchanged("1:p2p", Direction.IN, 2, 12),
        ChunksExchanged("1:p2p", Direction.OUT, 7, 70),
    ]
    assert bench.tier.take_events() == []
    bench.endpoint.gave = Moved(8, 80)
    assert bench.tier.take_events() == [ChunksExchanged("1:p2p", Direction.OUT, 1, 10)]


def test_memory_that_a_peer_may_still_write_is_in_use_until_it_is_released(bench):
    bench.follow()
    bench.tier.submit_load(bench.job())
    in_use = Loaded(1, (), {A: SHORT, B: SHORT}, 0, memory_in_use=True)
    (outcome,) = bench.post(in_use, Loaded(1, (C,), {}, 4))
    assert outcome.memory_in_use
    assert not bench.tier.has_pending_work()  # it may take for ever
    assert not bench.tier.drain_jobs(0.0)
    assert bench.post(Released(1)) == [JobReleased(1)]
    assert bench.tier.drain_jobs(0.0)


def test_a_job_that_not_even_the_io_thread_ends_is_given_up_with_its_memory(bench):
    bench.follow()
    bench.tier.submit_load(bench.job())
    bench.post(Loaded(1, (A,), {}, 4))
    bench.clock.advance(bench.options.load_deadline_s + 3.0)
    (outcome,) = bench.post()
    assert isinstance(outcome, JobOutcome)
    assert (outcome.done, set(outcome.failed), outcome.memory_in_use) == ((A,), {B, C}, True)
    assert {error.kind for error in outcome.failed.values()} == {Kind.TIMEOUT}
    assert bench.post(Loaded(1, (B,), {}, 4)) == []
    assert bench.post(Loaded(1, (), {C: SHORT}, 0, memory_in_use=True)) == []
    assert bench.post(Released(1)) == [JobReleased(1)]


def test_a_producer_is_waited_for_as_long_as_it_parks(bench):
    bench.follow(source(5710, key="remote_prefiller"))
    bench.tier.submit_load(bench.job())
    (load,) = bench.endpoint.told
    options = bench.options
    assert load.deadline == bench.clock() + options.park_deadline_s + options.lookup_deadline_s


def test_who_will_be_asked_wants_all_chunks_and_says_when_it_is_over(bench):
    request = RequestContext("p", {"remote_decoder": {"kv_request_id": "x"}})
    assert bench.tier.on_new_request(request) is OffloadPolicy.REQUEST
    assert bench.tier.lookup(NAMES, request) == [Lookup.MISS] * 3
    bench.tier.on_request_finished(request)
    bench.tier.on_request_finished(request)
    assert bench.endpoint.told == [("x", True), ("x", False)]


def test_who_was_asked_is_told_that_a_request_is_over(bench):
    request = bench.follow()
    bench.tier.on_request_finished(request)
    (over,) = bench.endpoint.told
    assert isinstance(over, Over)
    assert over.source.request == "x1"


def test_after_shutdown_nothing_goes_on(bench):
    request = bench.follow()
    bench.tier.submit_load(bench.job())
    bench.tier.shutdown(1.0)
    bench.tier.shutdown(1.0)
    assert bench.endpoint.told[1:] == ["closed"]
    assert bench.tier.lookup(NAMES, request) == [Lookup.MISS] * 3
    assert not bench.tier.submit_load(bench.job(2))
    assert not bench.tier.submit_store(bench.job(3))
    assert bench.post(Loaded(1, NAMES, {}, 12)) == []
    assert not bench.tier.has_pending_work()
