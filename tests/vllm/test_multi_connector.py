"""As a child of vLLM's MultiConnector, with another connector beside us.

The device has nine blocks: one prompt's, and the null block.
"""

import logging
import threading

import pytest

from kvtiers.device.copier import Direction
from kvtiers.device.cpu import CpuCopier
from kvtiers.engines.vllm import KVTiersConnector
from tests.vllm import neighbour
from tests.vllm.neighbour import Neighbour
from tests.vllm.offloading import CHUNK_BYTES, disk, files_of, offload, scheduler_of

pytestmark = pytest.mark.timeout(90)

TOKENS = 1000
CHUNKS = 7
CACHED = CHUNKS * 128
OPTIONS = {
    "num_gpu_blocks_override": 9,
    "max_model_len": 1024,
    "kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"},
}


def beside(*connectors):
    """MultiConnector over these, in their order."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("multi-connector")


@pytest.fixture(scope="module")
def running(engine, folder):
    """An engine with the neighbour before us, and with the statistics log of a server."""
    logger = logging.getLogger("vllm")
    before = logger.level
    logger.setLevel(logging.INFO)
    config = beside(neighbour.ENTRY, offload(secondary_tiers=[disk(folder)]))
    try:
        with engine(kv_transfer_config=config, **OPTIONS) as e:
            yield e
    finally:
        logger.setLevel(before)


def settle(engine):
    connector = scheduler_of(engine).connector
    engine.steps(lambda: not connector.has_pending_push_work())
    (ours,) = (c for c in connector.sub_connectors if isinstance(c, KVTiersConnector))
    scheduler = ours.connector_scheduler
    assert not scheduler.manager.inert
    scheduler.check()
    use = scheduler.manager.core.use
    assert (use.filling, use.pinned, use.orphaned) == (0, 0, 0), f"not at rest: {scheduler!r}"


def oracle(engine, asked):
    """The answer from the device cache; everything is stored afterwards."""
    engine.ask(asked)
    (answer,) = engine.ask(asked)
    assert engine.cached == [CACHED]
    settle(engine)
    return answer


def given(engine, asked, how, tokens):
    """The answer with the beginning of the prompt given by the neighbour."""
    params = {"neighbour": how, "neighbour_tokens": tokens}
    (answer,) = engine.ask(asked, extra_args={"kv_transfer_params": params})
    return answer


def loaded(engine):
    return engine.metrics().get("vllm:kv_offload_load_bytes", 0)


def test_beside_a_connector_of_vllm(engine, prompt, tmp_path):
    """Before the fixture starts the engine of the other tests: there can be one at a time."""
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    options = OPTIONS | {"disable_hybrid_kv_cache_manager": True}
    asked = prompt(TOKENS)
    with engine(kv_transfer_config=beside(offload(), example), **options) as e:
        expected = oracle(e, asked)
        assert list(tmp_path.iterdir()), "it keeps what it computes too"
        e.forget_device()
        assert e.ask(asked) == [expected]
        assert e.cached == [CACHED]
        settle(e)
        assert loaded(e) == CHUNKS * CHUNK_BYTES["llama"], "the first one that has it serves"


def test_hits_events_and_statistics(running, prompt, monkeypatch):
    seen = []
    connector = scheduler_of(running).connector
    take = connector.take_events
    monkeypatch.setattr(connector, "take_events", lambda: seen.extend(take()) or ())
    before = loaded(running)
    asked = prompt(TOKENS, seed=1)
    expected = oracle(running, asked)
    running.forget_device()
    assert running.ask(asked) == [expected]
    assert running.cached == [CACHED]
    settle(running)
    assert loaded(running) - before == CHUNKS * CHUNK_BYTES["llama"]
    assert {(type(event).__name__, event.medium) for event in seen} == {("BlockStored", "CPU")}
    assert sum(len(event.block_hashes) for event in seen) == CHUNKS


def test_what_a_neighbour_serves_is_not_ours(running, prompt):
    asked = prompt(TOKENS, seed=2)
    expected = oracle(running, asked)
    running.forget_device()
    before = loaded(running)
    assert given(running, asked, "slow", 512) != expected, "the neighbour gives other bytes"
    assert running.cached == [512]
    settle(running)
    assert loaded(running) == before


def test_blocks_that_a_neighbour_fills_are_copied_before(running, prompt, monkeypatch):
    """A finished request's blocks go to one that the neighbour serves, while we copy them."""
    asked = prompt(TOKENS, seed=3)
    gate = threading.Event()
    move, wait = CpuCopier._move, CpuCopier.wait

    def copy_when_allowed(copier, job):
        if job.direction is Direction.STORE:
            assert gate.wait(30), "neither waited for nor overtaken"
        return move(copier, job)

    def awaited(copier, job_ids):
        gate.set()
        return wait(copier, job_ids)

    monkeypatch.setattr(CpuCopier, "_move", copy_when_allowed)
    monkeypatch.setattr(CpuCopier, "wait", awaited)
    monkeypatch.setattr(Neighbour, "on_write", staticmethod(gate.set))
    running.ask(asked, max_tokens=1)
    given(running, prompt(TOKENS, seed=4), "slow", CACHED)
    assert gate.is_set()
    settle(running)
    running.forget_device()
    (loaded_from_host,) = running.ask(asked)
    assert running.cached == [CACHED]
    settle(running)
    running.forget_device()
    running.ask(asked, extra_args={"kv_transfer_params": {"max_load_tokens": 0}})
    assert running.cached == [0]
    assert running.ask(asked) == [loaded_from_host]
    settle(running)


def test_what_a_neighbour_failed_to_load_is_not_kept(running, prompt, folder):
    """The request runs in the step of such a load: its chunks are offered before it fails."""
    asked = prompt(TOKENS, seed=5)
    before = files_of(folder)
    answer = given(running, asked, "failing", 512)
    settle(running)
    assert files_of(folder) == before, "what rests on a failed load was kept"
    assert running.metrics()["vllm:kvtiers_chunks_failed"] == CHUNKS
    running.forget_device()
    assert running.ask(asked) == [answer]
    assert running.cached == [0]
    settle(running)
    assert len(files_of(folder)) == len(before) + CHUNKS
