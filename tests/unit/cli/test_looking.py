"""``ls``, ``stat``, ``du``, ``verify``: what they say is what is there, whatever is there."""

import os
import time
from contextlib import contextmanager

import pytest

from kvtiers.chunks import PAGE_BYTES
from kvtiers.hashing import chunk_keys, seed_id
from kvtiers.tiers.base import Item
from kvtiers.tiers.fs import names
from tests.unit.cli.cli_kit import (
    CAPACITY,
    CHUNK,
    KEYS,
    NAMESPACE,
    OTHER,
    TOKENS,
    WALL,
    Tier,
    good,
    group,
    kvtiers,
    manifest,
    only_files,
    only_log,
    process,
    write_json,
)
from tests.unit.tiers.fs.fs_kit import flip
from tests.unit.tiers.tier_kit import filled


def by_id(listed):
    return {each["namespace"]: each for each in listed}


def test_ls_adds_up(tier):
    listed = by_id(good(kvtiers("ls", tier.url, "--json")).json["namespaces"])
    ours = listed[NAMESPACE.id]
    assert (ours["chunks"], ours["bytes"]) == (4, 4 * CHUNK)
    last = WALL + 3 if tier.layout == "files" else WALL  # when its segment was begun
    assert (ours["oldest"], ours["last_used"]) == (WALL, last)
    assert ours["manifest"] == NAMESPACE.fields
    assert listed[OTHER.id]["chunks"] == 2
    text = good(kvtiers("ls", tier.url)).out
    assert "32.0 KiB" in text
    assert "digest-of-m bfloat16" in text


@only_files
def test_ls_chunks_shows_those_used_last_first(tier):
    ran = good(kvtiers("ls", tier.url, "--chunks", "--limit", "3", "--json")).json
    assert [c["key"] for c in ran["chunks"]] == [k.hex() for k in reversed(KEYS[1:])]
    assert ran["left_out"] == 3
    assert "3 more" in good(kvtiers("ls", tier.url, "--chunks", "--limit", "3")).out


def test_a_document_has_all_chunks_and_a_table_says_how_many_it_leaves_out(tier):
    tier.fill(chunk_keys(list(range(16 * 120)), 0, 16, 16))
    ran = good(kvtiers("ls", tier.url, "--chunks", "--json")).json
    assert (len(ran["chunks"]), ran["left_out"]) == (126, 0)
    last = [c["last_used"] for c in ran["chunks"]]
    assert last == sorted(last, reverse=True)
    text = good(kvtiers("ls", tier.url, "--chunks")).out
    assert len(text.splitlines()) == 1 + 100 + 1
    assert "26 more" in text
    ran = good(kvtiers("ls", tier.url, "--chunks", "--json", "--limit", "7")).json
    assert (len(ran["chunks"]), ran["left_out"]) == (7, 119)


def test_du_counts_what_a_capacity_counts(tier):
    ran = good(kvtiers("du", f"{tier.url}?capacity=1GiB", "--json")).json
    on_disk = sum(p.stat().st_size for p in tier.root.rglob("*") if p.is_file())
    assert ran["bytes"] == on_disk == sum(u["bytes"] for u in ran["usage"])
    chunks = [u for u in ran["usage"] if u["part"] == "chunks"]
    header = PAGE_BYTES if tier.layout == "files" else 0
    assert sum(u["bytes"] for u in chunks) == 6 * (CHUNK + header)
    assert ran["capacity_bytes"] == 1 << 30
    text = good(kvtiers("du", f"{tier.url}?capacity=1GiB")).out
    assert "of 1.0 GiB capacity" in text
    assert ("RESERVED" in text) == (tier.layout == "log")


