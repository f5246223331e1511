"""One peer that is asked, without sockets and with time by hand."""

import heapq
import itertools

import pytest

from kvtiers.errors import Kind
from kvtiers.events import MissReason
from kvtiers.tiers.breaker import State
from kvtiers.tiers.p2p import protocol as p
from kvtiers.tiers.p2p.loop import Timer
from kvtiers.tiers.p2p.notes import Answered, Ask, Load, Loaded, Over, Released
from kvtiers.tiers.p2p.options import P2POptions
from kvtiers.tiers.p2p.peer import Peer
from kvtiers.tiers.p2p.protocol import Role, Verdict
from kvtiers.tiers.p2p.roles import Source
from kvtiers.tiers.p2p.us import Identity, Us
from tests.unit.tiers.p2p.engines import LAYOUT, keys

NAMES = A, B = tuple(keys(2))
TOKEN = bytes(range(16))
PULL = Source(Role.SOURCE, "r", "10.0.0.1", 5710)
WAIT = Source(Role.PREFILL, "r", "10.0.0.1", 5710)
OPTIONS = P2POptions()


class Time:
    """The part of a ``Loop`` that a peer uses."""

    def __init__(self) -> None:
        self.now = 100.0
        self._timers: list = []
        self._order = itertools.count()

    def clock(self) -> float:
        return self.now

    def at(self, when, call) -> Timer:
        timer = Timer(call)
        heapq.heappush(self._timers, (when, next(self._order), timer))
        return timer

    def go(self, seconds: float) -> None:
        end = self.now + seconds
        while self._timers and self._timers[0][0] <= end:
            when, _, timer = heapq.heappop(self._timers)
            self.now = max(self.now, when)
            if timer.call is not None:
                timer.call()
        self.now = end


class Line:
    def __init__(self, heard, broken) -> None:
        self.heard, self.broken = heard, broken
        self.said: list[p.Message] = []
        self.nonce = b""
        self.closed = False

    def send(self, data: bytes) -> None:
        envelope = p.parse(data)
        if isinstance(envelope.message, p.Hello):
            self.nonce = envelope.token
        self.said.append(envelope.message)

    def close(self) -> None:
        self.closed = True


class Lines:
    address: str | None = "10.0.0.1"
    forbidden: str | None = None

    def __init__(self) -> None:
        self.dialled: list[Line] = []
        self.asked: list = []

    def resolve(self, host, resolved) -> None:
        self.asked.append(resolved)

    def refusal(self, address, host, port):
        return self.forbidden

    def dial(self, address, host, port, heard, broken) -> Line:
        self.dialled.append(Line(heard, broken))
        return self.dialled[-1]


class Writer:
    """A transport like RDMA: it reads the producer's memory, and does not stop at once."""

    name = b"rdma"

    def __init__(self) -> None:
        self.calls = None
        self.expected: dict = {}
        self.reading: list[tuple[int, int, int, int]] = []
        self.closed = False
        self.has_room = True

    def receive_from(self, host, offer, calls):
        self.calls = calls
        return self

    def expect(self, transfer, views) -> None:
        self.expected[transfer] = views

    def ready(self, transfer, chunks) -> None:
        self.reading += [(transfer, *chunk) for chunk in chunks]

    def stop(self, transfer) -> bool:
        return transfer not in {number for number, *_ in self.reading}

    def forget(self, transfer) -> None:
        del self.expected[transfer]

    def close(self) -> None:
        self.closed = True


class Bench:
    def __init__(self) -> None:
        self.time, self.lines, self.writer, self.notes = Time(), Lines(), Writer(), []
        us = Us(Identity("n", LAYOUT, "us"), OPTIONS, self.time, (self.writer,))
        self.peer = Peer("10.0.0.1", 5710, us, self.lines, self.notes.append)
        self.numbers = itertools.count()

    @property
    def line(self) -> Line:
        return self.lines.dialled[-1]

    def ask(self, names=NAMES, source=PULL) -> int:
        number = next(self.numbers)
        self.peer.ask(Ask(number, source, names, self.time.now + 2.0))
        return number

    def load(self, names=NAMES, source=PULL) -> int:
        number = next(self.numbers)
        views = [memoryview(bytearray(8)) for _ in names]
        self.peer.load(Load(number, source, names, views, self.time.now + 20.0))
        return number

    def named(self) -> None:
        self.lines.asked.pop()(self.lines.address)

    def hear(self, message, token=TOKEN) -> None:
        self.line.heard(p.encode(message, token))
        self.peer.check()

    def open(self) -> None:
        if self.lines.asked:
            self.named()
        self.hear(p.HelloAck(self.line.nonce, "them", b"rdma", b""))

    def take(self) -> list:
        self.peer.check()
        notes, self.notes[:] = list(self.notes), []
        return notes

    def said(self, kind) -> list:
        return [message for message in self.line.said if isinstance(message, kind)]


