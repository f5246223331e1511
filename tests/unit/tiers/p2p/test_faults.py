"""Lost messages, lies, halves of connections: each costs its own request a bounded delay."""

import socket
import time

import pytest
from xxhash import xxh3_64_intdigest

from kvtiers.chunks import Lookup, Namespace
from kvtiers.tiers.breaker import State
from kvtiers.tiers.p2p import protocol as p
from kvtiers.tiers.p2p.frames import HEADER
from tests.unit.tiers.p2p.engines import (
    CHUNK_BYTES,
    Engine,
    engines,
    keys,
    payload,
    source,
    until,
    with_options,
)
from tests.unit.tiers.p2p.middle import Liar, Lossy, honest

NAMES = keys(4)
HITS, MISSES = [Lookup.HIT] * 4, [Lookup.MISS] * 4
ROLES = ("remote_kv_source", "remote_prefiller")


def pulled(engine: Engine, params: dict, seconds: float = 10.0) -> list[Lookup]:
    """What comes of a request, whole or not; it and all it left has ended then."""
    request = engine.request(params)
    verdicts = engine.pull(NAMES, request, seconds)
    engine.must_have([k for k, v in zip(NAMES, verdicts, strict=True) if v is Lookup.HIT])
    engine.manager.on_request_finished(request)
    engine.rest()
    return verdicts


# -- a message of each kind is lost ---------------------------------------------------------------

COSTS_NOTHING = (p.Finished, p.Goodbye, p.TransferDone, p.Taken)
NIXL_SAYS = (p.ChunkReady, p.Taken)
LOST = [
    pytest.param(kind, transport, id=f"{kind.__name__}-{transport}")
    for kind in sorted(p._BODIES, key=lambda kind: kind.__name__)
    for transport in ("tcp", "nixl")
    if kind not in (p.Refuse, p.Cancel) and (transport == "nixl" or kind not in NIXL_SAYS)
]
"""A refusal and a cancel, which such a session does not say, have tests of their own."""


def by(transport: str, **changes: object):
    return with_options(transport=transport, plaintext_data=True, **changes)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(("kind", "transport"), LOST)
def test_a_message_of_each_kind_is_lost(kind, transport, role):
    greets = kind in (p.Hello, p.HelloAck)
    with (
        engines(options=by(transport, handshake_deadline_s=1.0 if greets else 10.0)) as (a, b),
        Lossy(a.port, lambda message: type(message) is kind) as between,
    ):
        _is_lost(kind, role, a, b, between)


def _is_lost(kind, role, a, b, between):
    prefill = a.request({"remote_decoder": {"kv_request_id": "x1"}})
    a.store(NAMES, prefill)
    a.manager.on_request_finished(prefill)
    verdicts = pulled(b, source(between, key=role))
    if kind in (p.Ping, p.Pong):
        until(lambda: not b.on_io(lambda: b.endpoint._peers["127.0.0.1", between.port]._course))
    else:
        assert verdicts == (HITS if kind in COSTS_NOTHING else MISSES)
    until(lambda: between.lost or kind is p.Goodbye)
    assert pulled(b, source(a, "x2")) == HITS  # nobody else notices
    until(lambda: not a.parent._pins)
    a.rest()


@pytest.mark.parametrize("transport", ["tcp", "nixl"])
def test_a_refusal_that_is_lost(transport):
    """At the end of the handshake's patience it is as if nobody were there."""
    options = by(transport, handshake_deadline_s=0.5)
    other = Namespace({"model": "another"})
    with (
        engines(1, options=options) as (a,),
        engines(1, options=options, namespace=other) as (b,),
        Lossy(a.port, lambda message: type(message) is p.Refuse) as between,
    ):
        assert pulled(b, source(between)) == MISSES
        assert [type(message) for message in between.lost] == [p.Refuse]
        peer = b.endpoint._peers["127.0.0.1", between.port]
        assert b.on_io(lambda: (peer._course, peer._breaker.state)) == (None, State.OPEN)
        a.rest()


@pytest.mark.parametrize("transport", ["tcp", "nixl"])
def test_a_cancel_that_is_lost(transport):
    options = by(transport, load_deadline_s=0.5, park_deadline_s=0.5, lookup_deadline_s=0.2)
    with engines(options=options) as (a, b):
        with Lossy(a.port, lambda message: type(message) is p.Cancel) as between:
            assert pulled(b, source(between, "never", "remote_prefiller")) == MISSES
            a.store(NAMES)
            until(lambda: pulled(b, source(between, "x2")) == HITS)
        a.rest()