def test_du_shows_strangers_and_measurements_and_adds_up_neither(tier):
    before = good(kvtiers("du", tier.url, "--json")).json
    (tier.root / "note").write_bytes(b"a")
    (tier.root / "folder").mkdir()
    (tier.root / "folder" / "note").write_bytes(b"bc")
    trial = tier.root / f"{names.TRIAL}x"
    trial.mkdir()
    (trial / "chunk").write_bytes(b"defg")
    after = good(kvtiers("du", tier.url, "--json")).json
    assert after["bytes"] == before["bytes"]
    assert sum(u["bytes"] for u in after["usage"]) == sum(u["bytes"] for u in before["usage"]) + 7
    text = good(kvtiers("du", tier.url)).out
    assert "TRIAL  FOREIGN  " in text


def test_du_says_the_bound_that_rules_here(tier):
    """Of files the quota file says it, of a log its lock."""
    ran = good(kvtiers("du", tier.url, "--json")).json
    assert ran["capacity_bytes"] == CAPACITY[tier.layout]


# -- stat -----------------------------------------------------------------------------------------


def test_stat_of_a_key_or_its_beginning(tier):
    shown = good(kvtiers("stat", tier.url, KEYS[3].hex()[:10], "--json")).json["chunks"]
    assert [(c["key"], c["namespace"], c["intact"]) for c in shown] == [
        (KEYS[3].hex(), NAMESPACE.id, True)
    ]
    ran = good(kvtiers("stat", tier.url, KEYS[0].hex(), "--namespace", OTHER.id[:8]))
    assert f"namespace  {OTHER.id}" in ran.out
    assert "intact" in ran.out


def test_stat_of_a_damaged_chunk_says_so(tier):
    tier.damage(KEYS[3])
    ran = kvtiers("stat", tier.url, KEYS[3].hex())
    assert ran.status == 1
    assert "its checksum differs" in ran.out


def test_an_ambiguous_key_is_refused(tier):
    tier.fill([k for k in chunk_keys(list(range(1600)), 0, 16, 16)])
    ran = kvtiers("stat", tier.url, KEYS[0].hex()[:1])
    assert ran.status == 2
    assert "chunks begin with" in ran.err


def loadable(tier, prompt, *words):
    shown = good(kvtiers("stat", tier.url, "--tokens", prompt, *words, "--json")).json
    return by_id(shown["namespaces"])


def test_stat_of_tokens_says_chunk_by_chunk(tier, prompt):
    shown = loadable(tier, prompt)
    assert shown[NAMESPACE.id]["loadable_tokens"] == 64
    assert shown[OTHER.id]["loadable_tokens"] == 32
    rows = shown[OTHER.id]["chunks"]
    assert [(r["first_token"], r["end_token"], r["stored"]) for r in rows] == [
        (0, 16, True),
        (16, 32, True),
        (32, 48, False),
        (48, 64, False),
    ]
    assert [r["key"] for r in rows] == [k.hex() for k in KEYS]


def test_a_hole_ends_the_prefix(tier, prompt):
    tier.forget(KEYS[1])
    shown = loadable(tier, prompt, "--namespace", NAMESPACE.id)[NAMESPACE.id]
    assert shown["loadable_tokens"] == 16
    assert [r["stored"] for r in shown["chunks"]] == [True, False, True, True]


def stored_with(tmp_path, namespace, keys):
    return Tier(tmp_path / "own").fill(keys, namespace)


def test_a_window_needs_what_it_reaches_and_no_more(tmp_path, prompt):
    namespace = manifest(groups=[group(0), group(1, "SlidingWindowSpec", window=20)])
    windows = chunk_keys(TOKENS, 1, 16, 16)
    tier = stored_with(tmp_path, namespace, [*KEYS, *windows[1:3]])
    # At 48 tokens it reaches back to token 29, so chunks 1 and 2; at 64 it lacks chunk 3.
    assert loadable(tier, prompt)[namespace.id]["loadable_tokens"] == 48


def test_recurrent_state_needs_its_last_chunk_only(tmp_path, prompt):
    namespace = manifest(groups=[group(0), group(1, "MambaSpec")])
    states = chunk_keys(TOKENS, 1, 16, 16)
    tier = stored_with(tmp_path, namespace, [*KEYS, states[2]])
    assert loadable(tier, prompt)[namespace.id]["loadable_tokens"] == 48


