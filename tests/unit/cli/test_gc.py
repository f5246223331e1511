"""``gc``: what was not used for longest leaves, within what was named, and nothing else."""

import os
import time

import pytest

from kvtiers.chunks import PAGE_BYTES
from kvtiers.tiers.fs import maintain, tree, trials
from kvtiers.tiers.fs.log.ownership import TEMP
from kvtiers.tiers.fs.names import TRIAL, leaving
from kvtiers.tiers.fs.quota import STATE_BYTES
from tests.unit.cli.cli_kit import (
    CHUNK,
    KEYS,
    NAMESPACE,
    OTHER,
    good,
    kvtiers,
    only_files,
    only_log,
)
from tests.unit.tiers.fs.test_open import dead_scratch

FILE = CHUNK + PAGE_BYTES
BESIDES = len(NAMESPACE.manifest()) + len(OTHER.manifest()) + STATE_BYTES
"""What a bound of layout ``files`` counts too: the manifests and the quota file."""


def left(tier, namespace=NAMESPACE):
    return tier.numbers(namespace)


@only_files
@pytest.mark.parametrize(
    ("keep", "ours", "others"),
    [
        (6, [0, 1, 2, 3], [0, 1]),
        (5, [0, 1, 2, 3], [1]),
        (3, [1, 2, 3], []),
        (1, [3], []),
        (0, [], []),
    ],
)
def test_max_bytes_is_of_files_and_the_oldest_leave(tier, keep, ours, others):
    bound = keep * FILE + BESIDES
    ran = good(kvtiers("gc", tier.url, "--max-bytes", bound, "--json")).json
    assert (left(tier), left(tier, OTHER)) == (ours, others)
    assert ran["chunks"] == 6 - keep
    assert ran["bytes"] == (6 - keep) * FILE
    assert ran["bytes_left"] == bound


@only_files
def test_one_byte_less_takes_one_chunk_more(tier):
    good(kvtiers("gc", tier.url, "--max-bytes", 6 * FILE + BESIDES - 1))
    assert (left(tier), left(tier, OTHER)) == ([0, 1, 2, 3], [1])


@only_files
def test_within_one_namespace_nothing_else_counts_or_leaves(tier):
    bound = 2 * FILE + len(NAMESPACE.manifest())
    good(kvtiers("gc", tier.url, "--namespace", NAMESPACE.id, "--max-bytes", bound))
    assert (left(tier), left(tier, OTHER)) == ([2, 3], [0, 1])


@only_files
def test_older_than(tier):
    for i, k in enumerate(KEYS):
        used_at = time.time() - 3600 * (i + 0.5)
        os.utime(tier.file(k), (used_at, used_at))
    good(kvtiers("gc", tier.url, "--older-than", "2h"))
    assert (left(tier), left(tier, OTHER)) == ([0, 1], [])


@pytest.mark.parametrize("words", [["--max-bytes", "0"], ["--older-than", "1d"]])
def test_a_dry_run_says_the_same_and_changes_nothing(tier, words):
    before = tier.image()
    words = ["gc", tier.url, *words]
    would = good(kvtiers(*words, "--dry-run", "--json")).json
    assert would["chunks"] == 6
    said = good(kvtiers(*words, "--dry-run")).out
    assert f"namespace {NAMESPACE.id}: would delete 4 chunks" in said
    assert tier.image() == before
    did = good(kvtiers(*words, "--json")).json
    assert {**would, "dry_run": False} == did
    assert (left(tier), left(tier, OTHER)) == ([], [])


def test_one_namespace_only(tier):
    good(kvtiers("gc", tier.url, "--max-bytes", "0", "--namespace", OTHER.id[:6]))
    assert (left(tier), left(tier, OTHER)) == ([0, 1, 2, 3], [])


def test_without_a_bound_no_chunk_leaves(tier):
    ran = good(kvtiers("gc", tier.url, "--json")).json
    assert (ran["chunks"], ran["bytes"]) == (0, 0)
    assert (left(tier), left(tier, OTHER)) == ([0, 1, 2, 3], [0, 1])


@only_files
def test_what_dead_engines_left_goes_too(tier):
    dead = dead_scratch(tier.root / NAMESPACE.id)
    aside = tier.root / NAMESPACE.id / "quarantine"
    aside.mkdir()
    for n in range(6):
        (aside / f"0{n}-g0.kvc").write_bytes(b"x")
    (tier.root / OTHER.id / "7f").mkdir()
    would = kvtiers("gc", tier.url, "--dry-run")
    assert "would delete temporary folders and files of dead writers: 1\n" in good(would).out
    assert dead.exists()
    ran = good(kvtiers("gc", tier.url, "--json")).json
    assert [ran[what] for what in ("temporary", "quarantined", "empty_folders")] == [1, 2, 1]
    assert not dead.exists()
    assert (left(tier), left(tier, OTHER)) == ([0, 1, 2, 3], [0, 1])


def taken(tier):
    usage = good(kvtiers("du", tier.url, "--json")).json["usage"]
    return sum(u["bytes"] for u in usage if u["part"] != "foreign")


@pytest.mark.parametrize("words", [[], ["--max-bytes", "0"], ["--namespace", OTHER.id]])
def test_it_counts_what_du_counts(tier, words):
    """Manifests, locks and what dead writers and measurements left included."""
    if tier.layout == "files":
        (dead_scratch(tier.root / NAMESPACE.id) / "0").write_bytes(bytes(4096))
    else:
        (tier.root / "log" / TEMP).write_bytes(bytes(4096))
    killed = tier.root / f"{TRIAL}x" / "tier"
    killed.mkdir(parents=True)
    (killed / "0").write_bytes(bytes(12345))
    before = taken(tier)
    would = good(kvtiers("gc", tier.url, *words, "--dry-run", "--json")).json
    if "--namespace" not in words:
        assert would["bytes"] + would["bytes_left"] == before
    did = good(kvtiers("gc", tier.url, *words, "--json")).json
    assert did["bytes"] == before - taken(tier)
    assert {**would, "dry_run": False} == did
    assert killed.exists() == ("--namespace" in words)
    if "--namespace" not in words:
        assert did["bytes_left"] == taken(tier)


