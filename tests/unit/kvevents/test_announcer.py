"""The thread, and what waits for it."""

import errno
import gc
import os
import sys
import threading
from collections import Counter

import pytest

from kvtiers.events import (
    ChunksDeclined,
    ChunksFound,
    ChunksRemoved,
    ChunksStored,
    Hop,
    Reason,
    TierReachable,
)
from kvtiers.kvevents import sidefile
from kvtiers.kvevents.announcer import Announcer
from kvtiers.kvevents.messages import BlockRemoved
from kvtiers.kvevents.narrator import Narrator
from kvtiers.kvevents.notes import Missed, Notes
from kvtiers.kvevents.sidefile import SideFile
from kvtiers.kvevents.spans import Group, Place

from .tree import keys, prompt

HOST, DISK = "0:primary", "1:fs"
EVICTED = Reason.EVICTED


class Wall:
    """An outlet of which the test says how much it takes."""

    def __init__(self, room=1 << 20):
        self.left = room
        self.said = []
        self.closed = False
        self.fault = None

    def room(self):
        return self.left

    def say(self, events):
        if self.fault:
            raise self.fault
        self.said += events
        self.left -= sum(len(e.block_hashes) for e in events)

    def serve(self, narrator):
        return None

    def close(self):
        self.closed = True


def described(source):
    chunk, expected = source
    if chunk is None:
        raise LookupError("the request is gone")
    return chunk.key, chunk.description, expected


@pytest.fixture
def told():
    """``told(outlet)``: an announcer that describes chunks."""
    made = []

    def start(outlet, describe=described, **options):
        narrator = Narrator(
            {HOST: Place("CPU")}, {0: Group("full_attention")}, SideFile(None, "", 1 << 20)
        )
        made.append(Announcer(narrator, outlet, describe, values=2, **options))
        return made[-1]

    yield start
    for each in made:
        each.close(10)


def test_what_happened_is_said_in_order(told):
    wall, chunks = Wall(), prompt(200)
    announcer = told(wall)
    for chunk in chunks:
        announcer.capture((chunk, True))
    announcer(ChunksStored(HOST, keys(chunks)))
    announcer(ChunksDeclined(Hop.STORE, HOST, 1, Reason.NO_ROOM))
    assert announcer.flush(20)
    announcer(ChunksRemoved(HOST, keys(chunks[150:]), EVICTED))
    assert announcer.flush(20)
    assert not announcer.pending
    announcer.check()
    assert [h for e in wall.said[:-1] for h in e.block_hashes] == [c.hashes[0] for c in chunks]
    assert all(e.token_ids for e in wall.said[:-1])
    assert isinstance(wall.said[-1], BlockRemoved)
    announcer.close(10)
    assert wall.closed
    announcer(ChunksStored(HOST, keys(chunks)))


def test_without_room_nothing_is_said_and_nothing_lost(told):
    wall, chunks = Wall(room=3), prompt(10)
    announcer = told(wall)
    announcer(ChunksStored(HOST, keys(chunks)))
    assert announcer.flush(20)
    assert len(wall.said) == 3
    assert not announcer.pending, "it waits for room, not for time"
    announcer(ChunksRemoved(HOST, keys(chunks[5:]), EVICTED))
    wall.left = 100
    announcer.wake()
    assert announcer.flush(20)
    assert len(wall.said) == 5, "what came and went meanwhile is of no concern"


def test_a_chunk_that_cannot_be_described_has_its_hash(told, caplog):
    wall, chunks = Wall(), prompt(2)
    announcer = told(wall)
    for source in ((None, True), (chunks[1], True), (None, True)):
        announcer.capture(source)
    announcer(ChunksStored(HOST, keys(chunks)))
    assert announcer.flush(20)
    assert sorted(len(e.token_ids) for e in wall.said) == [0, 4]
    assert caplog.text.count("a chunk cannot be described") == 1


def test_a_full_disk_costs_descriptions_and_no_news(told, caplog, monkeypatch):
    monkeypatch.setattr(sidefile, "_FLUSH_BYTES", 300)
    full = True
    pwrite = os.pwrite

    def write(fd, data, offset):
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, data, offset)

    wall, chunks = Wall(), prompt(50)
    announcer = told(wall)
    monkeypatch.setattr(os, "pwrite", write)
    for chunk in chunks:
        announcer.capture((chunk, True))
    announcer(ChunksStored(HOST, keys(chunks)))
    assert announcer.flush(20)
    assert len({h for e in wall.said for h in e.block_hashes}) == 50
    assert 0 < sum(bool(e.token_ids) for e in wall.said) < 50
    full = False
    announcer(ChunksRemoved(HOST, keys(chunks), EVICTED))
    assert announcer.flush(20)
    assert sum(len(e.block_hashes) for e in wall.said if isinstance(e, BlockRemoved)) == 50
    assert caplog.text.count("No space left") == 1
    announcer.check()


def test_a_fault_silences_it_and_nothing_else(told, caplog):
    wall = Wall()
    wall.fault = RuntimeError("a bug")
    announcer = told(wall)
    announcer(ChunksStored(HOST, keys(prompt(2))))
    announcer._thread.join(20)
    assert "does so no more" in caplog.text
    assert "silent" in repr(announcer)
    announcer(ChunksStored(HOST, keys(prompt(2))))
    assert not announcer.pending
    assert not announcer.flush(20)
    assert wall.closed
    announcer.capture((prompt(1)[0], True))
    announcer.send_captured()
    assert not announcer.notes._captured, "nobody will ever want it, and it keeps a request"


