"""Prefill and decode apart, of models of which only a part of a prefix is read: windows, states."""

from contextlib import ExitStack

import pytest

from kvtiers.demo.server import free_port
from tests.vllm.conftest import running
from tests.vllm.offloading import settle
from tests.vllm.serving import Server
from tests.vllm.test_p2p import TOKENS, at, device_hit, p2p, prefill, pull, tier_of

CACHED = {"gemma3": 1408, "qwen3_next": 1280}


@pytest.fixture(scope="module")
def producers(checkpoint, tmp_path_factory):
    """A server of each model, and the port at which it answers peers; they start side by side."""
    logs = tmp_path_factory.mktemp("logs")
    with ExitStack() as stack:
        made = {}
        for kind in CACHED:
            port = free_port()
            server = Server(checkpoint(kind), p2p(port), logs / kind)
            stack.callback(server.stop)
            made[kind] = (server, port)
        for server, _ in made.values():
            server.wait_ready()
        yield made


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", CACHED)
def test_decode_reads_what_prefill_left_of_a_prompt_that_nobody_saw_before(
    producers, checkpoint, prompt, kind
):
    """Sent before its prefill, and after it. The server of vLLM 0.32 leaves no state by itself."""
    server, port = producers[kind]
    first, second = prompt(TOKENS, 1), prompt(TOKENS, 2)
    with running(checkpoint(kind), kv_transfer_config=p2p()) as here:
        end = here.begin(first, **at(port, "remote_prefiller", "pd1"))
        here.steps(lambda: tier_of(here)._jobs)
        prefill(server, first, remote_decoder={"kv_request_id": "pd1"})
        handed_over = end()
        assert here.cached == [CACHED[kind]]
        settle(here)
        assert device_hit(here, first, CACHED[kind]) == handed_over
        prefill(server, second, remote_decoder={"kv_request_id": "pd2"})
        after = pull(here, second, CACHED[kind], **at(port, "remote_prefiller", "pd2"))
        assert device_hit(here, second, CACHED[kind]) == after
        here.forget_device(connector=True)
        (computed,) = here.ask(second)
        assert here.cached == [0]
        assert computed.tokens == after.tokens
