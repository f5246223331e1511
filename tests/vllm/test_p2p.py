"""Chunks of other engines: pulled, handed over from prefill to decode, and peers that die.

Two servers and an engine in this process. The oracle is a hit of the device cache of the same
length, bit for bit. Loopback.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvtiers.demo.server import free_port
from kvtiers.tiers.p2p.peer import Standing
from tests.vllm.offloading import (
    CHUNK_BYTES,
    PEER_LOOKUP_S,
    manager_of,
    offload,
    peering,
    scheduler_of,
    settle,
)
from tests.vllm.serving import READY_S, Server, cpu_seconds, request

pytestmark = pytest.mark.timeout(400)

TOKENS, CACHED, CHUNKS = 1500, 1408, 11
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting_by_reason"


@dataclass
class Peer:
    """A server, and the port at which its first replica answers peers."""

    server: Server
    port: int


def p2p(port=0, **options):
    tier = peering(port, **options)
    return offload(lookup_deadline_s=PEER_LOOKUP_S, secondary_tiers=[tier])


@pytest.fixture(scope="module")
def peers(checkpoint, tmp_path_factory):
    """One engine, and one of two replicas; they start side by side."""
    logs, model = tmp_path_factory.mktemp("logs"), checkpoint("llama")
    with ExitStack() as stack:
        made = []
        for name, options in (("one", ()), ("two", ("--data-parallel-size", "2"))):
            port = free_port(2)
            server = Server(model, p2p(port), logs / name, *options)
            stack.callback(server.stop)
            made.append(Peer(server, port))
        for peer in made:
            peer.server.wait_ready()
        yield made


@pytest.fixture(scope="module")
def one(peers):
    return peers[0]


@pytest.fixture(scope="module")
def two(peers):
    return peers[1]


@pytest.fixture(scope="module")
def started(engine):
    with engine(kv_transfer_config=p2p()) as e:
        yield e


@pytest.fixture
def here(started):
    """An engine in this process that has nothing."""
    settle(started)
    started.forget_device(connector=True)
    return started


def params(**roles):
    return {"extra_args": {"kv_transfer_params": roles}}


def at(port, role="remote_kv_source", name="x1", host="127.0.0.1"):
    named = {"kv_request_id": name, "remote_host": host, "remote_port": port}
    return params(**{role: named})


def cached_by_source(engine, source):
    name = "vllm:prompt_tokens_cached_by_source"
    counters = [m for m in engine.llm.get_metrics() if m.name == name]
    return sum(m.value for m in counters if m.labels["source"] == source)


def pull(engine, asked, cached, **sampling):
    """The answer, with ``cached`` tokens of the prompt from elsewhere."""
    before = cached_by_source(engine, "p2p")
    (answer,) = engine.ask(asked, **sampling)
    assert engine.cached == [cached]
    assert cached_by_source(engine, "p2p") == before + cached
    settle(engine)
    return answer


def pulled(engine, asked, cached, **sampling):
    """The same, which is what a device hit gives."""
    answer = pull(engine, asked, cached, **sampling)
    assert device_hit(engine, asked, cached) == answer


def device_hit(engine, asked, cached):
    (answer,) = engine.ask(asked)
    assert engine.cached == [cached]
    settle(engine)
    return answer


def test_a_prefix_is_pulled_from_the_peer_that_a_request_names(one, here, prompt):
    asked = prompt(TOKENS, 1)
    one.server.ask(asked)
    pulled(here, asked, CACHED, **at(one.port))


def test_a_conversation_moves_from_a_busy_engine(one, here, prompt):
    """Of its second turn a sixteenth is computed, while the first engine computes for another."""
    first, more = prompt(TOKENS, 2), prompt(20, 3)
    answer, _ = one.server.ask(first)
    second = [*first, *answer, *more]
    with ExitStack() as others:
        for seed in range(10, 14):
            busy = one.server.completion(prompt(100, seed), 3900)
            others.enter_context(closing(one.server.send("/v1/completions", **busy)))
        one.server.wait_for(4, RUNNING)
        moved = pull(here, second, CACHED, **at(one.port))
        assert one.server.value(RUNNING) > 0
    assert (len(second) - CACHED) / len(second) < 0.1
    assert device_hit(here, second, CACHED) == moved
    one.server.wait_for(0, RUNNING)


def test_an_idle_engine_answers_without_a_step_and_then_sleeps(one, here, prompt):
    asked = prompt(TOKENS, 5)
    stored = {"name": "vllm:kvtiers_chunks_stored_total", "tier": "0:primary"}
    before = one.server.value(**stored)
    one.server.ask(asked)
    one.server.wait_for(before + CHUNKS, **stored)
    steps = one.server.value("vllm:iteration_tokens_total_count")
    pulled(here, asked, CACHED, **at(one.port))
    assert one.server.value("vllm:iteration_tokens_total_count") == steps > 0
    before = cpu_seconds(one.server.process.pid, "VLLM::EngineCore")
    time.sleep(2)
    spent = cpu_seconds(one.server.process.pid, "VLLM::EngineCore") - before
    assert before > 0
    assert spent <= 0.1


def prefill(server, asked, **roles):
    """The answer of the one that prefills, whole."""
    body = server.completion(asked, 1, kv_transfer_params=roles)
    return server.post("/v1/completions", **body)


def tier_of(engine):
    return manager_of(engine).core.tiers[0].tier


def arrived(engine, port):
    """How many chunks came in transfers that ended, and of this peer in those under way.

    A step may see the answer to a part of a question: then a request has two transfers.
    """
    peer = tier_of(engine)._endpoint._peers.get(("127.0.0.1", port))
    transfers = () if peer is None else list(peer._outstanding._transfers.values())
    return tier_of(engine)._came.chunks + sum(len(transfer.done) for transfer in transfers)


def standing(engine, host, port):
    peer = tier_of(engine)._endpoint._peers.get((host, port))
    return peer and peer.standing


def test_decode_waits_for_a_prefill_that_comes_after_it_and_holds_no_blocks(one, here, prompt):
    """VLLM's own keys: an orchestrator names the request for both."""
    asked = prompt(TOKENS, 6)
    end = here.begin(asked, **at(one.port, "remote_prefiller", "pd1"))
    here.steps(lambda: tier_of(here)._jobs)
    assert scheduler_of(here).kv_cache_manager.usage == 0, "blocks are taken when chunks are here"
    answer = prefill(one.server, asked, remote_decoder={"kv_request_id": "pd1"})
    assert answer["kv_transfer_params"] is None
    handed_over = end()
    assert here.cached == [CACHED]
    settle(here)
    assert device_hit(here, asked, CACHED) == handed_over
    one.server.wait_for(0, "vllm:kv_cache_usage_perc")