def test_groups_with_chunks_of_different_length_load_whole_chunks_of_each(tmp_path, prompt):
    namespace = manifest(groups=[group(0, blocks=2), group(1)])
    keys = [*chunk_keys(TOKENS, 0, 32, 16)[:1], *chunk_keys(TOKENS, 1, 16, 16)]
    tier = stored_with(tmp_path, namespace, keys)
    assert loadable(tier, prompt)[namespace.id]["loadable_tokens"] == 32


def test_beside_a_window_or_a_state_the_last_token_is_not_loaded(tmp_path):
    """It has to be computed: once more over full attention, else as the first that is not there."""
    prompt = write_json(tmp_path / "exact.json", TOKENS)
    tier = stored_with(tmp_path, NAMESPACE, KEYS)
    assert loadable(tier, prompt)[NAMESPACE.id]["loadable_tokens"] == 64
    namespace = manifest(groups=[group(0), group(1, "SlidingWindowMLASpec", window=32)])
    windows = chunk_keys(TOKENS, 1, 16, 16)
    tier = stored_with(tmp_path, namespace, [*KEYS, *windows[2:]])
    assert loadable(tier, prompt)[namespace.id]["loadable_tokens"] == 63
    namespace = manifest("n", groups=[group(0), group(1, "MambaSpec")])
    tier = stored_with(tmp_path, namespace, [*KEYS, *windows])
    assert loadable(tier, prompt)[namespace.id]["loadable_tokens"] == 48


def test_local_attention_needs_the_local_chunk_that_the_next_token_is_in(tmp_path, prompt):
    namespace = manifest(groups=[group(0), group(1, "ChunkedLocalAttentionSpec", window=32)])
    tier = stored_with(tmp_path, namespace, [*KEYS[:3], chunk_keys(TOKENS, 1, 16, 16)[2]])
    assert loadable(tier, prompt)[namespace.id]["loadable_tokens"] == 48
    tier.forget(KEYS[2], namespace)
    assert loadable(tier, prompt)[namespace.id]["loadable_tokens"] == 32


def test_a_window_in_a_group_that_keeps_all_tokens_counts_as_full(tmp_path, prompt):
    """So it is where vLLM's hybrid KV cache manager is switched off: it asks for all chunks."""
    namespace = manifest(groups=[group(0, "FullAttentionSpec", window=20)])
    tier = stored_with(tmp_path, namespace, [KEYS[0], *KEYS[2:]])
    assert loadable(tier, prompt)[namespace.id]["loadable_tokens"] == 16


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
def test_hash_and_seed_are_the_namespaces(tmp_path, prompt, algorithm):
    namespace = manifest(hash_algorithm=algorithm, hash_seed=seed_id("42"))
    tier = stored_with(tmp_path, namespace, chunk_keys(TOKENS, 0, 16, 16, algorithm, "42"))
    assert loadable(tier, prompt, "--seed", "42")[namespace.id]["loadable_tokens"] == 64
    for words, why in [([], "give it as --seed"), (["--seed", "43"], "--seed is not")]:
        ran = kvtiers("stat", tier.url, "--tokens", prompt, *words)
        assert ran.status == 2
        assert why in ran.err


def test_a_random_seed_is_nobodys(tmp_path, prompt):
    tier = stored_with(tmp_path, manifest(hash_seed="random:7"), KEYS)
    ran = kvtiers("stat", tier.url, "--tokens", prompt)
    assert ran.status == 2
    assert "drew its hash seed at random" in ran.err


