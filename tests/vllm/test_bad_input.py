"""Bad input gets one sentence with the key and the remedy, before serving, and leaves nothing."""

import contextlib
import gc
import logging
import os
import shutil
import tempfile
import threading
from pathlib import Path

import pytest

from kvtiers.errors import ConfigError, KVTiersError
from tests.vllm.offloading import disk, offload
from tests.vllm.serving import Server


@pytest.fixture
def memory():
    """A folder of our own for host memory: other engines on this machine do not disturb."""
    folder = tempfile.mkdtemp(prefix="bad-input-", dir="/dev/shm")
    yield Path(folder)
    shutil.rmtree(folder)


@pytest.fixture
def said():
    """The lines of the ``kvtiers`` logger from WARNING up."""
    lines = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append((record.levelname, record.getMessage()))
    logger = logging.getLogger("kvtiers")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def left_behind():
    """What a refused start must not leave: threads, mappings, descriptors."""
    gc.collect()
    threads = {t.name for t in threading.enumerate()} - {"tqdm_monitor"}
    maps = Path("/proc/self/maps").read_text().splitlines()
    names = {line.split()[-1] for line in maps if "kvtiers-" in line}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names.add(os.readlink(f"/proc/self/fd/{fd}"))
    return threads, {n for n in names if "kvtiers-" in n}


def one_sentence(message):
    assert "\n" not in message
    assert message[-1] != "."
    assert ". " not in message, "more than one sentence"
    return message


@pytest.fixture
def refused(engine, memory, said, tmp_path_factory, monkeypatch):
    """``refused(config)``: the one sentence with which the engine does not start."""
    temporary = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def start(config, **options):
        config["kv_connector_extra_config"].setdefault("region_directory", str(memory))
        said.clear()
        before = left_behind()
        with pytest.raises(KVTiersError) as caught, engine(kv_transfer_config=config, **options):
            pass
        message = one_sentence(str(caught.value))
        assert said == [("ERROR", message)]
        assert isinstance(caught.value, ConfigError)
        del caught
        assert [now - then for now, then in zip(left_behind(), before, strict=True)] == [
            set(),
            set(),
        ]
        assert os.listdir(memory) == []
        assert list(temporary.glob("*kvtiers*")) == []
        return message

    return start


WRONG_VALUES = [
    ({"cpu_byte_to_use": 1}, ["'cpu_byte_to_use'", "did you mean 'cpu_bytes_to_use'?"]),
    ({"cpu_bytes_to_use": "64GB"}, ["cpu_bytes_to_use", "whole number of bytes", "not '64GB'"]),
    ({"cpu_bytes_to_use": None}, ["cpu_bytes_to_use is missing", "set it"]),
    ({"cpu_bytes_to_use": 1000}, ["cpu_bytes_to_use", "less than one chunk", "at least 524288"]),
    ({"cpu_bytes_to_use": 1 << 50}, ["cpu_bytes_to_use", "bytes free", "lower it", "--shm-size"]),
    ({"block_size": 100}, ["block_size", "multiple", "128 tokens", "use 128"]),
    ({"offload_prompt_only": "no"}, ["offload_prompt_only", "true or false", "not 'no'"]),
    ({"eviction_policy": "lur"}, ["eviction_policy 'lur'", "did you mean 'lru'?"]),
    (
        {"eviction_policy": "A", "cache_policy_module_path": "no.such"},
        ["cache_policy_module_path", "no.such", "cannot be imported", "install it"],
    ),
    (
        {"eviction_policy": "Nope", "cache_policy_module_path": "json"},
        ["eviction_policy", '"Nope"', "not a class", "json"],
    ),
    ({"secondary_tiers": {"type": "fs"}}, ["secondary_tiers", "a list of mappings"]),
    ({"region_directory": "/no/such"}, ["region_directory /no/such", "mount a tmpfs"]),
    ({"sync_load_budget_bytes": 1}, ["sync_load_budget_bytes", "must stay 0"]),
]


@pytest.mark.parametrize(("extra", "words"), WRONG_VALUES, ids=lambda v: next(iter(v)))
def test_a_wrong_value(refused, extra, words):
    message = refused(offload(**{"cpu_bytes_to_use": 64_000_000, **extra}))
    assert [w for w in words if w not in message] == []


WRONG_TIERS = [
    ({}, ["secondary_tiers[1]", "has no 'type'", "such as 'fs'"]),
    ({"type": "fss"}, ["secondary_tiers[1].type", "'fss'", "did you mean fs?"]),
    ({"type": "fs"}, ["secondary_tiers[1].root_dir", "is missing"]),
    ({"type": "fs", "root_dri": "/x"}, ["secondary_tiers[1].root_dri", "did you mean root_dir?"]),
    ({"type": "fs", "root_dir": 7}, ["secondary_tiers[1].root_dir", "7", "a string"]),
    ({"type": "Mine", "module_path": "no.such"}, ["secondary_tiers[1].module_path", "no.such"]),
    ({"type": "Nope", "module_path": "json"}, ["secondary_tiers[1].type", "json has no class"]),
    ({"type": "Mine", "module_path": 3}, ["secondary_tiers[1].module_path", "3"]),
]


