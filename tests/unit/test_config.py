import dataclasses
import pickle
from types import MappingProxyType

import pytest

from kvtiers.config import KVTiersConfig, TierSpec, describe, parse_config
from kvtiers.errors import ConfigError, Kind

GIB = 1 << 30


def parse(**extra):
    return parse_config({"cpu_bytes_to_use": GIB, **extra})


def refused(**extra) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(**extra)
    assert caught.value.kind is Kind.CONFIG
    message = str(caught.value)
    assert "\n" not in message
    assert "kv_connector_extra_config" in message
    return message


def test_the_smallest_config_has_the_defaults_of_upstream() -> None:
    config = parse_config({"cpu_bytes_to_use": GIB})
    assert config.cpu_bytes_to_use == GIB
    assert config.blocks_per_chunk == 1
    assert config.block_size is None
    assert config.eviction_policy == "lru"
    assert config.cache_policy_module_path is None
    assert config.secondary_tiers == ()
    assert config.store_threshold == 0
    assert config.max_tracker_size == 64_000
    assert config.offload_prompt_only is True
    assert config.self_describing_kv_events is False
    assert config.ignored == ()


def test_our_own_keys_have_the_documented_defaults() -> None:
    config = parse()
    assert config.model_digest is None
    assert config.promote_deadline_s == 30
    assert config.promotion_wait_s == 0.25
    assert config.cascade_max_pinned_fraction == 0.5
    assert config.region_directory == "/dev/shm"
    assert config.shutdown_deadline_s == 10


def test_every_key_is_read() -> None:
    extra = {
        "cpu_bytes_to_use": 5 * GIB,
        "blocks_per_chunk": 4,
        "chunk_keys": "own",
        "eviction_policy": "Mine",
        "cache_policy_module_path": "my.policies",
        "secondary_tiers": [{"type": "memory"}],
        "store_threshold": 2,
        "max_tracker_size": 7,
        "offload_prompt_only": False,
        "self_describing_kv_events": True,
        "kv_event_descriptions_directory": "/kv",
        "kv_event_descriptions_bytes": 9,
        "kv_event_inventory": True,
        "model_digest": "abc",
        "promote_deadline_s": 3,
        "lookup_deadline_s": 2,
        "promotion_wait_s": 0,
        "cascade_max_pinned_fraction": 1,
        "warm_manifest": "hot.json",
        "region_directory": "/tmp",
        "shutdown_deadline_s": 0.5,
    }
    config = parse_config(extra)
    read = {key: getattr(config, key) for key in extra}
    assert read == {**extra, "secondary_tiers": (TierSpec("memory", None, {}),)}
    names = {f.name for f in dataclasses.fields(KVTiersConfig)}
    assert names - set(extra) == {"block_size", "ignored", "observe"}


def test_the_result_is_frozen_and_travels_between_processes() -> None:
    config = parse(secondary_tiers=[{"type": "fs", "root_dir": "/kv"}])
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.blocks_per_chunk = 2
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(("given", "bytes_"), [(1e9, 1_000_000_000), (4096, 4096)])
def test_integral_floats_are_whole_numbers(given, bytes_) -> None:
    config = parse_config({"cpu_bytes_to_use": given})
    assert config.cpu_bytes_to_use == bytes_
    assert type(config.cpu_bytes_to_use) is int


@pytest.mark.parametrize("extra", [{}, {"cpu_bytes_to_use": None}])
def test_the_required_key_is_asked_for(extra) -> None:
    with pytest.raises(ConfigError, match=r"^cpu_bytes_to_use is missing from kv_connector_ex"):
        parse_config(extra)


def test_a_misspelt_key_is_refused_with_the_nearest_valid_name() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"cpu_bytes_to_us": GIB})
    assert str(caught.value) == (
        "unknown key 'cpu_bytes_to_us' in kv_connector_extra_config;"
        " did you mean 'cpu_bytes_to_use'?"
    )


def test_a_key_like_nothing_else_gets_the_list_of_keys() -> None:
    message = refused(zzz=1)
    assert "unknown key 'zzz'" in message
    assert "cpu_bytes_to_use" in message
    assert "sync_load_budget_bytes" in message