def test_what_a_manifest_does_not_say_the_call_says(tmp_path, prompt):
    """As under vLLM's own connector, which does not know the algorithm."""
    fields = {
        "model": "name:m",
        "tokens_per_hash": 16,
        "hash_seed": seed_id(None),
        "groups": [[0, 16, 1]],
        "bytes": {"blocks_per_chunk": 2},
    }
    namespace = type(NAMESPACE)(fields)
    tier = stored_with(tmp_path, namespace, chunk_keys(TOKENS, 0, 32, 16, "sha256_cbor"))
    ran = kvtiers("stat", tier.url, "--tokens", prompt)
    assert "give --hash" in ran.err
    shown = loadable(tier, prompt, "--hash", "sha256_cbor")[namespace.id]
    assert [r["end_token"] for r in shown["chunks"]] == [32, 64]
    assert shown["loadable_tokens"] == 64
    ran = kvtiers("stat", tier.url, "--tokens", prompt, "--hash", "sha256", "--tokens-per-hash", 8)
    assert "leave --tokens-per-hash out" in ran.err


def test_salt_and_adapter_are_part_of_the_name(tmp_path, prompt):
    from kvtiers.hashing import request_extra_keys

    extra = request_extra_keys(("ad", "/ad"), "s1")
    namespace = manifest(hash_algorithm="sha256_cbor")
    keys = chunk_keys(TOKENS, 0, 16, 16, "sha256_cbor", extra_keys=extra)
    tier = stored_with(tmp_path, namespace, keys)
    words = ["--salt", "s1", "--lora", "ad", "/ad"]
    assert loadable(tier, prompt, *words)[namespace.id]["loadable_tokens"] == 64
    assert loadable(tier, prompt)[namespace.id]["loadable_tokens"] == 0


def test_a_manifest_without_spans_is_refused_or_left_out(tier, prompt):
    strange = type(NAMESPACE)({"model": "m", "groups": "many"})
    tier.fill(KEYS[:1], strange)
    ran = kvtiers("stat", tier.url, "--tokens", prompt, "--namespace", strange.id)
    assert ran.status == 2
    assert "does not say how many tokens" in ran.err
    ran = kvtiers("stat", tier.url, "--tokens", prompt, "--json")
    assert ran.status == 0
    assert len(ran.json["namespaces"]) == 2
    assert strange.id in ran.json["warnings"][0]


@pytest.mark.parametrize(
    "tokens",
    [{"a": 1}, [1, "2"], [1.5], [True], [-1], [1 << 40], "text", None],
    ids=repr,
)
def test_what_is_no_list_of_tokens(tier, tmp_path, tokens):
    ran = kvtiers("stat", tier.url, "--tokens", write_json(tmp_path / "t", tokens))
    assert ran.status == 2
    assert "give a JSON list of token ids" in ran.err


# -- verify ---------------------------------------------------------------------------------------


def damage(tier):
    """Two chunks: one with a flipped bit, one that holds another."""
    tier.damage(KEYS[1])
    tier.overwrite(KEYS[2], KEYS[0])
    return {KEYS[1].hex(), KEYS[2].hex()}


def test_verify_reports_each_damaged_chunk_and_changes_nothing(tier):
    assert good(kvtiers("verify", tier.url, "--json")).json["damaged"] == []
    bad, before = damage(tier), tier.image()
    ran = kvtiers("verify", tier.url, "--json")
    assert ran.status == 1
    assert {d["key"] for d in ran.json["damaged"]} == bad
    assert ran.json["chunks"] == 6
    text = kvtiers("verify", tier.url).out
    assert "checksum differs (left)" in text
    if tier.layout == "files":
        assert f"foreign key {KEYS[0].hex()} (left)" in text
    assert tier.image() == before


def test_repair_takes_them_away_and_nothing_else(tier):
    damage(tier)
    before = tier.image()
    ran = kvtiers("verify", tier.url, "--repair", "--dry-run", "--json")
    assert {d["outcome"] for d in ran.json["damaged"]} == {"would be removed"}
    assert tier.image() == before
    ran = kvtiers("verify", tier.url, "--repair", "--json")
    assert ran.status == 1
    assert {d["outcome"] for d in ran.json["damaged"]} == {"removed"}
    assert good(kvtiers("verify", tier.url, "--json")).json["chunks"] == 4
    assert tier.numbers() == [0, 3]


