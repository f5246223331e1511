"""What was asked of a peer and what it was told to bring, from the asking to the last word.

Runs on the I/O thread. What the peer says is taken in only as far as it answers something that is
here; anything else raises ProtocolError, and whoever called ends the session.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from kvtiers.chunks import Key
from kvtiers.errors import Kind
from kvtiers.events import MissReason
from kvtiers.tiers.p2p import protocol
from kvtiers.tiers.p2p.loop import Loop, Timer
from kvtiers.tiers.p2p.notes import Answered, Ask, Failure, Load, Loaded, Released, ToTier
from kvtiers.tiers.p2p.protocol import Code, Message, Role, Verdict
from kvtiers.tiers.p2p.roles import Source
from kvtiers.tiers.p2p.session import TRANSFER, Course, Move, Moving, Turn
from kvtiers.tiers.p2p.transport import Receiver
from kvtiers.tiers.p2p.wire import ProtocolError

_GONE = Failure(Kind.VANISHED, "the peer has it no more")
_LATE = Failure(Kind.TIMEOUT, "the peer did not bring it in time")
_NO_ROOM = Failure(Kind.IO, "reads from peers that hang keep too much of host memory")
_STUCK_AFTER_S = 0.5
"""A read that is ended while it goes well has ended by then."""
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
    hangs_from: float = float("inf")
    """Since it was ended and its memory is in use: when that is no wonder any more."""
    done: list[int] = field(default_factory=list)
    failed: dict[int, Failure] = field(default_factory=dict)
    offered: set[int] = field(default_factory=set)
    """Places that were said to be ready, and are being read or were."""


class Awaited(Enum):
    """What a peer can be late with. One does not make up for the other."""

    ANSWERS = "lookups were not answered in time"
    CHUNKS = "chunks did not come in time"


@dataclass(frozen=True, slots=True)
class Voices:
    """Who is told of what."""

    say: Callable[[Message], None]
    """The peer."""
    post: Callable[[ToTier], None]
    """The tier."""
    well: Callable[[Awaited], None]
    """The session: what was awaited came in time."""
    late: Callable[[Awaited], None]
    """The session: it did not."""
    forged: Callable[[str], None]
    """The session: the peer broke its word."""


class Outstanding:
    """Questions and transfers of one peer."""

    def __init__(self, loop: Loop, voices: Voices) -> None:
        self.receiver: Receiver | None = None
        """That of the session; None without one."""
        self._loop = loop
        self._voices = voices
        self._numbers = 0
        self._questions: dict[int, _Question] = {}
        self._transfers: dict[int, _Transfer] = {}

    def number(self) -> int:
        """One that nothing had before."""
        self._numbers += 1
        return self._numbers

    def ask(self, ask: Ask) -> None:
        """Send a question. Caller guarantees: the session is open."""
        for keys in _batches(ask.keys):
            number = self.number()
            timer = self._loop.at(ask.deadline, partial(self._unanswered, number))
            self._questions[number] = _Question(ask, keys, set(range(len(keys))), timer)
            self._voices.say(protocol.LookUp(number, ask.source.request, ask.source.role, keys))

    def load(self, load: Load) -> None:
        """Have chunks brought. Caller guarantees: the session is open."""
        assert self.receiver is not None
        if not self.receiver.has_room:
            self._voices.post(Loaded(load.job, (), dict.fromkeys(load.keys, _NO_ROOM), 0))
            return
        start = 0
        for keys in _batches(load.keys):
            number = self.number()
            try:
                views = [load.views[start + i] for i in range(len(keys))]
                sizes = [view.nbytes for view in views]
            except Exception as e:  # host memory is gone: the job must end all the same
                dead = Failure(Kind.CLOSED, f"host memory cannot be written: {e}")
                self._voices.post(Loaded(load.job, (), dict.fromkeys(keys, dead), 0))
                continue
            finally:
                start += len(keys)
            self.receiver.expect(number, views)
            timer = self._loop.at(load.deadline, partial(self._overdue, number))
            self._transfers[number] = _Transfer(load, keys, sizes, set(range(len(keys))), timer)
            source = load.source
            self._voices.say(protocol.Fetch(number, source.request, source.role, keys))

    def over(self, source: Source) -> None:
        """A request is over: nobody waits for what a producer would compute for it."""
        for number, transfer in list(self._transfers.items()):
            waits = transfer.course.state is Moving.FLYING and source.role is Role.PREFILL
            if waits and transfer.load.source == source:
                self._stop(number, transfer, _UNWANTED)

    def lost(self, why: Failure) -> None:
        """The session ends: close the data connection, then say what is lost."""
        receiver, self.receiver = self.receiver, None
        transfers = dict(self._transfers)
        in_use = {number for number in transfers if receiver and not receiver.stop(number)}
        if receiver is not None:
            receiver.close()
        questions, self._questions = self._questions, {}
        for question in questions.values():
            question.timer.cancel()
            self._give_up(question, MissReason.TIER_DOWN)
        for number, transfer in transfers.items():
            if transfer.course.state is Moving.FLYING:
                transfer.failed.update(dict.fromkeys(transfer.left, why))
                turn = Turn.LOST_IN_USE if number in in_use else Turn.LOST
                self._moved(transfer, turn, number)

    def take(self, message: Message) -> None:
        """Take in a reply. Raises ProtocolError if it answers nothing that was asked."""
        if isinstance(message, protocol.LookUpAnswer):
            self._answered(message)
        elif isinstance(message, protocol.TransferDone):
            self._refused(message)
        elif isinstance(message, protocol.ChunkReady):
            self._can_be_read(message)
        elif isinstance(message, protocol.Pong) and message.number > self._numbers:
            raise ProtocolError("it answers what was not asked")

    def _can_be_read(self, message: protocol.ChunkReady) -> None:
        transfer = self._transfers.get(message.transfer)
        if transfer is None or transfer.course.state is not Moving.FLYING:
            if message.transfer > self._numbers:
                raise ProtocolError("it brings what was not asked for")
            return  # too late: it was told so
        if not {place for place, *_ in message.chunks} <= transfer.left:
            raise ProtocolError("it brings what was not asked for, or twice")
        assert self.receiver is not None
        transfer.offered.update(place for place, *_ in message.chunks)
        self.receiver.ready(message.transfer, message.chunks)

    def _answered(self, answer: protocol.LookUpAnswer) -> None:
        question = self._questions.get(answer.question)
        if question is None:
            if answer.question > self._numbers:
                raise ProtocolError("it answers what was not asked")
            return  # too late
        places = {place for place, _ in answer.verdicts}
        if not places <= question.left:
            raise ProtocolError("it answers what was not asked, or twice")
        self._voices.well(Awaited.ANSWERS)
        question.left -= places
        found = {question.keys[p]: verdict != Verdict.ABSENT for p, verdict in answer.verdicts}
        if not question.left:
            question.timer.cancel()
            del self._questions[answer.question]
        self._voices.post(Answered(question.ask.number, found))

    def _unanswered(self, number: int) -> None:
        self._give_up(self._questions.pop(number), MissReason.PENDING)
        self._voices.late(Awaited.ANSWERS)

    def _give_up(self, question: _Question, why: MissReason) -> None:
        absent = {question.keys[place]: False for place in question.left}
        self._voices.post(Answered(question.ask.number, absent, why))

    def arrived(self, number: int, place: int, whole: bool) -> None:
        """The transport brought a chunk."""
        transfer = self._transfers.get(number)
        if transfer is None or transfer.course.state is not Moving.FLYING:
            return
        if not whole:
            self._voices.forged("a chunk was changed on the way")
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
        self._voices.late(Awaited.CHUNKS)

    def _stop(self, number: int, transfer: _Transfer, why: Failure) -> None:
        assert self.receiver is not None
        transfer.failed.update(dict.fromkeys(transfer.left, why))
        stopped = self.receiver.stop(number)
        self._moved(transfer, Turn.LATE if stopped else Turn.LATE_IN_USE, number)

    def stopped(self, number: int) -> None:
        """Nothing of a transfer lands any more that could not be stopped at once."""
        transfer = self._transfers.get(number)
        if transfer is not None and transfer.course.state is Moving.STOPPING:
            self._moved(transfer, Turn.STOPPED, number)

    def _moved(self, transfer: _Transfer, turn: Turn, number: int) -> None:
        move = transfer.course.on(turn)
        transfer.timer.cancel()
        if transfer.course.state is Moving.STOPPING:
            transfer.hangs_from = self._loop.clock() + _STUCK_AFTER_S
        if move in (Move.CANCEL, Move.CANCEL_IN_USE):
            self._voices.say(protocol.Cancel(number))
        if transfer.course.state is Moving.ENDED:
            del self._transfers[number]
            if self.receiver is not None and move is Move.REPORT:
                self.receiver.forget(number)
        if move is Move.RELEASE:
            self._voices.post(Released(transfer.load.job))
            return
        if turn is Turn.ALL:
            self._voices.well(Awaited.CHUNKS)
        self._voices.post(
            Loaded(
                transfer.load.job,
                tuple(transfer.keys[place] for place in transfer.done),
                {transfer.keys[place]: why for place, why in transfer.failed.items()},
                sum(transfer.sizes[place] for place in transfer.done),
                transfer.course.state is Moving.STOPPING,
            )
        )

    @property
    def busy(self) -> bool:
        """Whether something is awaited of the session."""
        return bool(self._questions or self._flying)

    @property
    def cramped(self) -> bool:
        """Whether the session is of no use for more, and nothing is awaited of it."""
        return self.receiver is not None and not self.receiver.has_room and not self.busy

    @property
    def hangs(self) -> bool:
        """Whether reads of it were ended long ago and go on: the peer hangs."""
        now = self._loop.clock()
        return any(now >= transfer.hangs_from for transfer in self._transfers.values())

    @property
    def empty(self) -> bool:
        """Whether nothing is awaited, nor in use."""
        return not (self._questions or self._transfers)

    @property
    def _flying(self) -> list[_Transfer]:
        return [t for t in self._transfers.values() if t.course.state is Moving.FLYING]

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        assert self.receiver is not None or not self.busy, "asked without a session"
        assert all(t.left for t in self._flying), "a transfer ended and is not reported"
        assert all(q.left for q in self._questions.values()), "a question was answered and is kept"

    def __repr__(self) -> str:
        return f"<Outstanding {len(self._questions)} questions, {len(self._transfers)} transfers>"


def _batches(keys: tuple[Key, ...]) -> list[tuple[Key, ...]]:
    return [keys[i : i + protocol.MAX_KEYS] for i in range(0, len(keys), protocol.MAX_KEYS)]