def test_a_measurement_that_cannot_be_removed_is_said(tier, monkeypatch):
    killed = tier.root / f"{TRIAL}x"
    killed.mkdir()
    (killed / "0").write_bytes(bytes(12345))
    monkeypatch.setattr(trials.shutil, "rmtree", lambda path, ignore_errors: None)
    ran = kvtiers("gc", tier.url, "--json")
    assert (ran.status, ran.json["failed"], ran.json["bytes"]) == (1, 1, 0)
    assert ran.json["warnings"] == [f"{killed.name} cannot be deleted"]
    assert ran.json["bytes_left"] == taken(tier)


@only_files
def test_what_is_promised_to_an_engine_stays(tier):
    promised = time.time() + 20
    os.utime(tier.file(KEYS[0]), (promised, promised))
    ran = kvtiers("gc", tier.url, "--max-bytes", "0", "--json")
    assert (left(tier), left(tier, OTHER)) == ([0], [])
    assert (ran.status, ran.json["chunks"], ran.json["in_use"]) == (1, 5, 1)
    (said,) = ran.json["warnings"]
    assert said == "more is left than --max-bytes: 1 chunks are in use by engines"
    roomy = FILE + BESIDES
    assert good(kvtiers("gc", tier.url, "--max-bytes", roomy, "--json")).json["in_use"] == 0
    assert good(kvtiers("gc", tier.url, "--older-than", "1s", "--json")).json["chunks"] == 0


@only_files
def test_what_cannot_be_deleted_is_said_and_does_not_keep_the_others(tier, monkeypatch):
    real, path = os.unlink, str(tier.file(KEYS[1]))

    def unlink(name, **where):
        if name == leaving(path):
            raise PermissionError(1, "told to refuse")
        real(name, **where)

    monkeypatch.setattr(maintain.os, "unlink", unlink)
    ran = kvtiers("gc", tier.url, "--max-bytes", "0", "--json")
    assert (ran.status, ran.json["failed"]) == (1, 1)
    assert ran.json["warnings"] == [f"{path[len(str(tier.root)) + 1 :]} cannot be deleted"]
    assert left(tier) == [1]


@pytest.mark.parametrize("words", [[], ["--max-bytes", "0"], ["--dry-run"]])
def test_what_may_not_be_listed_is_said(tier, monkeypatch, words):
    """It is not counted either: what is left is more than it says."""
    folder, real = tier.root / NAMESPACE.id, os.scandir
    if tier.layout == "files":
        folder = tier.file(KEYS[0]).parent

    def scandir(path):
        if str(path) == str(folder):
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(tree.os, "scandir", scandir)
    ran = kvtiers("gc", tier.url, *words, "--json")
    assert ran.status == 1
    assert ran.json["warnings"] == [
        f"{folder} cannot be listed (Permission denied), so that what it holds neither counts nor "
        "leaves: call as the user who may list it"
    ]


@only_files
def test_it_deletes_chunks_only(tier):
    ours = tier.root / NAMESPACE.id
    strangers = [tier.root / "note", ours / "note", ours / KEYS[0].hex()[:2] / "note.kvc"]
    for path in strangers:
        path.touch()
    (tier.root / "link").symlink_to(ours)
    good(kvtiers("gc", tier.url, "--max-bytes", "0"))
    assert all(path.exists() for path in strangers)
    assert (tier.root / NAMESPACE.id / "manifest.json").exists()
    assert (left(tier), left(tier, OTHER)) == ([], [])


@only_files
def test_a_link_out_of_the_tier_is_not_followed(tier, tmp_path):
    fan = tier.file(KEYS[0]).parent
    outside = fan.rename(tmp_path / fan.name)
    fan.symlink_to(outside)
    good(kvtiers("gc", tier.url, "--max-bytes", "0"))
    assert (outside / tier.file(KEYS[0]).name).exists()


# -- a log ----------------------------------------------------------------------------------------


@only_log
def test_a_log_shrinks_by_whole_segments(tier):
    segments = sorted((tier.root / "log").glob("*.kvs"))
    length = segments[0].stat().st_size
    beside = taken(tier) - len(segments) * length
    ran = good(kvtiers("gc", tier.url, "--max-bytes", beside + 2 * length - 1, "--json")).json
    assert ran["segments"] == len(segments) - 1
    assert ran["bytes_left"] == beside + length
    assert (left(tier), left(tier, OTHER)) == ([], [0, 1])  # it was begun last
    said = good(kvtiers("gc", tier.url, "--max-bytes", 0)).out
    assert "deleted segments: 1\n" in said
    assert left(tier, OTHER) == []


@only_log
@pytest.mark.parametrize("words", [["--max-bytes", "0"], ["--max-bytes", "0", "--dry-run"], []])
def test_a_log_is_its_owners_to_shrink(tier, words):
    store, before = tier.open(), tier.image()
    ran = kvtiers("gc", tier.url, *words)
    assert (ran.status, ran.out) == (2, "")
    assert f"belongs to the living process {os.getpid()}" in ran.err
    assert "stop that engine, or lower its capacity_bytes" in ran.err
    assert ran.err.count("\n") == 1
    assert tier.image() == before
    store.close()
