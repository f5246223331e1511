"""A late reader gets what holds now; one that missed something gets what it missed."""

import threading

import pytest
import zmq

from kvtiers.errors import ConfigError
from kvtiers.events import ChunksRemoved, ChunksStored, Reason
from kvtiers.kvevents import replay
from kvtiers.kvevents.announcer import Announcer
from kvtiers.kvevents.messages import END_OF_REPLAY, BlockRemoved, decode
from kvtiers.kvevents.narrator import Narrator
from kvtiers.kvevents.publisher import Publisher
from kvtiers.kvevents.sidefile import SideFile
from kvtiers.kvevents.spans import Group, Place

from .readers import Llmd
from .tree import about_to_be_stored, keys, prompt

HOST, DISK = "0:primary", "1:fs"
PLACES = {HOST: Place("CPU", "LOCAL", HOST), DISK: Place("STORAGE", "LOCAL", DISK)}


class Engine:
    def __init__(self, folder, **options):
        self.ends = [f"ipc://{folder}/pub", f"ipc://{folder}/replay"]
        self.publisher = Publisher(
            *self.ends, topic="kv@pod@m", rank=3, clock=lambda: 1.5, **options
        )
        narrator = Narrator(PLACES, {0: Group("full_attention")}, SideFile(None, "", 1 << 24))
        self.announcer = Announcer(narrator, self.publisher, about_to_be_stored)

    def stored(self, tier, chunks):
        for chunk in chunks:
            self.announcer.capture((chunk,))
        self.announcer(ChunksStored(tier, keys(chunks)))
        assert self.announcer.flush(20)

    def removed(self, tier, chunks):
        self.announcer(ChunksRemoved(tier, keys(chunks), Reason.EVICTED))
        assert self.announcer.flush(20)


@pytest.fixture
def engine(tmp_path):
    made = Engine(tmp_path)
    yield made
    made.announcer.close(20)


@pytest.fixture
def asking(engine):
    """A DEALER as llm-d has it."""
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(engine.ends[1])
    yield socket
    socket.close(linger=0)


def replayed(socket, start):
    """Numbers and payloads; the form of each frame is checked."""
    socket.send_multipart([b"", start.to_bytes(8, "big")])
    got = []
    while True:
        assert socket.poll(20_000), "no reply"
        empty, topic, seq, payload = socket.recv_multipart()
        assert empty == b""
        if seq == END_OF_REPLAY:
            assert (topic, payload) == (b"", b"")
            return got
        assert topic == b"kv@pod@m"
        got.append((int.from_bytes(seq, "big"), payload))


def test_a_late_reader_gets_what_holds_now(engine, asking):
    chunks = prompt(40)
    for n in range(10):
        engine.stored(DISK, chunks[4 * n : 4 * n + 4])
    engine.stored(HOST, chunks[:20])
    engine.removed(DISK, chunks[30:])
    late = Llmd()
    got = replayed(asking, 0)
    assert [seq for seq, _ in got] == [*range(12)], "contiguous up to now"
    for _, payload in got:
        late.read(payload)
        assert decode(payload).rank == 3
    assert late.held("storage") == dict.fromkeys((c.hashes[0] for c in chunks[:30]), 1)
    assert late.held("cpu") == dict.fromkeys((c.hashes[0] for c in chunks[:20]), 1)
    assert all(len(p) < 20 for _, p in got[:-1]), "what is superseded is empty"


def test_nothing_was_said_yet(engine, asking):
    assert replayed(asking, 0) == []


def test_what_was_missed_is_sent_again(engine, asking):
    chunks = prompt(5)
    for chunk in chunks:
        engine.stored(HOST, [chunk])
    got = replayed(asking, 3)
    assert [(seq, decode(p).events[0].block_hashes) for seq, p in got] == [
        (3, chunks[3].hashes),
        (4, chunks[4].hashes),
    ]
    assert replayed(asking, 5) == []
    engine.publisher.check()


def test_live_batches_are_numbered_and_follow_on_a_replay(engine, asking):
    live = zmq.Context.instance().socket(zmq.SUB)
    live.connect(engine.ends[0])
    live.setsockopt(zmq.SUBSCRIBE, b"kv@")
    chunks = prompt(60)
    reader, heard = Llmd(), []
    n = 0
    while not live.poll(20):  # until the subscription has arrived
        engine.stored(HOST, chunks[n : n + 1])
        n += 1
    for seq, payload in replayed(asking, 0):
        reader.read(payload)
        heard.append(seq)
    engine.removed(HOST, chunks[:1])
    while reader.held("cpu") != dict.fromkeys((c.hashes[0] for c in chunks[1:n]), 1):
        assert live.poll(20_000)
        topic, seq, payload = live.recv_multipart()
        assert topic == b"kv@pod@m"
        if int.from_bytes(seq, "big") > heard[-1]:
            assert int.from_bytes(seq, "big") == heard[-1] + 1
            heard.append(heard[-1] + 1)
            reader.read(payload)
    live.close(linger=0)


