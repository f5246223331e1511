"""KV cache leaves a real engine for host memory and disk, and comes back exactly.

The oracle of a cached answer is a device-cache hit of the same length: a cold prefill computes with
other shapes, and in bf16 that shows.
"""

import pytest
import torch

from kvtiers.chunks import PAGE_BYTES, round_up
from tests.vllm.offloading import (
    chunks_in,
    disk,
    files_of,
    manager_of,
    offload,
    scheduler_of,
    settle,
    shared_memory,
)

TOKENS = 2000
CACHED = 1920
CHUNKS = 15


LAYOUTS = pytest.mark.parametrize("layout", ["files", "log"])


def oracle(engine, prompt):
    """The answer with the prompt in the device cache; everything is stored afterwards."""
    engine.ask(prompt)
    settle(engine)
    (answer,) = engine.ask(prompt)
    assert engine.cached == [CACHED]
    settle(engine)
    return answer


def flood(engine, prompt, rounds=3):
    """Push everything else out of host memory."""
    for seed in range(100, 100 + rounds):
        engine.ask(prompt(TOKENS, seed=seed))
        settle(engine)


def test_host_hit(engine, prompt):
    before = shared_memory()
    with engine(kv_transfer_config=offload()) as e:
        assert shared_memory() == before, "the name of a live engine's memory must be gone"
        expected = oracle(e, prompt(TOKENS))
        assert "vllm:kv_offload_load_bytes" not in e.metrics(), "a device hit needs no load"
        e.forget_device()
        assert e.ask(prompt(TOKENS)) == [expected]
        assert e.cached == [CACHED]
        settle(e)
        metrics = e.metrics()
        assert metrics["vllm:kv_offload_load_bytes"] == CHUNKS * 512 * 1024
        assert metrics["vllm:external_prefix_cache_hits"] == CACHED


@LAYOUTS
def test_disk_hit_after_host_eviction(engine, prompt, tmp_path, layout):
    config = offload(10e6, secondary_tiers=[disk(tmp_path, layout=layout)])
    with engine(kv_transfer_config=config) as e:
        expected = oracle(e, prompt(TOKENS))
        flood(e, prompt)
        e.forget_device()
        assert e.ask(prompt(TOKENS)) == [expected]
        assert e.cached == [CACHED]
        settle(e)
        assert e.metrics()["vllm:kv_offload_tiering_read_bytes"] == CHUNKS * 512 * 1024


@LAYOUTS
def test_disk_hit_after_a_restart(engine, prompt, tmp_path, layout):
    config = offload(secondary_tiers=[disk(tmp_path, layout=layout)])
    with engine(kv_transfer_config=config) as e:
        expected = oracle(e, prompt(TOKENS))
    assert chunks_in(tmp_path) == CHUNKS
    for _ in range(2):
        with engine(kv_transfer_config=config) as e:
            assert e.ask(prompt(TOKENS)) == [expected]
            assert e.cached == [CACHED]
            settle(e)
            assert chunks_in(tmp_path) == CHUNKS


def test_a_part_of_the_prefix_is_loaded_and_the_rest_computed(engine, prompt):
    with engine(kv_transfer_config=offload()) as e:
        long = prompt(TOKENS)
        short = long[:1000]
        e.ask(short)
        (expected,) = e.ask(long)
        assert e.cached == [7 * 128], "the device cache holds the beginning"
        settle(e)
        e.forget_device(connector=True)
        e.ask(short)
        settle(e)
        e.forget_device()
        assert e.ask(long) == [expected]
        assert e.cached == [7 * 128]


@pytest.mark.parametrize(("blocks", "cached"), [(1, 1920), (4, 1536)])
def test_blocks_per_chunk(engine, prompt, tmp_path, blocks, cached):
    config = offload(blocks_per_chunk=blocks, secondary_tiers=[disk(tmp_path)])
    asked = prompt(TOKENS)
    with engine(kv_transfer_config=config) as e:
        e.ask(asked)
        settle(e)
        e.forget_device(connector=True)
        e.ask(asked[: cached + 1])
        (expected,) = e.ask(asked[: cached + 1])
        assert e.cached == [cached]
        settle(e)
        e.forget_device()
        assert e.ask(asked[: cached + 1]) == [expected]
        assert e.cached == [cached]
    with engine(kv_transfer_config=config) as e:
        assert e.ask(asked[: cached + 1]) == [expected]
        assert e.cached == [cached]


