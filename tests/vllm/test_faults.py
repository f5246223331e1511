"""Whatever fails, the engine lives and answers what it would have answered without us."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtiers.chunks import key_digest
from kvtiers.device.copier import Direction
from kvtiers.device.cpu import CpuCopier
from kvtiers.hashing import chunk_keys
from tests.vllm.offloading import disk, files_of, manager_of, offload, settle, shared_memory

pytestmark = pytest.mark.timeout(90)

TOKENS = 2000
CACHED = 1920


class FailingCopies:
    """Makes copies of one direction fail while it is on."""

    def __init__(self, monkeypatch, direction):
        self.on = False
        self.failed = 0
        move = CpuCopier._move

        def fail(copier, job):
            if self.on and job.direction is direction:
                self.failed += 1
                raise OSError("told to fail")
            return move(copier, job)

        monkeypatch.setattr(CpuCopier, "_move", fail)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_failed_load_is_computed_and_its_chunks_are_stored_again(
    engine, prompt, monkeypatch, kind
):
    copies = FailingCopies(monkeypatch, Direction.LOAD)
    asked = prompt(1500)
    with engine(kind, kv_transfer_config=offload()) as e:
        (cold,) = e.ask(asked)
        settle(e)
        (expected,) = e.ask(asked)
        cached = e.cached
        settle(e)
        e.forget_device()
        copies.on = True
        assert e.ask(asked) == [cold]
        assert copies.failed == 1
        settle(e)
        failed = e.metrics()["vllm:kvtiers_chunks_failed"]
        assert failed > 0, "a failed load is a metric"
        copies.on = False
        e.forget_device()
        assert e.ask(asked) == [expected]
        assert e.cached == cached
        settle(e)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_failed_store_is_a_miss_and_is_offered_again_later(engine, prompt, monkeypatch, kind):
    copies = FailingCopies(monkeypatch, Direction.STORE)
    asked = prompt(1500)
    with engine(kind, kv_transfer_config=offload()) as e:
        copies.on = True
        (cold,) = e.ask(asked)
        settle(e)
        assert copies.failed > 0
        assert e.metrics()["vllm:kvtiers_chunks_failed"] > 0, "a failed store is a metric"
        assert manager_of(e).core.use.resident == 0
        copies.on = False
        e.forget_device()
        assert e.ask(asked) == [cold]
        assert e.cached == [0]
        settle(e)
        (expected,) = e.ask(asked)
        cached = e.cached
        settle(e)
        e.forget_device()
        assert e.ask(asked) == [expected]
        assert e.cached == cached != [0]


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def test_a_flipped_byte_on_disk_is_a_miss_for_that_chunk_only(engine, prompt, tmp_path):
    config = offload(secondary_tiers=[disk(tmp_path)])
    asked = prompt(TOKENS)
    with engine(kv_transfer_config=config) as e:
        e.ask(asked)
        settle(e)
        e.forget_device(connector=True)
        e.ask(asked[: 5 * 128 + 1])
        (part,) = e.ask(asked[: 5 * 128 + 1])
        assert e.cached == [640]
        settle(e)
    sixth = chunk_keys(asked, group=0, tokens_per_chunk=128, tokens_per_hash=128)[5]
    victim = next(p for p in files_of(tmp_path) if key_digest(sixth).hex() in p.name)
    damage(victim)
    with engine(kv_transfer_config=config) as e:
        e.ask(asked)
        assert e.cached == [640]
        settle(e)
        assert e.metrics()["vllm:kvtiers_chunks_failed"] == 1
        e.forget_device()
        assert e.ask(asked[: 5 * 128 + 1]) == [part]
        settle(e)
        damage_repaired = next(p for p in files_of(tmp_path) if p.name == victim.name)
        assert damage_repaired.stat().st_size == victim.stat().st_size


def test_a_disk_that_fails_every_write_costs_nothing_but_hits(
    engine, prompt, tmp_path, monkeypatch
):
    config = offload(10e6, secondary_tiers=[disk(tmp_path)])
    asked = prompt(TOKENS)
    with engine(kv_transfer_config=config) as e:
        write = os.pwritev

        def full(*args):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "pwritev", full)
        (cold,) = e.ask(asked)
        e.steps(lambda: e.metrics().get("vllm:kv_offload_tiering_cascade_job_failures", 0) > 0)
        assert files_of(tmp_path) == []
        e.forget_device()
        e.ask(asked)
        assert e.cached == [CACHED]
        monkeypatch.setattr(os, "pwritev", write)
        e.forget_device(connector=True)
        assert e.ask(asked) == [cold]
        e.steps(lambda: len(files_of(tmp_path)) == 15)


BROKEN_TIER = '''
class Broken:
    """Says HIT to everything and fails, or raises, wherever it can."""
    name = "broken"
    medium = "STORAGE"
    locality = "LOCAL"

    def __init__(self, context, mode):
        self.mode, self.jobs = mode, []

    def lookup(self, keys, request):
        from kvtiers import Lookup
        if self.mode == "raise":
            raise RuntimeError("lookup")
        return [Lookup.RETRY if self.mode == "retry" else Lookup.HIT for _ in keys]

    def submit_store(self, job):
        if self.mode == "raise":
            raise RuntimeError("submit_store")
        return False

    def submit_load(self, job):
        self.jobs.append(job)
        return True

    def get_finished_jobs(self):
        from kvtiers import Kind, KVTiersError
        from kvtiers.tiers.base import JobOutcome
        if self.mode == "silent":
            return []
        jobs, self.jobs = self.jobs, []
        failed = KVTiersError("broken on purpose", kind=Kind.IO)
        return [JobOutcome(j.id, (), dict.fromkeys(j.keys, failed)) for j in jobs]

    def touch(self, keys):
        raise RuntimeError("touch")

    def drain_jobs(self, deadline_s):
        return True

    def shutdown(self, deadline_s):
        raise RuntimeError("shutdown")
'''


@pytest.mark.parametrize("mode", ["fail", "raise", "silent", "retry"])
def test_a_tier_that_breaks_every_promise_costs_a_bounded_delay(
    engine, prompt, tmp_path, monkeypatch, mode
):
    (tmp_path / "broken_tier.py").write_text(BROKEN_TIER)
    monkeypatch.syspath_prepend(str(tmp_path))
    tier = {"type": "Broken", "module_path": "broken_tier", "mode": mode}
    config = offload(secondary_tiers=[tier], promote_deadline_s=0.5)
    with engine(kv_transfer_config=config) as e:
        e.ask(prompt(TOKENS))
        assert e.cached == [0]
        assert not manager_of(e).inert
        if mode != "silent":
            settle(e)
            (device,) = e.ask(prompt(TOKENS))
            settle(e)
            e.forget_device()
            assert e.ask(prompt(TOKENS)) == [device]
            assert e.cached == [CACHED]
    sys.modules.pop("broken_tier", None)


def test_a_bug_of_ours_switches_us_off_and_the_engine_goes_on(engine, prompt, monkeypatch):
    with engine(kv_transfer_config=offload()) as e:
        (cold,) = e.ask(prompt(TOKENS))
        settle(e)
        manager = manager_of(e)
        monkeypatch.setattr(manager.core, "lookup", lambda key, request: 1 / 0)
        e.forget_device()
        assert e.ask(prompt(TOKENS)) == [cold]
        assert manager.inert
        assert e.ask(prompt(TOKENS, seed=2))[0].tokens


def test_a_host_tier_of_one_chunk(engine, prompt):
    with engine(kv_transfer_config=offload(512 * 1024)) as e:
        e.ask(prompt(TOKENS))
        settle(e)
        assert manager_of(e).core.use.resident == 1
        e.forget_device()
        e.ask(prompt(TOKENS))
        assert e.cached == [128], "the chunk that is kept begins the prefix"
        settle(e)


def test_a_host_tier_of_one_chunk_above_a_disk(engine, prompt, tmp_path):
    """float32: what is not cached is computed in other shapes than in a cold run."""
    config = offload(1024 * 1024, secondary_tiers=[disk(tmp_path)])
    with engine(dtype="float32", kv_transfer_config=config) as e:
        (cold,) = e.ask(prompt(TOKENS))
        settle(e)
        for _ in range(3):
            e.forget_device()
            (answer,) = e.ask(prompt(TOKENS))
            assert answer.tokens == cold.tokens
            settle(e)


def test_preemption_under_a_tiny_device_cache(engine, prompt, tmp_path):
    """float32: preempted requests are computed in other batches."""
    asked = [prompt(500, seed=i) for i in range(4)]
    with engine(dtype="float32", enable_prefix_caching=False) as e:
        expected = [e.ask(a, max_tokens=150)[0].tokens for a in asked]
    options = {"dtype": "float32", "num_gpu_blocks_override": 14, "max_model_len": 1024}
    config = offload(secondary_tiers=[disk(tmp_path)], offload_prompt_only=False)
    with engine(kv_transfer_config=config, **options) as e:
        for _ in range(2):
            assert [a.tokens for a in e.ask(*asked, max_tokens=150)] == expected
            settle(e)
        assert e.metrics()["vllm:num_preemptions"] > 0


def test_abort_in_the_middle_of_stores_promotions_and_loads(engine, prompt, tmp_path):
    from vllm import SamplingParams

    config = offload(10e6, secondary_tiers=[disk(tmp_path)])
    with engine(dtype="float32", kv_transfer_config=config) as e:
        expected = [e.ask(prompt(TOKENS, seed=i))[0].tokens for i in range(3)]
        settle(e)
        llm_engine = e.llm.llm_engine
        params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)
        for steps in (1, 2, 3, 5, 8):
            e.forget_device()
            for i in range(3):
                request = {"prompt_token_ids": prompt(TOKENS, seed=i)}
                llm_engine.add_request(f"{steps}-{i}", request, params)
            for _ in range(steps):
                llm_engine.step()
            llm_engine.abort_request([f"{steps}-{i}" for i in range(3)])
            settle(e)
        e.forget_device()
        assert [e.ask(prompt(TOKENS, seed=i))[0].tokens for i in range(3)] == expected


KILLED = """
import sys
sys.path[:0] = {paths!r}
from pathlib import Path
import random
from tests.vllm import conftest, offloading
from tests.vllm.checkpoints import VOCAB