# -- a producer that lies -------------------------------------------------------------------------


def nothing(liar: Liar, connection: socket.socket) -> None:
    connection.recv(64)
    liar._stopped.wait(10)


def sends(*frames: bytes):
    """A data connection that sends these once something is fetched."""

    def serve(liar: Liar, connection: socket.socket) -> None:
        connection.recv(64)
        liar.fetched.wait(10)
        connection.sendall(b"".join(frames))
        liar._stopped.wait(10)

    return serve


def frame(place: int, data: bytes, transfer: int = 2, size=None, checksum=None, zero=0) -> bytes:
    size = len(data) if size is None else size
    checksum = xxh3_64_intdigest(data) if checksum is None else checksum
    return HEADER.pack(transfer, place, zero, size, checksum) + data


GOOD = [frame(place, payload(key)) for place, key in enumerate(NAMES)]


def saying(**scripts):
    """Honest, but for the messages that are named."""

    def script(liar, envelope):
        own = scripts.get(type(envelope.message).__name__)
        return honest(liar, envelope) if own is None else own(liar, envelope.message, envelope)

    return script


def test_an_honest_liar_is_believed():
    with engines(1) as (b,), Liar(honest, sends(*GOOD[::-1])) as liar:
        assert pulled(b, source(liar)) == HITS


DATA_LIES = {
    "a chunk of a transfer that nobody asked for": [frame(0, payload(NAMES[0]), transfer=99)],
    "a chunk beyond the end of the transfer": [frame(4, payload(NAMES[0]))],
    "a chunk twice": [GOOD[0], GOOD[0]],
    "a chunk that is too long": [frame(0, payload(NAMES[0], CHUNK_BYTES + 1))],
    "a chunk that is too short": [frame(0, payload(NAMES[0], CHUNK_BYTES - 1))],
    "a chunk that is said to be enormous": [frame(0, b"", size=2**63)],
    "a chunk whose bytes were changed": [frame(0, payload(NAMES[0]), checksum=1)],
    "something in a header that is none": [frame(0, payload(NAMES[0]), zero=1)],
}


@pytest.mark.parametrize("lie", DATA_LIES, ids=lambda lie: lie.replace(" ", "-"))
def test_a_lie_on_the_data_connection_ends_the_session_and_opens_the_breaker(lie):
    with engines(1) as (b,), Liar(honest, sends(*DATA_LIES[lie], *GOOD)) as liar:
        verdicts = pulled(b, source(liar))
        assert Lookup.MISS in verdicts
        peer = b.endpoint._peers["127.0.0.1", liar.port]
        assert b.on_io(lambda: (peer._course, peer._breaker.state)) == (None, State.OPEN)


def again(liar, message, envelope):
    return [liar.welcome(envelope), liar.welcome(envelope)]


def of_another_session(liar, message, envelope):
    return [(honest(liar, envelope)[0][0], bytes(16))]


def answering(*verdicts, question=0):
    def script(liar, message, envelope):
        return [(p.LookUpAnswer(message.question + question, verdicts), liar.token)]

    return script


def raw(data: bytes):
    return lambda liar, message, envelope: [(data, b"")]


def ending(*failed, transfer=0):
    def script(liar, message, envelope):
        return [(p.TransferDone(message.transfer + transfer, failed), liar.token)]

    return script


def saying_so(*messages):
    return lambda liar, message, envelope: [(m, liar.token) for m in messages]


def another_transport(liar, message, envelope):
    return [(p.HelloAck(envelope.token, "x", b"rdma", b""), liar.token)]


def no_offer(liar, message, envelope):
    return [(p.HelloAck(envelope.token, "x", b"tcp", b"?"), liar.token)]


def another_nonce(liar, message, envelope):
    return [(p.HelloAck(bytes(16), "x", b"tcp", liar.offer), liar.token)]


