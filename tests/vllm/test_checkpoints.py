"""The oracle itself: stock vLLM on our checkpoints is deterministic and sees damaged KV cache."""

import pytest
import torch

LENGTH = 1400
CACHED = 1280
"""Ten blocks of 128 tokens, five of 256."""


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_next"])
def test_device_hits_repeat_exactly_and_depend_on_every_layer(engine, prompt, kind):
    with engine(kind) as running:
        long = prompt(LENGTH)
        cold = running.ask(long)
        assert running.cached == [0]
        hit = running.ask(long)
        assert running.cached == [CACHED]
        assert running.ask(long) == hit
        running.forget_device()
        assert running.ask(long) == cold
        assert running.cached == [0]
        assert running.ask(long) == hit

        for cache in running.kv_caches():
            begin = cache.flatten(1).view(torch.int8)[:, :128]
            kept = begin.clone()
            begin ^= 0x18
            assert running.ask(long) != hit
            assert running.cached == [CACHED]
            begin.copy_(kept)
        assert running.ask(long) == hit
        prompts_so_far = running.metrics()["vllm:prefix_cache_queries"] / LENGTH
        hits_so_far = running.metrics()["vllm:prefix_cache_hits"] / CACHED
        assert hits_so_far == prompts_so_far - 2

        other = running.ask(prompt(128, seed=1) + long[128:])
        assert running.cached == [0]
        assert other[0].distance(cold[0]) > 1e-3


def test_mla_answers_depend_on_the_first_tokens_of_a_long_prompt(engine, prompt):
    with engine("deepseek_v2", num_gpu_blocks_override=1024) as running:
        long = prompt(LENGTH)
        (right,) = running.ask(long)
        assert running.ask(long) == [right]
        (other,) = running.ask(prompt(128, seed=1) + long[128:])
        assert right.distance(other) > 1e-3


def test_float32_answers_do_not_depend_on_what_was_cached_nor_on_the_batch(engine, prompt):
    with engine("llama", dtype="float32") as running:
        prompts = [prompt(900, seed) for seed in range(3)]
        alone = [running.ask(one)[0] for one in prompts]
        together = running.ask(*prompts)
        assert running.cached == [896] * 3
        for one, many in zip(alone, together, strict=True):
            assert one.tokens == many.tokens
            assert one.distance(many) < 1e-4


def test_two_ranks_agree_with_one_in_float32(engine, prompt):
    long = prompt(LENGTH)
    with engine("llama", dtype="float32") as running:
        (one,) = running.ask(long)
    with engine("llama", dtype="float32", tensor_parallel_size=2) as running:
        (two,) = running.ask(long)
        assert running.ask(long) == running.ask(long)
        assert running.cached == [CACHED]
    assert one.tokens == two.tokens
    assert one.distance(two) < 1e-3
