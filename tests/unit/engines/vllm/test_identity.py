import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from kvtiers.engines.vllm import namespace
from kvtiers.engines.vllm.identity import (
    GroupSpan,
    build_namespace,
    cpu_byte_format,
    identity_from_vllm,
)
from kvtiers.errors import Kind, KVTiersError

CERTIFICATE = {"format": "v1-hnd-packed", "page_bytes": [4096, 4096]}
GROUPS = (GroupSpan(0, "full_attention", 16, 1, None, ("layers.0", "layers.1")),)


class HFConfig(SimpleNamespace):
    def to_dict(self):
        return dict(vars(self))


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    save_file({"w": np.arange(64, dtype=np.float32)}, folder / "model.safetensors")
    return folder


def hf_config(**changes):
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    return HFConfig(**{"model_type": "llama", "rope_parameters": rope, **changes})


def model_config(folder, **changes):
    hf = changes.pop("hf_config", hf_config())
    fields = {
        "model": str(folder),
        "model_weights": "",
        "revision": None,
        "hf_config": hf,
        "hf_text_config": hf,
        "hf_overrides": {},
        "hf_config_path": None,
        "quantization": None,
        "quantization_config": None,
        "dtype": torch.bfloat16,
        "max_model_len": 2048,
        "multimodal_config": None,
        "disable_sliding_window": False,
    }
    return SimpleNamespace(**{**fields, **changes})


def engine(folder, *, model=None, cache=None, load=None, parallel=None, **changes):
    """A stand-in for a VllmConfig, with the attributes that are read."""
    cache_fields = {
        "cache_dtype": "auto",
        "prefix_caching_hash_algo": "sha256",
        "sliding_window": None,
        "mamba_cache_dtype": "auto",
        "mamba_ssm_cache_dtype": "auto",
        "kv_cache_dtype_skip_layers": [],
    }
    parallel_fields = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "cp_kv_cache_interleave_size": 1,
        "world_size": 1,
    }
    fields = {
        "model_config": model_config(folder, **(model or {})),
        "cache_config": SimpleNamespace(**{**cache_fields, **(cache or {})}),
        "load_config": SimpleNamespace(
            **{"load_format": "auto", "download_dir": None, **(load or {})}
        ),
        "parallel_config": SimpleNamespace(**{**parallel_fields, **(parallel or {})}),
        "speculative_config": None,
        "lora_config": None,
    }
    return SimpleNamespace(**{**fields, **changes})


def identify(config, *, environ=None, **options):
    options = {"tokens_per_hash": 16, **options}
    return identity_from_vllm(config, environ=environ or {}, **options)


def namespace_id(identity, groups=GROUPS, certificate=CERTIFICATE, *, portable=True) -> str:
    return build_namespace(identity, groups, certificate, portable=portable).id


@pytest.fixture
def base_id(checkpoint):
    return namespace_id(identify(engine(checkpoint)))


def test_the_same_engine_twice_meets_itself(checkpoint, base_id) -> None:
    identity = identify(engine(checkpoint))
    assert namespace_id(identity) == base_id
    assert identity.warnings == ()
    assert identity.model.weights is None


def test_the_path_does_not_matter(checkpoint, tmp_path, base_id) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    built = build_namespace(identify(engine(copy)), GROUPS, CERTIFICATE, portable=True)
    assert built.id == base_id
    assert str(tmp_path) not in built.manifest()


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0}


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"dtype": torch.float16}},
        {"model": {"hf_config": hf_config(rope_parameters=YARN)}},
        {"model": {"hf_config": hf_config(rope_theta=5e5)}},
        {"model": {"hf_config": hf_config(max_position_embeddings=4096)}},
        {"model": {"hf_overrides": {"num_hidden_layers": 1}}},
        {"model": {"hf_config_path": "/other"}},
        {"model": {"hf_overrides": lambda config: config}},
        {"model": {"model_class_overrides": {"A": "m:B"}}},
        {"model": {"code_revision": "abc"}},
        {"model": {"quantization": "fp8"}},
        {"model": {"quantization_config": {"linear": "fp8"}}},
        {"model": {"hf_config": hf_config(quantization_config={"quant_method": "awq"})}},
        {"model": {"hf_config": hf_config(compression_config={"bits": 4})}},
        {"model": {"disable_sliding_window": True}},
        {"model": {"multimodal_config": SimpleNamespace(mm_processor_kwargs={"n": 4})}},
        {"cache": {"cache_dtype": "fp8_e5m2"}},
        {"cache": {"sliding_window": 512}},
        {"cache": {"calculate_kv_scales": True}},
        {"cache": {"kv_cache_dtype_skip_layers": ["0"]}},
        {"cache": {"mamba_cache_dtype": "float32"}},
        {"cache": {"mamba_ssm_cache_dtype": "float32"}},
        {"cache": {"prefix_caching_hash_algo": "sha256_cbor"}},
        {"lora_config": SimpleNamespace(lora_dtype=torch.float16)},
        {"load": {"load_format": "dummy"}},
    ],
    ids=str,
)
def test_what_makes_bytes_different_keeps_engines_apart(checkpoint, base_id, changes) -> None:
    assert namespace_id(identify(engine(checkpoint, **changes))) != base_id


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"max_model_len": 100_000}},
        {"cache": {"cache_dtype": "bfloat16"}},
        {"cache": {"calculate_kv_scales": False}},
        {"lora_config": SimpleNamespace(lora_dtype=torch.bfloat16)},
        {"lora_config": SimpleNamespace(lora_dtype="auto")},
        {"speculative_config": SimpleNamespace(method="ngram")},
        {"model": {"multimodal_config": SimpleNamespace(mm_processor_kwargs=None)}},
        {"parallel": {"tensor_parallel_size": 2, "world_size": 2}},
        {"load": {"load_format": "safetensors"}},
    ],
    ids=str,
)
def test_what_does_not_lets_them_meet(checkpoint, base_id, changes) -> None:
    assert namespace_id(identify(engine(checkpoint, **changes))) == base_id