def test_strange_requests_are_passed_over(engine, asking):
    engine.stored(HOST, prompt(1))
    asking.send_multipart([b"", b"x"])
    asking.send_multipart([b"y"])
    assert len(replayed(asking, 0)) == 1


def test_who_asks_all_the_time_silences_nobody(engine, asking, monkeypatch):
    """Each answer is followed by the next question before it is looked again."""
    answered = []
    answer = replay.answer

    def ask_again(*args):
        answered.append(len(said))
        asking.send_multipart([b"", (0).to_bytes(8, "big")])
        assert engine.publisher._router.poll(20_000)
        return answer(*args)

    said = []
    monkeypatch.setattr(replay, "answer", ask_again)
    monkeypatch.setattr(engine.publisher, "say", said.extend)
    asking.send_multipart([b"", (0).to_bytes(8, "big")])
    engine.stored(HOST, prompt(1))
    assert said
    monkeypatch.setattr(replay, "answer", answer)


def test_a_reader_that_takes_nothing_is_given_up(engine, asking, monkeypatch):
    monkeypatch.setattr(replay, "PATIENCE_S", 0.05)
    asking.setsockopt(zmq.RCVHWM, 1)
    chunks = prompt(1)
    batches = [(n, b"x" * 10_000) for n in range(20_000)]
    monkeypatch.setattr(engine.publisher._ring, "since", lambda start: batches)
    engine.stored(HOST, chunks)
    gone = zmq.Context.instance().socket(zmq.DEALER)
    gone.connect(engine.ends[1])
    gone.send_multipart([b"", (1).to_bytes(8, "big")])
    done = threading.Event()
    monkeypatch.setattr(engine.publisher._ring, "add", lambda p: done.set() or 7)
    engine.stored(HOST, prompt(1, 5))
    assert done.wait(30), "it goes on with the others"
    gone.close(linger=0)


def test_what_waits_for_a_reader_that_takes_nothing_is_bounded_in_bytes(tmp_path):
    bound = 100_000
    publisher = Publisher(f"ipc://{tmp_path}/pub", queue_bytes=bound)
    live = zmq.Context.instance().socket(zmq.SUB)
    live.setsockopt(zmq.RCVHWM, 1)
    live.connect(f"ipc://{tmp_path}/pub")
    live.setsockopt(zmq.SUBSCRIBE, b"")
    while not live.poll(20):  # until the subscription has arrived
        publisher.say([BlockRemoved([1])])
    events = [BlockRemoved([*range(n, n + 1024)]) for n in range(1 << 60, (1 << 60) + 100)]
    for _ in range(20):
        publisher.say(events)
    publisher.check()
    last, taken = BlockRemoved([2]), 0
    while True:
        while not live.poll(20):
            publisher.say([last])  # is dropped as long as there is no room, and else comes last
        payload = live.recv_multipart()[2]
        if decode(payload).events == [last]:
            break
        taken += len(payload)
    assert bound / 2 < taken < 1_500_000, "of 18 million; the system's own buffers are beyond it"
    live.close(linger=0)
    publisher.close()


def test_a_queue_of_nothing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="queue_bytes is 0"):
        Publisher(f"ipc://{tmp_path}/pub", queue_bytes=0)


class SlowReader:
    """A socket, and the time: it has room for a message every ``every_s`` seconds."""

    def __init__(self, every_s):
        self.now, self.sent = 0.0, 0
        self._every_s, self._room_at = every_s, 0.0

    def send_multipart(self, frames, flags):
        if self.now < self._room_at:
            raise zmq.Again
        self.sent += 1
        self._room_at = self.now + self._every_s

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += max(seconds, 0.1)


@pytest.mark.parametrize(("every_s", "whole"), [(0.5, True), (4.0, False)])
def test_a_reader_that_takes_a_little_all_the_time_is_given_up(monkeypatch, every_s, whole):
    reader = SlowReader(every_s)
    monkeypatch.setattr(replay, "time", reader)
    batches = [(n, b"x") for n in range(50)]
    assert replay.answer(reader, b"who", b"", batches) is whole
    assert reader.now < replay.LONGEST_S + 1
    assert (reader.sent == 51) is whole


def test_the_ring_is_bounded_by_bytes():
    ring = replay.ReplayRing(100)
    for n in range(50):
        assert ring.add(bytes(7)) == n
    ring.check()
    assert [seq for seq, _ in ring.since(0)] == [*range(36, 50)]
    assert repr(ring) == "<ReplayRing 14 batches, 98 bytes>"
    ring._kept.popleft()
    with pytest.raises(AssertionError, match="do not add up"):
        ring.check()


def test_an_endpoint_that_cannot_be_had(tmp_path):
    with pytest.raises(ConfigError, match="cannot be had"):
        Publisher(f"ipc://{tmp_path}/no/such/folder")


def test_publishers_show_themselves(engine):
    engine.stored(HOST, prompt(1))
    assert repr(engine.publisher).startswith("<Publisher batch 1 is next, <ReplayRing 1 batches")
