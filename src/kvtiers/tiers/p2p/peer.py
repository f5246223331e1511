"""One peer that is asked: its session, what was asked of it, and what it was told to bring.

Runs on the I/O thread. What a peer says is believed only as far as it answers something that was
asked; the rest ends the session, and the peer is left alone for a while.
"""

import logging
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from kvtiers.chunks import Key
from kvtiers.errors import Kind
from kvtiers.tiers.breaker import Breaker, State
from kvtiers.tiers.p2p import protocol
from kvtiers.tiers.p2p.line import Line, Lines
from kvtiers.tiers.p2p.loop import Timer
from kvtiers.tiers.p2p.notes import Answered, Ask, Failure, Load, Loaded, Over, Released, ToTier
from kvtiers.tiers.p2p.protocol import Code, Message, Role, Verdict
from kvtiers.tiers.p2p.session import (
    CONSUMER,
    TRANSFER,
    Act,
    Asking,
    Course,
    Heard,
    Move,
    Moving,
    Patience,
    Turn,
    Watch,
)
from kvtiers.tiers.p2p.transport import Delivered, Receiver
from kvtiers.tiers.p2p.us import Us
from kvtiers.tiers.p2p.wire import ProtocolError

_log = logging.getLogger("kvtiers")

_GONE = Failure(Kind.VANISHED, "the peer has it no more")
_LATE = Failure(Kind.TIMEOUT, "the peer did not bring it in time")
_UNWANTED = Failure(Kind.TIMEOUT, "the request that waited for it is over")
_FAILURES = {
    Code.ABSENT: _GONE,
    Code.DEADLINE: Failure(Kind.TIMEOUT, "the peer waited for it in vain"),
}


@dataclass(slots=True, eq=False)
class _Question:
    """A part of what was asked at once."""

    ask: Ask
    keys: tuple[Key, ...]
    left: set[int]
    """Places that were not answered."""
    timer: Timer


@dataclass(slots=True, eq=False)
class _Transfer:
    """A part of a job."""

    load: Load
    keys: tuple[Key, ...]
    sizes: list[int]
    left: set[int]
    """Places that neither arrived nor failed."""
    timer: Timer
    course: Course[Moving, Turn, Move] = field(
        default_factory=lambda: Course(TRANSFER, Moving.FLYING)
    )
    done: list[int] = field(default_factory=list)
    failed: dict[int, Failure] = field(default_factory=dict)
    offered: set[int] = field(default_factory=set)
    """Places that were said to be ready, and are being read or were."""


