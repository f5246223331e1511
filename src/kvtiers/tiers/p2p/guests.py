"""The peers that ask us: their sessions on the one ROUTER, and the data connections to them.

Runs on the I/O thread. Who asks is not believed: a message that cannot come now ends its session,
and nobody else notices. What is asked goes to the serving thread; what that decides comes back
through ``answer``, ``push`` and ``done``.
"""

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import zmq

from kvtiers.tiers.p2p import protocol
from kvtiers.tiers.p2p.loop import Timer
from kvtiers.tiers.p2p.notes import (
    Demand,
    Finished,
    Gone,
    Moved,
    Query,
    Sent,
    Stopped,
    ToServing,
)
from kvtiers.tiers.p2p.protocol import Code, Message, Role, Verdict
from kvtiers.tiers.p2p.session import PRODUCER, Asked, Course, Deed, Serving
from kvtiers.tiers.p2p.transport import Sender, Transport
from kvtiers.tiers.p2p.transport import Sent as SentCalls
from kvtiers.tiers.p2p.us import Us
from kvtiers.tiers.p2p.wire import ProtocolError

_log = logging.getLogger("kvtiers")

_MAX_OUTSTANDING = 1 << 20
"""Chunks in questions and transfers of one consumer that are not answered: some 100 MB."""
_TOGETHER_S = 0.002
"""Chunks that go out within it are told of together."""
_SAID = 256
"""Refusals that are remembered, so that each is logged once."""


@dataclass(slots=True, eq=False)
class Guest:
    """A consumer."""

    number: int
    identity: bytes
    course: Course[Serving, Asked, Deed] = field(
        default_factory=lambda: Course(PRODUCER, Serving.NEW)
    )
    label: str = ""
    token: bytes = b""
    sender: Sender | None = None
    heard: float = 0.0
    questions: dict[int, int] = field(default_factory=dict)
    """Those that are not answered, and how many chunks each has."""
    transfers: dict[int, int] = field(default_factory=dict)
    """Those that are not done, likewise."""
    outstanding: int = 0
    """Chunks of both."""
    cancelled: set[int] = field(default_factory=set)
    """Transfers that were cancelled and are not over for the serving thread."""
    sent: dict[int, list[int]] = field(default_factory=dict)
    """Chunks that went out and of which the serving thread was not told yet, by transfer."""
    going: dict[tuple[int, int], int] = field(default_factory=dict)
    """Bytes of chunks that the sender has, by transfer and place."""
    timer: Timer | None = None


