"""NIXL and UCX, on whatever this machine has: the consumer reads the producer's memory."""

import sys
import threading
import time

import pytest

from kvtiers.chunks import Lookup
from kvtiers.errors import ConfigError
from kvtiers.tiers.addresses import address_of
from kvtiers.tiers.p2p.nixl import new_agent
from tests.unit.tiers.p2p.engines import QUICK, Engine, engines, keys, source, until, with_options
from tests.unit.tiers.p2p.test_killed import BIG, bytes_landed, child, look
from tests.unit.tiers.p2p.test_killed import NAMES as BIG_NAMES
from tests.unit.tiers.p2p.test_pull import _look, came_in

BY_NIXL = with_options(transport="nixl", plaintext_data=True, load_deadline_s=20.0)
NAMES = keys(40)


@pytest.fixture(scope="module")
def pair():
    """Two engines for all tests here: an agent takes half a second."""
    with engines(options=BY_NIXL, slots=256) as (a, b):
        yield a, b


def session(a, b):
    return b.endpoint._peers["127.0.0.1", a.port]


def reader(engine):
    return engine.endpoint._us.transports[0]._reader


def at_rest(engine):
    mine = reader(engine)
    return not mine.active and not mine.lent and time.monotonic() > mine.lingers_until


def spent_while_idle(*engines):
    """Processor seconds of the process in half a second, and calls of NIXL."""
    for engine in engines:
        engine.rest()
        until(lambda engine=engine: at_rest(engine))
    calls = []
    agents = [reader(engine).agent for engine in engines]
    for agent in agents:
        agent.get_new_notifs = lambda: calls.append(1)
        agent.check_xfer_state = lambda handle: calls.append(1)
    began = time.process_time()
    time.sleep(0.5)
    spent = time.process_time() - began
    for agent in agents:
        del agent.get_new_notifs, agent.check_xfer_state
    return spent, len(calls)


def test_what_a_peer_has_is_read(pair):
    a, b = pair
    a.store(NAMES[:30])
    request = b.request(source(a))
    assert b.pull(NAMES, request) == [Lookup.HIT] * 30 + [Lookup.MISS] * 10
    b.must_have(NAMES[:30])
    assert type(session(a, b)._outstanding.receiver).__name__ == "NixlReceiver"
    b.manager.on_request_finished(request)
    b.rest()
    a.rest()


def test_both_ways(pair):
    a, b = pair
    names = keys(8, "theirs")
    b.store(names)
    assert a.pull(names, a.request(source(b))) == [Lookup.HIT] * 8
    a.must_have(names)


def test_an_idle_engine_sleeps(pair):
    """With NIXL's own thread it would be half a second for each engine."""
    a, b = pair
    names = keys(8, "before")
    a.store(names)
    request = b.request(source(a, "x7"))
    assert b.pull(names, request) == [Lookup.HIT] * 8
    b.manager.on_request_finished(request)
    spent, calls = spent_while_idle(a, b)
    assert session(a, b)._outstanding.receiver is not None, "the session stands"
    assert spent < 0.1
    assert calls == 0


def test_decode_reads_while_prefill_runs(pair):
    a, b = pair
    names = keys(8, "pd")
    prefill = a.request({"remote_decoder": {"kv_request_id": "pd"}})
    decode = b.request(source(a, "pd", "remote_prefiller"))
    a.store(names[:4], prefill)
    until(lambda: (_look(b, names, decode), came_in(b, names[:4]))[1])
    assert came_in(b, names) is False
    a.store(names[4:], prefill)
    a.manager.on_request_finished(prefill)
    assert b.pull(names, decode) == [Lookup.HIT] * 8
    b.must_have(names)


def test_bytes_that_changed_since_they_were_summed_do_not_count(pair):
    a, b = pair
    names = keys(2, "changing")
    a.store(names)
    turn = a.endpoint._guests._by_number
    senders = a.on_io(lambda: [guest.sender for guest in turn.values()])
    for sender in senders:
        ready = sender._calls.ready

        def change(transfer, rows, ready=ready):
            ready(transfer, [(place, address, checksum ^ 1) for place, address, checksum in rows])

        object.__setattr__(sender._calls, "ready", change)
    request = b.request(source(a, "x9"))
    assert b.pull(names, request) == [Lookup.MISS] * 2
    b.manager.on_request_finished(request)
    b.rest()
    until(lambda: not a.parent._pins)


def test_a_peer_without_nixl_is_served_over_tcp(pair):
    a, _ = pair
    names = keys(4, "mixed")
    a.store(names)
    b = Engine(options=QUICK)
    try:
        assert b.pull(names, b.request(source(a, "x3"))) == [Lookup.HIT] * 4
        b.must_have(names)
        assert type(session(a, b)._outstanding.receiver).__name__ == "TcpReceiver"
    finally:
        b.close()


def test_over_tcp_a_producer_that_only_serves_sends_what_is_read(monkeypatch):
    """There UCX has nothing but two threads that call it."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    names = keys(32, "by-tcp")
    with engines(options=BY_NIXL) as (a, b):
        a.store(names)
        request = b.request(source(a))
        assert b.pull(names, request) == [Lookup.HIT] * 32
        b.must_have(names)
        b.manager.on_request_finished(request)
        assert spent_while_idle(a, b)[1] == 0


@pytest.mark.parametrize("stage", ["asked", "while-chunks-come"])
def test_a_producer_that_is_killed_costs_what_did_not_come(stage):
    with (
        engines(1, slots=32, layout=BIG, options=BY_NIXL) as (b,),
        child(_produce, 0) as (process, _, port),
    ):
        request = b.request(source(port))
        landed = {"asked": lambda: True, "while-chunks-come": lambda: bytes_landed(b)}[stage]
        until(lambda: (look(b, request), landed())[1])
        process.kill()
        verdicts = b.pull(BIG_NAMES, request)
        there = [k for k, v in zip(BIG_NAMES, verdicts, strict=True) if v is Lookup.HIT]
        b.must_have(there)
        b.manager.on_request_finished(request)
        b.rest()


def _produce(pipe, port: int) -> None:
    engine = Engine(slots=32, layout=BIG, options=BY_NIXL)
    engine.store(BIG_NAMES)
    pipe.send(engine.port)
    pipe.recv()


@pytest.mark.parametrize("backends", [("NOPE",), ("UCX", "NOPE"), ()])
def test_backends_that_there_are_not_are_refused(backends):
    with pytest.raises(ConfigError, match=r"backends name (NOPE|none): NIXL has .*UCX.* here"):
        new_agent(backends, 0)


def test_without_nixl_it_is_refused_in_words_that_say_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    before = set(threading.enumerate())
    with pytest.raises(ConfigError) as caught:
        Engine(options=BY_NIXL)
    said = str(caught.value)
    assert said.startswith("transport is nixl, which is not installed (")
    assert said.endswith("): pip install nixl, or use transport tcp")
    assert set(threading.enumerate()) <= before


def test_addresses():
    memory = bytearray(b"0123456789")
    whole = memoryview(memory)
    assert address_of(whole[4:]) - address_of(whole) == 4
    assert address_of(whole.toreadonly()[2:]) - address_of(whole) == 2
    dead = whole[1:]
    dead.release()
    with pytest.raises(ValueError, match="released"):
        address_of(dead)