def test_repair_looks_again_before_it_takes_anything(tier, monkeypatch):
    """An engine may have taken the chunk away and written it anew since it was read."""
    tier.damage(KEYS[1])
    opened = tier.place_type.open_store

    def rewritten(place, namespace, layout):
        tier.damage(KEYS[1])  # once more: it is intact
        return opened(place, namespace, layout)

    monkeypatch.setattr(tier.place_type, "open_store", rewritten)
    ran = kvtiers("verify", tier.url, "--repair", "--json")
    assert [d["outcome"] for d in ran.json["damaged"]] == ["intact by now"]
    assert good(kvtiers("verify", tier.url, "--json")).json["chunks"] == 6


def test_repair_where_others_evict_says_that_it_stays(tmp_path):
    tier = Tier(tmp_path / "kv")
    store = tier.open(eviction="external")
    assert store.write([Item(k, filled(i, CHUNK)) for i, k in enumerate(KEYS)]) == [None] * 4
    store.close()
    tier.damage(KEYS[1])
    ran = kvtiers("verify", tier.url, "--repair", "--json")
    (bad,) = ran.json["damaged"]
    assert bad["outcome"] == "left: what evicts here has to take it away"
    assert tier.file(KEYS[1]).exists()


@only_log
def test_faults_of_segments_are_said_and_mended(tier):
    first, second, *_ = sorted((tier.root / "log").glob("*.kvs"))
    flip(first, first.stat().st_size - 1)
    flip(second, 30)
    before = tier.image()
    ran = kvtiers("verify", tier.url, "--json")
    assert (ran.status, ran.json["damaged"], ran.json["chunks"]) == (1, [], 4)
    assert [f["namespace"] for f in ran.json["faults"]] == [NAMESPACE.id, None]
    assert "the table is damaged" in ran.json["faults"][0]["problem"]
    assert "the header is damaged" in ran.json["faults"][1]["problem"]
    dry = kvtiers("verify", tier.url, "--repair", "--dry-run", "--json").json
    outcomes = [f["outcome"] for f in dry["faults"]]
    assert outcomes == ["would be written anew", "would be removed"]
    assert tier.image() == before
    ran = kvtiers("verify", tier.url, "--repair")
    assert ran.status == 1
    assert "(written anew)\n" in ran.out
    assert "all intact, faults besides: 2" in ran.out
    assert good(kvtiers("verify", tier.url, "--json")).json["chunks"] == 4
    one = kvtiers("verify", tier.url, "--namespace", OTHER.id, "--json")
    assert good(one).json["faults"] == []


@only_files
@pytest.mark.parametrize("how", ["fifo", "folder", "link", "empty", "huge"])
def test_repair_of_what_is_no_chunk_file_at_all(tier, how):
    path = tier.file(KEYS[1])
    aside = path.rename(path.with_name("kept"))
    if how == "fifo":
        os.mkfifo(path)
    elif how == "folder":
        (path / "somebodys").mkdir(parents=True)
    elif how == "link":
        path.symlink_to("kept")
    else:
        path.touch()
        os.truncate(path, 0 if how == "empty" else 1 << 40)
    ran = process("verify", tier.url, "--repair")
    assert (ran.status, ran.err) == (1, "")
    assert not os.path.lexists(path)
    assert aside.stat().st_size == PAGE_BYTES + CHUNK  # a link's target is not touched
    assert good(kvtiers("verify", tier.url, "--json")).json["chunks"] == 5


# -- hostile folders ------------------------------------------------------------------------------


def test_a_damaged_manifest_is_shown_and_its_chunks_are_read(tier):
    (tier.root / OTHER.id / names.MANIFEST).write_text('{"model": "\x1b[31m"}')
    before = tier.image()
    ran = good(kvtiers("ls", tier.url))
    assert "manifest.json is damaged" in ran.out
    ran = kvtiers("verify", tier.url, "--repair", "--json")
    assert ran.status == 1
    assert ran.json["chunks"] == 6
    assert [n["namespace"] for n in ran.json["damaged_namespaces"]] == [OTHER.id]
    for words in (["gc", "--max-bytes", "0", "--namespace", OTHER.id], ["export", "/x/y"]):
        kvtiers(words[0], tier.url, *words[1:])
    assert tier.image() == before


