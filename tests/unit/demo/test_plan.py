import json
from pathlib import Path

import pytest

from kvtiers.demo.plan import (
    BLOCK_TOKENS,
    LARGE_HOST_CHUNKS,
    MAX_MODEL_LEN,
    SMALL_DEVICE_BLOCKS,
    SMALL_HOST_CHUNKS,
    Break,
    Mode,
    ModelGeometry,
    connector,
    disk_tier,
    geometry_from_config,
    server_arguments,
    server_environment,
    server_plan,
)

SMOL = ModelGeometry(layers=30, kv_heads=3, head_size=64)
ROOT = Path("/somewhere/disk")
DISK = disk_tier(ROOT)
# Chunks that the recorded conversations reach in the end, as measured with the real tokenizer.
ONE, BOTH = 20, 36


def test_geometry_of_the_demo_model():
    config = {
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 576,
    }
    assert geometry_from_config(config) == SMOL
    assert SMOL.chunk_bytes == 23_040 * BLOCK_TOKENS


def test_explicit_head_size_wins_and_heads_default_to_all():
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "head_dim": 32}
    assert geometry_from_config(config) == ModelGeometry(layers=2, kv_heads=4, head_size=32)


@pytest.mark.parametrize("mode", [Mode.NONE, Mode.REFERENCE])
def test_passes_without_offload_name_no_connector(mode):
    plan = server_plan(mode, SMOL, DISK)
    assert plan.offload is None
    assert "--kv-transfer-config" not in server_arguments(plan, Path("m"), 1)


def test_device_cache_holds_one_conversation_and_the_reference_holds_both():
    assert ONE < SMALL_DEVICE_BLOCKS < 2 * ONE - 3
    assert SMALL_DEVICE_BLOCKS * BLOCK_TOKENS >= MAX_MODEL_LEN
    assert server_plan(Mode.REFERENCE, SMOL, DISK).device_blocks > BOTH
    for mode in (Mode.NONE, Mode.HOST, Mode.DISK):
        assert server_plan(mode, SMOL, DISK).device_blocks == SMALL_DEVICE_BLOCKS


def test_host_pass_is_the_json_of_the_readme():
    plan = server_plan(Mode.HOST, SMOL, DISK)
    assert plan.offload == {
        "kv_connector": "KVTiersConnector",
        "kv_connector_module_path": "kvtiers.engines.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": LARGE_HOST_CHUNKS * SMOL.chunk_bytes,
            "offload_prompt_only": False,
        },
    }
    assert LARGE_HOST_CHUNKS > BOTH


def test_disk_pass_has_a_host_tier_too_small_for_the_history():
    extra = server_plan(Mode.DISK, SMOL, DISK).offload["kv_connector_extra_config"]
    assert extra["secondary_tiers"] == [
        {"type": "fs", "root_dir": str(ROOT), "capacity_fraction": 0.5}
    ]
    assert ONE < extra["cpu_bytes_to_use"] // SMOL.chunk_bytes == SMALL_HOST_CHUNKS < BOTH


def test_broken_host_tier_has_room_for_one_chunk():
    extra = server_plan(Mode.HOST, SMOL, DISK, Break.HOST).offload["kv_connector_extra_config"]
    assert extra["cpu_bytes_to_use"] == SMOL.chunk_bytes


def test_breaking_the_disk_changes_no_configuration():
    for mode in Mode:
        assert server_plan(mode, SMOL, DISK, Break.DISK) == server_plan(mode, SMOL, DISK)


def test_connector_is_passed_as_one_json_argument():
    arguments = server_arguments(server_plan(Mode.DISK, SMOL, DISK), Path("some/model"), 4711)
    given = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    assert given == connector(SMALL_HOST_CHUNKS * SMOL.chunk_bytes, DISK)
    assert arguments[arguments.index("--port") + 1] == "4711"
    assert arguments[arguments.index("--host") + 1] == "127.0.0.1"
    assert arguments[arguments.index("--model") + 1] == "some/model"


def test_environment_keeps_what_is_there_and_forbids_fetching():
    environment = server_environment({"PATH": "/bin", "HF_HUB_OFFLINE": "0"}, cpus=2)
    assert environment["PATH"] == "/bin"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["TORCHDYNAMO_DISABLE"] == "1"


@pytest.mark.parametrize(("cpus", "threads"), [(1, "1"), (2, "1"), (4, "3"), (64, "8")])
def test_every_pass_computes_with_the_same_threads_and_leaves_one_cpu_free(cpus, threads):
    environment = server_environment({"OMP_NUM_THREADS": "99"}, cpus)
    assert environment["OMP_NUM_THREADS"] == threads
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