def test_prefill_holds_no_blocks_when_nobody_has_come_for_its_chunks_yet(one, here, prompt):
    """Also not of what it has only in host memory for decode, which then has all of it."""
    asked, port = prompt(TOKENS, 19), tier_of(here).port
    fetched = {"name": "vllm:prompt_tokens_cached_by_source_total", "source": "p2p"}
    before = one.server.value(**fetched)
    (answer,) = here.ask(asked, max_tokens=1, **params(remote_decoder={"kv_request_id": "pd2"}))
    here.steps(lambda: scheduler_of(here).kv_cache_manager.usage == 0)
    settle(here)
    here.forget_device()
    assert one.server.value(**fetched) == before, "nobody asked"
    named = at(port, "remote_prefiller", "pd2")["extra_args"]
    assert one.server.ask(asked, 1, **named) == (answer.tokens, CACHED)


def test_what_a_device_hit_left_out_of_host_memory_is_handed_over_too(one, here, prompt):
    """The prefix was computed when nothing was stored of it; of prefill only the rest is new."""
    asked = prompt(TOKENS, 7)
    prefill(one.server, asked[:900], max_offload_tokens=0)
    told = prefill(one.server, asked, do_remote_decode=True, do_remote_prefill=False)
    assert told["usage"]["prompt_tokens_details"]["cached_tokens"] == 896
    pulled(here, asked, CACHED, **params(**told["kv_transfer_params"]))