LIES = {
    "says what is no message": saying(Hello=raw(b"\0" * 40)),
    "says nothing": saying(Hello=raw(b"")),
    "welcomes somebody else": saying(Hello=another_nonce),
    "welcomes twice": saying(Hello=again),
    "chooses a transport that was not offered": saying(Hello=another_transport),
    "offers no connection": saying(Hello=no_offer),
    "speaks before it welcomes": saying(Hello=saying_so(p.Pong(1))),
    "answers in another session": saying(LookUp=of_another_session),
    "answers what was not asked": saying(LookUp=answering((0, 1), question=10**6)),
    "answers beyond the question": saying(LookUp=answering((4, 1))),
    "answers no number of places": saying(LookUp=answering(*((n, 1) for n in range(2000)))),
    "sends what a consumer sends": saying(LookUp=saying_so(p.LookUp(1, "x", 0, (b"k" * 36,)))),
    "ends what was not asked for": saying(Fetch=ending(transfer=10**6)),
    "fails places that there are not": saying(Fetch=ending((9, 8))),
    "says that chunks can be read": saying(Fetch=saying_so(p.ChunkReady(2, ((0, 0, 0),)))),
    "says so of what was not asked for": saying(Fetch=saying_so(p.ChunkReady(99, ((0, 0, 0),)))),
}


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.replace(" ", "-"))
def test_a_lie_on_the_control_channel_ends_the_session_and_opens_the_breaker(lie):
    patient = with_options(lookup_deadline_s=60.0, handshake_deadline_s=60.0, load_deadline_s=60.0)
    with engines(1, options=patient) as (b,), Liar(LIES[lie], nothing) as liar:
        began = time.monotonic()
        assert pulled(b, source(liar)) == MISSES
        assert time.monotonic() - began < 20  # no deadline had to pass
        peer = b.endpoint._peers["127.0.0.1", liar.port]
        assert b.on_io(lambda: (peer._course, peer._breaker.state)) == (None, State.OPEN)


def test_a_replayed_answer_ends_the_session():
    def twice(liar, message, envelope):
        (answer,) = honest(liar, envelope)
        part = (p.LookUpAnswer(message.question, ((0, 1),)), liar.token)
        return [part, part, answer]

    with engines(1) as (b,), Liar(saying(LookUp=twice), nothing) as liar:
        verdicts = pulled(b, source(liar))
        assert verdicts[1:] == MISSES[1:]
        peer = b.endpoint._peers["127.0.0.1", liar.port]
        assert b.on_io(lambda: peer._breaker.state) is State.OPEN


def test_a_peer_that_says_it_has_everything_and_brings_nothing():
    options = with_options(load_deadline_s=0.5)
    with engines(1, options=options) as (b,), Liar(honest, nothing) as liar:
        began = time.monotonic()
        assert pulled(b, source(liar)) == MISSES
        assert 0.4 < time.monotonic() - began < 20
        until(lambda: any(isinstance(message, p.Cancel) for message in liar.heard))