def test_block_size_in_tokens_is_understood_as_upstream_does(engine, prompt):
    with engine(kv_transfer_config=offload(block_size=256)) as e:
        e.ask(prompt(TOKENS))
        settle(e)
        assert manager_of(e).core.use.resident == 7


def test_gemma3_with_chunks_wider_than_the_window(engine, prompt):
    asked = prompt(1500)
    with engine("gemma3", kv_transfer_config=offload(blocks_per_chunk=4)) as e:
        e.ask(asked)
        settle(e)
        e.forget_device()
        e.ask(asked)
        loaded = e.cached[0]
        settle(e)
        assert loaded > 0
        e.forget_device(connector=True)
        e.ask(asked[: loaded + 1])
        (expected,) = e.ask(asked[: loaded + 1])
        settle(e)
        e.forget_device()
        assert e.ask(asked[: loaded + 1]) == [expected]


def recurrent_states(root) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Convolution and state in each chunk of a gated delta-net, of the checkpoint "qwen3_next"."""
    q_k_v, state = 2 * 3 * (2 * 128 + 256), 4 * 4 * 64 * 64
    found = {}
    for path in files_of(root):
        payload = torch.frombuffer(bytearray(path.read_bytes()[PAGE_BYTES:]), dtype=torch.uint8)
        if len(payload) == round_up(q_k_v + state):
            both = payload[: q_k_v + state].split([q_k_v, state])
            kinds = (torch.bfloat16, torch.float32)
            parts = [p.view(kind).float() for p, kind in zip(both, kinds, strict=True)]
            found[path.name] = (parts[0], parts[1])
    return found


def test_recurrent_state_goes_from_one_rank_to_two_and_back(engine, prompt, tmp_path):
    """It is cut by heads. In bfloat16, the only type that vLLM's has on the CPU: TP rounds.

    So answers tell little, and what each topology stores for itself is compared: it must be nearly
    the same, under the same name.
    """
    asked, few = prompt(TOKENS), {"max_tokens": 4}
    roots = {ranks: tmp_path / str(ranks) for ranks in (1, 2)}
    for ranks, root in roots.items():
        config = offload(secondary_tiers=[disk(root)])
        with engine("qwen3_next", tensor_parallel_size=ranks, kv_transfer_config=config) as e:
            e.ask(asked, **few)
            settle(e)
    one, two = (recurrent_states(root) for root in roots.values())
    assert len(one) == len(two) == 3
    for name in one:
        for mine, theirs in zip(one[name], two[name], strict=True):
            assert torch.corrcoef(torch.stack([mine, theirs]))[0, 1] > 0.99
    for ranks, root in zip((2, 1), roots.values(), strict=True):
        config = offload(secondary_tiers=[disk(root)])
        stored = files_of(root)
        with engine("qwen3_next", tensor_parallel_size=ranks, kv_transfer_config=config) as e:
            e.ask(asked, **few)
            assert e.cached == [1792]
            settle(e)
        assert files_of(root) == stored


def test_per_request_limits_and_tier_filter(engine, prompt, tmp_path):
    def ask(e, asked, **params):
        return e.ask(asked, extra_args={"kv_transfer_params": params})

    config = offload(10e6, secondary_tiers=[disk(tmp_path)])
    with engine(kv_transfer_config=config) as e:
        ask(e, prompt(TOKENS, seed=1), max_offload_tokens=256)
        settle(e)
        assert manager_of(e).core.use.resident == 2
        e.ask(prompt(TOKENS, seed=2))
        settle(e)
        e.forget_device()
        ask(e, prompt(TOKENS, seed=2), max_load_tokens=0)
        assert e.cached == [0]
        settle(e)
        e.forget_device()
        ask(e, prompt(TOKENS, seed=2), max_load_tokens=512)
        assert e.cached == [512]
        settle(e)
        flood(e, prompt)
        e.forget_device()
        ask(e, prompt(TOKENS, seed=2), kv_load_tiers=[])
        assert e.cached == [0]
        settle(e)
        flood(e, prompt)
        e.forget_device()
        ask(e, prompt(TOKENS, seed=2), kv_load_tiers=[{"medium": "STORAGE"}])
        assert e.cached == [CACHED]


def test_decoded_tokens_are_stored_when_asked_for(engine, prompt):
    with engine(kv_transfer_config=offload(offload_prompt_only=False)) as e:
        (answer,) = e.ask(prompt(200), max_tokens=200)
        settle(e)
        assert manager_of(e).core.use.resident == 3
        longer = prompt(200) + list(answer.tokens)
        e.forget_device()
        e.ask(longer)
        assert e.cached == [384]


def test_reset_with_the_connector_forgets_host_memory_but_not_disk(engine, prompt, tmp_path):
    config = offload(secondary_tiers=[disk(tmp_path)])
    with engine(kv_transfer_config=config) as e:
        expected = oracle(e, prompt(TOKENS))
        e.forget_device(connector=True)
        assert manager_of(e).core.use.resident == 0
        assert e.ask(prompt(TOKENS)) == [expected]
        assert e.cached == [CACHED]
        settle(e)


def test_the_spec_alone_under_vllms_own_connector(engine, prompt, tmp_path):
    extra = {"spec_name": "KVTiersSpec", "spec_module_path": "kvtiers.engines.vllm"}
    config = offload(secondary_tiers=[disk(tmp_path)], model_digest="tiny", **extra)
    config |= {"kv_connector": "OffloadingConnector", "kv_connector_module_path": None}
    with engine(kv_transfer_config=config) as e:
        expected = oracle(e, prompt(TOKENS))
        e.forget_device()
        assert e.ask(prompt(TOKENS)) == [expected]
        assert e.cached == [CACHED]
        settle(e)


def test_arc_and_a_policy_of_ones_own(engine, prompt, tmp_path, monkeypatch):
    (tmp_path / "mypolicy.py").write_text(
        "from kvtiers.host.policies.lru import LRUPolicy\nclass Stingy(LRUPolicy):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for extra in (
        {"eviction_policy": "arc"},
        {"eviction_policy": "Stingy", "cache_policy_module_path": "mypolicy"},
    ):
        with engine(kv_transfer_config=offload(**extra)) as e:
            expected = oracle(e, prompt(TOKENS))
            e.forget_device()
            assert e.ask(prompt(TOKENS)) == [expected]


def test_a_batch_of_requests_with_shared_prefixes(engine, prompt, tmp_path):
    """Mixed batches, in float32: tokens equal those of a run without any cache."""
    config = offload(10e6, secondary_tiers=[disk(tmp_path)])
    shared = prompt(700)
    asked = [shared + prompt(300 + 100 * i, seed=i) for i in range(6)]
    with engine(dtype="float32", enable_prefix_caching=False) as e:
        expected = [e.ask(a)[0].tokens for a in asked]
    with engine(dtype="float32", kv_transfer_config=config) as e:
        for _ in range(3):
            e.forget_device()
            assert [a.tokens for a in e.ask(*asked)] == expected
            settle(e)
        assert sum(e.cached) > 0


def test_the_engine_is_set_to_recompute_failed_loads_and_needs_no_flag_for_hybrid_models(engine):
    from vllm.distributed.kv_transfer.kv_connector.v1 import SupportsHMA

    from kvtiers.engines.vllm import KVTiersConnector

    assert issubclass(KVTiersConnector, SupportsHMA)
    with engine("gemma3", kv_transfer_config=offload()) as e:
        assert scheduler_of(e).recompute_kv_load_failures


def test_keys_of_upstream_without_effect_are_said_once(engine, caplog):
    extra = {"canonical_layout": True, "spec_name": "TieringOffloadingSpec"}
    with engine(kv_transfer_config=offload(**extra)):
        said = [r.getMessage() for r in caplog.records if "has no effect" in r.getMessage()]
    assert len([m for m in said if m.startswith("canonical_layout ")]) == 1
    assert len([m for m in said if m.startswith("spec_name ")]) == 1


@pytest.mark.parametrize("connector", [False, True])
def test_running_requests_survive_a_reset_of_the_prefix_cache(engine, prompt, connector):
    """VLLM preempts them, and a load resumes them in the same step. float32: other batches."""
    from vllm import SamplingParams

    asked = prompt(1000)
    with engine(dtype="float32", kv_transfer_config=offload()) as e:
        (expected,) = e.ask(asked, max_tokens=40)
        settle(e)
        e.forget_device(connector=True)
        llm_engine = e.llm.llm_engine
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
        llm_engine.add_request("runs", {"prompt_token_ids": asked}, params)
        for _ in range(12):
            llm_engine.step()
        llm_engine.reset_prefix_cache(reset_running_requests=True, reset_connector=connector)
        outputs = []
        for _ in range(2000):
            outputs += [o for o in llm_engine.step() if o.finished]
            if outputs:
                break
        assert tuple(outputs[0].outputs[0].token_ids) == expected.tokens
        settle(e)
