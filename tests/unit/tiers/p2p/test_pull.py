"""Chunks that a peer has come over, whole."""

from kvtiers.chunks import Lookup
from tests.unit.tiers.p2p.engines import engines, keys, source


def test_what_a_peer_has_is_pulled():
    names = keys(20)
    with engines() as (a, b):
        a.store(names[:12])
        request = b.request(source(a))
        assert b.pull(names, request) == [Lookup.HIT] * 12 + [Lookup.MISS] * 8
        b.must_have(names[:12])
        b.manager.on_request_finished(request)
        b.rest()
        a.rest()
