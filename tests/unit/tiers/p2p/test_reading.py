"""NIXL's side of a session, with an agent whose every answer a test decides."""

import threading

import pytest
from xxhash import xxh3_64_intdigest

from kvtiers.errors import ConfigError
from kvtiers.tiers.addresses import address_of
from kvtiers.tiers.p2p.nixl import NixlSender, NixlTransport, _parts
from kvtiers.tiers.p2p.reading import Chunk
from kvtiers.tiers.p2p.transport import Delivered, Sent
from kvtiers.tiers.p2p.wire import ProtocolError
from tests.unit.tiers.p2p.engines import until
from tests.unit.tiers.p2p.test_peer import Time


class Agent:
    """Copies when it is told to; its memory is this process's."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.states: dict[int, str] = {}
        self.posts = "PROC"
        self.fails = ""
        self.handles = 0

    def register_memory(self, regions, kind):
        if self.fails == "register":
            raise RuntimeError("no memory")
        self.said.append("register")
        return "registered"

    def deregister_memory(self, registered) -> None:
        self.said.append("deregister")

    def get_agent_metadata(self) -> bytes:
        return b"agent"

    def add_remote_agent(self, metadata) -> str:
        self.said.append("add")
        return metadata.decode()

    def remove_remote_agent(self, name) -> None:
        self.said.append("remove")

    def get_xfer_descs(self, entries, kind):
        return entries

    def initialize_xfer(self, operation, local, remote, name) -> int:
        if self.fails == "read":
            raise RuntimeError("it was disconnected")
        self.handles += 1
        return self.handles

    def transfer(self, handle) -> str:
        self.states[handle] = self.posts
        return self.posts

    def check_xfer_state(self, handle) -> str:
        return self.states[handle]

    def release_xfer_handle(self, handle) -> None:
        self.said.append("release")


class Loop(Time):
    """Calls are kept until the test makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list = []

    def call(self, handler) -> None:
        self.calls.append(handler)

    def turn(self) -> None:
        calls, self.calls = self.calls, []
        for handler in calls:
            handler()


class Bench:
    def __init__(self, agent=None) -> None:
        self.loop, self.agent = Loop(), agent or Agent()
        self.memory = bytearray(b"theirs" * 4096)
        self.threads: list[threading.Thread] = []
        self.transport = NixlTransport(self.loop, memoryview(self.memory), self.agent, self.start)
        self.said: list = []
        calls = Delivered(
            lambda *a: self.said.append(("arrived", *a)),
            lambda *a: self.said.append(("stopped", *a)),
            lambda *a: self.said.append(("taken", *a)),
            lambda *a: self.said.append(("broken", *a)),
        )
        self.offer = self.transport.send_to(Sent(*[lambda *a: None] * 3)).offer
        self.receiver = self.transport.receive_from("", self.offer, calls)
        self.start_address = address_of(memoryview(self.memory))

    def start(self, target, name) -> threading.Thread:
        self.threads.append(threading.Thread(target=target, name=name, daemon=True))
        self.threads[-1].start()
        return self.threads[-1]

    def expect(self, transfer: int, count: int) -> list[memoryview]:
        views = [memoryview(bytearray(b"theirs" * 2)) for _ in range(count)]
        self.receiver.expect(transfer, views)
        return views

    def row(self, place: int, checksum=None) -> tuple[int, int, int]:
        good = xxh3_64_intdigest(b"theirs" * 2)
        return place, self.start_address, good if checksum is None else checksum

    def read(self) -> None:
        until(lambda: self.loop.calls)
        self.loop.turn()
        self.receiver.check()
        self.transport.check()

    def end(self, state: str = "DONE") -> None:
        until(lambda: self.agent.states)
        for handle in self.agent.states:
            self.agent.states[handle] = state
        self.read()


@pytest.fixture
def bench():
    made = Bench()
    yield made
    made.agent.states = dict.fromkeys(made.agent.states, "DONE")
    made.transport.close()
    assert made.agent.said[-1] == "deregister"
    assert not made.threads[0].is_alive()


def test_what_is_ready_is_read_summed_and_said_to_be_taken(bench):
    bench.expect(1, 3)
    bench.receiver.ready(1, [bench.row(0), bench.row(2, checksum=7)])
    bench.end()
    assert bench.said == [
        ("taken", 1, [0, 2]),
        ("arrived", 1, 0, True),
        ("arrived", 1, 2, False),
    ]


def test_a_read_that_fails_ends_the_session(bench):
    bench.expect(1, 1)
    bench.receiver.ready(1, [bench.row(0)])
    bench.end("ERR")
    assert bench.said == [("broken", "NIXL could not read: ERR", False)]


