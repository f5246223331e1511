"""What may happen in a session, and what is to be done then: two tables, and one for a transfer.

Pure: no socket, no thread, no clock; ``now`` (monotonic seconds) is an argument. A pair of state
and event that a table does not have cannot come about: it is a bug of ours, raises, and changes
nothing. Whatever a *peer* can do has its line in every state in which it can reach us.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)
A = TypeVar("A", bound=Enum)


# -- the consumer's side --------------------------------------------------------------------------


class Asking(Enum):
    """Where a session stands for the one who dials."""

    NAMING = "naming"
    """The name of the peer is being resolved."""
    GREETING = "greeting"
    """``Hello`` is on its way."""
    OPEN = "open"
    ENDED = "ended"


class Heard(Enum):
    """What happens to it."""

    NAMED = "named"
    UNNAMED = "unnamed"
    """The name does not resolve."""
    WELCOME = "welcome"
    """``HelloAck`` with our nonce."""
    REFUSED = "refused"
    RESTARTED = "restarted"
    """Refused because the peer knows of no such session: it begins anew."""
    REPLY = "reply"
    """What answers a question of an open session, with its token."""
    GOODBYE = "goodbye"
    FORGED = "forged"
    """No message, one that only a consumer sends, one with another token, or a lie."""
    BROKEN = "broken"
    """A connection could not be made, or ended."""
    LATE = "late"
    """The deadline of the state passed."""
    IDLE = "idle"
    """Nobody needed it for long."""
    STOP = "stop"


class Act(Enum):
    """What the one who dials does."""

    GREET = "greet"
    """Open the control connection and say ``Hello``."""
    GO_ON = "go on"
    """Open the data connection; send what waited for the session."""
    TAKE = "take"
    """Take in the reply."""
    LEAVE = "leave"
    """Close both connections. Nobody is to blame."""
    BLAME = "blame"
    """Close both connections; what was outstanding fails, and it counts against the peer."""


CONSUMER: Mapping[tuple[Asking, Heard], tuple[Asking, Act]] = {
    (Asking.NAMING, Heard.NAMED): (Asking.GREETING, Act.GREET),
    (Asking.NAMING, Heard.UNNAMED): (Asking.ENDED, Act.BLAME),
    (Asking.NAMING, Heard.LATE): (Asking.ENDED, Act.BLAME),
    (Asking.NAMING, Heard.STOP): (Asking.ENDED, Act.LEAVE),
    (Asking.GREETING, Heard.WELCOME): (Asking.OPEN, Act.GO_ON),
    (Asking.GREETING, Heard.REFUSED): (Asking.ENDED, Act.BLAME),
    (Asking.GREETING, Heard.RESTARTED): (Asking.ENDED, Act.BLAME),
    (Asking.GREETING, Heard.REPLY): (Asking.ENDED, Act.BLAME),
    (Asking.GREETING, Heard.GOODBYE): (Asking.ENDED, Act.BLAME),
    (Asking.GREETING, Heard.FORGED): (Asking.ENDED, Act.BLAME),
    (Asking.GREETING, Heard.BROKEN): (Asking.ENDED, Act.BLAME),
    (Asking.GREETING, Heard.LATE): (Asking.ENDED, Act.BLAME),
    (Asking.GREETING, Heard.STOP): (Asking.ENDED, Act.LEAVE),
    (Asking.OPEN, Heard.WELCOME): (Asking.ENDED, Act.BLAME),
    (Asking.OPEN, Heard.REFUSED): (Asking.ENDED, Act.BLAME),
    (Asking.OPEN, Heard.RESTARTED): (Asking.ENDED, Act.LEAVE),
    (Asking.OPEN, Heard.REPLY): (Asking.OPEN, Act.TAKE),
    (Asking.OPEN, Heard.GOODBYE): (Asking.ENDED, Act.LEAVE),
    (Asking.OPEN, Heard.FORGED): (Asking.ENDED, Act.BLAME),
    (Asking.OPEN, Heard.BROKEN): (Asking.ENDED, Act.BLAME),
    (Asking.OPEN, Heard.LATE): (Asking.ENDED, Act.BLAME),
    (Asking.OPEN, Heard.IDLE): (Asking.ENDED, Act.LEAVE),
    (Asking.OPEN, Heard.STOP): (Asking.ENDED, Act.LEAVE),
}


# -- the producer's side --------------------------------------------------------------------------


class Serving(Enum):
    """Where a session stands for the one who was dialled."""

    NEW = "new"
    """Nothing was heard before."""
    OPEN = "open"
    ENDED = "ended"


class Asked(Enum):
    """What happens to it."""

    HELLO = "hello"
    """Of an engine that can be served."""
    MISFIT = "misfit"
    """Of one that cannot: another version, namespace, geometry or transport, or one too many."""
    REQUEST = "request"
    """What a consumer asks in an open session, with its token."""
    STALE = "stale"
    """The same without a session, or with another's token."""
    FORGED = "forged"
    """No message, one that only a producer sends, or one that asks for what cannot be."""
    GOODBYE = "goodbye"
    BROKEN = "broken"
    """The data connection broke."""
    LATE = "late"
    """Nothing was heard for too long."""
    STOP = "stop"


