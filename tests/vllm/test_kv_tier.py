"""Two real engines share a Valkey; what becomes of the server costs hits and nothing else."""

import time

import pytest

from tests.servers import valkey
from tests.vllm.offloading import manager_of, offload, settle

TOKENS = 2000
CACHED = 1920
CHUNKS = 15


@pytest.fixture
def server():
    with valkey.valkey(maxmemory="1gb", maxmemory_policy="allkeys-lru") as made:
        yield made


def tier(server, **options):
    """A configuration whose host memory holds everything, above the server."""
    entry = {"type": "kv", "url": server.url, "breaker_cooldown_s": 0.2, **options}
    return offload(secondary_tiers=[entry])


def chunks_at(server):
    return server.do("DBSIZE") - len(server.do("KEYS", "*:manifest"))


def test_a_second_engine_is_served_the_prefix_of_the_first(engine, prompt, server):
    with engine(kv_transfer_config=tier(server)) as first:
        first.ask(prompt(TOKENS))
        settle(first)
        (expected,) = first.ask(prompt(TOKENS))
        assert first.cached == [CACHED]
        settle(first)
    assert chunks_at(server) == CHUNKS
    with engine(kv_transfer_config=tier(server)) as second:
        assert second.ask(prompt(TOKENS)) == [expected]
        assert second.cached == [CACHED]
        settle(second)
        assert second.metrics()["vllm:kv_offload_tiering_read_bytes"] == CHUNKS * 512 * 1024
    assert chunks_at(server) == CHUNKS


def test_a_server_that_dies_in_mid_run_costs_misses_and_comes_back(engine, prompt, server):
    with engine(kv_transfer_config=tier(server)) as e:
        e.ask(prompt(TOKENS))
        settle(e)
        (expected,) = e.ask(prompt(TOKENS))
        settle(e)
        server.kill()
        e.forget_device(connector=True)
        for seed in range(1, 8):  # enough for the breaker
            e.ask(prompt(300, seed=seed))
        (cold,) = e.ask(prompt(TOKENS))
        assert e.cached == [0]
        assert cold.finish_reason == expected.finish_reason
        manager_of(e).check()
        server.start()
        e.forget_device(connector=True)

        def stored_again():
            e.forget_device(connector=True)
            e.ask(prompt(TOKENS))
            settle(e)
            return chunks_at(server) >= CHUNKS

        valkey.wait_until(stored_again, "chunks are stored again")
        e.forget_device(connector=True)
        assert e.ask(prompt(TOKENS)) == [expected]
        assert e.cached == [CACHED]
        settle(e)
        manager_of(e).check()


def test_a_server_that_hangs_holds_up_no_request_for_long(engine, prompt, server):
    with engine(kv_transfer_config=tier(server, timeout_s=0.5)) as e:
        e.ask(prompt(TOKENS))
        settle(e)
        (expected,) = e.ask(prompt(TOKENS))
        settle(e)
        e.forget_device(connector=True)
        with server.frozen():
            began = time.monotonic()
            (answer,) = e.ask(prompt(TOKENS))
            assert time.monotonic() - began < 30
            assert len(answer.tokens) == len(expected.tokens)
        settle(e)
        manager_of(e).check()