def test_weights_keep_engines_apart(checkpoint, base_id) -> None:
    save_file({"w": np.arange(1, 65, dtype=np.float32)}, checkpoint / "model.safetensors")
    assert namespace_id(identify(engine(checkpoint))) != base_id


class TestLongContexts:
    """Some model code computes other bytes once the longest context passes a limit."""

    def context(self, checkpoint, length, **hf):
        model = {"hf_config": hf_config(**hf), "max_model_len": length}
        return namespace_id(identify(engine(checkpoint, model=model)))

    @pytest.mark.parametrize("inside", [True, False])
    def test_long_rope(self, checkpoint, inside) -> None:
        limit = {"original_max_position_embeddings": 4096}
        rope = {"rope_type": "longrope", "long_factor": [2.0], **(limit if inside else {})}
        hf = {"rope_parameters": rope, **({} if inside else limit)}
        short = self.context(checkpoint, 2048, **hf)
        assert self.context(checkpoint, 4096, **hf) == short
        assert self.context(checkpoint, 4097, **hf) != short

    def test_llama4_temperature(self, checkpoint) -> None:
        short = self.context(checkpoint, 32_768, model_type="llama4_text")
        assert self.context(checkpoint, 32_769, model_type="llama4_text") != short


class TestHashing:
    def test_the_seed_keeps_engines_apart_and_stays_out_of_the_manifest(self, checkpoint) -> None:
        config = engine(checkpoint)
        ids = {namespace_id(identify(config, environ=e)) for e in ({}, {"PYTHONHASHSEED": "0"})}
        identity = identify(config, environ={"PYTHONHASHSEED": "314159265"})
        manifest = build_namespace(identity, GROUPS, CERTIFICATE, portable=True).manifest()
        assert len(ids | {namespace_id(identity)}) == 3
        assert "314159265" not in manifest

    def test_random_seeds_share_nothing_and_warn(self, checkpoint) -> None:
        config = engine(checkpoint, cache={"prefix_caching_hash_algo": "xxhash"})
        first = identify(config, unique=lambda: "one")
        assert first.hash_seed == "random:one"
        assert "PYTHONHASHSEED" in first.warnings[0]
        assert namespace_id(identify(config)) != namespace_id(identify(config))

    def test_a_seed_makes_the_xxhash_algorithms_shareable(self, checkpoint) -> None:
        config = engine(checkpoint, cache={"prefix_caching_hash_algo": "xxhash_cbor"})
        one, two = (identify(config, environ={"PYTHONHASHSEED": "7"}) for _ in range(2))
        assert namespace_id(one) == namespace_id(two)
        assert one.warnings == ()

    def test_tokens_per_hash(self, checkpoint, base_id) -> None:
        assert namespace_id(identify(engine(checkpoint), tokens_per_hash=32)) != base_id


