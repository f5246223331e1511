"""NIXL's side of a session, with an agent whose every answer a test decides."""

import threading
from queue import Empty

import pytest
from xxhash import xxh3_64_intdigest

from kvtiers.errors import ConfigError
from kvtiers.tiers.addresses import address_of
from kvtiers.tiers.p2p import reading
from kvtiers.tiers.p2p.nixl import NixlTransport
from kvtiers.tiers.p2p.nixl_receiver import _parts
from kvtiers.tiers.p2p.nixl_sender import NixlSender
from kvtiers.tiers.p2p.reading import Chunk, Forget, Lent, Read, Reader
from kvtiers.tiers.p2p.transport import Delivered, Sent
from kvtiers.tiers.p2p.wire import ProtocolError
from tests.unit.tiers.p2p.engines import until
from tests.unit.tiers.p2p.test_peer import Time

LONGEST_S = 30.0


class Agent:
    """Copies when it is told to; its memory is this process's."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.states: dict[int, str] = {}
        self.posts = "PROC"
        self.all_end = False
        self.fails = ""
        self.handles = 0
        self.looked = 0

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

    def get_new_notifs(self) -> dict:
        self.looked += 1
        if self.fails == "look":
            raise RuntimeError("it lost its device")
        return {}

    def check_xfer_state(self, handle) -> str:
        return "DONE" if self.all_end else self.states[handle]

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
        self.transport = NixlTransport(
            self.loop, memoryview(self.memory), self.agent, self.start, LONGEST_S
        )
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
        self.loop.now += reading._LOOK_AFTER_STUCK_S
        self.read()


@pytest.fixture
def bench():
    made = Bench()
    yield made
    made.agent.all_end = True
    made.loop.now += reading._LOOK_AFTER_STUCK_S
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
    until(lambda: bench.agent.states)
    assert bench.receiver.stop(1) is False
    assert bench.receiver.stop(2) is True
    bench.receiver.close()
    bench.receiver.close()
    assert "remove" not in bench.agent.said
    bench.end()
    assert bench.said == [("stopped", 1)]
    until(lambda: "remove" in bench.agent.said)


def test_with_too_much_stuck_nothing_more_may_be_expected(bench):
    """Of 24 KiB an eighth may be."""
    views = [memoryview(bytearray(2048)) for _ in range(2)]
    for transfer in (1, 2):
        bench.receiver.expect(transfer, views)
        bench.receiver.ready(transfer, [(0, bench.start_address, 0)])
    other = bench.transport.receive_from("", bench.offer, bench.receiver._calls)
    until(lambda: len(bench.agent.states) == 2)
    bench.receiver.stop(1)
    assert other.has_room
    bench.receiver.stop(2)
    assert not other.has_room
    other.close()
    bench.receiver.close()
    bench.end()
    until(lambda: (bench.loop.turn(), bench.receiver.has_room)[1])
    bench.receiver.check()
    assert bench.receiver._stuck.bytes == 0


def test_what_is_read_when_the_engine_stops_keeps_host_memory(monkeypatch, caplog):
    monkeypatch.setattr(reading, "_JOIN_S", 0.05)
    kept: list = []
    monkeypatch.setattr("kvtiers.tiers.p2p.nixl._KEPT", kept)
    bench = Bench()
    bench.expect(1, 1)
    bench.receiver.ready(1, [bench.row(0)])
    until(lambda: bench.agent.states)
    bench.receiver.stop(1)

    def time_goes_on(*_):
        bench.loop.now += 0.01
        return "PROC"

    bench.agent.get_new_notifs = bench.agent.check_xfer_state = time_goes_on
    bench.transport.close()
    assert kept == [bench.transport]
    assert "deregister" not in bench.agent.said
    with pytest.raises(BufferError):
        bench.memory.append(0)
    assert "it stays until the process ends" in caplog.text


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


def test_at_the_start_it_says_whom_it_trusts(bench, monkeypatch, caplog):
    monkeypatch.setenv("UCX_NET_DEVICES", "eth7")
    Bench().transport.close()
    (line,) = [r.getMessage() for r in caplog.records if "transport is nixl" in r.getMessage()]
    assert "peers can write this process's memory" in line
    assert "UCX listens on eth7" in line


def test_memory_that_nixl_does_not_take_is_refused():
    agent = Agent()
    agent.fails = "register"
    with pytest.raises(ConfigError, match="does not take host memory: no memory"):
        Bench(agent)


def test_reads_are_cut_where_they_get_long():
    chunks = [Chunk(n, memoryview(b""), 3 << 20, 0, 0, 0) for n in range(5)]
    assert [[c.place for c in part] for part in _parts(chunks)] == [[0, 1], [2, 3], [4]]
    assert _parts([]) == []


# -- the thread -----------------------------------------------------------------------------------

CHUNK = Chunk(0, memoryview(b"x"), 1, 0, 0, 0)


class Script:
    """What is in the queue by the time it is looked at; Empty stands for a wait in vain."""

    def __init__(self, time: Time, *items) -> None:
        self.time, self.items = time, list(items)
        self.waits: list[float | None] = []

    def get(self, timeout: float | None = None):
        self.waits.append(timeout)
        item = self.items.pop(0)
        if item is not Empty:
            return item
        assert timeout is not None, "it sleeps"
        self.time.now += timeout
        raise Empty


def waits(agent, *items):
    """How long the thread waits each time: None for as long as nothing happens."""
    time = Time()
    script = Script(time, *items, None)
    reader = Reader(agent, time.clock, script)
    reader.run()
    reader.check()
    assert not script.items
    return script.waits


def test_with_nothing_to_do_it_sleeps():
    agent = Agent()
    assert waits(agent) == [None]
    assert agent.looked == 0


def test_while_chunks_are_lent_it_looks_after_nixl_for_others():
    agent = Agent()
    every = reading._LOOK_FOR_OTHERS_EVERY_S
    assert waits(agent, Lent(2), Empty, Empty, Lent(-1), Empty, Lent(-1)) == [
        *(None, 0.0, every, every),
        *(0.0, every),
        None,
    ]
    assert agent.looked == 3


def test_a_read_is_looked_after_until_it_ended():
    agent, said = Agent(), []
    read = Read(b"agent", [CHUNK], lambda read, why: said.append(why))

    class Ending(Script):
        def get(self, timeout=None):
            if len(self.waits) == 3:
                agent.states[1] = "DONE"
            return super().get(timeout)

    time = Time()
    script = Ending(time, read, Empty, Empty, Empty, None)
    Reader(agent, time.clock, script).run()
    assert script.waits == [None, 0.0, reading._LOOK_EVERY_S, reading._LOOK_EVERY_S, None]
    assert said == [""]


def stuck_read(said: list) -> Read:
    read = Read(b"agent", [CHUNK], lambda read, why: said.append(why))
    read.wanted = False
    return read


class HangsFrom(Script):
    """Nobody waits for ``read`` any more once it was begun."""

    def __init__(self, time: Time, read: Read, *items) -> None:
        super().__init__(time, read, *items)
        self.read = read

    def get(self, timeout=None):
        if len(self.waits) == 1:
            self.read.wanted = False
        return super().get(timeout)


def hang(*items):
    """How long the thread waits each time beside a read that does not end; it and its agent."""
    time, agent = Time(), Agent()
    script = HangsFrom(time, Read(b"agent", [CHUNK], lambda read, why: None), *items, None)
    reader = Reader(agent, time.clock, script)
    agent.looks = []
    look = agent.check_xfer_state
    agent.check_xfer_state = lambda handle: (agent.looks.append(time.now), look(handle))[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading.time, "sleep", lambda s: setattr(time, "now", time.now + s))
        reader.run()
    reader.check()
    return script.waits, reader, agent


def test_a_read_that_does_not_end_is_looked_after_ever_more_rarely():
    told, *_ = hang(*[Empty] * 30)
    pauses = [min(reading._LOOK_EVERY_S * 2**n, reading._LOOK_AFTER_STUCK_S) for n in range(29)]
    assert told[2:-1] == pytest.approx(pauses[: len(told) - 3])
    assert told[-1] == pytest.approx(reading._LOOK_AFTER_STUCK_S)


def test_nor_does_it_keep_others_waiting_or_get_looked_after_with_them():
    _, _, agent = hang(Lent(1), *[Empty] * 2000)
    assert agent.looked > 1500
    assert len(agent.looks) < 150


def test_at_the_end_its_producer_is_not_forgotten():
    """UCX would write all the same, and NIXL say that it does not."""
    _, reader, agent = hang(Empty)
    assert reader.active
    assert "remove" not in agent.said
    assert "release" not in agent.said


def test_a_read_that_nobody_waits_for_is_not_begun():
    agent, said = Agent(), []
    assert waits(agent, stuck_read(said)) == [None, None]
    assert agent.handles == 0
    assert said == ["nobody waits for it"]


@pytest.mark.parametrize("work", [Lent(0, lingers=True), Forget(b"unknown")])
def test_for_a_while_it_looks_after_what_nobody_waits_for(work):
    agent = Agent()
    every = reading._LOOK_FOR_OTHERS_EVERY_S
    looks = round(reading._LINGER_S / every)
    told = waits(agent, work, *[Empty] * (looks + 1))
    assert told == [None, 0.0, *[every] * looks, None]


def test_nixl_that_cannot_get_on_is_asked_again():
    agent = Agent()
    agent.fails = "look"
    waits(agent, Lent(1), Empty, Empty, Lent(-1))
    assert agent.looked == 2


# -- the producer's end ---------------------------------------------------------------------------


class Producer:
    def __init__(self) -> None:
        self.loop, self.said = Loop(), []
        calls = Sent(
            lambda *a: self.said.append(("sent", *a)),
            lambda *a: self.said.append(("ready", *a)),
            self.broken,
        )
        self.lent: list[Lent] = []
        self.sender = NixlSender(self.loop, calls, b"", self.lent.append, LONGEST_S)
        self.chunks = [memoryview(bytes([n]) * 64) for n in range(3)]

    def broken(self, why: str) -> None:
        self.said.append(("broken", why))
        self.sender.close()

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
    assert producer.lent == [Lent(3), Lent(-2)]
    producer.sender.drop(7)
    assert producer.take() == [("sent", 7, 1, False)]
    assert producer.lent[2:] == [Lent(-1, lingers=True)]


def test_a_consumer_that_takes_nothing_cannot_keep_what_is_lent_to_it():
    producer = Producer()
    producer.sender.push(7, [(0, producer.chunks[0])])
    producer.take()
    producer.loop.go(LONGEST_S / 2)
    producer.sender.push(8, [(0, producer.chunks[1])])
    producer.sender.taken(7, [0])
    producer.take()
    producer.loop.go(LONGEST_S / 2)
    assert producer.take() == []
    producer.loop.go(LONGEST_S / 2)
    assert producer.take() == [("broken", "it does not take what it asked for")]


def test_a_consumer_that_took_everything_has_all_the_time():
    producer = Producer()
    producer.sender.push(7, [(0, producer.chunks[0])])
    producer.take()
    producer.sender.taken(7, [0])
    producer.take()
    producer.loop.go(2 * LONGEST_S)
    assert producer.take() == []


def test_what_a_session_leaves_untaken_is_taken_back():
    producer = Producer()
    producer.sender.push(7, list(enumerate(producer.chunks)))
    producer.take()
    producer.sender.close()
    producer.sender.close()
    assert producer.lent == [Lent(3), Lent(-3, lingers=True)]


def test_who_hears_that_the_session_ends_while_chunks_are_announced_lends_nothing():
    producer = Producer()
    producer.chunks[1].release()
    object.__setattr__(producer.sender._calls, "sent", lambda *a: producer.sender.close())
    producer.sender.push(7, list(enumerate(producer.chunks)))
    assert producer.take() == []
    assert producer.lent == []


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