def test_control_characters_never_reach_the_terminal(tmp_path, layout):
    namespace = manifest("[b]\x1b]0;a\x07\n\u202e")
    tier = Tier(tmp_path / "a\x1b[31m", layout).fill(KEYS, namespace)
    (tier.root / namespace.id / "zz\n\x1b[2J").touch()
    for name in ("ls", "du", "verify"):
        ran = good(kvtiers(name, f"fs://{tmp_path}/a%1B%5B31m"))
        assert "\x1b" not in ran.out
        assert all(c.isprintable() or c == "\n" for c in ran.out)
    shown = good(kvtiers("ls", f"fs://{tmp_path}/a%1B%5B31m")).out
    assert "[b]\\x1b]0;a" in shown


@contextmanager
def as_nobody():
    """Root reads everything; whoever runs this otherwise is nobody enough."""
    if os.geteuid() == 0:
        os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(0)
    else:
        yield


@pytest.fixture
def open_tier(tmp_path_factory):
    """A tier in folders that everybody may pass."""
    root = tmp_path_factory.mktemp("open")
    tier = Tier(root / "kv").fill()
    for folder in [root, root.parent, root.parent.parent]:
        folder.chmod(0o755)
    for path in tier.root.rglob("*"):
        path.chmod(0o755)
    tier.root.chmod(0o755)
    return tier


def test_unreadable_folders_and_files_are_said_and_passed_over(open_tier):
    good(kvtiers("verify", open_tier.url))
    hidden = open_tier.file(KEYS[0]).parent
    hidden.chmod(0)
    open_tier.file(KEYS[1]).chmod(0)
    with as_nobody():
        listed = kvtiers("ls", open_tier.url, "--json")
        verified = kvtiers("verify", open_tier.url, "--json")
    open_tier.file(KEYS[1]).unlink()
    with as_nobody():
        rest = kvtiers("verify", open_tier.url)
    hidden.chmod(0o755)
    assert (rest.status, rest.err.count("\n")) == (1, 1)
    assert rest.out.startswith("2 chunks")
    assert "all intact, but 1 things could not be looked at" in rest.out
    assert listed.status == 0
    assert listed.json["namespaces"][0]["chunks"] == 3
    assert listed.json["warnings"] == [f"{hidden} cannot be listed: Permission denied"]
    assert listed.err.count("\n") == 1
    assert verified.status == 1
    (bad,) = verified.json["damaged"]
    assert (bad["key"], bad["damaged"]) == (KEYS[1].hex(), False)
    assert "Permission denied" in bad["problem"]


def test_a_log_that_may_not_be_listed_is_said(open_tier):
    log = Tier(open_tier.root.parent / "log", "log").fill()
    log.root.chmod(0o755)
    for path in log.root.rglob("*"):
        path.chmod(0o755)
    (log.root / "log").chmod(0)
    with as_nobody():
        listed = kvtiers("ls", log.url, "--json")
        verified = kvtiers("verify", log.url, "--json")
    assert (listed.status, listed.json["layout"]) == (0, "log")
    assert listed.json["warnings"] == [f"{log.root}/log cannot be listed: Permission denied"]
    assert verified.status == 1


@only_files
def test_a_promise_to_an_engine_is_no_use_in_the_future(tier):
    ahead = time.time() + 9
    os.utime(tier.file(KEYS[0]), (ahead, ahead))
    ran = good(kvtiers("ls", tier.url, "--json")).json
    assert max(n["last_used"] for n in ran["namespaces"]) <= time.time()


def test_ages_are_from_now(tmp_path, layout):
    tier = Tier(tmp_path / "kv", layout).fill(KEYS[:1], used_at=time.time() - 7200)
    assert " 2 h " in good(kvtiers("ls", tier.url)).out
