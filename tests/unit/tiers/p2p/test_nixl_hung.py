"""Producers whose memory is being read over UCX and TCP, and that hang, or lie: as processes."""

import os
import signal
import time
from dataclasses import replace

import pytest

from kvtiers.chunks import Lookup
from kvtiers.tiers.p2p.reading import Reader
from tests.unit.tiers.p2p.engines import CHUNK_BYTES, QUICK, Engine, engines, keys, source, until
from tests.unit.tiers.p2p.test_killed import BIG, NAMES, bytes_landed, child, look
from tests.unit.tiers.p2p.test_nixl import reader

BY_NIXL = replace(QUICK, transport="nixl", plaintext_data=True)
SLOTS = 64
MANY = keys(100, "many")


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch):
    """As between machines without RDMA: both sides have to call UCX."""
    monkeypatch.setenv("UCX_TLS", "tcp")


def _produce(pipe, port: int) -> None:
    engine = Engine(slots=32, layout=BIG, options=BY_NIXL)
    engine.store(NAMES)
    pipe.send(engine.port)
    pipe.recv()


def _let_go(pipe, port: int) -> None:
    """A producer that says when nothing is kept for peers."""
    engine = Engine(slots=32, layout=BIG, options=BY_NIXL)
    engine.store(NAMES)
    pipe.send(engine.port)
    pipe.recv()
    until(lambda: not engine.parent._pins)
    engine.manager.check()
    engine.parent.check()
    pipe.send("let go")
    pipe.recv()


def _consume(pipe, port: int) -> None:
    engine = Engine(slots=32, layout=BIG, options=BY_NIXL)
    request = engine.request(source(port, "theirs"))
    until(lambda: (look(engine, request), bytes_landed(engine))[1])
    pipe.send("reads")
    engine.pull(NAMES, request)
    pipe.recv()


def _lie(pipe, port: int) -> None:
    """It answers, and never calls UCX."""
    Reader._get_on = lambda self: None
    engine = Engine(slots=128, options=BY_NIXL)
    engine.store(MANY)
    pipe.send(engine.port)
    pipe.recv()


def stuck(engine) -> int:
    return engine.endpoint._us.transports[0]._stuck.bytes


def looks_in_half_a_second(engine) -> int:
    agent, calls = reader(engine).agent, []
    look, get_on = agent.check_xfer_state, agent.get_new_notifs
    agent.check_xfer_state = lambda handle: (calls.append(1), look(handle))[1]
    agent.get_new_notifs = lambda: (calls.append(1), get_on())[1]
    time.sleep(0.5)
    del agent.check_xfer_state, agent.get_new_notifs
    return len(calls)


@pytest.mark.parametrize("then", [signal.SIGCONT, signal.SIGKILL], ids=["goes-on", "is-killed"])
def test_a_producer_that_is_stopped_while_it_is_read(then):
    """What UCX writes when it goes on lands where it belongs, and nobody else has that memory."""
    with (
        engines(1, slots=SLOTS, layout=BIG, options=BY_NIXL) as (b,),
        child(_produce, 0) as (producer, _, port),
    ):
        request = b.request(source(port))
        until(lambda: (look(b, request), bytes_landed(b))[1])
        os.kill(producer.pid, signal.SIGSTOP)
        verdicts = b.pull(NAMES, request)
        there = [k for k, v in zip(NAMES, verdicts, strict=True) if v is Lookup.HIT]
        b.manager.on_request_finished(request)
        until(lambda: stuck(b))
        held, session_ = stuck(b), session_at(b, port)
        until(lambda: b.on_io(lambda: session_._outstanding.hangs))
        until(lambda: reader(b).stuck_pause == pytest.approx(0.05))
        assert looks_in_half_a_second(b) <= 11 * len(reader(b).active)
        assert b.pull(NAMES[-1:], b.request(source(port, "again"))) == [Lookup.MISS]
        assert stuck(b) == held
        free = SLOTS - len(there) - held // BIG.slot_bytes
        others = keys(free, "others")
        b.store(others)
        os.kill(producer.pid, then)
        until(lambda: not reader(b).active, seconds=60.0)
        until(lambda: not stuck(b))
        b.must_have([*others, *there])
        b.rest()


def session_at(engine, port):
    return engine.endpoint._peers["127.0.0.1", port]


def test_a_producer_that_answers_and_never_calls_ucx():
    """It costs a part of host memory that has an end, its requests a miss, and others nothing."""
    impatient = replace(BY_NIXL, load_deadline_s=0.5)
    b = Engine(slots=SLOTS, options=impatient)
    with child(_lie, 0) as (_, _, port), engines(1, options=BY_NIXL) as (honest,):
        for n in range(8):
            request = b.request(source(port, f"r{n}"))
            assert b.pull(MANY[n * 8 : n * 8 + 8], request) == [Lookup.MISS] * 8
            b.manager.on_request_finished(request)
            peer = session_at(b, port)
            until(lambda peer=peer: b.on_io(lambda: peer._outstanding.hangs))
        assert stuck(b) == 8 * CHUNK_BYTES
        names = keys(8, "honest")
        honest.store(names)
        request = b.request(source(honest))
        assert b.pull(names, request) == [Lookup.HIT] * 8
        b.must_have(names)
        b.manager.on_request_finished(request)
    until(lambda: not reader(b).active, seconds=60.0)
    b.rest()
    b.close()


@pytest.mark.parametrize("transports", ["tcp", "whatever-there-is"])
def test_a_consumer_that_is_killed_while_it_reads(transports, monkeypatch):
    """Its producer lives, serves others, and lets go of what was kept for it."""
    if transports != "tcp":
        monkeypatch.delenv("UCX_TLS")
    with (
        child(_let_go, 0) as (producer, pipe, port),
        engines(1, slots=32, layout=BIG, options=BY_NIXL) as (other,),
    ):
        with child(_consume, port):
            pass  # which kills it
        request = other.request(source(port))
        assert other.pull(NAMES, request) == [Lookup.HIT] * len(NAMES)
        other.must_have(NAMES)
        other.manager.on_request_finished(request)
        pipe.send("asked whether it let go")
        assert pipe.poll(60.0)
        assert pipe.recv() == "let go"
        assert producer.is_alive()
        other.rest()
