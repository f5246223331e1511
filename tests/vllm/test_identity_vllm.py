"""The identity of a real VllmConfig: what is read there exists and has the values we expect."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file
from vllm.engine.arg_utils import EngineArgs

from kvtiers.engines.vllm.identity import GroupSpan, build_namespace, identity_from_vllm

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file({"model.norm.weight": torch.ones(64)}, folder / "model.safetensors")
    return folder


def identify(folder, **options):
    config = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, max_model_len=128, **options
    ).create_engine_config()
    return identity_from_vllm(config, tokens_per_hash=16, environ={})


def namespace_id(identity) -> str:
    return build_namespace(identity, [GroupSpan(0, "x", 16, 1)], {}, portable=True).id


def test_a_real_configuration(checkpoint, tmp_path) -> None:
    identity = identify(checkpoint)
    assert identity.warnings == ()
    assert identity.model.weights is None
    assert identity.model.dtype == identity.kv_dtype == "bfloat16"
    assert identity.model.rope["rope_parameters"]["rope_theta"] == 10_000.0
    assert identity.model.overrides == {}
    assert identity.model.quantization == {"method": None, "checkpoint": None, "engine": None}
    # vLLM's CPU platform sets this one for every model.
    assert set(identity.kv_settings) <= {"mamba_ssm_cache_dtype"}
    assert (identity.hash_algorithm, identity.hash_seed) == ("sha256", "vllm-none-hash")
    assert identity.topology["tp"] == identity.topology["world_size"] == 1

    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    assert namespace_id(identify(copy)) == namespace_id(identity)


def test_settings_of_a_real_engine_keep_it_apart(checkpoint) -> None:
    longer = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}}
    plain = identify(checkpoint)
    rope = identify(checkpoint, hf_overrides=longer)
    assert rope.model.rope["rope_parameters"]["rope_type"] == "linear"
    others = [
        rope,
        identify(checkpoint, dtype="float32"),
        identify(checkpoint, prefix_caching_hash_algo="sha256_cbor"),
        identify(checkpoint, load_format="dummy"),
    ]
    assert len({namespace_id(i) for i in (plain, *others)}) == 5
