"""The spec without facts: what vLLM's own connector does not tell is refused or named."""

import pytest
import torch
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from vllm.v1.kv_offload.config import OffloadingGroupConfig

from kvtiers.config import parse_config
from kvtiers.engines.vllm.facts import formats_without_facts, namespace_without_facts
from kvtiers.engines.vllm.refusals import refuse_without_asserts, refuse_without_facts
from kvtiers.engines.vllm.spec import KVTiersSpec
from kvtiers.errors import ConfigError

FS = {"type": "fs", "root_dir": "/x", "capacity_bytes": 1 << 30}
MEMORY = {"type": "memory", "capacity_bytes": 1_000_000}
MINE = {"type": "Mine", "module_path": "my.tiers"}


def settings(*tiers, **extra):
    return {"cpu_bytes_to_use": 1_000_000, "secondary_tiers": list(tiers), **extra}


def one_sentence(caught) -> str:
    message = str(caught.value)
    assert "\n" not in message
    assert ". " not in message
    assert message[-1] != "."
    return message


class TestRefusals:
    @pytest.mark.parametrize("tier", [FS, MINE, {**MEMORY, "module_path": "my.tiers"}])
    def test_a_tier_that_may_outlive_the_engine_needs_a_model_digest(
        self, offloading_config, tier
    ) -> None:
        extra = settings(MEMORY, tier)
        with pytest.raises(ConfigError) as caught:
            KVTiersSpec(offloading_config(extra_config=extra))
        message = one_sentence(caught)
        assert message.startswith("secondary_tiers[1] in kv_connector_extra_config outlives")
        assert "use KVTiersConnector, or set model_digest" in message
        assert caught.value.context == {"key": "model_digest"}
        assert caught.value.said
        KVTiersSpec(offloading_config(extra_config={**extra, "model_digest": "mine"}))

    def test_what_ends_with_the_engine_needs_none(self, offloading_config) -> None:
        KVTiersSpec(offloading_config(extra_config=settings()))
        KVTiersSpec(offloading_config(extra_config=settings(MEMORY)))

    def test_on_an_accelerator_a_digest_does_not_do(self) -> None:
        """How K and V lie in a page depends on the attention backend, which nobody tells."""
        config = parse_config(settings(FS, model_digest="mine"))
        refuse_without_facts(config, "cpu")
        with pytest.raises(ConfigError) as caught:
            refuse_without_facts(config, "cuda")
        message = one_sentence(caught)
        assert "cuda device; use KVTiersConnector" in message
        assert caught.value.context == {"key": "secondary_tiers[0]"}
        refuse_without_facts(parse_config(settings(MEMORY)), "cuda")

    def test_peers_need_our_connector(self):
        """They make room in host memory between a lookup and its load."""
        config = parse_config(settings({"type": "p2p"}, model_digest="mine"))
        with pytest.raises(ConfigError) as caught:
            refuse_without_facts(config)
        assert one_sentence(caught).startswith("secondary_tiers[0] in kv_connector_extra_config is")
        assert one_sentence(caught).endswith("would end the engine; use KVTiersConnector")

    def test_names_of_our_own_need_our_connector(self):
        config = parse_config({**settings(MEMORY), "chunk_keys": "own"})
        with pytest.raises(ConfigError, match=r"chunk_keys in .* names the chunks; use KVTiers"):
            refuse_without_facts(config)

    def test_the_worker_is_what_knows_the_device(self, offloading_config, tmp_path) -> None:
        extra = settings(FS, model_digest="mine", region_directory=str(tmp_path))
        spec = KVTiersSpec(offloading_config(extra_config=extra))
        pages = torch.empty(4, 4096, dtype=torch.int8, device="meta")
        tensors = [CanonicalKVCacheTensor(pages, 4096)]
        with pytest.raises(ConfigError, match="of this meta device"):
            spec.get_worker(CanonicalKVCaches(tensors, [[CanonicalKVCacheRef(0, 4096)]]))
        assert list(tmp_path.iterdir()) == []

    def test_without_assertions_vllm_would_take_a_failed_copy_for_a_good_one(self) -> None:
        refuse_without_asserts(True)
        with pytest.raises(ConfigError, match="python -O") as caught:
            refuse_without_asserts(False)
        assert "or use KVTiersConnector" in one_sentence(caught)


def namespace_id(config, *, model_digest="mine", hash_seed=None, device="cpu") -> str:
    named = {"byte_formats": formats_without_facts(config, device)}
    return namespace_without_facts(config, named, model_digest=model_digest, hash_seed=hash_seed).id


class TestNamespace:
    def test_the_path_does_not_matter_where_there_is_a_digest(self, offloading_config) -> None:
        one, two = offloading_config(), offloading_config(name="/elsewhere")
        assert namespace_id(one) == namespace_id(two)
        assert namespace_id(one, model_digest=None) != namespace_id(two, model_digest=None)

    @pytest.mark.parametrize(
        "changes",
        [
            {"dtype": "float16"},
            {"dtype": "fp8_e5m2"},
            {"tokens_per_hash": 16},
            {"world_size": 2, "tp_size": 2},
            {"world_size": 2, "pcp_size": 2},
            {"dcp_size": 2},
            {"groups": (OffloadingGroupConfig(64, ("layers.0", "layers.1"), 0),)},
            {"groups": (OffloadingGroupConfig(32, ("layers.0",), 0),)},
        ],
        ids=str,
    )
    def test_what_makes_bytes_different_keeps_engines_apart(
        self, offloading_config, monkeypatch, changes
    ) -> None:
        monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: True)
        assert namespace_id(offloading_config(**changes)) != namespace_id(offloading_config())

    def test_digest_and_hash_seed_keep_engines_apart(self, offloading_config) -> None:
        config = offloading_config()
        ids = {
            namespace_id(config),
            namespace_id(config, model_digest="other"),
            namespace_id(config, hash_seed="0"),
            namespace_id(config, hash_seed="1"),
        }
        assert len(ids) == 4

    @pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3"])
    def test_processors_that_pack_k_in_another_way_do_not_meet(
        self, offloading_config, monkeypatch, dtype
    ) -> None:
        config = offloading_config(dtype=dtype)
        monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: True)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
        with_amx = namespace_id(config)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        assert namespace_id(config) != with_amx
        monkeypatch.setattr("platform.machine", lambda: "other")
        assert formats_without_facts(config, "cpu")[0].startswith("cpu-other-")

    def test_each_group_has_a_format_of_its_own(self, offloading_config) -> None:
        groups = tuple(OffloadingGroupConfig(n, (f"layers.{n}",), n) for n in (32, 64))
        config = offloading_config(groups=groups)
        first, second = formats_without_facts(config, "cpu")
        assert "-bs32-" in first
        assert "-bs64-" in second
        assert formats_without_facts(config, "cuda") == ["lbhnc-unknown"] * 2


def test_the_spec_alone_refuses_pipeline_stages(offloading_config) -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 2, but under vLLM's own"):
        KVTiersSpec(offloading_config(pp_size=2, world_size=2))
