"""Two real engines share a bucket of a real S3 server; its death costs hits and nothing else."""

import pytest

from tests.vllm.offloading import manager_of, offload, settle

pytestmark = pytest.mark.timeout(240)

TOKENS = 2000
CACHED = 1920
CHUNKS = 15


def tier(s3, bucket, **options):
    """A configuration with the bucket behind host memory that holds everything."""
    entry = {"type": "obj", "url": f"s3://{bucket}/kv", "endpoint": s3.endpoint, "allow_http": True}
    return offload(secondary_tiers=[{**entry, "breaker_cooldown_s": 0.2, **options}])


def read_below(engine):
    return engine.metrics().get("vllm:kv_offload_tiering_read_bytes", 0)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_second_engine_is_served_the_prefix_of_the_first(engine, prompt, s3, bucket, kind):
    """Chunks of the first kind of model are objects of their own, those of the second are packed.

    Of Gemma 3 a window is read to its end only, so the prefix ends with the last block.
    """
    with engine(kind, kv_transfer_config=tier(s3, bucket)) as first:
        first.ask(prompt(TOKENS))
        settle(first)
        (expected,) = first.ask(prompt(TOKENS))
        assert first.cached == [CACHED]
        settle(first)
    with engine(kind, kv_transfer_config=tier(s3, bucket)) as second:
        assert second.ask(prompt(TOKENS)) == [expected]
        assert second.cached == [CACHED]
        settle(second)
        assert read_below(second) > 0


def test_a_server_that_dies_in_mid_run_costs_misses_and_comes_back(engine, prompt, s3, bucket):
    with engine(kv_transfer_config=tier(s3, bucket, request_timeout_s=2.0)) as e:
        e.ask(prompt(TOKENS))
        settle(e)
        (expected,) = e.ask(prompt(TOKENS))
        settle(e)
        s3.kill()
        e.forget_device(connector=True)
        for seed in range(1, 5):
            e.ask(prompt(300, seed=seed))
        (cold,) = e.ask(prompt(TOKENS))
        assert e.cached == [0]
        assert cold.finish_reason == expected.finish_reason
        settle(e)
        s3.start()
        for _ in range(100):
            e.forget_device(connector=True)
            (answer,) = e.ask(prompt(TOKENS))
            settle(e)
            if e.cached == [CACHED]:
                break
        assert e.cached == [CACHED]
        assert answer == expected
        manager_of(e).check()