class TestWithoutWeights:
    def test_a_given_digest_needs_no_weights(self, checkpoint) -> None:
        config = engine("nobody/absent")
        identity = identify(config, digest="mine")
        assert identity.model.digest == "mine"
        assert identity.model.weights is None
        assert identity.warnings == ()
        assert namespace_id(identity) == namespace_id(identify(engine(checkpoint), digest="mine"))

    def test_absent_weights_are_told_by_name_and_revision_with_a_warning(self) -> None:
        config = engine("nobody/absent", model={"revision": "v1"})
        identity = identify(config)
        assert identity.model.weights == "unverified:nobody/absent:v1"
        (warning,) = identity.warnings
        assert "nobody/absent" in warning
        assert "model_digest" in warning
        ids = {
            namespace_id(identity),
            namespace_id(identify(engine("nobody/other", model={"revision": "v1"}))),
            namespace_id(identify(engine("nobody/absent", model={"revision": "v2"}))),
            namespace_id(
                identify(
                    engine(
                        "nobody/absent",
                        model={"revision": "v1", "hf_config": hf_config(hidden_size=8)},
                    )
                )
            ),
        }
        assert len(ids) == 4

    @pytest.mark.parametrize("load_format", ["tensorizer", "my_plugin"])
    def test_a_loader_that_reads_elsewhere_is_not_believed(self, checkpoint, load_format) -> None:
        identity = identify(engine(checkpoint, load={"load_format": load_format}))
        assert identity.model.weights == f"unverified:{checkpoint}:None"
        assert load_format in identity.warnings[0]

    def test_weights_streamed_from_elsewhere_are_named_by_their_address(self, checkpoint) -> None:
        identity = identify(engine(checkpoint, model={"model_weights": "s3://bucket/model"}))
        assert identity.model.weights == "unverified:s3://bucket/model:None"

    def test_a_file_of_weights_takes_the_engines_config_along(self, checkpoint) -> None:
        file = checkpoint / "model.safetensors"
        one = identify(engine(file)).model
        two = identify(engine(file, model={"hf_config": hf_config(hidden_size=8)})).model
        assert one.digest != two.digest
        assert one.weights is None


class TestDraft:
    def draft(self, checkpoint, folder, method="eagle3", **changes):
        fields = {
            "method": method,
            "draft_model_config": model_config(folder, **changes),
            "draft_load_config": None,
            "kv_cache_dtype": None,
        }
        return engine(checkpoint, speculative_config=SimpleNamespace(**fields))

    @pytest.fixture
    def head(self, tmp_path):
        folder = tmp_path / "head"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        save_file({"h": np.ones(4, np.float32)}, folder / "model.safetensors")
        return folder

    def test_a_draft_model_with_kv_keeps_engines_apart(self, checkpoint, head, base_id) -> None:
        one = namespace_id(identify(self.draft(checkpoint, head)))
        save_file({"h": np.zeros(4, np.float32)}, head / "model.safetensors")
        two = namespace_id(identify(self.draft(checkpoint, head)))
        three = namespace_id(identify(self.draft(checkpoint, head, dtype=torch.float16)))
        four = namespace_id(identify(self.draft(checkpoint, head, method="draft_model")))
        assert len({base_id, one, two, three, four}) == 5

    def test_its_cache_dtype_counts(self, checkpoint, head) -> None:
        config = self.draft(checkpoint, head)
        before = namespace_id(identify(config))
        config.speculative_config.kv_cache_dtype = "fp8"
        assert namespace_id(identify(config)) != before

    def test_without_a_model_of_its_own_the_method_counts(self, checkpoint, base_id) -> None:
        speculative = SimpleNamespace(method="custom_class", draft_model_config=None)
        config = engine(checkpoint, speculative_config=speculative)
        assert namespace_id(identify(config)) != base_id

    def test_a_given_digest_names_prediction_layers_of_the_same_model_only(
        self, checkpoint, head
    ) -> None:
        same = identify(self.draft(checkpoint, checkpoint, method="mtp"), digest="mine")
        other = identify(self.draft(checkpoint, head), digest="mine")
        assert same.draft.digest == "mine"
        assert other.draft.digest != "mine"

    def test_one_warning_for_one_cause(self) -> None:
        config = self.draft("nobody/absent", "nobody/absent", method="mtp")
        assert len(identify(config).warnings) == 1


