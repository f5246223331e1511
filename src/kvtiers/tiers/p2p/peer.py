"""One peer that is asked: its session, from the first question to the last word.

Runs on the I/O thread. What a peer says is believed only as far as it answers something that was
asked; the rest ends the session, and the peer is left alone for a while.
"""

import logging
import secrets
from collections import Counter, deque
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import cast

from kvtiers.errors import Kind
from kvtiers.events import MissReason
from kvtiers.tiers.breaker import Breaker, State
from kvtiers.tiers.p2p import protocol
from kvtiers.tiers.p2p.line import Line, Lines
from kvtiers.tiers.p2p.loop import Timer
from kvtiers.tiers.p2p.notes import Answered, Ask, Failure, Load, Loaded, Over, ToTier
from kvtiers.tiers.p2p.outstanding import Awaited, Outstanding, Voices
from kvtiers.tiers.p2p.protocol import Code, Message
from kvtiers.tiers.p2p.session import CONSUMER, Act, Asking, Course, Heard, Patience, Watch
from kvtiers.tiers.p2p.transport import Delivered
from kvtiers.tiers.p2p.us import Us
from kvtiers.tiers.p2p.wire import ProtocolError

_log = logging.getLogger("kvtiers")


class Standing(Enum):
    """What there is to do with a peer."""

    CONNECTED = "connected"
    DIALLING = "dialling"
    LEFT_ALONE = "left alone"
    IDLE = "idle"


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
        self._strikes: Counter[Awaited] = Counter()
        """What came too late, each in a row of its own."""
        self._waiting: deque[Ask | Load | Over] = deque()
        """What is sent when the session opens."""
        forged = partial(self._on, Heard.FORGED)
        voices = Voices(self._say, post, self._fared_well, self._struck, forged)
        self._outstanding = Outstanding(us.loop, voices)
        self._requests: set[str] = set()
        """Those the peer knows of in this session."""
        self._said = ""
        self._course: Course[Asking, Heard, Act] | None = None
        self._reset_session()

    def _reset_session(self) -> None:
        self._course = None
        self._line: Line | None = None
        self._watch: Watch | None = None
        self._watch_timer: Timer | None = None
        self._nonce = self._token = b""
        self._address = ""
        self._requests.clear()

    # -- what the tier wants ---------------------------------------------------------------------

    def ask(self, ask: Ask) -> None:
        """Find out which of these the peer has."""
        if self._ready(ask):
            self._send(ask)

    def load(self, load: Load) -> None:
        """Have these brought."""
        if self._ready(load):
            self._send(load)

    def over(self, over: Over) -> None:
        """Tell the peer that it need not keep anything for this request."""
        request = over.source.request
        if request in self._requests:
            self._requests.discard(request)
            self._outstanding.over(over.source)
            self._say(protocol.Finished(request))
        elif any(wanted.source == over.source for wanted in self._waiting):
            self._waiting.append(over)

    @property
    def standing(self) -> Standing:
        """What there is to do with it now. On any thread."""
        course = self._course
        if course is not None:
            return Standing.CONNECTED if course.state is Asking.OPEN else Standing.DIALLING
        out = self._breaker.is_out(self._us.loop.clock())
        return Standing.LEFT_ALONE if out else Standing.IDLE

    @property
    def idle(self) -> bool:
        """Whether nothing would be lost if it were forgotten."""
        return self.unused and not self._breaker.is_out(self._us.loop.clock())

    @property
    def unused(self) -> bool:
        """Whether nothing is known of it but how it failed."""
        return self._course is None and self._outstanding.empty

    def stop(self) -> None:
        """End the session with grace."""
        if self._course is not None:
            self._on(Heard.STOP, "this engine stops")

    def _ready(self, wanted: Ask | Load) -> bool:
        """Whether the session is open. If not, ``wanted`` waits for it, or fails."""
        now = self._us.loop.clock()
        if self._outstanding.hangs:
            self._fail(wanted, Failure(Kind.IO, f"reads from {self} do not end"))
            return False
        if self._outstanding.cramped:  # by way of another transport there is room
            self._on(Heard.IDLE, "its data transport has no room left here")
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

    def _fail(self, wanted: Ask | Load | Over, why: Failure) -> None:
        if isinstance(wanted, Ask):
            absent = dict.fromkeys(wanted.keys, False)
            self._post(Answered(wanted.number, absent, MissReason.TIER_DOWN))
        elif isinstance(wanted, Load):
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
        broken = partial(self._on, Heard.BROKEN)
        try:
            self._line = self._lines.dial(self._address, self.host, self.port, self._heard, broken)
        except OSError as e:
            broken(f"no connection can be made: {e}")
            return
        who = self._us.identity
        hello = protocol.Hello(
            who.namespace,
            protocol.groups_of(who.layout),
            who.label,
            tuple(transport.name for transport in self._us.transports if transport.has_room),
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
                self._outstanding.take(envelope.message)
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
        ours = self._outstanding
        calls = Delivered(ours.arrived, ours.stopped, self._taken, self._data_broke)
        try:
            ours.receiver = transport.receive_from(self._address, ack.offer, calls)
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
            else:
                self._send(wanted)

    def _look_again(self) -> None:
        watch = self._watch
        assert watch is not None
        if self._watch_timer is not None:
            self._watch_timer.cancel()
        self._watch_timer = self._us.loop.at(watch.next(), self._look_after)

    def _look_after(self) -> None:
        watch, now = self._watch, self._us.loop.clock()
        assert watch is not None
        busy = self._outstanding.busy or bool(self._waiting)
        due = watch.due(now, busy)
        if due is not None:
            self._on(due, "it gives no sign of life" if due is Heard.LATE else "nobody needs it")
        if self._watch is not watch:
            return
        if watch.wants_ping(now):
            watch.pinged(now)
            self._say(protocol.Ping(self._outstanding.number()))
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
        if self._line is not None:
            self._line.close()
        if self._watch_timer is not None:
            self._watch_timer.cancel()
        self._strikes.clear()
        self._reset_session()
        waiting, self._waiting = self._waiting, deque()
        self._outstanding.lost(why)
        for wanted in waiting:
            self._fail(wanted, why)

    def _say(self, message: Message) -> None:
        if self._line is not None and self._token:
            self._line.send(protocol.encode(message, self._token))

    def _send(self, wanted: Ask | Load | Over) -> None:
        assert self._watch is not None
        if isinstance(wanted, Over):
            self.over(wanted)
            return
        self._requests.add(wanted.source.request)
        self._watch.used(self._us.loop.clock())
        if isinstance(wanted, Ask):
            self._outstanding.ask(wanted)
        else:
            self._outstanding.load(wanted)

    def _taken(self, number: int, places: Sequence[int]) -> None:
        self._say(protocol.Taken(number, tuple((place,) for place in places)))

    def _fared_well(self, with_: Awaited) -> None:
        del self._strikes[with_]
        if not self._strikes:  # who answers and brings nothing has proved nothing
            self._breaker.succeeded()

    def _struck(self, with_: Awaited) -> None:
        self._strikes[with_] += 1
        if self._strikes[with_] >= self._us.options.breaker_failures:
            self._on(Heard.LATE, with_.value)

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        self._breaker.check()
        if self._course is not None:
            self._course.check()
        is_open = self._course is not None and self._course.state is Asking.OPEN
        self._outstanding.check()
        assert is_open == (self._outstanding.receiver is not None), "half a session"
        assert not (is_open and self._waiting), "something waits for a session that is open"
        assert (self._line is None) == (self._nonce == b""), "a line without a greeting"

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def __repr__(self) -> str:
        state = "no session" if self._course is None else self._course.state.value
        return f"<Peer {self}: {state}, {self._outstanding!r}, {self._breaker.state.value}>"