@pytest.fixture
def bench():
    return Bench()


@pytest.fixture
def session(bench):
    """One that is open; what opened it is answered."""
    bench.ask()
    bench.open()
    (question,) = bench.said(p.LookUp)
    bench.hear(p.LookUpAnswer(question.question, ((0, 1), (1, 1))))
    bench.take()
    return bench


def test_nothing_is_dialled_before_something_is_asked(bench):
    bench.time.go(1000.0)
    assert not bench.lines.asked
    assert bench.peer.idle


def test_what_is_asked_meanwhile_waits_for_the_session(bench):
    bench.ask()
    bench.load()
    assert len(bench.lines.asked) == 1
    bench.named()
    (hello,) = bench.line.said
    assert hello == p.Hello("n", p.groups_of(LAYOUT), "us", (b"rdma",))
    bench.open()
    (question,), (fetch,) = bench.said(p.LookUp), bench.said(p.Fetch)
    assert question.keys == fetch.keys == NAMES
    assert bench.writer.expected.keys() == {fetch.transfer}


@pytest.mark.parametrize("stage", ["name", "welcome"])
def test_the_handshake_has_one_deadline(bench, stage):
    number, job = bench.ask(), bench.load()
    bench.time.go(1.0)
    if stage == "welcome":
        bench.named()
    bench.time.go(1.9)
    assert bench.take() == []
    bench.time.go(0.2)
    answered, loaded = bench.take()
    assert answered == Answered(number, {A: False, B: False}, MissReason.TIER_DOWN)
    assert (loaded.job, set(loaded.failed), loaded.memory_in_use) == (job, {A, B}, False)
    if stage == "name":
        bench.named()  # too late
        assert not bench.lines.dialled
    else:
        assert bench.line.closed


@pytest.mark.parametrize("why", ["unknown", "forbidden"])
def test_a_name_that_leads_nowhere(bench, why):
    bench.lines.address = None if why == "unknown" else "10.0.0.1"
    bench.lines.forbidden = "it is not on this machine" if why == "forbidden" else None
    number = bench.ask()
    bench.named()
    assert bench.take() == [Answered(number, {A: False, B: False}, MissReason.TIER_DOWN)]
    assert not bench.lines.dialled


def test_who_failed_is_left_alone_then_tried_once(bench):
    bench.ask()
    bench.named()
    bench.line.broken("the connection is refused")
    bench.take()
    number = bench.ask()
    assert bench.take() == [Answered(number, {A: False, B: False}, MissReason.TIER_DOWN)]
    assert not bench.lines.asked
    bench.time.go(5.1)
    bench.ask()
    bench.ask()
    assert len(bench.lines.asked) == 1  # both wait for the one trial
    bench.named()
    bench.line.broken("the connection is refused")
    assert len(bench.take()) == 2
    bench.time.go(5.1)
    bench.ask()
    assert not bench.lines.asked  # the pause doubled
    bench.time.go(5.0)
    bench.ask()
    assert bench.lines.asked


def test_a_trial_that_proved_nothing_does_not_lock_the_peer_out(bench):
    bench.ask()
    bench.named()
    bench.line.broken("x")
    bench.time.go(5.1)
    bench.ask()
    bench.open()
    bench.hear(p.Goodbye())
    assert bench.peer._breaker.state is State.OPEN
    bench.time.go(60.0)
    bench.ask()
    assert bench.lines.asked


def test_an_open_session_is_pinged_and_ended_when_it_is_silent(session):
    for _ in range(10):
        session.time.go(2.0)
        ping = session.said(p.Ping)[-1]
        session.hear(p.Pong(ping.number))
    job = session.load()
    session.time.go(9.9)
    assert not session.line.closed
    session.time.go(0.2)
    (loaded,) = session.take()
    assert loaded.job == job
    assert session.line.closed
    assert session.writer.closed
    assert session.peer._breaker.state is State.OPEN


def test_an_idle_session_is_let_go_and_dialled_anew(session):
    for _ in range(160):
        session.time.go(2.0)
        if session.line.closed:
            break
        session.hear(p.Pong(1))
    assert session.line.closed
    assert isinstance(session.line.said[-1], p.Goodbye)
    assert session.peer.idle
    session.ask()
    session.named()
    assert len(session.lines.dialled) == 2