@pytest.mark.parametrize(("tier", "words"), WRONG_TIERS, ids=str)
def test_a_wrong_tier_behind_a_good_one(refused, tmp_path, tier, words):
    """The good one has threads and a folder by then."""
    message = refused(offload(secondary_tiers=[disk(tmp_path / "good"), tier]))
    assert [w for w in words if w not in message] == []


def test_a_folder_that_cannot_be_used(refused, tmp_path):
    file = tmp_path / "file"
    file.write_text("not a folder")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "holiday.jpg").write_text("")
    for root, words in (
        (file, "a file is in the way: name a folder"),
        (file / "below", "a file is in the way: name a folder"),
        (foreign, "holds other things (holiday.jpg)"),
        (Path("/proc/kvtiers"), "kvtiers cannot write"),
    ):
        message = refused(offload(secondary_tiers=[disk(root)]))
        assert message.startswith(f"secondary_tiers[0].root_dir is {root}")
        assert words in message
    assert [p.name for p in foreign.iterdir()] == ["holiday.jpg"]


def test_a_manifest_that_disagrees(refused, engine, tmp_path):
    config = offload(secondary_tiers=[disk(tmp_path)])
    with engine(kv_transfer_config=config):
        (manifest,) = tmp_path.rglob("manifest.json")
    damaged = manifest.read_text().replace("bfloat16", "float64")
    manifest.write_text(damaged)
    message = refused(offload(secondary_tiers=[disk(tmp_path)]))
    assert message.startswith(f"secondary_tiers[0].root_dir holds {manifest}, which disagrees")
    assert f"move the folder {manifest.parent} away" in message
    assert manifest.read_text() == damaged


def test_more_memory_than_the_machine_has(refused, monkeypatch):
    import kvtiers.engines.vllm.spec as spec
    from kvtiers.host.region import check_capacity

    def little_memory(*args, **kwargs):
        return check_capacity(*args, **kwargs, memory=lambda: 1_000_000)

    monkeypatch.setattr(spec, "check_capacity", little_memory)
    message = refused(offload())
    assert "cpu_bytes_to_use" in message
    assert "this machine has 1000000 bytes of memory available: lower it" in message


def test_block_size_where_groups_differ_in_blocks(checkpoint, said):
    from kvtiers.config import parse_config
    from kvtiers.engines.vllm.connector import _check_span

    settings = parse_config({"cpu_bytes_to_use": 1, "block_size": 256})
    with pytest.raises(ConfigError, match="blocks of 128 and 256 tokens; set blocks_per_chunk"):
        _check_span(settings, {128, 256})


def test_stages_are_refused_before_a_model_is_loaded_where_we_have_no_copier(checkpoint, said):
    from vllm.engine.arg_utils import EngineArgs

    from kvtiers.engines.vllm import KVTiersConnector

    args = EngineArgs(
        model=str(checkpoint("llama")),
        skip_tokenizer_init=True,
        pipeline_parallel_size=2,
        distributed_executor_backend="mp",
        kv_transfer_config=offload(),
    )
    config = args.create_engine_config()
    KVTiersConnector.get_required_kvcache_layout(config)
    config.device_config.device_type = "xpu"
    with pytest.raises(ConfigError) as caught:
        KVTiersConnector.get_required_kvcache_layout(config)
    message = one_sentence(str(caught.value))
    assert "pipeline_parallel_size is 2, but under vLLM's copy worker for xpu" in message
    assert "use tensor_parallel_size instead" in message
    assert said == [("ERROR", message)]


def test_settings_are_refused_where_vllm_first_asks_for_them(said):
    """With CUDA graphs on: in the API server, before any process is started."""
    from kvtiers.engines.vllm import KVTiersConnector

    assert KVTiersConnector.requires_piecewise_for_cudagraph({"cpu_bytes_to_use": 1}) is False
    with pytest.raises(ConfigError, match="did you mean 'cpu_bytes_to_use'") as caught:
        KVTiersConnector.requires_piecewise_for_cudagraph({"cpu_bytes": 1})
    assert said == [("ERROR", str(caught.value))]


def test_the_spec_alone_says_it_too(refused):
    config = offload(spec_name="KVTiersSpec", spec_module_path="kvtiers.engines.vllm")
    config |= {"kv_connector": "OffloadingConnector", "kv_connector_module_path": None}
    config["kv_connector_extra_config"]["store_treshold"] = 2
    assert "did you mean 'store_threshold'?" in refused(config)


def test_the_server_ends_with_the_sentence_in_its_log(checkpoint, memory, tmp_path):
    file = tmp_path / "file"
    file.write_text("not a folder")
    config = offload(secondary_tiers=[disk(file)], region_directory=str(memory))
    server = Server(checkpoint("llama"), config, tmp_path / "log")
    try:
        assert server.process.wait(200) != 0
    finally:
        server.stop()
    lines = server.log.read_text().splitlines()
    sentence = f"secondary_tiers[0].root_dir is {file}, where a file is in the way: name a folder"
    (line,) = [x for x in lines if x.endswith(sentence) and "ConfigError" not in x]
    assert "ERROR" in line
    assert "logs.py" in line, "the line of our logger"
    assert os.listdir(memory) == []