@pytest.fixture
def router(one, two, tmp_path):
    """``vllm-router`` before both, as if they spoke NIXL; its port."""
    port, log = free_port(), tmp_path / "router.log"
    command = [str(Path(sys.executable).with_name("vllm-router")), "--vllm-pd-disaggregation"]
    command += ["--prefill", f"http://127.0.0.1:{one.server.port}"]
    command += ["--decode", f"http://127.0.0.1:{two.server.port}"]
    command += ["--kv-connector", "nixl", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(free_port())]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + READY_S
        while not answers(port):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        yield port
    finally:
        process.kill()
        process.wait()


def answers(port):
    try:
        return request(port, "GET", "/readiness")[0] == 200
    except OSError:
        return False


def test_the_router_that_others_use_for_nixl(one, two, router, here, prompt):
    """It prefills on the one and decodes on the other; neither knows of the other before."""
    asked = prompt(TOKENS, 8)
    loaded = {"name": "vllm:prompt_tokens_cached_by_source_total", "source": "p2p"}
    before = two.server.value(**loaded)
    status, text = request(router, "POST", "/v1/completions", one.server.completion(asked, 8))
    assert status == 200, text
    (single,) = here.ask(asked)
    assert tuple(json.loads(text)["choices"][0]["token_ids"]) == single.tokens
    two.server.wait_for(before + CACHED, **loaded)
    body = one.server.completion(prompt(TOKENS, 9), 8, stream=True)
    status, text = request(router, "POST", "/v1/completions", body)
    assert (status, text.rstrip().endswith("data: [DONE]")) == (200, True), text
    two.server.wait_for(before + 2 * CACHED, **loaded)


def test_each_replica_answers_at_a_port_of_its_own(two, here, prompt):
    for replica in range(2):
        asked = prompt(TOKENS, 10 + replica)
        two.server.ask(asked, replica=replica)
        pulled(here, asked, CACHED, **at(two.port + replica))


@pytest.mark.parametrize(
    "roles",
    [
        {"remote_kv_source": {"kv_request_id": "x"}},
        {"remote_prefiller": {"kv_request_id": "x", "remote_host": "no such", "remote_port": 1}},
        {"remote_kv_source": {"kv_request_id": "x", "remote_host": "192.0.2.1", "remote_port": 1}},
    ],
)
def test_roles_that_cannot_be_are_computed(here, prompt, roles):
    asked = prompt(TOKENS, 12)
    (answer,) = here.ask(asked, **params(**roles))
    assert here.cached == [0]
    settle(here)
    here.forget_device(connector=True)
    assert here.ask(asked) == [answer]


def test_a_peer_that_is_not_there_costs_no_other_request_anything(one, here, prompt):
    """After one such request all of the p2p tier of vLLM 0.32 falls silent."""
    asked = prompt(TOKENS, 13)
    one.server.ask(asked)
    for role in ("remote_kv_source", "remote_prefiller"):
        here.forget_device(connector=True)
        (computed,) = here.ask(asked, **at(free_port(), role))
        assert here.cached == [0]
        settle(here)
        here.forget_device(connector=True)
        pulled(here, asked, CACHED, **at(one.port))
    here.forget_device(connector=True)
    assert here.ask(asked) == [computed]


def test_a_peer_is_killed_while_it_brings_and_while_it_fetches(one, two, here, prompt):
    """What it brought counts, the rest is computed; whoever it asked goes on."""
    asked = prompt(TOKENS, 14)
    half, brought = 6 * 128, 6
    here.ask(asked[: half + 1])
    expected = device_hit(here, asked, half)
    here.forget_device(connector=True)
    two.server.ask(asked[: half + 1], replica=0)
    fetching = at(one.port, "remote_prefiller", "never")["extra_args"]
    body = two.server.completion(prompt(TOKENS, 15), 1, **fetching)
    with closing(two.server.send("/v1/completions", replica=1, **body)):
        before = arrived(here, two.port)
        end = here.begin(asked, **at(two.port, "remote_prefiller", "never"))
        here.steps(lambda: arrived(here, two.port) == before + brought)
        two.server.wait_for(1, WAITING, reason="deferred", engine="1")
        os.killpg(two.server.process.pid, signal.SIGKILL)
        assert end() == expected
    assert here.cached == [half]
    settle(here)
    here.forget_device(connector=True)
    here.ask(asked, **at(two.port))
    assert here.cached == [0], "it is dead"
    settle(here)
    one.server.ask(prompt(TOKENS, 16))
    pulled(here, prompt(TOKENS, 16), CACHED, **at(one.port))


