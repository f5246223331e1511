"""Peers that cannot be reached, or say nothing: their requests miss; nobody else notices."""

import socket
import threading
import time

import pytest

from kvtiers.chunks import Lookup
from kvtiers.events import LookupsSettled, MissReason
from kvtiers.tiers.base import Circuit
from kvtiers.tiers.p2p.names import Names
from tests.unit.tiers.p2p.engines import Engine, engines, keys, source, until, with_options

MISSES = [Lookup.MISS] * 4


def named(host: str, port: int = 5710) -> dict:
    where = {"kv_request_id": "x1", "remote_host": host, "remote_port": port}
    return {"remote_kv_source": where}


def pulled(engine: Engine, params: dict) -> tuple[list[Lookup], float]:
    began = time.monotonic()
    request = engine.request(params)
    verdicts = engine.pull(keys(4), request)
    engine.manager.on_request_finished(request)
    return verdicts, time.monotonic() - began


@pytest.fixture
def silent():
    """A port that takes connections and never says anything."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    yield listener.getsockname()[1]
    listener.close()


@pytest.fixture
def dead():
    """A port on which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def test_a_silent_peer_counts_as_dialled_and_then_as_left_alone(silent):
    with engines(1, options=with_options(breaker_cooldown_s=60.0)) as (engine,):
        engine.manager.lookup(keys(1)[0], engine.request(source(silent)))
        engine.step()
        until(lambda: engine.tier.peers().dialling == 1)
        until(lambda: engine.tier.peers().left_alone == 1)
        assert sum(engine.tier.peers()) == 1


def test_a_dead_port_is_a_miss_at_once_and_forgotten_for_a_while(dead):
    with engines(1) as (engine,):
        verdicts, seconds = pulled(engine, source(dead))
        assert verdicts == MISSES
        (settled,) = [event for event in engine.events if isinstance(event, LookupsSettled)]
        assert settled.missed["1:p2p", MissReason.TIER_DOWN] == 4
        assert engine.tier.standing().circuit is Circuit.OPEN
        assert seconds < 0.9  # the handshake's deadline is 1 s
        engine.rest()
        verdicts, seconds = pulled(engine, source(dead))
        assert verdicts == MISSES
        assert not engine.on_io(lambda: engine.endpoint._peers["127.0.0.1", dead].idle)


def test_a_silent_peer_is_a_miss_at_the_handshakes_deadline(silent):
    with engines(1) as (engine,):
        verdicts, seconds = pulled(engine, source(silent))
        assert verdicts == MISSES
        assert seconds < 5
        engine.rest()


@pytest.mark.parametrize("kind", ["dead", "silent"])
def test_a_peer_that_cannot_be_reached_disturbs_nobody_else(kind, request):
    """VLLM's own tier goes silent to all peers after one such (feasibility H)."""
    port = request.getfixturevalue(kind)
    with engines() as (a, b):
        names = keys(4)
        a.store(names)
        first, second = b.request(source(port, "x0")), b.request(source(a, "x1"))
        b.manager.lookup(names[0], first)
        b.step()
        assert b.pull(names, second) == [Lookup.HIT] * 4
        b.must_have(names)
        assert b.pull(keys(2, "other"), first) == [Lookup.MISS] * 2
        third = b.request(source(a, "x2"))
        a.store(keys(4, "more"))
        assert b.pull(keys(4, "more"), third) == [Lookup.HIT] * 4


def test_a_name_that_does_not_resolve_is_a_miss():
    names = Names(look_up=lambda host: None)
    with engines(1, names=names) as (engine,):
        verdicts, _ = pulled(engine, named("nowhere.invalid"))
        assert verdicts == MISSES
        engine.rest()


def test_a_resolver_that_hangs_holds_up_only_the_peer_of_that_name():
    hangs = threading.Event()
    names = Names(look_up=lambda host: hangs.wait(30) and None)
    with engines(2, names=names) as (a, b):
        chunks = keys(4)
        a.store(chunks)
        waits = b.request(named("slow.invalid"))
        b.manager.lookup(chunks[0], waits)
        b.step()
        assert b.pull(chunks, b.request(source(a))) == [Lookup.HIT] * 4
        assert b.pull(keys(1, "other"), waits) == [Lookup.MISS]
        hangs.set()


def test_more_names_than_resolvers_is_a_miss_and_passes():
    hangs, asked = threading.Event(), []
    names = Names(look_up=lambda host: (asked.append(host), hangs.wait(30), None)[2])
    with engines(1, names=names, options=with_options(handshake_deadline_s=20.0)) as (engine,):
        for n in range(8):
            request = engine.request(named(f"slow{n}.invalid"))
            engine.manager.lookup(keys(1)[0], request)
        engine.step()
        until(lambda: len(asked) == 8)
        verdicts, seconds = pulled(engine, named("one-more.invalid"))
        assert verdicts == MISSES
        assert seconds < 10
        hangs.set()


def test_another_machine_is_not_asked_without_keys():
    with engines(1) as (engine,):
        verdicts, _ = pulled(engine, named("192.0.2.1"))
        assert verdicts == MISSES
        engine.rest()


def test_more_peers_than_may_be_asked_is_a_miss(silent):
    with engines(1, options=with_options(max_peers=1)) as (engine,):
        waits = engine.request(source(silent))
        engine.manager.lookup(keys(1)[0], waits)
        engine.step()
        verdicts, seconds = pulled(engine, named("127.0.0.2"))
        assert verdicts == MISSES
        assert seconds < 0.9
        engine.rest()


def test_peers_that_are_left_alone_do_not_keep_others_out(dead):
    """Anybody who sends requests can name some that are not there."""
    options = with_options(max_peers=3, breaker_cooldown_s=30.0)
    with engines(options=options) as (a, b):
        a.store(keys(4))
        for n in range(2, 8):
            assert pulled(b, named(f"127.0.0.{n}", dead))[0] == MISSES
        assert pulled(b, source(a))[0] == [Lookup.HIT] * 4
        b.rest()


def test_a_peer_that_went_away_while_nobody_asked_is_asked_anew():
    with engines(1) as (b,):
        a = Engine()
        a.store(keys(4))
        port = a.port
        assert b.pull(keys(4), b.request(source(a))) == [Lookup.HIT] * 4
        a.close()
        a = Engine(options=with_options(port=port))
        more = keys(4, "more")
        a.store(more)
        try:
            until(lambda: b.pull(more, b.request(source(port))) == [Lookup.HIT] * 4)
            b.must_have(more)
        finally:
            a.close()


def test_many_dead_peers_leave_the_sockets_working(dead):
    with engines() as (a, b):
        a.store(keys(4))
        for n in range(2, 12):
            verdicts, _ = pulled(b, named(f"127.0.0.{n}", dead))
            assert verdicts == MISSES
        assert pulled(b, source(a))[0] == [Lookup.HIT] * 4