def test_beyond_its_bound_the_queue_keeps_which_tiers_something_was_missed_of():
    notes, names = Notes(max_queued=5, values=3), keys(prompt(8))
    notes.put(ChunksStored(HOST, names[:3]))
    notes.put(ChunksStored(HOST, names))
    notes.capture("two" * 2)
    notes.put_captured()
    notes.put(TierReachable(HOST, False))
    notes.put(ChunksRemoved(HOST, names[:2], EVICTED))
    notes.put(ChunksFound(DISK, names[:1], complete=False))
    notes.put(ChunksFound(HOST, ()))
    notes.check()
    assert repr(notes) == "<Notes 4 chunks queued, 11 beyond the bound>"
    assert notes.queued == 4 + 11
    assert (notes.dropped, notes.waiting) == (2, True)
    assert notes.overflow() == [], "first what was before"
    assert notes.get(0.0) == ChunksStored(HOST, names[:3])
    assert notes.get(0.0) is None
    assert notes.overflow() == [
        ChunksFound(DISK, (), complete=False),
        Missed(HOST),
        Missed(DISK),
        ChunksFound(HOST, ()),
        TierReachable(HOST, False),
    ]
    assert not notes.waiting
    notes.put(ChunksStored(HOST, names[:3]))
    assert notes.get(0.0).keys == names[:3]
    notes.check()


def test_what_waits_for_a_reader_that_hangs_is_bounded():
    notes, names = Notes(max_queued=10), keys(prompt(2000))
    notes.put(ChunksFound(DISK, names[:1], complete=False))

    def held():
        return sum(map(sys.getsizeof, gc.get_referents(notes, *vars(notes).values())))

    for name in names[:100]:
        notes.put(ChunksStored(HOST, (name,)))
        notes.put(ChunksFound(DISK, (name,)))
        notes.put(TierReachable(DISK, False))
    before = held()
    for name in names[100:]:
        notes.put(ChunksStored(HOST, (name,)))
        notes.put(ChunksRemoved(HOST, (name,), EVICTED))
        notes.put(ChunksFound(DISK, (name,)))
        notes.put(TierReachable(DISK, False))
    assert held() == before


def test_after_more_than_the_queue_holds_it_is_told_what_the_tiers_hold(told):
    wall, chunks = Wall(), prompt(30)
    gate = threading.Event()
    announcer = told(wall, lambda source: gate.wait(20) and described(source), max_queued=8)
    for chunk in chunks[:2]:
        announcer.capture((chunk, True))
    announcer(ChunksStored(HOST, keys(chunks[:4])))
    for chunk in chunks[4:]:
        announcer(ChunksStored(HOST, keys([chunk])))
    announcer(ChunksRemoved(HOST, keys(chunks[:20]), EVICTED))
    announcer.residents = {HOST: keys(chunks[20:])}.get
    gate.set()
    assert announcer.flush(20)
    held = Counter()
    for event in wall.said:
        held.update({h: -1 if isinstance(event, BlockRemoved) else 1 for h in event.block_hashes})
    assert {h for h, n in held.items() if n} == {c.hashes[0] for c in chunks[20:]}
    assert set(held.values()) <= {0, 1}, "once, and taken back once"
    assert announcer.wanted == set(keys(chunks[20:])), "what is gone need not be described"
    announcer.check()


def test_what_was_told_stands_until_the_tier_can_say_what_it_holds(told):
    wall, chunks = Wall(), prompt(20)
    announcer = told(wall, max_queued=8)
    announcer(ChunksStored(HOST, keys(chunks[:2])))
    assert announcer.flush(20)
    before = [*wall.said]
    announcer.residents = lambda tier: None
    announcer(ChunksStored(HOST, keys(chunks[2:])))
    assert announcer.flush(20)
    assert wall.said == before
    announcer.residents = {HOST: keys(chunks[1:])}.get
    announcer(ChunksStored(DISK, keys(chunks)))
    assert announcer.flush(20)
    told_now = wall.said[len(before) :]
    gone = [h for e in told_now if isinstance(e, BlockRemoved) for h in e.block_hashes]
    assert gone == chunks[0].hashes
    came = {h for e in told_now if not isinstance(e, BlockRemoved) for h in e.block_hashes}
    assert came == {c.hashes[0] for c in chunks[2:]}
    announcer.check()


def test_one_event_that_is_more_than_the_queue_holds_is_noticed(told):
    wall, chunks = Wall(), prompt(9)
    announcer = told(wall, max_queued=8)
    announcer.residents = {HOST: keys(chunks)}.get
    announcer(ChunksStored(HOST, keys(chunks)))
    assert announcer.flush(20)
    assert len({h for e in wall.said for h in e.block_hashes}) == 9


def test_who_puts_does_not_wait_for_a_reader_that_hangs(told):
    gate = threading.Event()

    def hang(source):
        assert gate.wait(60)
        return described(source)

    wall, chunks = Wall(), prompt(50)
    announcer = told(wall, hang, max_queued=10)
    announcer.residents = {HOST: keys(chunks[7:8])}.get
    announcer.capture((chunks[0], True))
    for chunk in chunks:
        announcer(ChunksStored(HOST, (chunk.key,)))
        announcer(ChunksRemoved(HOST, (chunk.key,), EVICTED))
    announcer(ChunksStored(HOST, (chunks[7].key,)))
    assert announcer.pending
    gate.set()
    assert announcer.flush(20)
    stands = {}
    for event in wall.said:
        for h in event.block_hashes:
            stands[h] = type(event) is not BlockRemoved
    assert [h for h, there in stands.items() if there] == chunks[7].hashes