class TestNamespace:
    @pytest.fixture
    def identity(self, checkpoint):
        return identify(engine(checkpoint))

    @pytest.mark.parametrize(
        "change",
        [
            {"group": 1},
            {"kind": "sliding_window"},
            {"tokens_per_block": 32},
            {"blocks_per_chunk": 4},
            {"window_tokens": 512},
            {"layers": ("layers.1", "layers.0")},
        ],
        ids=str,
    )
    def test_groups_count(self, identity, base_id, change) -> None:
        groups = (replace(GROUPS[0], **change),)
        assert namespace_id(identity, groups) != base_id

    def test_the_order_in_which_groups_are_given_does_not(self, identity) -> None:
        groups = (GROUPS[0], replace(GROUPS[0], group=1))
        assert namespace_id(identity, groups) == namespace_id(identity, groups[::-1])

    def test_the_byte_format_counts(self, identity, base_id) -> None:
        assert namespace_id(identity, certificate={**CERTIFICATE, "format": "x"}) != base_id

    def test_bytes_that_are_not_portable_are_bound_to_the_topology(self, checkpoint) -> None:
        changes = [
            {},
            {"tensor_parallel_size": 2},
            {"pipeline_parallel_size": 2},
            {"prefill_context_parallel_size": 2},
            {"decode_context_parallel_size": 2},
            {"cp_kv_cache_interleave_size": 2},
            {"world_size": 2},
        ]
        identities = [identify(engine(checkpoint, parallel=c)) for c in changes]
        assert len({namespace_id(i, portable=False) for i in identities}) == len(changes)
        assert len({namespace_id(i, portable=True) for i in identities}) == 1
        assert namespace_id(identities[0], portable=False) != namespace_id(identities[0])

    def test_the_manifest_is_readable_and_says_its_format(self, identity) -> None:
        built = build_namespace(identity, GROUPS, CERTIFICATE, portable=False)
        fields = json.loads(built.manifest())
        assert fields["format"] == 1
        assert fields["model"]["digest"] == identity.model.digest
        assert fields["kv_dtype"] == "bfloat16"
        assert fields["groups"][0]["tokens_per_block"] == 16
        assert fields["bytes"] == CERTIFICATE
        assert fields["topology"]["tp"] == 1
        assert "warnings" not in fields

    def test_the_format_version_counts(self, identity, base_id, monkeypatch) -> None:
        monkeypatch.setattr(namespace, "FORMAT_VERSION", 2)
        assert namespace_id(identity) != base_id


def test_a_changed_vllm_is_said_so(checkpoint) -> None:
    config = engine(checkpoint)
    del config.cache_config.prefix_caching_hash_algo
    with pytest.raises(KVTiersError, match="prefix_caching_hash_algo") as caught:
        identify(config)
    assert caught.value.kind is Kind.UNSUPPORTED


class TestCPUFormat:
    @pytest.fixture
    def isa(self, monkeypatch):
        """Let the tests choose the instruction set; the real function asks the processor."""

        def choose(name):
            def _get_attn_isa(dtype, block_size, head_size=None, kv_cache_dtype=None):
                return name

            path = "vllm.v1.attention.backends.cpu_attn._get_attn_isa"
            monkeypatch.setattr(path, _get_attn_isa)

        return choose

    def test_each_thing_that_changes_the_bytes_changes_the_id(self, isa) -> None:
        ids = set()
        for name in ("amx", "vec", "vec16", "neon"):
            isa(name)
            ids.add(cpu_byte_format("bfloat16", 128, 64))
        ids.add(cpu_byte_format("float32", 128, 64))
        ids.add(cpu_byte_format("bfloat16", 32, 64))
        ids.add(cpu_byte_format("bfloat16", 128, 128))
        ids.add(cpu_byte_format("bfloat16", 128, 64, "fp8_e5m2"))
        assert len(ids) == 8

    def test_the_architecture_is_part_of_it(self, isa, monkeypatch) -> None:
        isa("vec16")
        ids = set()
        for machine in ("x86_64", "aarch64"):
            monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
            ids.add(cpu_byte_format("bfloat16", 16, 80))
        assert ids == {
            "cpu-x86_64-vec16-bs16-hs80-bfloat16",
            "cpu-aarch64-vec16-bs16-hs80-bfloat16",
        }

    def test_vllm_itself_is_asked(self) -> None:
        by_name = cpu_byte_format("float32", 128, 64)
        assert by_name == cpu_byte_format(torch.float32, 128, 64)
        assert by_name.endswith("-bs128-hs64-float32")
        assert "-vec16-" in cpu_byte_format("float32", 128, 80)

    def test_a_moved_function_is_said_so(self, monkeypatch) -> None:
        monkeypatch.delattr("vllm.v1.attention.backends.cpu_attn._get_attn_isa")
        with pytest.raises(KVTiersError, match="_get_attn_isa") as caught:
            cpu_byte_format("float32", 128, 64)
        assert caught.value.kind is Kind.UNSUPPORTED

    def test_changed_arguments_are_said_so(self, monkeypatch) -> None:
        path = "vllm.v1.attention.backends.cpu_attn._get_attn_isa"
        monkeypatch.setattr(path, lambda dtype, layout: "vec")
        with pytest.raises(KVTiersError, match="its arguments are others"):
            cpu_byte_format("float32", 128, 64)