@pytest.mark.parametrize("key", ["_internal", "ignored", "Cpu_Bytes"])
def test_no_key_is_special(key) -> None:
    assert f"unknown key {key!r}" in refused(**{key: 1})


def test_an_unknown_key_is_refused_even_when_null() -> None:
    assert "did you mean 'block_size'" in refused(blok_size=None)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("cpu_bytes_to_use", 0, "a whole number of bytes above 0"),
        ("cpu_bytes_to_use", -1, "a whole number of bytes above 0"),
        ("cpu_bytes_to_use", 1.5, "a whole number of bytes above 0"),
        ("cpu_bytes_to_use", "8GB", "a whole number of bytes above 0"),
        ("cpu_bytes_to_use", True, "a whole number of bytes above 0"),
        ("cpu_bytes_to_use", float("inf"), "a whole number of bytes above 0"),
        ("blocks_per_chunk", 0, "a whole number, 1 or more"),
        ("block_size", -16, "a whole number, 1 or more"),
        ("store_threshold", -1, "a whole number, 0 or more"),
        ("max_tracker_size", 0, "a whole number, 1 or more"),
        ("offload_prompt_only", "false", "true or false"),
        ("offload_prompt_only", 0, "true or false"),
        ("self_describing_kv_events", 1, "true or false"),
        ("eviction_policy", "", "a non-empty string"),
        ("cache_policy_module_path", 3, "a non-empty string"),
        ("model_digest", b"x", "a non-empty string"),
        ("promote_deadline_s", 0, "a number of seconds above 0"),
        ("promote_deadline_s", float("nan"), "a number of seconds above 0"),
        ("promote_deadline_s", 10**400, "a number of seconds above 0"),
        ("promote_deadline_s", "30", "a number of seconds above 0"),
        ("promotion_wait_s", -0.1, "a number of seconds, 0 or more"),
        ("cascade_max_pinned_fraction", 0, "a fraction above 0 and up to 1"),
        ("cascade_max_pinned_fraction", 1.01, "a fraction above 0 and up to 1"),
        ("region_directory", "shm", "an absolute path"),
        ("shutdown_deadline_s", True, "a number of seconds above 0"),
        ("secondary_tiers", "fs", "a list of mappings, each with a 'type'"),
    ],
)
def test_a_value_that_does_not_fit_is_named_with_what_is_expected(key, value, expected) -> None:
    message = refused(**{key: value})
    assert message == f"{key} in kv_connector_extra_config must be {expected}, not {value!r}"


def test_null_means_not_set() -> None:
    assert parse(block_size=None, blocks_per_chunk=None, secondary_tiers=None) == parse()


class TestChunkSpan:
    def test_blocks_per_chunk_holds_for_every_group(self) -> None:
        assert parse(blocks_per_chunk=4).chunk_blocks(16) == 4

    def test_block_size_is_in_tokens(self) -> None:
        assert parse(block_size=256).chunk_blocks(16) == 16

    def test_block_size_must_be_a_multiple_of_the_engines_block(self) -> None:
        with pytest.raises(ConfigError, match=r"block_size .* is 250 tokens .* use 256"):
            parse(block_size=250).chunk_blocks(16)

    def test_one_of_the_two(self) -> None:
        message = refused(block_size=256, blocks_per_chunk=1)
        assert message.startswith("block_size and blocks_per_chunk ")


class TestRelations:
    def test_a_policy_of_your_own_needs_its_module(self) -> None:
        assert "cache_policy_module_path" in refused(eviction_policy="Belady")

    def test_a_misspelt_policy_gets_the_nearest(self) -> None:
        assert refused(eviction_policy="lruu").endswith("did you mean 'lru'?")
        assert refused(eviction_policy="ARC").endswith("did you mean 'arc'?")

    def test_a_promotion_cannot_wait_longer_than_its_request(self) -> None:
        message = refused(promotion_wait_s=5, promote_deadline_s=2)
        assert "promotion_wait_s (5)" in message
        assert "promote_deadline_s (2)" in message


