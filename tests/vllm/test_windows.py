"""Blocks that a sliding window gave back are another request's: they are never stored again."""

import numpy as np
import pytest

from kvtiers.chunks import PAGE_BYTES
from tests.vllm.offloading import disk, files_of, offload, settle

OPTIONS = {"dtype": "float32", "max_num_batched_tokens": 256, "max_model_len": 1408}


def chunks(root):
    """The bytes of every chunk on disk, by file name."""
    return {p.name: np.frombuffer(p.read_bytes()[PAGE_BYTES:], np.float32) for p in files_of(root)}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("event", ["reset", "finish"])
def test_blocks_reused_by_others_are_not_stored(engine, prompt, tmp_path, event):
    from vllm import SamplingParams

    asked = prompt(1024, seed=1)
    config = offload(secondary_tiers=[disk(tmp_path / "clean")])
    with engine("gemma3", kv_transfer_config=config, **OPTIONS) as e:
        e.ask(asked, max_tokens=4)
        settle(e)
        e.forget_device()
        (expected,) = e.ask(asked, max_tokens=4)
        cached = e.cached
        settle(e)
    config = offload(secondary_tiers=[disk(tmp_path / "busy")])
    options = {**OPTIONS, "num_gpu_blocks_override": 44}
    with engine("gemma3", kv_transfer_config=config, **options) as e:
        llm_engine = e.llm.llm_engine

        def add(name, ids, tokens):
            params = SamplingParams(
                temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
            )
            llm_engine.add_request(name, {"prompt_token_ids": ids}, params)

        add("long", asked, 380)
        for _ in range(304):
            llm_engine.step()
        for i in range(4):
            add(f"other{i}", prompt(1000, seed=10 + i), 2)
            for _ in range(8):
                llm_engine.step()
        if event == "reset":
            assert e.llm.reset_prefix_cache(reset_connector=True) in (True, False)
        e.steps(lambda: not llm_engine.has_unfinished_requests())
        settle(e)
        e.forget_device()
        (answer,) = e.ask(asked, max_tokens=4)
        if e.cached == cached:
            assert answer.distance(expected) < 1e-3
        assert answer.tokens == expected.tokens
        settle(e)
    clean, busy = chunks(tmp_path / "clean"), chunks(tmp_path / "busy")
    common = clean.keys() & busy.keys()
    assert common
    wrong = [n for n in common if not np.allclose(clean[n], busy[n], atol=1e-2)]
    assert wrong == []
