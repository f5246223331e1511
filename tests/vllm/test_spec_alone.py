"""The spec under vLLM's own connector: a failure may end the engine, but never bend an answer."""

import logging

import pytest

from kvtiers.core.load import NO_SLOT
from kvtiers.core.manager import TieringManager
from kvtiers.device.copier import Direction
from kvtiers.device.cpu import CpuCopier
from kvtiers.errors import ConfigError
from tests.vllm.offloading import disk, files_of, manager_of, offload, settle

pytestmark = pytest.mark.timeout(90)

TOKENS = 1000
CACHED = 896


def alone(**extra):
    """The ``kv_transfer_config`` that names the spec and vLLM's own connector."""
    named = {"spec_name": "KVTiersSpec", "spec_module_path": "kvtiers.engines.vllm"}
    config = offload(**named, **extra)
    return config | {"kv_connector": "OffloadingConnector", "kv_connector_module_path": None}


@pytest.fixture
def said():
    """The lines of the ``kvtiers`` logger from INFO up."""
    lines = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("kvtiers")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.setLevel(level)
    logger.removeHandler(handler)


@pytest.fixture
def failing(monkeypatch):
    """``failing(direction)``: from now on copies of that direction fail, when all is moved."""
    move = CpuCopier._move

    def start(direction):
        def fail(copier, job):
            moved = move(copier, job)
            if job.direction is direction:
                raise OSError("told to fail")
            return moved

        monkeypatch.setattr(CpuCopier, "_move", fail)

    return start


def compute(e, asked):
    """Ask, and wait until what was computed is stored."""
    e.ask(asked)
    settle(e)


def stored(e, asked):
    """The answer with the prompt in the device cache; it is in host memory afterwards."""
    compute(e, asked)
    (expected,) = e.ask(asked)
    assert e.cached == [CACHED]
    settle(e)
    e.forget_device()
    return expected


def test_a_failed_load_ends_the_engine_instead_of_answering(engine, prompt, failing, said):
    asked = prompt(TOKENS)
    with engine(kv_transfer_config=alone()) as e:
        stored(e, asked)
        failing(Direction.LOAD)
        with pytest.raises(AssertionError):
            e.ask(asked)
    assert any("told to fail" in line for line in said)
    assert any("under KVTiersConnector" in line for line in said)


def test_a_failed_store_ends_the_engine_instead_of_counting(engine, prompt, failing):
    with engine(kv_transfer_config=alone()) as e:
        failing(Direction.STORE)
        with pytest.raises(AssertionError):
            compute(e, prompt(TOKENS))
        assert manager_of(e).core.use.resident == 0


def test_a_chunk_that_left_host_memory_is_not_loaded(engine, prompt, monkeypatch, said):
    """The manager says so with NO_SLOT, which is the last slot to whoever counts from the end."""
    asked = prompt(TOKENS)
    load = TieringManager.load

    def last_one_gone(core, keys, request):
        return [*load(core, keys, request)[:-1], NO_SLOT]

    with engine(kv_transfer_config=alone()) as e:
        stored(e, asked)
        monkeypatch.setattr(TieringManager, "load", last_one_gone)
        with pytest.raises(AssertionError):
            e.ask(asked)
    assert any("left host memory" in line for line in said)


def test_our_connector_computes_in_all_these_cases(engine, prompt, monkeypatch, failing):
    """The same faults, so that the tests above show what the mode changes and nothing else."""
    asked = prompt(TOKENS)
    with engine(kv_transfer_config=offload()) as e:
        (cold,) = e.ask(asked)
        settle(e)
        e.forget_device()
        failing(Direction.LOAD)
        assert e.ask(asked) == [cold]
        settle(e)


def test_a_tier_that_outlives_the_engine_needs_a_model_digest(engine, tmp_path, said):
    with (
        pytest.raises(ConfigError) as caught,
        engine(kv_transfer_config=alone(secondary_tiers=[disk(tmp_path)])),
    ):
        pass
    assert said == [str(caught.value)]
    assert files_of(tmp_path) == []


def test_what_one_digest_stored_another_does_not_find(engine, prompt, tmp_path, said):
    asked = prompt(TOKENS)
    config = {
        name: alone(secondary_tiers=[disk(tmp_path)], model_digest=name) for name in ("one", "two")
    }
    with engine(kv_transfer_config=config["one"]) as e:
        expected = stored(e, asked)
    for name, cached in (("two", 0), ("one", CACHED)):
        with engine(kv_transfer_config=config[name]) as e:
            (answer,) = e.ask(asked)
            assert e.cached == [cached]
            settle(e)
    assert answer == expected
    (manifest, other) = [p.read_text() for p in tmp_path.rglob("manifest.json")]
    assert "cpu-" in manifest
    assert "cpu-" in other


def test_the_start_up_line_says_what_it_cannot_tell(engine, said):
    """gemma3 has windows, which vLLM's own connector does not mention."""
    for config, words in ((alone(), "= at least "), (offload(), "= ")):
        said.clear()
        with engine("gemma3", kv_transfer_config=config):
            pass
        (line,) = [x for x in said if "host memory for" in x]
        assert words in line
    assert "at least" not in line