if __name__ == "__main__":
    config = offloading.offload(10e6, secondary_tiers=[offloading.disk(Path({root!r}))])
    with conftest.running(Path({model!r}), kv_transfer_config=config) as e:
        print("ready", flush=True)
        for seed in range(1000):
            e.ask(random.Random(seed).choices(range(3, VOCAB), k={tokens}))
            print("asked", seed, flush=True)
"""


def test_a_killed_engine_leaves_no_memory_and_no_torn_chunk(engine, checkpoint, prompt, tmp_path):
    root, before = tmp_path / "kv", set(shared_memory())
    script = tmp_path / "killed.py"
    script.write_text(
        KILLED.format(paths=sys.path, root=str(root), model=str(checkpoint("llama")), tokens=TOKENS)
    )
    child = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert child.stdout is not None
    for line in child.stdout:
        if line.strip() == "asked 3":
            break
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert set(shared_memory()) <= before
    with engine(kv_transfer_config=offload(secondary_tiers=[disk(root)])) as e:
        e.ask(prompt(TOKENS))
        settle(e)
        (expected,) = e.ask(prompt(TOKENS))
        e.forget_device(connector=True)
        assert e.ask(prompt(TOKENS)) == [expected]
        assert e.cached == [CACHED]
        assert "vllm:kvtiers_chunks_failed" not in e.metrics()


GATED_TIER = '''
import threading

from kvtiers.tiers.base import Capabilities

gate = threading.Event()


class Gated:
    """A store whose writes wait for the gate."""
    medium = "STORAGE"

    def __init__(self, context):
        self.capabilities = Capabilities(persistent=False, shared=False)
        self.held = set()

    def contains(self, keys):
        return [k in self.held for k in keys]

    def write(self, items):
        gate.wait(60)
        self.held.update(i.key for i in items)
        return [None] * len(items)

    def read(self, items):
        return [None] * len(items)

    def delete(self, keys):
        self.held.difference_update(keys)

    def scan(self):
        return ()

    def touch(self, keys):
        pass

    def close(self):
        gate.set()
'''


def test_chunks_declined_for_lack_of_room_are_stored_when_there_is_room(
    engine, prompt, tmp_path, monkeypatch
):
    """Ten of twenty slots are pinned by a stuck tier: a prompt of 15 chunks finds room for ten."""
    (tmp_path / "gated_tier.py").write_text(GATED_TIER)
    monkeypatch.syspath_prepend(str(tmp_path))
    tier = {"type": "Gated", "module_path": "gated_tier"}
    with engine(kv_transfer_config=offload(20 * 512 * 1024, secondary_tiers=[tier])) as e:
        from vllm import SamplingParams

        gate = sys.modules["gated_tier"].gate
        core = manager_of(e).core
        e.ask(prompt(TOKENS, seed=1))
        e.steps(lambda: core.use.pinned == 10)
        llm_engine = e.llm.llm_engine
        params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, detokenize=False)
        llm_engine.add_request("b", {"prompt_token_ids": prompt(TOKENS, seed=2)}, params)
        e.steps(lambda: e.metrics().get("vllm:kvtiers_chunks_declined", 0) >= 5)
        gate.set()
        e.steps(lambda: not llm_engine.has_unfinished_requests())
        settle(e)
        e.forget_device()
        e.ask(prompt(TOKENS, seed=2))
        assert e.cached == [CACHED], "no hole is left in the prefix"
    sys.modules.pop("gated_tier", None)