class Deed(Enum):
    """What the one who was dialled does."""

    WELCOME = "welcome"
    """Prepare the data connection, say ``HelloAck``."""
    SERVE = "serve"
    REFUSE = "refuse"
    """Say why, let go of everything."""
    FORGET = "forget"
    """Let go of everything; there is nobody to tell."""
    DISMISS = "dismiss"
    """Say ``Goodbye``, let go of everything."""


PRODUCER: Mapping[tuple[Serving, Asked], tuple[Serving, Deed]] = {
    (Serving.NEW, Asked.HELLO): (Serving.OPEN, Deed.WELCOME),
    (Serving.NEW, Asked.MISFIT): (Serving.ENDED, Deed.REFUSE),
    (Serving.NEW, Asked.STALE): (Serving.ENDED, Deed.REFUSE),
    (Serving.NEW, Asked.FORGED): (Serving.ENDED, Deed.REFUSE),
    (Serving.NEW, Asked.GOODBYE): (Serving.ENDED, Deed.FORGET),
    (Serving.OPEN, Asked.HELLO): (Serving.ENDED, Deed.REFUSE),
    (Serving.OPEN, Asked.MISFIT): (Serving.ENDED, Deed.REFUSE),
    (Serving.OPEN, Asked.REQUEST): (Serving.OPEN, Deed.SERVE),
    (Serving.OPEN, Asked.STALE): (Serving.ENDED, Deed.REFUSE),
    (Serving.OPEN, Asked.FORGED): (Serving.ENDED, Deed.REFUSE),
    (Serving.OPEN, Asked.GOODBYE): (Serving.ENDED, Deed.FORGET),
    (Serving.OPEN, Asked.BROKEN): (Serving.ENDED, Deed.DISMISS),
    (Serving.OPEN, Asked.LATE): (Serving.ENDED, Deed.FORGET),
    (Serving.OPEN, Asked.STOP): (Serving.ENDED, Deed.DISMISS),
}


# -- a transfer, for the consumer -----------------------------------------------------------------


class Moving(Enum):
    """Where a transfer stands for the one whose memory it writes."""

    FLYING = "flying"
    STOPPING = "stopping"
    """It has failed; something may still land."""
    ENDED = "ended"


class Turn(Enum):
    """What happens to it."""

    ALL = "all"
    """Every chunk has arrived, or was refused."""
    LATE = "late"
    """Its deadline passed, or nobody wants it any more; nothing lands any more."""
    LATE_IN_USE = "late in use"
    """The same, but something may still land."""
    LOST = "lost"
    """The session ended; nothing lands any more."""
    LOST_IN_USE = "lost in use"
    """The same, but something may still land."""
    STOPPED = "stopped"
    """Nothing lands any more."""