class Guests:
    """All consumers."""

    def __init__(
        self, us: Us, router: "zmq.Socket[bytes]", post: Callable[[ToServing], None]
    ) -> None:
        """``router`` is bound already."""
        self._us = us
        self._loop = us.loop
        self._options = us.options
        self._router = router
        self._post = post
        self._numbers = 0
        self._by_identity: dict[bytes, Guest] = {}
        self._by_number: dict[int, Guest] = {}
        self._told: set[str] = set()
        self.gave = Moved()
        """What went out. May be looked at on any thread."""
        us.loop.attach(router, self._received)

    # -- what consumers say ----------------------------------------------------------------------

    def _received(self, parts: list[bytes]) -> None:
        identity = parts[0]
        guest = self._by_identity.get(identity) or Guest(0, identity)
        refusal = protocol.Refuse(Code.MALFORMED, "that is no message")
        token = bytes(protocol.TOKEN_BYTES)
        try:
            envelope = protocol.parse(parts[1] if len(parts) == 2 else b"")
            token = envelope.token
            event, refusal = self._event_of(guest, envelope)
        except ProtocolError as e:
            refusal = protocol.Refuse(Code.MALFORMED, f"your message is refused: {e}")
            self._on(guest, Asked.FORGED, refusal, token)
            return
        if event is Asked.REQUEST:
            guest.course.on(event)
            guest.heard = self._loop.clock()
            try:
                self._serve(guest, envelope.message)
            except ProtocolError as e:
                refusal = protocol.Refuse(Code.MALFORMED, f"your message is refused: {e}")
                self._on(guest, Asked.FORGED, refusal, token)
            return
        self._on(guest, event, refusal, token)
        if event is Asked.HELLO and guest.course.state is Serving.OPEN:
            self._welcome(guest, envelope)

    def _event_of(self, guest: Guest, envelope: protocol.Envelope) -> tuple[Asked, protocol.Refuse]:
        message, token = envelope.message, envelope.token
        if isinstance(message, protocol.Hello):
            guest.label = guest.label or protocol.shown(message.label)
            misfit = self._misfit(message, envelope.version)
            again = protocol.Refuse(Code.MALFORMED, "you said hello before")
            return (Asked.HELLO, again) if misfit is None else (Asked.MISFIT, misfit)
        requests = (
            protocol.LookUp
            | protocol.Fetch
            | protocol.Taken
            | protocol.Cancel
            | protocol.Finished
            | protocol.Ping
            | protocol.Goodbye
        )
        if not isinstance(message, requests):
            raise ProtocolError("only a producer sends that")
        stale = protocol.Refuse(Code.UNKNOWN_SESSION, "there is no such session here: say hello")
        if isinstance(message, protocol.Goodbye) and guest.course.state is Serving.NEW:
            return Asked.GOODBYE, stale  # of a session that ended meanwhile
        if guest.course.state is not Serving.OPEN or token != guest.token:
            return Asked.STALE, stale
        return (Asked.GOODBYE if isinstance(message, protocol.Goodbye) else Asked.REQUEST), stale

    def _misfit(self, hello: protocol.Hello, version: int) -> protocol.Refuse | None:
        refusal = protocol.refusal_of(
            hello, self._us.identity.namespace, self._us.identity.layout, version
        )
        if refusal is not None:
            return refusal
        if self._transport_for(hello) is None:
            ours = ", ".join(t.name.decode() for t in self._us.transports)
            return protocol.Refuse(Code.TRANSPORT, f"you take none of my data transports: {ours}")
        if len(self._by_number) >= self._options.max_peers:
            return protocol.Refuse(Code.BUSY, f"I serve {len(self._by_number)} peers: max_peers")
        return None

    def _transport_for(self, hello: protocol.Hello) -> Transport | None:
        by_name = {t.name: t for t in self._us.transports}
        return next((by_name[name] for name in hello.transports if name in by_name), None)

    # -- the session -----------------------------------------------------------------------------

    def _on(self, guest: Guest, event: Asked, refusal: protocol.Refuse, token: bytes) -> None:
        if not guest.course.takes(event):
            return  # of a session that ended meanwhile
        deed = guest.course.on(event)
        if deed is Deed.REFUSE:
            self._say_once(guest, refusal)
            self._send(guest, refusal, token)
        elif deed is Deed.DISMISS:
            self._send(guest, protocol.Goodbye(), guest.token)
        if guest.course.state is Serving.ENDED:
            self._let_go(guest)

    def _welcome(self, guest: Guest, envelope: protocol.Envelope) -> None:
        hello = envelope.message
        assert isinstance(hello, protocol.Hello)
        transport = self._transport_for(hello)
        assert transport is not None
        self._numbers += 1
        guest.number = self._numbers
        guest.token = secrets.token_bytes(protocol.TOKEN_BYTES)
        guest.heard = self._loop.clock()
        calls = SentCalls(
            partial(self._sent, guest), partial(self._ready, guest), partial(self._broke, guest)
        )
        guest.sender = transport.send_to(calls)
        self._by_identity[guest.identity] = self._by_number[guest.number] = guest
        self._keep_watch(guest)
        ack = protocol.HelloAck(
            envelope.token, self._us.identity.label, transport.name, guest.sender.offer
        )
        self._send(guest, ack, guest.token)

    def _keep_watch(self, guest: Guest) -> None:
        until = guest.heard + self._options.silence_deadline_s
        guest.timer = self._loop.at(until, partial(self._look_after, guest))

    def _look_after(self, guest: Guest) -> None:
        if self._loop.clock() - guest.heard < self._options.silence_deadline_s:
            self._keep_watch(guest)
        else:
            self._end(guest, Asked.LATE)

    def _broke(self, guest: Guest, why: str) -> None:
        _log.info("p2p: the session with %s ended: %s", guest.label or "a peer", why)
        self._end(guest, Asked.BROKEN)

    def _end(self, guest: Guest, event: Asked) -> None:
        unsaid = protocol.Refuse(Code.CLOSING, "")
        self._on(guest, event, unsaid, guest.token)

    def _let_go(self, guest: Guest) -> None:
        """Read nothing of a session's chunks any more; only then are they let go."""
        if guest.timer is not None:
            guest.timer.cancel()
        if guest.sender is not None:
            guest.sender.close()
            guest.sender = None
        self._by_identity.pop(guest.identity, None)
        if self._by_number.pop(guest.number, None) is not None:
            self._post(Gone(guest.number))

    def _say_once(self, guest: Guest, refusal: protocol.Refuse) -> None:
        if refusal.code == Code.UNKNOWN_SESSION:
            return  # one of us was restarted
        line = f"{guest.label or 'a peer'} was refused: {refusal.words}"
        if line not in self._told and len(self._told) < _SAID:
            self._told.add(line)
            _log.warning("p2p: %s", line)

    def _send(self, guest: Guest, message: Message, token: bytes) -> None:
        self._loop.send(self._router, [guest.identity, protocol.encode(message, token)])

    # -- requests --------------------------------------------------------------------------------

    def _serve(self, guest: Guest, message: Message) -> None:
        """Pass a request on. Raises ProtocolError for one that cannot be."""
        if isinstance(message, protocol.Ping):
            self._send(guest, protocol.Pong(message.number), guest.token)
        elif isinstance(message, protocol.Finished):
            self._post(Finished(guest.number, message.request))
        elif isinstance(message, protocol.Cancel):
            self._cancel(guest, message.transfer)
        elif isinstance(message, protocol.Taken):
            if message.transfer in guest.transfers and guest.sender is not None:
                places = [place for (place,) in message.places]
                guest.sender.taken(message.transfer, places)
        elif isinstance(message, protocol.LookUp | protocol.Fetch):
            keys = protocol.keys_of(message, self._us.identity.layout)
            if guest.outstanding + len(keys) > _MAX_OUTSTANDING:
                raise ProtocolError("you ask too much at once")
            guest.outstanding += len(keys)
            if isinstance(message, protocol.LookUp):
                _refuse_again(message.question in guest.questions)
                guest.questions[message.question] = len(keys)
                about = (message.question, message.request, Role(message.role), keys)
                self._post(Query(guest.number, *about))
            else:
                _refuse_again(message.transfer in guest.transfers)
                guest.transfers[message.transfer] = len(keys)
                about = (message.transfer, message.request, Role(message.role), keys)
                self._post(Demand(guest.number, *about))

    def _cancel(self, guest: Guest, transfer: int) -> None:
        if transfer in guest.transfers and transfer not in guest.cancelled:
            guest.cancelled.add(transfer)
            assert guest.sender is not None
            guest.sender.drop(transfer)
            self._post(Stopped(guest.number, transfer))

    # -- what the serving thread decided ---------------------------------------------------------

    def answer(self, session: int, question: int, verdicts: dict[int, Verdict], last: bool) -> None:
        """Tell a consumer what can be had, by place."""
        guest = self._by_number.get(session)
        if guest is None:
            return
        if last:
            guest.outstanding -= guest.questions.pop(question, 0)
        rows = tuple((place, int(verdict)) for place, verdict in verdicts.items())
        self._send(guest, protocol.LookUpAnswer(question, rows), guest.token)

    def push(self, session: int, transfer: int, chunks: Sequence[tuple[int, memoryview]]) -> None:
        """Bring chunks to a consumer, unless it is gone or wants them no more."""
        guest = self._by_number.get(session)
        if guest is None or guest.sender is None:
            return  # the serving thread learns of it by ``Gone``
        if transfer in guest.cancelled:
            self._post(Sent(session, transfer, tuple(place for place, _ in chunks)))
            return
        guest.going.update(((transfer, place), _size(view)) for place, view in chunks)
        guest.sender.push(transfer, chunks)

    def done(self, session: int, transfer: int, failed: dict[int, Code]) -> None:
        """Nothing of a transfer will be pushed any more."""
        guest = self._by_number.get(session)
        if guest is None:
            return
        guest.outstanding -= guest.transfers.pop(transfer, 0)
        if transfer in guest.cancelled:
            guest.cancelled.discard(transfer)
            return
        rows = tuple((place, int(code)) for place, code in failed.items())
        self._send(guest, protocol.TransferDone(transfer, rows), guest.token)

    def _sent(self, guest: Guest, transfer: int, place: int, ok: bool) -> None:
        nbytes = guest.going.pop((transfer, place))
        if ok:
            self.gave = self.gave.plus(1, nbytes)
        if not guest.sent:
            self._loop.at(self._loop.clock() + _TOGETHER_S, partial(self._tell_sent, guest))
        guest.sent.setdefault(transfer, []).append(place)
        if not ok and transfer not in guest.cancelled and guest.number in self._by_number:
            refused = protocol.TransferDone(transfer, ((place, int(Code.FAILED)),))
            self._send(guest, refused, guest.token)

    def _ready(self, guest: Guest, transfer: int, chunks: Sequence[tuple[int, int, int]]) -> None:
        self._send(guest, protocol.ChunkReady(transfer, tuple(chunks)), guest.token)

    def _tell_sent(self, guest: Guest) -> None:
        for transfer, places in guest.sent.items():
            self._post(Sent(guest.number, transfer, tuple(places)))
        guest.sent.clear()

    @property
    def count(self) -> int:
        """How many there are. On any thread."""
        return len(self._by_number)

    def close(self) -> None:
        """Say goodbye to all."""
        for guest in list(self._by_number.values()):
            self._end(guest, Asked.STOP)
        self._loop.detach(self._router)
        self._router.close(50)

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        assert len(self._by_number) <= self._options.max_peers, "more guests than max_peers"
        assert len(self._by_number) == len(self._by_identity), "a guest is known by half"
        for guest in self._by_number.values():
            assert guest.course.state is Serving.OPEN, "a guest without a session"
            assert guest.cancelled <= guest.transfers.keys(), "cancelled, and over"
            waiting = (*guest.questions.values(), *guest.transfers.values())
            assert guest.outstanding == sum(waiting), "what is outstanding does not add up"

    def __repr__(self) -> str:
        return f"<Guests {len(self._by_number)} sessions>"


def _size(view: memoryview) -> int:
    """In bytes; 0 of memory that was reset, which does not go out."""
    try:
        return view.nbytes
    except ValueError:
        return 0


def _refuse_again(known: bool) -> None:
    if known:
        raise ProtocolError("you asked that before")