def test_a_peer_that_was_restarted_is_dialled_anew_at_once(session):
    job = session.load()
    session.hear(p.Refuse(int(p.Code.UNKNOWN_SESSION), "say hello"))
    (loaded,) = session.take()
    assert set(loaded.failed) == {A, B}
    assert loaded.job == job
    session.ask()
    assert session.lines.asked


def test_chunks_that_arrive_and_chunks_that_are_refused(session):
    job = session.load()
    (fetch,) = session.said(p.Fetch)
    session.writer.calls.arrived(fetch.transfer, 1, True)
    assert session.take() == []
    session.hear(p.TransferDone(fetch.transfer, ((0, int(p.Code.ABSENT)),)))
    (loaded,) = session.take()
    assert (loaded.job, loaded.done, loaded.bytes) == (job, (B,), 8)
    assert loaded.failed[A].kind is Kind.VANISHED
    assert not session.writer.expected


def late(session, seconds: float = 20.0) -> Loaded:
    """Let a job's deadline pass while the peer lives."""
    for _ in range(int(seconds / 2)):
        session.time.go(2.0)
        session.hear(p.Pong(1))
    (loaded,) = session.take()
    return loaded


def test_memory_that_is_still_written_is_in_use_until_it_is_not(session):
    job = session.load()
    (fetch,) = session.said(p.Fetch)
    session.hear(p.ChunkReady(fetch.transfer, ((0, 64, 1), (1, 128, 2))))
    assert session.writer.reading == [(fetch.transfer, 0, 64, 1), (fetch.transfer, 1, 128, 2)]
    session.writer.calls.arrived(fetch.transfer, 0, True)
    session.writer.calls.taken(fetch.transfer, [0])
    assert session.said(p.Taken) == [p.Taken(fetch.transfer, ((0,),))]
    loaded = late(session)
    assert (loaded.done, set(loaded.failed), loaded.memory_in_use) == ((A,), {B}, True)
    assert loaded.failed[B].kind is Kind.TIMEOUT
    assert session.said(p.Cancel) == [p.Cancel(fetch.transfer)]
    session.writer.calls.arrived(fetch.transfer, 1, True)
    assert session.take() == []
    session.writer.calls.stopped(fetch.transfer)
    session.writer.calls.stopped(fetch.transfer)
    assert session.take() == [Released(job)]


@pytest.mark.parametrize("stage", ["flying", "stopping"])
def test_it_is_in_use_too_when_the_session_ends(session, stage):
    job = session.load((A,))
    (fetch,) = session.said(p.Fetch)
    session.hear(p.ChunkReady(fetch.transfer, ((0, 64, 1),)))
    if stage == "stopping":
        assert late(session).memory_in_use
    session.hear(p.Goodbye())
    assert session.writer.closed
    assert [n.memory_in_use for n in session.take()] == ([True] if stage == "flying" else [])
    session.writer.calls.stopped(fetch.transfer)
    assert session.take() == [Released(job)]
    assert session.peer.idle


def test_a_peer_whose_reads_do_not_end_is_given_none(session):
    """Not in a later session either; others are asked as ever."""
    session.load((A,))
    (fetch,) = session.said(p.Fetch)
    session.hear(p.ChunkReady(fetch.transfer, ((0, 64, 1),)))
    assert late(session).memory_in_use
    session.load((B,))
    assert len(session.said(p.Fetch)) == 2, "it may end any moment"
    session.time.go(1.0)
    session.take()
    for stage in ("in this session", "after it"):
        job, asked = session.load((B,)), session.ask((B,))
        loaded, answered = session.take()
        assert (loaded.job, answered.number) == (job, asked)
        assert "do not end" in loaded.failed[B].words
        assert answered.found == {B: False}
        if stage == "in this session":
            session.hear(p.Goodbye())
            session.take()
    session.writer.calls.stopped(fetch.transfer)
    session.load((A,))
    session.open()
    assert session.said(p.Fetch)


def test_nothing_is_begun_while_reads_from_others_keep_too_much(session):
    session.ask((B,))
    session.writer.has_room = False
    session.load((A,))
    assert session.said(p.Fetch) == []
    (loaded,) = session.take()
    assert not loaded.memory_in_use
    assert "keep too much of host memory" in loaded.failed[A].words


def test_a_session_whose_transport_has_no_room_makes_place_for_one_over_another(session):
    session.writer.has_room = False
    before = session.line
    session.load((A,))
    assert [type(m) for m in before.said[-1:]] == [p.Goodbye]
    session.named()
    assert session.said(p.Hello)[0].transports == ()