class Move(Enum):
    """What is said of it."""

    REPORT = "report"
    """What arrived is done, the rest has failed, its memory is free."""
    REPORT_IN_USE = "report in use"
    """The same, but its memory may not be used before it is released."""
    CANCEL = "cancel"
    """As ``REPORT``, and the producer is told."""
    CANCEL_IN_USE = "cancel in use"
    """As ``REPORT_IN_USE``, and the producer is told."""
    RELEASE = "release"
    """Its memory is free at last."""


TRANSFER: Mapping[tuple[Moving, Turn], tuple[Moving, Move]] = {
    (Moving.FLYING, Turn.ALL): (Moving.ENDED, Move.REPORT),
    (Moving.FLYING, Turn.LATE): (Moving.ENDED, Move.CANCEL),
    (Moving.FLYING, Turn.LATE_IN_USE): (Moving.STOPPING, Move.CANCEL_IN_USE),
    (Moving.FLYING, Turn.LOST): (Moving.ENDED, Move.REPORT),
    (Moving.FLYING, Turn.LOST_IN_USE): (Moving.STOPPING, Move.REPORT_IN_USE),
    (Moving.STOPPING, Turn.STOPPED): (Moving.ENDED, Move.RELEASE),
}


@dataclass(slots=True, eq=False)
class Course(Generic[S, E, A]):
    """A state that moves by a table."""

    table: Mapping[tuple[S, E], tuple[S, A]]
    state: S

    def on(self, event: E) -> A:
        """Move on; what is to be done. Raises ValueError, unmoved, for what cannot happen."""
        step = self.table.get((self.state, event))
        if step is None:
            raise ValueError(f"{event.value} cannot happen to what is {self.state.value}")
        self.state, action = step
        return action

    def takes(self, event: E) -> bool:
        """Whether ``event`` can happen now."""
        return (self.state, event) in self.table

    def check(self) -> None:
        """Raise AssertionError if the state is none of the table's."""
        states = {state for state, _ in self.table} | {state for state, _ in self.table.values()}
        assert self.state in states, f"{self.state} is no state of this table"

    def __repr__(self) -> str:
        return f"<Course {self.state.value}>"


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a consumer's session waits, in seconds."""

    handshake_s: float
    """For the name, the connection and the welcome together."""
    silence_s: float
    """For a sign of life, while one was asked for."""
    ping_s: float
    """Between signs of life that are asked for."""
    idle_s: float
    """Without anything to ask, until the session is let go."""


class Watch:
    """When a session that is waited on is to be looked after. Pure."""

    def __init__(self, patience: Patience, now: float) -> None:
        self._patience = patience
        self._handshake_until = now + patience.handshake_s
        self._heard = now
        self._used = now
        self._pinged = now
        self._open = False

    def opened(self, now: float) -> None:
        """The session is open: from now on signs of life count."""
        self._open = True
        self._heard = self._used = self._pinged = now

    def heard(self, now: float) -> None:
        """The peer gave a sign of life."""
        self._heard = now

    def used(self, now: float) -> None:
        """Something was asked."""
        self._used = now

    def pinged(self, now: float) -> None:
        """A sign of life was asked for."""
        self._pinged = now

    def due(self, now: float, busy: bool) -> Heard | None:
        """What happened by waiting: LATE, IDLE, or nothing."""
        if not self._open:
            return Heard.LATE if now >= self._handshake_until else None
        if now >= self._heard + self._patience.silence_s:
            return Heard.LATE
        if not busy and now >= self._used + self._patience.idle_s:
            return Heard.IDLE
        return None

    def wants_ping(self, now: float) -> bool:
        """Whether it is time to ask for a sign of life."""
        return self._open and now >= self._pinged + self._patience.ping_s

    def next(self) -> float:
        """When to look again."""
        if not self._open:
            return self._handshake_until
        return min(self._heard + self._patience.silence_s, self._pinged + self._patience.ping_s)

    def check(self) -> None:
        """Raise AssertionError if more was heard than can be waited for."""
        assert self._patience.ping_s < self._patience.silence_s, "it is late before it is asked"

    def __repr__(self) -> str:
        return f"<Watch {'open' if self._open else 'greeting'}, heard {self._heard:.1f}>"
