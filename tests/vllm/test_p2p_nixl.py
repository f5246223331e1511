"""Two real engines and NIXL: what it takes from the other's memory is what a device hit gives.

As ``test_p2p.py``; a server, and an engine in this process.
"""

import os
import signal
import time

import pytest

from kvtiers.demo.server import free_port
from tests.vllm.offloading import settle
from tests.vllm.serving import Server, cpu_seconds
from tests.vllm.test_p2p import (
    CACHED,
    CHUNKS,
    TOKENS,
    Peer,
    arrived,
    at,
    device_hit,
    p2p,
    prefill,
    pulled,
    tier_of,
)

pytestmark = pytest.mark.timeout(400)


def by_nixl(port=0):
    return p2p(port, transport="nixl", plaintext_data=True)


@pytest.fixture(scope="module")
def one(checkpoint, tmp_path_factory):
    port = free_port()
    server = Server(checkpoint("llama"), by_nixl(port), tmp_path_factory.mktemp("logs") / "one")
    try:
        yield Peer(server, port)
    finally:
        server.stop()


@pytest.fixture(scope="module")
def started(one, engine):
    """It starts beside the server."""
    with engine(kv_transfer_config=by_nixl()) as e:
        one.server.wait_ready()
        yield e


@pytest.fixture
def here(started):
    """An engine in this process that has nothing."""
    settle(started)
    started.forget_device(connector=True)
    return started


def reader_of(engine):
    transport = tier_of(engine)._endpoint._us.transports[0]
    assert transport.name == b"nixl"
    return transport._reader


def test_each_reads_what_the_other_has_and_then_both_sleep(one, here, prompt):
    theirs, ours = prompt(TOKENS, 1), prompt(TOKENS, 2)
    one.server.ask(theirs)
    pulled(here, theirs, CACHED, **at(one.port))
    assert reader_of(here).names, "it was read by NIXL"
    (computed,) = here.ask(ours)
    settle(here)
    named = at(tier_of(here).port)["extra_args"]
    assert one.server.ask(ours, len(computed.tokens), **named) == (computed.tokens, CACHED)
    before = cpu_seconds(one.server.process.pid, "VLLM::EngineCore")
    time.sleep(2)
    assert cpu_seconds(one.server.process.pid, "VLLM::EngineCore") - before <= 0.1


def test_decode_reads_what_prefill_computes(one, here, prompt):
    """What is there of it before it has ended, and then the rest."""
    asked, half = prompt(TOKENS, 3), 6
    one.server.ask(asked[: half * 128 + 1])
    before = arrived(here, one.port)
    end = here.begin(asked, **at(one.port, "remote_prefiller", "pd1"))
    here.steps(lambda: arrived(here, one.port) == before + half)
    assert tier_of(here)._jobs, "the rest is waited for"
    prefill(one.server, asked, remote_decoder={"kv_request_id": "pd1"})
    handed_over = end()
    assert here.cached == [CACHED]
    settle(here)
    assert device_hit(here, asked, CACHED) == handed_over


def test_a_peer_is_killed_while_its_memory_is_read(one, here, prompt, monkeypatch):
    """What was not read is computed. The last one here."""
    asked = prompt(TOKENS, 4)
    (computed,) = here.ask(asked)
    settle(here)
    here.forget_device(connector=True)
    stored = {"name": "vllm:kvtiers_chunks_stored_total", "tier": "0:primary"}
    before = one.server.value(**stored)
    one.server.ask(asked)
    one.server.wait_for(before + CHUNKS, **stored)
    agent, killed = reader_of(here).agent, []
    transfer = agent.transfer

    def kill_first(handle):
        if not killed:
            os.killpg(one.server.process.pid, signal.SIGKILL)
            killed.append(one.server.process.wait())
        return transfer(handle)

    monkeypatch.setattr(agent, "transfer", kill_first)
    assert here.ask(asked, **at(one.port)) == [computed]
    assert killed, "nothing was read"
    settle(here)
    assert here.cached[0] < CACHED
