"""Every kind of model that vLLM runs on the CPU: what was stored is what comes back.

The oracle is a device-cache hit of the same length, bit for bit; between tensor-parallel sizes,
which round differently, tokens in float32. docs/models.md says what is run here and what is not.
"""

import pytest

from tests.vllm.offloading import CHUNK_BYTES, disk, files_of, manager_of, offload, settle
from tests.vllm.serving import serving

pytestmark = pytest.mark.timeout(120)

TOKENS = 1500


def hits(engine, asked, cached):
    """The answers, with the beginning of each prompt from some cache; the engine rests after."""
    answers = engine.ask(*asked)
    assert engine.cached == [cached] * len(asked)
    settle(engine)
    return answers


def read_from_disk(engine):
    return engine.metrics().get("vllm:kv_offload_tiering_read_bytes", 0)


@pytest.mark.parametrize(
    ("kind", "cached", "chunks"),
    [
        ("gemma3", 1408, 11 + 2 * 2),
        ("mistral", 1408, 2),
        ("gpt_oss", 1408, 11 + 1),
        ("qwen3_next", 1280, 5 + 3),
    ],
)
def test_host_disk_and_restart_hits_are_exact(engine, prompt, tmp_path, kind, cached, chunks):
    """``chunks``: those that a load of the prompt reads, of groups with a window its tail only."""
    config = offload(secondary_tiers=[disk(tmp_path)])
    asked = [prompt(TOKENS)]
    with engine(kind, kv_transfer_config=config) as e:
        e.ask(*asked)
        expected = hits(e, asked, cached)
        e.forget_device()
        assert hits(e, asked, cached) == expected
        assert read_from_disk(e) == 0, "host memory had everything"
        e.forget_device(connector=True)
        assert manager_of(e).core.use.resident == 0
        assert hits(e, asked, cached) == expected
        assert manager_of(e).core.use.resident == chunks
        read = read_from_disk(e)
    with engine(kind, kv_transfer_config=config) as e:
        assert hits(e, asked, cached) == expected
        assert manager_of(e).core.use.resident == chunks
        assert read_from_disk(e) == read > 0


def test_tensor_parallel_sizes_load_what_each_other_stored(engine, prompt, tmp_path):
    """TP=1 stores one prompt, TP=2 loads it and stores another, TP=1 loads that; under one root."""
    config = offload(secondary_tiers=[disk(tmp_path)])
    options = {"dtype": "float32", "kv_transfer_config": config}
    not_stored = {"extra_args": {"kv_transfer_params": {"max_offload_tokens": 0}}}
    ones, twos = prompt(TOKENS, seed=1), prompt(TOKENS, seed=2)
    with engine(**options) as e:
        e.ask(ones)
        e.ask(twos, **not_stored)
        single = hits(e, [ones], 1408)
        single += e.ask(twos, **not_stored)
        settle(e)
    assert len(files_of(tmp_path)) == 11
    with engine(tensor_parallel_size=2, **options) as e:
        (loaded,) = hits(e, [ones], 1408)
        e.ask(twos)
        (hit,) = hits(e, [twos], 1408)
        e.forget_device()
        assert hits(e, [twos], 1408) == [hit], "its own, from host memory"
    assert len(files_of(tmp_path)) == 22
    assert len({p.relative_to(tmp_path).parts[0] for p in files_of(tmp_path)}) == 1
    with engine(**options) as e:
        (other,) = hits(e, [twos], 1408)
    for answer, expected in zip((loaded, hit, other), (single[0], *single[1:] * 2), strict=True):
        assert answer.tokens == expected.tokens
        assert answer.distance(expected) < 1e-4


def test_mla_comes_back_byte_for_byte(engine, prompt, tmp_path):
    """MLA on the CPU computes differently in each batch: a load is compared with another load."""
    config = offload(secondary_tiers=[disk(tmp_path)])
    options = {"num_gpu_blocks_override": 1024, "max_model_len": 2048}
    asked = prompt(600)
    with engine("deepseek_v2", kv_transfer_config=config, **options) as e:
        e.ask(asked)
        settle(e)
        e.forget_device()
        loaded = hits(e, [asked], 592)
    with engine("deepseek_v2", kv_transfer_config=config, **options) as e:
        assert hits(e, [asked], 592) == loaded


@pytest.mark.timeout(300)
def test_data_parallel_replicas_share_tiers_and_nothing_else(checkpoint, prompt, tmp_path):
    """What one replica stored, the other one reads from disk; each has host memory of its own."""
    root, asked = tmp_path / "root", prompt(1000)
    config = offload(secondary_tiers=[disk(root)])
    options = ("--data-parallel-size", "2")
    with serving(checkpoint("llama"), config, tmp_path / "log", *options) as server:
        assert len(server.regions) == 2
        first, cached = server.ask(asked, replica=0)
        assert cached == 0
        written = {"engine": "0", "tier": "1:fs"}
        size = 7 * CHUNK_BYTES["llama"]
        server.wait_for(size, "vllm:kv_offload_tiering_write_bytes_total", **written)
        assert server.ask(asked, replica=1) == (first, 896)
        read = {"engine": "1", "tier": "1:fs"}
        server.wait_for(size, "vllm:kv_offload_tiering_read_bytes_total", **read)
        assert len(files_of(root)) == 7