def test_a_read_that_is_refused_ends_the_session(bench):
    bench.agent.fails = "read"
    bench.expect(1, 1)
    bench.receiver.ready(1, [bench.row(0)])
    bench.read()
    assert bench.said == [("broken", "NIXL refused to read: it was disconnected", False)]


@pytest.mark.parametrize(
    ("place", "address", "why"),
    [(0, -1, "not in its memory"), (0, 6 * 4096, "not in its memory"), (1, 0, "twice")],
)
def test_what_cannot_be_ready_is_a_lie(bench, place, address, why):
    bench.expect(1, 2)
    bench.receiver.ready(1, [bench.row(1)])
    with pytest.raises(ProtocolError, match=why):
        bench.receiver.ready(1, [(place, bench.start_address + address, 0)])


def test_what_is_being_read_when_it_is_stopped_stops_later(bench):
    bench.expect(1, 1)
    bench.expect(2, 1)
    bench.receiver.ready(1, [bench.row(0)])
    assert bench.receiver.stop(1) is False
    assert bench.receiver.stop(2) is True
    bench.receiver.close()
    bench.receiver.close()
    assert "remove" not in bench.agent.said
    bench.end()
    assert bench.said == [("stopped", 1)]
    until(lambda: "remove" in bench.agent.said)


def test_an_agent_is_forgotten_with_the_last_session_that_reads_from_it(bench):
    other = bench.transport.receive_from("", bench.offer, bench.receiver._calls)
    bench.receiver.close()
    assert bench.transport._users
    other.close()
    assert not bench.transport._users


@pytest.mark.parametrize("offer", [b"", b"\0" * 16])
def test_an_offer_that_is_none_is_a_lie(bench, offer):
    with pytest.raises(ProtocolError, match="offer of NIXL is none"):
        bench.transport.receive_from("", offer, bench.receiver._calls)


def test_memory_that_nixl_does_not_take_is_refused():
    agent = Agent()
    agent.fails = "register"
    with pytest.raises(ConfigError, match="does not take host memory: no memory"):
        Bench(agent)


def test_reads_are_cut_where_they_get_long():
    chunks = [Chunk(n, memoryview(bytes(3 << 20)), 0, 0, 0) for n in range(5)]
    assert [[c.place for c in part] for part in _parts(chunks)] == [[0, 1], [2, 3], [4]]
    assert _parts([]) == []


# -- the producer's end ---------------------------------------------------------------------------


class Producer:
    def __init__(self) -> None:
        self.loop, self.said = Loop(), []
        calls = Sent(
            lambda *a: self.said.append(("sent", *a)),
            lambda *a: self.said.append(("ready", *a)),
            lambda *a: self.said.append(("broken", *a)),
        )
        self.sender = NixlSender(self.loop, calls, b"")
        self.chunks = [memoryview(bytes([n]) * 64) for n in range(3)]

    def take(self) -> list:
        self.loop.go(0.0)
        self.sender.check()
        said, self.said[:] = list(self.said), []
        return said


def test_chunks_are_announced_and_let_go_when_they_were_taken():
    producer = Producer()
    producer.sender.push(7, list(enumerate(producer.chunks)))
    ((kind, transfer, rows),) = producer.take()
    assert (kind, transfer) == ("ready", 7)
    sums = [xxh3_64_intdigest(view) for view in producer.chunks]
    assert rows == [(n, address_of(producer.chunks[n]), sums[n]) for n in range(3)]
    producer.sender.taken(7, [0, 2])
    assert producer.take() == [("sent", 7, 0, True), ("sent", 7, 2, True)]
    for places in ([0], [9]):
        with pytest.raises(ProtocolError, match="not offered"):
            producer.sender.taken(7, places)
    producer.sender.drop(7)
    assert producer.take() == [("sent", 7, 1, False)]


def test_a_chunk_whose_memory_was_reset_is_not_announced():
    producer = Producer()
    producer.chunks[1].release()
    producer.sender.push(7, list(enumerate(producer.chunks)))
    failed, ready = producer.take()
    assert failed == ("sent", 7, 1, False)
    assert [place for place, *_ in ready[2]] == [0, 2]


def test_what_was_not_summed_is_dropped_and_a_closed_end_says_nothing():
    producer = Producer()
    producer.sender.push(7, list(enumerate(producer.chunks)))
    producer.sender.drop(7)
    assert [entry[0] for entry in producer.take()] == ["sent"] * 3
    producer.sender.push(8, list(enumerate(producer.chunks)))
    producer.sender.close()
    assert producer.take() == []