@pytest.fixture(scope="module")
def again(two, checkpoint, tmp_path_factory):
    """A server at the address of the second, which is killed if it still runs."""
    two.server.stop()
    server = Server(checkpoint("llama"), p2p(two.port), tmp_path_factory.mktemp("again") / "log")
    try:
        server.wait_ready()
        yield Peer(server, two.port)
    finally:
        server.stop()


def test_a_producer_that_was_killed_is_asked_again_when_it_is_back(two, again, here, prompt):
    """After the breaker's cool-down, which began when it was dead."""
    asked = prompt(TOKENS, 17)
    again.server.ask(asked)
    known = tier_of(here)._endpoint._peers["127.0.0.1", two.port]
    here.steps(lambda: not known._breaker.is_out(time.monotonic()))
    pulled(here, asked, CACHED, **at(two.port))


def serving_of(engine):
    """What an engine in this process serves its peers with."""
    return tier_of(engine)._endpoint._serving._server


def parked(engine, count):
    """Whether a peer's transfer of so many chunks waits, and its connection is there."""
    wants = [w for s in list(serving_of(engine)._sessions.values()) for w in s.wants.values()]
    waiting = [len(transfer.places) for w in wants for transfer in list(w._transfers.values())]
    return waiting == [count] and any(s._socket for s in senders(engine))


def senders(engine):
    return [guest.sender for guest in list(tier_of(engine)._endpoint._guests._by_number.values())]


def unsent(sender):
    """How many bytes of the chunk that it began."""
    return sum(view.nbytes for view in list(sender._unsent))


def test_a_consumer_is_killed_in_the_middle_of_a_transfer(one, again, here, prompt):
    """It was stopped, so that the connection is full when it dies."""
    asked, chunks = prompt(3900, 18), 30
    port, parent = tier_of(here)._endpoint.port, serving_of(here)._parent
    fetching = at(port, "remote_prefiller", "cut")["extra_args"]
    body = again.server.completion(asked, 1, **fetching)
    with closing(again.server.send("/v1/completions", **body)):
        here.steps(lambda: parked(here, chunks))
        os.killpg(again.server.process.pid, signal.SIGSTOP)
        here.ask(asked, **params(remote_decoder={"kv_request_id": "cut"}))
        here.steps(lambda: any(0 < unsent(s) < CHUNK_BYTES["llama"] for s in senders(here)))
        assert len(parent._pinned) == chunks
        os.killpg(again.server.process.pid, signal.SIGKILL)
        here.steps(lambda: not parent._pinned)
    settle(here)
    parent.check()
    answer = device_hit(here, asked, chunks * 128)
    assert one.server.ask(asked, **at(port)["extra_args"]) == (answer.tokens, chunks * 128)


def test_a_producer_is_killed_when_all_came_and_before_the_handshake(one, here, prompt):
    """Of two requests; a peer that is named in another way is greeted anew. The last one here."""
    came, asked = prompt(TOKENS, 20), prompt(TOKENS, 21)
    (computed,) = here.ask(asked)
    here.ask(came)
    held = device_hit(here, came, CACHED)
    here.forget_device(connector=True)
    one.server.ask(came)
    before = arrived(here, one.port)
    with_all = here.begin(came, **at(one.port))
    here.steps(lambda: arrived(here, one.port) == before + CHUNKS)
    os.killpg(one.server.process.pid, signal.SIGSTOP)
    greeting = here.begin(asked, **at(one.port, host="localhost"))
    here.steps(lambda: standing(here, "localhost", one.port) is Standing.DIALLING)
    os.killpg(one.server.process.pid, signal.SIGKILL)
    began = time.monotonic()
    assert with_all().tokens == held.tokens  # in one batch with the other, which rounds otherwise
    assert here.cached == [CACHED]
    assert greeting().tokens == computed.tokens
    assert here.cached == [0]
    assert time.monotonic() - began < tier_of(here)._endpoint._us.options.handshake_deadline_s
    settle(here)
    assert standing(here, "localhost", one.port) is Standing.LEFT_ALONE