def test_what_can_be_read_too_late_is_not_read(session):
    session.load((A,))
    (fetch,) = session.said(p.Fetch)
    assert not late(session).memory_in_use
    session.hear(p.ChunkReady(fetch.transfer, ((0, 64, 1),)))
    assert not session.writer.reading
    assert not session.line.closed


@pytest.mark.parametrize("chunks", [((2, 64, 1),), ((1, 64, 1),)])
def test_what_can_be_read_and_was_not_asked_for_ends_the_session(session, chunks):
    session.load()
    (fetch,) = session.said(p.Fetch)
    session.hear(p.ChunkReady(fetch.transfer, ((1, 128, 1),)))
    session.writer.calls.arrived(fetch.transfer, 1, True)
    session.hear(p.ChunkReady(fetch.transfer, chunks))
    assert session.line.closed


def test_a_request_that_is_over_stops_waiting_for_prefill_and_tells_the_peer(session):
    session.ask(source=WAIT)
    session.load(source=WAIT)
    other = session.load(source=PULL)
    session.peer.over(Over(WAIT))
    waiting, fetched = session.said(p.Fetch)
    assert session.said(p.Cancel) == [p.Cancel(waiting.transfer)]
    assert session.said(p.Finished) == [p.Finished("r")]
    (loaded,) = session.take()
    assert loaded.job != other
    session.peer.over(Over(WAIT))
    assert len(session.said(p.Finished)) == 1
    assert fetched.transfer in session.peer._outstanding._transfers


def test_late_answers_are_ignored_and_counted(session):
    numbers = [session.ask() for _ in range(2)]
    session.time.go(2.1)
    absent = {A: False, B: False}
    assert session.take() == [Answered(number, absent, MissReason.PENDING) for number in numbers]
    late = session.said(p.LookUp)[-1].question
    session.hear(p.LookUpAnswer(late, ((0, int(Verdict.PRESENT)),)))
    assert session.take() == []
    assert not session.line.closed
    session.ask()
    session.time.go(2.1)
    assert session.line.closed  # the third in a row


def test_host_memory_that_is_gone_fails_the_job(session):
    dead = memoryview(bytearray(8))
    dead.release()
    session.peer.load(Load(77, PULL, NAMES, [dead, dead], session.time.now + 20))
    (loaded,) = session.take()
    assert isinstance(loaded, Loaded)
    assert {why.kind for why in loaded.failed.values()} == {Kind.CLOSED}


def test_an_engine_that_stops_says_goodbye(session):
    job = session.load()
    session.peer.stop()
    assert isinstance(session.line.said[-1], p.Goodbye)
    assert session.line.closed
    assert [note.job for note in session.take()] == [job]


def test_who_answers_and_brings_nothing_is_left_alone_after_some_times(session):
    """An answer does not make up for chunks that did not come."""
    for n in range(3):
        assert not session.line.closed
        session.ask()
        question = session.said(p.LookUp)[-1].question
        session.hear(p.LookUpAnswer(question, ((0, 1), (1, 1))))
        session.take()
        session.load()
        for _ in range(11):
            session.time.go(2.0)
            if not session.line.closed:
                session.hear(p.Pong(1))
        assert [type(note) for note in session.take()] == [Loaded], n
    assert session.line.closed
    assert session.peer._breaker.state is State.OPEN


def test_chunks_that_come_make_up_for_others_that_did_not(session):
    for _ in range(4):
        session.load((A,))
        late(session)
        session.load((A,))
        fetch = session.said(p.Fetch)[-1]
        session.writer.calls.arrived(fetch.transfer, 0, True)
        assert session.take()[0].done == (A,)
    assert not session.line.closed


def test_a_sign_of_life_that_nobody_asked_for_ends_the_session(session):
    session.hear(p.Pong(10**9))
    assert session.line.closed


def test_a_request_that_ended_before_the_session_opened_is_not_kept(bench):
    bench.ask(source=WAIT)
    bench.load(source=WAIT)
    bench.peer.over(Over(WAIT))
    bench.open()
    assert bench.said(p.Finished) == [p.Finished("r")]
    assert bench.said(p.Cancel) == [p.Cancel(bench.said(p.Fetch)[0].transfer)]
    assert not bench.peer._requests


def test_a_connection_that_cannot_even_be_begun_is_a_miss(bench, monkeypatch):
    def dial(*_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(bench.lines, "dial", dial)
    number = bench.ask()
    bench.named()
    assert bench.take() == [Answered(number, {A: False, B: False}, MissReason.TIER_DOWN)]
    assert bench.peer._breaker.state is State.OPEN
