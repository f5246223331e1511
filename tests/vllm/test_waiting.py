"""While chunks are on their way, the request holds no device blocks and others are served."""

import sys

import pytest

from tests.vllm.offloading import manager_of, offload, scheduler_of, settle

TOKENS = 2000

SLOW_READER = '''
import threading

from kvtiers.tiers.base import Capabilities

gate = threading.Event()


class SlowReader:
    """A store in a dict whose reads wait for the gate."""
    medium = "STORAGE"

    def __init__(self, context):
        self.capabilities = Capabilities(persistent=False, shared=False)
        self.held = {}

    def contains(self, keys):
        return [k in self.held for k in keys]

    def write(self, items):
        self.held.update((i.key, bytes(i.view)) for i in items)
        return [None] * len(items)

    def read(self, items):
        gate.wait(60)
        for item in items:
            item.view[:] = self.held[item.key]
        return [None] * len(items)

    def delete(self, keys):
        for key in keys:
            self.held.pop(key, None)

    def scan(self):
        return ()

    def touch(self, keys):
        pass

    def close(self):
        gate.set()
'''


@pytest.mark.timeout(90)
def test_a_waiting_request_holds_no_device_blocks_and_does_not_block_others(
    engine, prompt, tmp_path, monkeypatch
):
    from vllm import SamplingParams

    (tmp_path / "slow_reader.py").write_text(SLOW_READER)
    monkeypatch.syspath_prepend(str(tmp_path))
    tier = {"type": "SlowReader", "module_path": "slow_reader"}
    with engine(kv_transfer_config=offload(secondary_tiers=[tier])) as e:
        (_,) = e.ask(prompt(TOKENS))
        (expected,) = e.ask(prompt(TOKENS))
        settle(e)
        gate = sys.modules["slow_reader"].gate
        e.forget_device(connector=True)
        scheduler, core = scheduler_of(e), manager_of(e).core
        llm_engine = e.llm.llm_engine
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        llm_engine.add_request("waits", {"prompt_token_ids": prompt(TOKENS)}, params)
        e.steps(lambda: core.use.filling == 15)
        assert scheduler.kv_cache_manager.usage == 0
        llm_engine.add_request("other", {"prompt_token_ids": prompt(300, seed=9)}, params)
        e.steps(lambda: len(scheduler.requests) == 1)
        assert core.use.filling == 15, "the other one was served meanwhile"
        gate.set()
        e.steps(lambda: not llm_engine.has_unfinished_requests())
        settle(e)
        assert e.metrics()["vllm:kv_offload_load_bytes"] == 15 * 512 * 1024
        e.forget_device()
        assert e.ask(prompt(TOKENS)) == [expected]
    sys.modules.pop("slow_reader", None)