class Peer:
    """Asks one peer, as long as it is worth asking."""

    def __init__(
        self, host: str, port: int, us: Us, lines: Lines, post: Callable[[ToTier], None]
    ) -> None:
        self.host, self.port = host, port
        self._us = us
        self._lines = lines
        self._post = post
        options = us.options
        self._breaker = Breaker(1, options.breaker_cooldown_s, options.breaker_max_cooldown_s)
        self._patience = Patience(
            options.handshake_deadline_s,
            options.silence_deadline_s,
            options.ping_interval_s,
            options.idle_deadline_s,
        )
        self._numbers = 0
        self._strikes = 0
        """Answers in a row that came too late."""
        self._waiting: deque[Ask | Load] = deque()
        """What is sent when the session opens."""
        self._questions: dict[int, _Question] = {}
        self._transfers: dict[int, _Transfer] = {}
        self._requests: set[str] = set()
        """Those the peer knows of in this session."""
        self._said = ""
        self._course: Course[Asking, Heard, Act] | None = None
        self._reset_session()

    def _reset_session(self) -> None:
        self._course = None
        self._line: Line | None = None
        self._receiver: Receiver | None = None
        self._watch: Watch | None = None
        self._watch_timer: Timer | None = None
        self._nonce = self._token = b""
        self._address = ""
        self._requests.clear()

    # -- what the tier wants ---------------------------------------------------------------------

    def ask(self, ask: Ask) -> None:
        """Find out which of these the peer has."""
        if self._ready(ask):
            self._send_ask(ask)

    def load(self, load: Load) -> None:
        """Have these brought."""
        if self._ready(load):
            self._send_load(load)

    def over(self, over: Over) -> None:
        """Tell the peer that it need not keep anything for this request."""
        request = over.source.request
        if request in self._requests:
            self._requests.discard(request)
            for number, transfer in list(self._transfers.items()):
                waits = transfer.course.state is Moving.FLYING
                if (
                    waits
                    and transfer.load.source == over.source
                    and over.source.role is Role.PREFILL
                ):
                    self._stop(number, transfer, _UNWANTED)
            self._say(protocol.Finished(request))

    @property
    def idle(self) -> bool:
        """Whether nothing would be lost if it were forgotten."""
        unused = self._course is None and not self._transfers
        return unused and not self._breaker.is_out(self._us.loop.clock())

    def stop(self) -> None:
        """End the session with grace."""
        if self._course is not None:
            self._on(Heard.STOP, "this engine stops")

    def _ready(self, wanted: Ask | Load) -> bool:
        """Whether the session is open. If not, ``wanted`` waits for it, or fails."""
        now = self._us.loop.clock()
        if self._course is None:
            if not self._breaker.admit(now):
                self._fail(wanted, Failure(Kind.IO, f"{self} is left alone for a while"))
                return False
            self._begin(now)
        if self._course is not None and self._course.state is Asking.OPEN:
            return True
        if self._course is None:  # it could not begin
            self._fail(wanted, Failure(Kind.IO, f"{self} cannot be reached"))
        else:
            self._waiting.append(wanted)
        return False

    def _fail(self, wanted: Ask | Load, why: Failure) -> None:
        if isinstance(wanted, Ask):
            self._post(Answered(wanted.number, dict.fromkeys(wanted.keys, False)))
        else:
            self._post(Loaded(wanted.job, (), dict.fromkeys(wanted.keys, why), 0))

    # -- the session -----------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        self._course = Course(CONSUMER, Asking.NAMING)
        self._watch = Watch(self._patience, now)
        self._look_again()
        course = self._course
        self._lines.resolve(self.host, lambda address: self._named(course, address))

    def _named(self, course: Course[Asking, Heard, Act], address: str | None) -> None:
        if course is not self._course or course.state is not Asking.NAMING:
            return  # it took too long
        if address is None:
            self._on(Heard.UNNAMED, "its name does not resolve")
            return
        refusal = self._lines.refusal(address, self.host, self.port)
        if refusal is not None:
            self._on(Heard.UNNAMED, refusal)
            return
        self._address = address
        self._on(Heard.NAMED)

    def _on(self, event: Heard, why: str = "") -> None:
        course = self._course
        if course is None or not course.takes(event):
            return  # of a session that ended meanwhile
        act = course.on(event)
        if act is Act.GREET:
            self._greet()
        elif act is Act.GO_ON:
            self._go_on()
        elif act is Act.LEAVE:
            self._say(protocol.Goodbye())
            if self._breaker.state is State.TRIAL:  # it has proved nothing
                self._breaker.failed(self._us.loop.clock())
            self._end(Failure(Kind.IO, f"the session with {self} ended: {why}"))
        elif act is Act.BLAME:
            self._blame(why)

    def _greet(self) -> None:
        self._nonce = secrets.token_bytes(protocol.TOKEN_BYTES)
        self._line = self._lines.dial(
            self._address, self.host, self.port, self._heard, partial(self._on, Heard.BROKEN)
        )
        who = self._us.identity
        hello = protocol.Hello(
            who.namespace,
            protocol.groups_of(who.layout),
            who.label,
            tuple(transport.name for transport in self._us.transports),
        )
        self._line.send(protocol.encode(hello, self._nonce))

    def _heard(self, data: bytes) -> None:
        assert self._watch is not None
        try:
            envelope = protocol.parse(data)
            event = self._event_of(envelope)
            self._watch.heard(self._us.loop.clock())
            if event is Heard.REPLY and self._course and self._course.state is Asking.OPEN:
                self._course.on(event)
                self._take(envelope.message)
                return
            if event is Heard.WELCOME and self._course and self._course.state is Asking.GREETING:
                self._welcome(cast(protocol.HelloAck, envelope.message), envelope.token)
        except ProtocolError as e:
            self._on(Heard.FORGED, f"it broke the protocol: {e}")
            return
        message = envelope.message
        words = (
            f"it says: {protocol.shown(message.words)}"
            if isinstance(message, protocol.Refuse)
            else ""
        )
        self._on(event, words or "it broke the protocol")

    def _event_of(self, envelope: protocol.Envelope) -> Heard:
        """What a message means now. Raises ProtocolError."""
        message, token = envelope.message, envelope.token
        if isinstance(message, protocol.HelloAck):
            if message.nonce != self._nonce:
                raise ProtocolError("its welcome is for another")
            return Heard.WELCOME
        if isinstance(message, protocol.Refuse):
            if token not in (self._nonce, self._token):
                raise ProtocolError("its refusal is for another")
            restarted = message.code == Code.UNKNOWN_SESSION
            return Heard.RESTARTED if restarted else Heard.REFUSED
        if not self._token or token != self._token:
            raise ProtocolError("a message has another session's token")
        if isinstance(message, protocol.Goodbye):
            return Heard.GOODBYE
        replies = (
            protocol.LookUpAnswer | protocol.ChunkReady | protocol.TransferDone | protocol.Pong
        )
        if not isinstance(message, replies):
            raise ProtocolError("it sent what only a consumer sends")
        return Heard.REPLY

    def _welcome(self, ack: protocol.HelloAck, token: bytes) -> None:
        """Open the data connection. Raises ProtocolError for an offer that is none."""
        transport = next((t for t in self._us.transports if t.name == ack.transport), None)
        if transport is None:
            raise ProtocolError("it chose a data transport that was not offered")
        calls = Delivered(self._arrived, self._stopped, self._taken, self._data_broke)
        try:
            self._receiver = transport.receive_from(self._address, ack.offer, calls)
        except OSError as e:
            raise ProtocolError(f"its data connection cannot be made: {e}") from e
        self._token = token

    def _data_broke(self, why: str, lied: bool) -> None:
        self._on(Heard.FORGED if lied else Heard.BROKEN, why)

    def _go_on(self) -> None:
        assert self._watch is not None
        self._watch.opened(self._us.loop.clock())
        self._look_again()
        if self._said:
            _log.info("p2p: %s answers again", self)
            self._said = ""
        waiting, self._waiting = self._waiting, deque()
        for wanted in waiting:
            if self._course is None or self._course.state is not Asking.OPEN:
                self._fail(wanted, Failure(Kind.IO, f"the session with {self} ended"))
            elif isinstance(wanted, Ask):
                self._send_ask(wanted)
            else:
                self._send_load(wanted)

    def _look_again(self) -> None:
        watch = self._watch
        assert watch is not None
        if self._watch_timer is not None:
            self._watch_timer.cancel()
        self._watch_timer = self._us.loop.at(watch.next(), self._look_after)

    def _look_after(self) -> None:
        watch, now = self._watch, self._us.loop.clock()
        assert watch is not None
        busy = bool(self._questions or self._transfers or self._waiting)
        due = watch.due(now, busy)
        if due is not None:
            self._on(due, "it gives no sign of life" if due is Heard.LATE else "nobody needs it")
        if self._watch is not watch:
            return
        if watch.wants_ping(now):
            watch.pinged(now)
            self._say(protocol.Ping(self._number()))
        if self._watch is watch:
            self._look_again()

    def _blame(self, why: str) -> None:
        if why != self._said:
            self._said = why
            _log.warning(
                "p2p: %s is left alone for %g s at first: %s",
                self,
                self._us.options.breaker_cooldown_s,
                why,
            )
        self._breaker.failed(self._us.loop.clock())
        self._end(Failure(Kind.IO, f"{self} failed: {why}"))

    def _end(self, why: Failure) -> None:
        """Close both connections, so that nothing lands any more; then say what is lost."""
        receiver, transfers = self._receiver, dict(self._transfers)
        in_use = {number for number in transfers if receiver and not receiver.stop(number)}
        if receiver is not None:
            receiver.close()
        if self._line is not None:
            self._line.close()
        if self._watch_timer is not None:
            self._watch_timer.cancel()
        self._strikes = 0
        self._reset_session()
        questions, self._questions = self._questions, {}
        waiting, self._waiting = self._waiting, deque()
        for question in questions.values():
            question.timer.cancel()
            absent = {question.keys[place]: False for place in question.left}
            self._post(Answered(question.ask.number, absent))
        for number, transfer in transfers.items():
            if transfer.course.state is Moving.FLYING:
                transfer.failed.update(dict.fromkeys(transfer.left, why))
                turn = Turn.LOST_IN_USE if number in in_use else Turn.LOST
                self._moved(transfer, turn, number)
            elif number not in in_use:
                self._moved(transfer, Turn.STOPPED, number)
        for wanted in waiting:
            self._fail(wanted, why)

    def _say(self, message: Message) -> None:
        if self._line is not None and self._token:
            self._line.send(protocol.encode(message, self._token))

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    # -- questions and transfers -----------------------------------------------------------------

    def _send_ask(self, ask: Ask) -> None:
        loop = self._us.loop
        self._used(ask.source.request)
        for keys in _batches(ask.keys):
            number = self._number()
            timer = loop.at(ask.deadline, partial(self._unanswered, number))
            self._questions[number] = _Question(ask, keys, set(range(len(keys))), timer)
            self._say(protocol.LookUp(number, ask.source.request, ask.source.role, keys))

    def _send_load(self, load: Load) -> None:
        loop, receiver = self._us.loop, self._receiver
        assert receiver is not None
        self._used(load.source.request)
        start = 0
        for keys in _batches(load.keys):
            number = self._number()
            try:
                views = [load.views[start + i] for i in range(len(keys))]
                sizes = [view.nbytes for view in views]
            except Exception as e:  # host memory is gone: the job must end all the same
                dead = Failure(Kind.CLOSED, f"host memory cannot be written: {e}")
                self._post(Loaded(load.job, (), dict.fromkeys(keys, dead), 0))
                continue
            finally:
                start += len(keys)
            receiver.expect(number, views)
            timer = loop.at(load.deadline, partial(self._overdue, number))
            self._transfers[number] = _Transfer(load, keys, sizes, set(range(len(keys))), timer)
            source = load.source
            self._say(protocol.Fetch(number, source.request, source.role, keys))

    def _used(self, request: str) -> None:
        assert self._watch is not None
        self._requests.add(request)
        self._watch.used(self._us.loop.clock())

    def _take(self, message: Message) -> None:
        """Take in a reply. Raises ProtocolError if it answers nothing that was asked."""
        if isinstance(message, protocol.LookUpAnswer):
            self._answered(message)
        elif isinstance(message, protocol.TransferDone):
            self._refused(message)
        elif isinstance(message, protocol.ChunkReady):
            self._can_be_read(message)

    def _can_be_read(self, message: protocol.ChunkReady) -> None:
        transfer = self._transfers.get(message.transfer)
        if transfer is None or transfer.course.state is not Moving.FLYING:
            if message.transfer > self._numbers:
                raise ProtocolError("it brings what was not asked for")
            return  # too late: it was told so
        if not {place for place, *_ in message.chunks} <= transfer.left:
            raise ProtocolError("it brings what was not asked for, or twice")
        assert self._receiver is not None
        transfer.offered.update(place for place, *_ in message.chunks)
        self._receiver.ready(message.transfer, message.chunks)

    def _answered(self, answer: protocol.LookUpAnswer) -> None:
        question = self._questions.get(answer.question)
        if question is None:
            if answer.question > self._numbers:
                raise ProtocolError("it answers what was not asked")
            return  # too late
        places = {place for place, _ in answer.verdicts}
        if not places <= question.left:
            raise ProtocolError("it answers what was not asked, or twice")
        self._fared_well()
        question.left -= places
        found = {question.keys[p]: verdict != Verdict.ABSENT for p, verdict in answer.verdicts}
        if not question.left:
            question.timer.cancel()
            del self._questions[answer.question]
        self._post(Answered(question.ask.number, found))

    def _unanswered(self, number: int) -> None:
        question = self._questions.pop(number)
        absent = {question.keys[place]: False for place in question.left}
        self._post(Answered(question.ask.number, absent))
        self._struck("lookups were not answered in time")

    def _arrived(self, number: int, place: int, whole: bool) -> None:
        transfer = self._transfers.get(number)
        if transfer is None or transfer.course.state is not Moving.FLYING:
            return
        if not whole:
            self._on(Heard.FORGED, "a chunk was changed on the way")
            return
        transfer.left.discard(place)
        transfer.done.append(place)
        if not transfer.left:
            self._moved(transfer, Turn.ALL, number)

    def _refused(self, done: protocol.TransferDone) -> None:
        transfer = self._transfers.get(done.transfer)
        if transfer is None or transfer.course.state is not Moving.FLYING:
            if done.transfer > self._numbers:
                raise ProtocolError("it ends what was not asked for")
            return
        places = {place for place, _ in done.failed}
        if not places <= transfer.left - transfer.offered | transfer.failed.keys():
            raise ProtocolError("it takes back what it sent, or what was not asked for")
        unknown = Failure(Kind.IO, "the peer could not bring it")
        for place, code in done.failed:
            known = code in _FAILURES
            transfer.failed[place] = _FAILURES[Code(code)] if known else unknown
        transfer.left -= places
        if not transfer.left:
            self._moved(transfer, Turn.ALL, done.transfer)

    def _overdue(self, number: int) -> None:
        self._stop(number, self._transfers[number], _LATE)
        self._struck("chunks did not come in time")

    def _stop(self, number: int, transfer: _Transfer, why: Failure) -> None:
        assert self._receiver is not None
        transfer.failed.update(dict.fromkeys(transfer.left, why))
        stopped = self._receiver.stop(number)
        self._moved(transfer, Turn.LATE if stopped else Turn.LATE_IN_USE, number)

    def _stopped(self, number: int) -> None:
        transfer = self._transfers.get(number)
        if transfer is not None and transfer.course.state is Moving.STOPPING:
            self._moved(transfer, Turn.STOPPED, number)

    def _taken(self, number: int, places: Sequence[int]) -> None:
        self._say(protocol.Taken(number, tuple((place,) for place in places)))

    def _moved(self, transfer: _Transfer, turn: Turn, number: int) -> None:
        move = transfer.course.on(turn)
        transfer.timer.cancel()
        if move in (Move.CANCEL, Move.CANCEL_IN_USE):
            self._say(protocol.Cancel(number))
        if transfer.course.state is Moving.ENDED:
            del self._transfers[number]
            if self._receiver is not None and move is Move.REPORT:
                self._receiver.forget(number)
        if move is Move.RELEASE:
            self._post(Released(transfer.load.job))
            return
        if turn is Turn.ALL:
            self._fared_well()
        self._post(
            Loaded(
                transfer.load.job,
                tuple(transfer.keys[place] for place in transfer.done),
                {transfer.keys[place]: why for place, why in transfer.failed.items()},
                sum(transfer.sizes[place] for place in transfer.done),
                transfer.course.state is Moving.STOPPING,
            )
        )

    def _fared_well(self) -> None:
        self._strikes = 0
        self._breaker.succeeded()

    def _struck(self, why: str) -> None:
        self._strikes += 1
        if self._strikes >= self._us.options.breaker_failures:
            self._on(Heard.LATE, why)

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        self._breaker.check()
        if self._course is not None:
            self._course.check()
        is_open = self._course is not None and self._course.state is Asking.OPEN
        flying = [t for t in self._transfers.values() if t.course.state is Moving.FLYING]
        assert is_open or not (self._questions or flying), "asked without a session"
        assert not (is_open and self._waiting), "something waits for a session that is open"
        assert (self._line is None) == (self._nonce == b""), "a line without a greeting"
        assert all(transfer.left for transfer in flying), "a transfer ended and is not reported"

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def __repr__(self) -> str:
        state = "no session" if self._course is None else self._course.state.value
        return (
            f"<Peer {self}: {state}, {len(self._questions)} questions, "
            f"{len(self._transfers)} transfers, {self._breaker.state.value}>"
        )


def _batches(keys: tuple[Key, ...]) -> list[tuple[Key, ...]]:
    return [keys[i : i + protocol.MAX_KEYS] for i in range(0, len(keys), protocol.MAX_KEYS)]
