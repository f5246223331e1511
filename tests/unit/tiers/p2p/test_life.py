"""What an endpoint holds, and that it gives it back."""

import gc
import os
import threading
import time

from kvtiers.chunks import Lookup
from kvtiers.tiers.p2p.notes import Local
from tests.unit.tiers.p2p.engines import Engine, engines, keys, source, until, with_options
from tests.unit.tiers.p2p.middle import Liar, honest
from tests.unit.tiers.p2p.test_faults import nothing

NAMES = keys(4)


def held() -> tuple[set[str], int]:
    """Threads of ours, and descriptors."""
    gc.collect()
    threads = {t.name for t in threading.enumerate() if t.name.startswith("kvtiers-p2p")}
    return threads, len(os.listdir("/proc/self/fd"))


def test_everything_is_given_back():
    with engines() as (a, b):
        a.store(NAMES)
        b.pull(NAMES, b.request(source(a)))
    before = held()
    for _ in range(3):
        with engines() as (a, b):
            a.store(NAMES)
            assert b.pull(NAMES, b.request(source(a))) == [Lookup.HIT] * 4
    until(lambda: held()[0] <= before[0] and held()[1] <= before[1])


def test_a_shutdown_does_not_wait_for_a_peer_that_hangs():
    with Liar(honest, nothing) as liar:
        b = Engine(options=with_options(load_deadline_s=60.0))
        request = b.request(source(liar))
        until(lambda: (_look(b, request), b.tier._jobs)[1])
        began = time.monotonic()
        b.tier.shutdown(50.0)
        assert time.monotonic() - began < 20
        assert b.tier.get_finished_jobs() == []
        assert b.tier.lookup(NAMES, request.context) == [Lookup.MISS] * 4
        b.tier.shutdown(5.0)
        b.memory.append(0)  # nobody keeps any of it


def test_a_shutdown_returns_though_the_io_thread_hangs(caplog):
    b = Engine()
    hangs = threading.Event()
    b.endpoint._loop.call(lambda: hangs.wait(20))
    began = time.monotonic()
    b.tier.shutdown(0.2)
    assert time.monotonic() - began < 15
    assert "the I/O thread does not end" in caplog.text
    hangs.set()
    until(lambda: not b.endpoint._thread.is_alive())


def test_a_drain_waits_for_what_is_on_its_way():
    with engines() as (a, b):
        a.store(NAMES)
        request = b.request(source(a))
        until(lambda: (_look(b, request), b.tier._jobs or b.tier._came.chunks)[1])
        assert b.tier.drain_jobs(10.0)
        assert b.pull(NAMES, request) == [Lookup.HIT] * 4


def test_a_drain_of_the_whole_manager_leaves_peers_served():
    with engines() as (a, b):
        a.store(NAMES)
        assert a.manager.drain(5.0, time.monotonic)
        assert b.pull(NAMES, b.request(source(a))) == [Lookup.HIT] * 4


def test_a_bug_in_a_handler_does_not_end_the_io_thread(caplog):
    with engines() as (a, b):
        b.endpoint._loop.call(lambda: 1 / 0)
        a.store(NAMES)
        assert b.pull(NAMES, b.request(source(a))) == [Lookup.HIT] * 4
        assert "a bug in kvtiers" in caplog.text


def test_a_note_that_fails_does_not_take_others_with_it(caplog, monkeypatch):
    """One of them may be the one that lets go of memory."""
    a = Engine()
    server, took = a.endpoint._serving._server, threading.Event()
    take = server.take
    monkeypatch.setattr(
        server, "take", lambda note, now: (took.set(), 1 / 0) if note == "x" else take(note, now)
    )
    for note in ("x", Local("r", True), "x"):
        a.endpoint._serving.post(note)
    until(lambda: "r" in server._locals)
    a.endpoint._serving.post("x")
    a.close()
    assert took.is_set()
    assert caplog.text.count("a bug in kvtiers") == 3
    assert not a.endpoint._serving._thread.is_alive()


def test_a_parent_that_fails_does_not_end_the_serving_thread(caplog, monkeypatch):
    with engines() as (a, b):
        a.store(NAMES)
        pin = a.parent.pin
        failing = iter([True])
        monkeypatch.setattr(
            a.parent, "pin", lambda names: 1 / 0 if next(failing, 0) else pin(names)
        )
        assert b.pull(NAMES, b.request(source(a))) in ([Lookup.HIT] * 4, [Lookup.MISS] * 4)
        assert "a bug in kvtiers" in caplog.text
        assert b.pull(NAMES, b.request(source(a, "x2"))) == [Lookup.HIT] * 4


def _look(engine, request):
    engine.manager.poll(time.monotonic())
    for key in NAMES:
        engine.manager.lookup(key, request)
    engine.step()
