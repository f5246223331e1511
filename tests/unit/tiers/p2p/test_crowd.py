"""Ten peers at once, six of which misbehave, each in its way: the others are served."""

import socket
import threading
from contextlib import ExitStack, contextmanager

from kvtiers.chunks import Lookup
from kvtiers.tiers.p2p import protocol as p
from tests.unit.tiers.p2p.engines import Engine, engines, keys, source, until, with_options
from tests.unit.tiers.p2p.test_faults import Stranger

NAMES = tuple(keys(40))
OPTIONS = with_options(
    handshake_deadline_s=10.0,
    lookup_deadline_s=10.0,
    load_deadline_s=20.0,
    silence_deadline_s=10.0,
    hold_deadline_s=1.0,
    stall_deadline_s=0.5,
)


def floods(n: int) -> list[p.Message | bytes]:
    """Questions for ever more requests."""
    return [p.LookUp(n, f"flood{n}", int(p.Role.SOURCE), NAMES)]


def fetches_and_takes_nothing(n: int) -> list[p.Message | bytes]:
    return [p.Fetch(n, "x", int(p.Role.SOURCE), NAMES)]


def cancels(n: int) -> list[p.Message | bytes]:
    return [p.Fetch(n, "x", int(p.Role.SOURCE), NAMES), *[p.Cancel(n)] * 20]


def waits_for_what_never_comes(n: int) -> list[p.Message | bytes]:
    return [p.LookUp(n, f"never{n}", int(p.Role.PREFILL), tuple(keys(200, f"n{n}")))]


def repeats_itself(n: int) -> list[p.Message | bytes]:
    return [p.LookUp(1, "x", int(p.Role.SOURCE), NAMES)]


def talks_nonsense(n: int) -> list[p.Message | bytes]:
    return [bytes(range(n % 256)) * 9]


DEEDS = (
    floods,
    fetches_and_takes_nothing,
    cancels,
    waits_for_what_never_comes,
    repeats_itself,
    talks_nonsense,
)


@contextmanager
def misbehaving(producer: Engine, deed):
    """A peer that does it as fast as it is answered, and comes back when it is sent away."""
    stopped = threading.Event()

    def run() -> None:
        while not stopped.is_set():
            with Stranger(producer) as stranger:
                ack = stranger.greet()
                if not isinstance(ack, p.HelloAck):
                    continue
                port, token = int.from_bytes(ack.offer[:2], "little"), ack.offer[2:]
                with socket.create_connection(("127.0.0.1", port)) as data:
                    data.sendall(b"KVTD" + token)
                    _do(stranger, deed, stopped)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join(30)


def _do(stranger: Stranger, deed, stopped: threading.Event) -> None:
    for n in range(2000):
        for message in (*deed(n), p.Ping(n)):
            stranger.say(message)
        while True:
            if stopped.is_set():
                return
            heard = stranger.hear()
            if isinstance(heard, p.Goodbye | p.Refuse):
                return
            if heard == p.Pong(n):
                break


def test_those_who_behave_are_served_beside_those_who_do_not():
    with engines(5, options=OPTIONS) as (producer, *good):
        producer.store(NAMES)
        with ExitStack() as crowd:
            for deed in DEEDS:
                crowd.enter_context(misbehaving(producer, deed))
            until(lambda: len(producer.endpoint._guests._by_number) >= len(DEEDS) - 1)
            for turn in range(40):
                engine = good[turn % len(good)]
                request = engine.request(source(producer, f"good{turn}"))
                assert engine.pull(NAMES, request) == [Lookup.HIT] * len(NAMES)
                engine.must_have(NAMES)
                engine.manager.on_request_finished(request)
                engine.manager.release_device(engine.manager.reset())
        producer.rest()
