"""``warm``: the hot list."""

import json
import os

import pytest

from kvtiers.errors import ConfigError
from kvtiers.hashing import chunk_keys
from kvtiers.tiers.hot import HotPrefix, read_hot_list, write_hot_list
from tests.unit.cli.cli_kit import (
    KEYS,
    NAMESPACE,
    OTHER,
    TOKENS,
    Tier,
    good,
    group,
    kvtiers,
    manifest,
    only_files,
)


def test_prompts_are_written_beginning_first_and_only_what_can_be_loaded(tier, prompt, tmp_path):
    tier.forget(KEYS[2])
    hot = tmp_path / "hot.json"
    ran = good(kvtiers("warm", tier.url, "--tokens", prompt, "-o", hot, "--json")).json
    assert ran["chunks"] == 4
    assert {p.namespace: p.keys for p in read_hot_list(str(hot))} == {
        NAMESPACE.id: (KEYS[0], KEYS[1]),
        OTHER.id: (KEYS[0], KEYS[1]),
    }


def test_of_a_hybrid_model_only_what_is_read_is_hot(tmp_path, prompt):
    """A request that begins with the prompt reads the window's tail and the last state."""
    namespace = manifest(
        groups=[group(0), group(1, "SlidingWindowSpec", window=32), group(2, "MambaSpec")]
    )
    windows, states = (chunk_keys(TOKENS, index, 16, 16) for index in (1, 2))
    tier = Tier(tmp_path / "kv").fill([*KEYS, *windows, *states], namespace)
    good(kvtiers("warm", tier.url, "--tokens", prompt, "-o", tmp_path / "hot.json"))
    hot = (*KEYS[:3], windows[2], KEYS[3], windows[3], states[3])
    assert read_hot_list(str(tmp_path / "hot.json")) == [HotPrefix(namespace.id, hot)]


@only_files
def test_recent_ones_come_last_used_first_and_no_chunk_twice(tier, prompt, tmp_path):
    hot = tmp_path / "hot.json"
    words = ["--namespace", NAMESPACE.id, "--from-recent", "2"]
    good(kvtiers("warm", tier.url, *words, "-o", hot))
    assert read_hot_list(str(hot)) == [HotPrefix(NAMESPACE.id, (KEYS[3], KEYS[2]))]
    good(kvtiers("warm", tier.url, *words, "--tokens", prompt, "-o", hot))
    assert read_hot_list(str(hot)) == [HotPrefix(NAMESPACE.id, tuple(KEYS))]


def test_nothing_hot_writes_nothing(tier, tmp_path):
    (tmp_path / "short").write_text("[1, 2, 3]")
    hot = tmp_path / "hot.json"
    assert kvtiers("warm", tier.url, "--tokens", tmp_path / "short", "-o", hot).status == 2
    assert not hot.exists()


@pytest.mark.parametrize(
    "document",
    [
        [],
        {"format": "kvtiers-warm", "version": 2, "prefixes": []},
        {"format": "kvtiers-warm", "version": 1},
        {"format": "kvtiers-warm", "version": 1, "prefixes": [{"namespace": "a"}]},
        {"format": "kvtiers-warm", "version": 1, "prefixes": [{"namespace": 1, "keys": []}]},
        {"format": "kvtiers-warm", "version": 1, "prefixes": [{"namespace": "a", "keys": ["z"]}]},
        {"format": "kvtiers-warm", "version": 1, "prefixes": [{"namespace": "a", "keys": ["00"]}]},
        {"format": "kvtiers-warm", "version": 1, "prefixes": [{"namespace": "a", "keys": [1]}]},
    ],
    ids=range(8),
)
def test_what_is_no_hot_list(tmp_path, document):
    (tmp_path / "hot.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="is no hot list"):
        read_hot_list(str(tmp_path / "hot.json"))


def test_a_hot_list_is_replaced_whole(tmp_path):
    path = str(tmp_path / "hot.json")
    write_hot_list(path, [HotPrefix(NAMESPACE.id, tuple(KEYS))])
    write_hot_list(path, [HotPrefix(OTHER.id, tuple(KEYS[:1]))])
    assert read_hot_list(path) == [HotPrefix(OTHER.id, (KEYS[0],))]
    assert [p.name for p in tmp_path.iterdir()] == ["hot.json"]


@pytest.mark.parametrize("name", ["folder", "fifo", "absent/hot.json"])
def test_what_is_no_file_is_never_replaced(tier, tmp_path, name):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    before = sorted(p.name for p in tmp_path.iterdir())
    for words in (
        ["warm", tier.url, "--from-recent", "2", "-o", tmp_path / name],
        ["export", tier.url, tmp_path / name, "--force"],
    ):
        ran = kvtiers(*words)
        assert (ran.status, ran.out) == (2, "")
        assert "no regular file" in ran.err or "there is no folder" in ran.err
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_a_link_stays_one(tier, tmp_path):
    (tmp_path / "hot.json").symlink_to(tmp_path / "real.json")
    good(kvtiers("warm", tier.url, "--from-recent", "2", "-o", tmp_path / "hot.json"))
    assert (tmp_path / "hot.json").is_symlink()
    assert len(read_hot_list(str(tmp_path / "real.json"))) == 1
