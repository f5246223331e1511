"""Peers that are killed or stopped, as processes, at every stage; the other side goes on."""

import multiprocessing
import os
import signal
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest

from kvtiers.chunks import ChunkLayout, GroupLayout, Lookup
from tests.unit.tiers.p2p.engines import QUICK, Engine, engines, keys, source, until, with_options

SPAWN = multiprocessing.get_context("spawn")
BIG = ChunkLayout((GroupLayout(0, 4 << 20, 16),))
NAMES = keys(24)
PATIENCE_S = 60.0


def _produce(pipe, port: int) -> None:
    engine = Engine(slots=32, options=replace(QUICK, port=port), layout=BIG)
    engine.store(NAMES)
    pipe.send(engine.port)
    pipe.recv()
    engine.close()


def _consume(pipe, port: int) -> None:
    engine = Engine(slots=32, layout=BIG)
    request = engine.request(source(port, "theirs"))
    engine.manager.poll(time.monotonic())
    for key in NAMES:
        engine.manager.lookup(key, request)
    engine.step()
    pipe.send("asked")
    if pipe.recv() == "pull":
        until(lambda: (engine.pull(NAMES, request), True)[1])
    pipe.send("pulled")
    pipe.recv()


@contextmanager
def child(work, port: int):
    """Another process at ``work``, and what it first says."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=work, args=(theirs, port), daemon=True)
    process.start()
    try:
        assert ours.poll(PATIENCE_S), "the other process does not come up"
        yield process, ours, ours.recv()
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.join()


def look(engine, request):
    engine.manager.poll(time.monotonic())
    verdicts = [engine.manager.lookup(key, request) for key in NAMES]
    engine.step()
    return verdicts


def bytes_landed(engine):
    return any(engine.memory[:: BIG.slot_bytes])


STAGES = {
    "before the handshake": lambda engine, request: True,
    "asked": lambda engine, request: look(engine, request),
    "while chunks come": lambda engine, request: (look(engine, request), bytes_landed(engine))[1],
    "after all came": lambda engine, request: set(look(engine, request)) == {Lookup.HIT},
}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.replace(" ", "-"))
def test_a_producer_dies(stage, how):
    with engines(1, slots=32, layout=BIG) as (engine,), child(_produce, 0) as (process, _, port):
        request = engine.request(source(port))
        until(lambda: STAGES[stage](engine, request))
        os.kill(process.pid, how)
        began = time.monotonic()
        verdicts = engine.pull(NAMES, request)
        assert time.monotonic() - began < 10
        engine.must_have([k for k, v in zip(NAMES, verdicts, strict=True) if v is Lookup.HIT])
        engine.manager.on_request_finished(request)
        again = engine.request(source(port, "again"))
        engine.pull(keys(2, "other"), again)
        engine.manager.on_request_finished(again)
        engine.rest()


def test_a_producer_that_comes_back_has_another_token_and_is_used():
    with engines(1, slots=32, layout=BIG) as (engine,):
        with child(_produce, 0) as (_, _, port):
            assert Lookup.MISS not in engine.pull(NAMES[:4], engine.request(source(port, "1")))
        with child(_produce, port):
            until(lambda: Lookup.MISS not in engine.pull(NAMES[4:8], engine.request(source(port))))
            engine.must_have(NAMES[:8])


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("stage", ["asked", "while chunks come", "after all came"])
def test_a_consumer_dies(stage, how):
    with engines(slots=32, layout=BIG) as (producer, other):
        producer.store(NAMES)
        with child(_consume, producer.port) as (process, pipe, _):
            if stage != "asked":
                pipe.send("pull")
            if stage == "while chunks come":
                until(lambda: producer.parent._pins)
            if stage == "after all came":
                assert pipe.poll(PATIENCE_S)
            os.kill(process.pid, how)
            began = time.monotonic()
            assert Lookup.MISS not in other.pull(NAMES[:2], other.request(source(producer)))
            until(lambda: not producer.parent._pins)
            until(lambda: len(producer.endpoint._guests._by_number) <= 1)
            assert time.monotonic() - began < 15
            producer.manager.check()
            producer.parent.check()


def test_a_consumer_that_dies_while_it_waits_for_prefill_is_forgotten():
    with engines(1, slots=32, layout=BIG, options=with_options(park_deadline_s=60.0)) as (a,):
        with child(_wait_for_prefill, a.port):
            until(lambda: a.endpoint._serving._server.waiting)
        until(lambda: not a.endpoint._serving._server._sessions)
        a.rest()


def _wait_for_prefill(pipe, port: int) -> None:
    engine = Engine(slots=32, layout=BIG)
    request = engine.request(source(port, "pd", "remote_prefiller"))
    until(lambda: (look(engine, request), engine.tier._jobs)[1])
    pipe.send("waits")
    pipe.recv()
