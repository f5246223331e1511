"""Chunks of two sizes in a real engine: recurrent states beside attention, each in its slabs."""

from kvtiers.host.sized import SizedIndex
from tests.vllm.offloading import chunks_in, disk, manager_of, offload, settle

TOKENS = 1500
BLOCK = 256
ATTENTION, STATE = 128 * 1024, 68 * 1024
"""Bytes of a chunk of one block: one group of attention, three of states."""


def index_of(engine) -> SizedIndex:
    index = manager_of(engine).core._index
    index.check()
    return index


def oracle(engine, asked):
    """The answer with the prompt in the device cache; everything is stored afterwards."""
    engine.ask(asked)
    settle(engine)
    (answer,) = engine.ask(asked)
    settle(engine)
    return answer


def test_host_and_disk_hits_of_states_and_attention_are_exact(engine, prompt, tmp_path):
    config = offload(3e6, secondary_tiers=[disk(tmp_path)])
    asked = prompt(TOKENS)
    with engine("qwen3_next", kv_transfer_config=config) as e:
        index = index_of(e)
        assert isinstance(index, SizedIndex)
        assert index.num_slots == 21 * 34, "slabs of two states or one chunk of attention"
        expected = oracle(e, asked)
        e.forget_device()
        assert e.ask(asked) == [expected], "from host memory"
        settle(e)
        cached = e.cached[0]
        assert cached > TOKENS // 2
        for seed in range(100, 108):
            e.ask(prompt(TOKENS, seed=seed))
            settle(e)
        loads = e.metrics().get("vllm:kv_offload_tiering_read_bytes", 0)
        e.forget_device()
        assert e.ask(asked) == [expected], "from disk"
        assert e.cached == [cached]
        settle(e)
        assert e.metrics()["vllm:kv_offload_tiering_read_bytes"] > loads
        assert min(index_of(e)._free.owned()) >= 1, "both sizes have slabs"
    assert chunks_in(tmp_path)
    with engine("qwen3_next", kv_transfer_config=config) as e:
        assert e.ask(asked) == [expected], "after a restart"
        assert e.cached == [cached]
        settle(e)
        promoted = cached // BLOCK * ATTENTION + 3 * STATE
        assert e.metrics()["vllm:kv_offload_tiering_read_bytes"] == promoted, "of states the last"
