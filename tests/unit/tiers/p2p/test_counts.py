"""What an operator is told of peers: how many there are, and what came and went."""

from collections import Counter

from kvtiers.events import ChunksExchanged, Direction
from kvtiers.tiers.base import EmitsEvents, KnowsPeers, Peers
from tests.unit.tiers.p2p.engines import CHUNK_BYTES, engines, keys, source, until, with_options

NONE = Peers(connected=0, dialling=0, left_alone=0, idle=0, served=0)


def exchanged(engine) -> Counter:
    """Chunks and bytes so far, by direction."""
    engine.step()
    found: Counter = Counter()
    for event in engine.events:
        if isinstance(event, ChunksExchanged):
            assert event.tier == "1:p2p"
            found[event.direction, "chunks"] += event.chunks
            found[event.direction, "bytes"] += event.bytes
    return found


def test_what_one_brings_the_other_gave_and_each_chunk_counts_once():
    names = keys(20)
    with engines() as (a, b):
        assert isinstance(a.tier, EmitsEvents)
        a.store(names[:12])
        request = b.request(source(a))
        b.pull(names, request)
        b.manager.on_request_finished(request)
        b.rest()
        a.rest()
        moved = {"chunks": 12, "bytes": 12 * CHUNK_BYTES}
        assert exchanged(a) == {(Direction.OUT, what): n for what, n in moved.items()}
        assert exchanged(b) == {(Direction.IN, what): n for what, n in moved.items()}
        assert exchanged(a)[Direction.OUT, "chunks"] == 12, "it was said before"
        guests = a.endpoint._guests._by_number.values()
        assert a.on_io(lambda: [guest.going for guest in guests]) == [{}]


def test_peers_by_what_there_is_to_do_with_them():
    with engines() as (a, b):
        assert isinstance(a.tier, KnowsPeers)
        assert a.tier.peers() == b.tier.peers() == NONE
        a.store(keys(2))
        b.pull(keys(2), b.request(source(a)))
        assert b.tier.peers() == NONE._replace(connected=1)
        assert a.tier.peers() == NONE._replace(served=1)


def test_a_session_that_nobody_needs_leaves_an_idle_peer():
    with engines(options=with_options(idle_deadline_s=0.2)) as (a, b):
        a.store(keys(2))
        request = b.request(source(a))
        b.pull(keys(2), request)
        b.manager.on_request_finished(request)
        until(lambda: b.tier.peers() == NONE._replace(idle=1))
        until(lambda: a.tier.peers() == NONE)