class TestTiers:
    def test_options_are_passed_through_unread(self) -> None:
        entry = {"type": "fs", "root_dir": "/kv", "nested": {"a": [1]}}
        (tier,) = parse(secondary_tiers=[entry]).secondary_tiers
        assert tier == TierSpec("fs", None, {"root_dir": "/kv", "nested": {"a": [1]}})

    def test_later_changes_of_the_callers_mapping_do_not_reach_in(self) -> None:
        entry = {"type": "fs", "nested": {"a": [1]}}
        (tier,) = parse(secondary_tiers=[entry]).secondary_tiers
        entry["nested"]["a"].append(2)
        assert tier.options == {"nested": {"a": [1]}}

    def test_any_mapping_and_order_are_kept(self) -> None:
        entries = (MappingProxyType({"type": "Mine", "module_path": "my.tier"}), {"type": "fs"})
        tiers = parse(secondary_tiers=entries).secondary_tiers
        assert [(t.type, t.module_path) for t in tiers] == [("Mine", "my.tier"), ("fs", None)]

    def test_options_stay_out_of_the_repr(self) -> None:
        config = parse(secondary_tiers=[{"type": "obj", "secret_key": "hunter2"}])
        assert "obj" in repr(config)
        assert "hunter2" not in repr(config)

    @pytest.mark.parametrize(
        ("entry", "words"),
        [
            ({}, "secondary_tiers[1] in kv_connector_extra_config has no 'type'"),
            ("fs", "secondary_tiers[1] in kv_connector_extra_config must be a mapping"),
            ({"type": 3}, "secondary_tiers[1].type in kv_connector_extra_config must be a non-em"),
            ({"type": "X", "module_path": ""}, "secondary_tiers[1].module_path in kv_connector"),
        ],
    )
    def test_the_bad_entry_is_named(self, entry, words) -> None:
        assert words in refused(secondary_tiers=[{"type": "fs"}, entry])

    def test_errors_do_not_show_the_contents_of_mappings(self) -> None:
        message = refused(secondary_tiers={"type": "obj", "secret_key": "hunter2"})
        assert message.endswith("not a mapping")


class TestKeysWithoutEffect:
    def test_each_is_reported_with_the_reason(self) -> None:
        config = parse(canonical_layout=True, backpressure={}, tier_poll_interval_s=0.001)
        reasons = dict(config.ignored)
        assert set(reasons) == {"canonical_layout", "backpressure", "tier_poll_interval_s"}
        assert "canonical order" in reasons["canonical_layout"]

    def test_upstreams_spec_is_not_used(self) -> None:
        config = parse(spec_name="TieringOffloadingSpec")
        assert [key for key, _ in config.ignored] == ["spec_name"]

    def test_our_own_spec_is(self) -> None:
        config = parse(spec_name="KVTiersSpec", spec_module_path="kvtiers.engines.vllm")
        assert config.ignored == ()

    def test_a_module_whose_name_begins_like_ours_is_not_ours(self) -> None:
        config = parse(spec_name="X", spec_module_path="kvtiersx.spec")
        assert len(config.ignored) == 2

    def test_synchronous_loads_stay_off(self) -> None:
        assert parse(sync_load_budget_bytes=0).ignored == ()
        message = refused(sync_load_budget_bytes=1 << 20)
        assert "must stay 0, not 1048576" in message
        assert "cannot be reported" in message


def test_every_setting_is_documented() -> None:
    rows = [line.strip("|").split(" | ") for line in describe().splitlines()[2:]]
    documented = {row[0].strip(" `"): [cell.strip() for cell in row[1:]] for row in rows}
    for field in dataclasses.fields(KVTiersConfig):
        if field.name != "ignored":
            takes, default, meaning = documented[field.name]
            assert takes
            assert default
            assert meaning.endswith(".")
    assert documented["cpu_bytes_to_use"][1] == "required"
    assert documented["block_size"][1] == "not set"
    assert documented["offload_prompt_only"][1] == "true"
    assert documented["promote_deadline_s"][1] == "30.0"


def test_the_description_names_the_keys_without_effect_too() -> None:
    for key in ("canonical_layout", "backpressure", "spec_name", "sync_load_budget_bytes"):
        assert f"| `{key}` |" in describe()