def test_a_chunk_that_comes_after_its_deadline_lands_nowhere():
    """The slots are others' by then."""
    late = []

    def slow(liar, connection):
        connection.recv(64)
        liar.fetched.wait(10)
        half = GOOD[0][: len(GOOD[0]) // 2]
        connection.sendall(half)
        until(lambda: any(isinstance(message, p.Cancel) for message in liar.heard))
        until(lambda: late)
        connection.sendall(GOOD[0][len(half) :] + b"".join(GOOD[1:]))
        late.append("sent")
        liar._stopped.wait(10)

    with engines(1, options=with_options(load_deadline_s=0.5)) as (b,), Liar(honest, slow) as liar:
        assert pulled(b, source(liar)) == MISSES
        others = keys(64, "others")
        b.store(others)
        late.append("now")
        until(lambda: late[-1] == "sent")
        peer = b.endpoint._peers["127.0.0.1", liar.port]
        landed = lambda: [  # noqa: E731
            view is None for e in peer._outstanding.receiver._expected.values() for view in e.views
        ]
        until(lambda: b.on_io(landed) == [True] * 4)
        b.must_have(others)
        b.on_io(peer._outstanding.receiver.check)


def test_a_chunk_that_is_taken_back_while_it_comes_in_lands_nowhere():
    """Half of it comes, then the transfer is ended, then the other half."""
    ended = []

    def halves(liar, connection):
        connection.recv(64)
        liar.fetched.wait(10)
        half = GOOD[0][: len(GOOD[0]) // 2]
        connection.sendall(half)
        until(lambda: ended)
        connection.sendall(GOOD[0][len(half) :])
        ended.append("sent")
        liar._stopped.wait(10)

    def script(liar, envelope):
        if isinstance(envelope.message, p.Fetch):
            peer = b.endpoint._peers["127.0.0.1", liar.port]
            liar.fetched.set()
            until(lambda: peer._outstanding.receiver._landing)
            failed = tuple((n, int(p.Code.ABSENT)) for n in range(4))
            return [(p.TransferDone(envelope.message.transfer, failed), liar.token)]
        return honest(liar, envelope)

    with engines(1) as (b,), Liar(script, halves) as liar:
        assert pulled(b, source(liar)) == MISSES
        others = keys(64, "others")
        b.store(others)
        ended.append("now")
        until(lambda: ended[-1] == "sent")
        peer = b.endpoint._peers["127.0.0.1", liar.port]
        until(lambda: b.on_io(lambda: peer._outstanding.receiver._landing) is None)
        b.must_have(others)


def test_a_data_connection_that_nobody_takes():
    def script(liar, envelope):
        if isinstance(envelope.message, p.Hello):
            offer = (1).to_bytes(2, "little") + bytes(16)
            return [(p.HelloAck(envelope.token, "x", b"tcp", offer), liar.token)]
        return honest(liar, envelope)

    with engines(1) as (b,), Liar(script, nothing) as liar:
        assert pulled(b, source(liar)) == MISSES


def test_a_slow_peer_is_left_alone_after_some_late_answers():
    options = with_options(lookup_deadline_s=0.2, breaker_failures=2, breaker_cooldown_s=30.0)
    silent_on = saying(LookUp=lambda liar, message, envelope: [])
    with engines(1, options=options) as (b,), Liar(silent_on, nothing) as liar:
        for _ in range(2):
            assert pulled(b, source(liar)) == MISSES
        peer = b.endpoint._peers["127.0.0.1", liar.port]
        assert b.on_io(lambda: peer._breaker.state) is State.OPEN
        asked = sum(isinstance(message, p.LookUp) for message in liar.heard)
        assert pulled(b, source(liar)) == MISSES
        assert sum(isinstance(message, p.LookUp) for message in liar.heard) == asked


# -- a consumer that lies -------------------------------------------------------------------------


class Stranger:
    """Speaks to an engine by hand."""

    def __init__(self, engine: Engine) -> None:
        import zmq

        self.engine = engine
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(f"tcp://127.0.0.1:{engine.port}")
        self.token = bytes(16)

    def say(self, message, token=None) -> None:
        raw = isinstance(message, bytes)
        self.socket.send(message if raw else p.encode(message, token or self.token))

    def hear(self) -> p.Message:
        assert self.socket.poll(10_000), "the engine says nothing"
        envelope = p.parse(self.socket.recv())
        if isinstance(envelope.message, p.HelloAck):
            self.token = envelope.token
        return envelope.message

    def greet(self) -> p.HelloAck:
        layout = self.engine.layout
        namespace = self.engine.endpoint._us.identity.namespace
        self.say(p.Hello(namespace, p.groups_of(layout), "stranger", (b"tcp",)))
        return self.hear()

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.context.destroy(0)


REFUSED = {
    "no message": (b"\0" * 30, p.Code.MALFORMED),
    "a message of a producer": (p.Pong(1), p.Code.MALFORMED),
    "a key that cannot be": (p.LookUp(1, "x", 0, (b"k" * 32 + b"\0\0\0\7",)), p.Code.MALFORMED),
    "another hello": (p.Hello("", (), "x", (b"tcp",)), p.Code.NAMESPACE),
}


@pytest.mark.parametrize("lie", REFUSED, ids=lambda lie: lie.replace(" ", "-"))
def test_what_a_consumer_may_not_say_ends_its_session(lie):
    message, code = REFUSED[lie]
    with engines() as (a, b), Stranger(a) as stranger:
        a.store(NAMES)
        assert isinstance(stranger.greet(), p.HelloAck)
        stranger.say(message)
        refusal = stranger.hear()
        assert isinstance(refusal, p.Refuse)
        assert refusal.code == code
        stranger.say(p.LookUp(1, "x", 0, (NAMES[0],)))
        assert stranger.hear().code == p.Code.UNKNOWN_SESSION
        assert pulled(b, source(a)) == HITS
        a.rest()


def test_a_token_of_another_session_is_worth_nothing():
    with engines(1) as (a,), Stranger(a) as one, Stranger(a) as two:
        one.greet()
        two.greet()
        assert one.token != two.token
        two.say(p.LookUp(1, "x", 0, (NAMES[0],)), token=one.token)
        assert two.hear().code == p.Code.UNKNOWN_SESSION
        one.say(p.Ping(5))
        assert one.hear() == p.Pong(5)


def test_a_hello_that_is_replayed_ends_the_session():
    with engines(1) as (a,), Stranger(a) as stranger:
        stranger.greet()
        assert isinstance(stranger.greet(), p.Refuse)


def test_asking_too_much_at_once_ends_the_session(monkeypatch):
    monkeypatch.setattr("kvtiers.tiers.p2p.guests._MAX_OUTSTANDING", 64)
    with engines(1) as (a,), Stranger(a) as stranger:
        stranger.greet()
        for number in range(65):
            stranger.say(p.Fetch(number, "x", int(p.Role.PREFILL), (NAMES[0],)))
        assert stranger.hear().code == p.Code.MALFORMED
        until(lambda: not a.endpoint._guests._by_number)
        a.rest()


def test_a_consumer_that_does_not_come_for_its_chunks_is_let_go():
    """It lives, and asks; but no data connection ever comes."""
    with engines(1, options=with_options(silence_deadline_s=60.0)) as (a,), Stranger(a) as stranger:
        a.store(NAMES)
        stranger.greet()
        stranger.say(p.Fetch(1, "x", 0, tuple(NAMES)))
        until(lambda: a.parent._pins)
        assert isinstance(stranger.hear(), p.Goodbye)
        until(lambda: not a.parent._pins)
        a.rest()


def test_a_transfer_is_cancelled_once(monkeypatch):
    with engines(1) as (a,), Stranger(a) as stranger:
        stranger.greet()
        posted, post = [], a.endpoint._guests._post
        monkeypatch.setattr(a.endpoint._guests, "_post", lambda n: (posted.append(n), post(n))[1])
        fetch = p.Fetch(1, "x", int(p.Role.PREFILL), (NAMES[0],))
        with a.manager.exclusive:  # the serving thread does not get on
            for message in (fetch, p.Cancel(1), p.Cancel(1), p.Cancel(1), p.Ping(1)):
                stranger.say(message)
            assert stranger.hear() == p.Pong(1)
        assert [type(note).__name__ for note in posted] == ["Demand", "Stopped"]
        (guest,) = a.endpoint._guests._by_number.values()
        until(lambda: not guest.transfers)


def test_a_data_connection_needs_the_token_of_a_session_and_takes_it_once():
    with engines(1) as (a,), Stranger(a) as stranger:
        ack = stranger.greet()
        port, token = int.from_bytes(ack.offer[:2], "little"), ack.offer[2:]
        for shown in (b"KVTD" + bytes(16), b"GET / HTTP/1.1\r\n\r\n  ", b"KV"):
            with socket.create_connection(("127.0.0.1", port)) as wrong:
                wrong.sendall(shown)
                wrong.shutdown(socket.SHUT_WR)
                assert wrong.recv(1) == b""
        with (
            socket.create_connection(("127.0.0.1", port)) as first,
            socket.create_connection(("127.0.0.1", port)) as second,
        ):
            first.sendall(b"KVTD" + token)
            until(lambda: not a.endpoint._us.transports[0]._awaited)
            second.sendall(b"KVTD" + token)
            assert second.recv(1) == b""


def test_a_consumer_that_takes_no_bytes_is_let_go():
    """Half-open: its pings come, its data connection does not drain."""
    with engines(1, slots=256, options=with_options(silence_deadline_s=60.0)) as (a,):
        names = keys(200)
        a.store(names)
        with Stranger(a) as stranger:
            ack = stranger.greet()
            port = int.from_bytes(ack.offer[:2], "little")
            with socket.create_connection(("127.0.0.1", port)) as data:
                data.sendall(b"KVTD" + ack.offer[2:])
                stranger.say(p.Fetch(1, "x", 0, tuple(names)))
                until(lambda: a.parent._pins)
                until(lambda: not a.parent._pins)
                assert isinstance(stranger.hear(), p.Goodbye)
        a.rest()


def test_a_consumer_that_falls_silent_is_let_go():
    with engines(1) as (a,), Stranger(a) as stranger:
        stranger.greet()
        a.store(NAMES)
        stranger.say(p.LookUp(1, "x", 0, tuple(NAMES)))
        assert isinstance(stranger.hear(), p.LookUpAnswer)
        assert a.parent._pins
        until(lambda: not a.parent._pins)
        until(lambda: not a.endpoint._guests._by_number)


def test_an_engine_that_is_switched_off_serves_nobody():
    """What it believes of its slots may be wrong."""
    with engines() as (producer, consumer):
        names = keys(4)
        producer.store(names)
        producer.manager.retire()
        assert consumer.pull(names, consumer.request(source(producer))) == [Lookup.MISS] * 4
