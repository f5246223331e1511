"""``gc``: what was not used for longest leaves, within what was named, and nothing else."""

import os
import time

import pytest

from kvtiers.chunks import PAGE_BYTES
from kvtiers.tiers.fs.files_place import FilesPlace
from tests.unit.cli.cli_kit import CHUNK, KEYS, NAMESPACE, OTHER, good, kvtiers

FILE = CHUNK + PAGE_BYTES
MANIFESTS = len(NAMESPACE.manifest()) + len(OTHER.manifest())


def left(tier, namespace=NAMESPACE):
    return [i for i, k in enumerate(KEYS) if tier.file(k, namespace).exists()]


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
    bound = keep * FILE + MANIFESTS
    ran = good(kvtiers("gc", tier.url, "--max-bytes", bound, "--json")).json
    assert (left(tier), left(tier, OTHER)) == (ours, others)
    assert ran["chunks"] == 6 - keep
    assert ran["bytes"] == (6 - keep) * FILE
    assert ran["bytes_left"] == bound


def test_one_byte_less_takes_one_chunk_more(tier):
    good(kvtiers("gc", tier.url, "--max-bytes", 6 * FILE + MANIFESTS - 1))
    assert (left(tier), left(tier, OTHER)) == ([0, 1, 2, 3], [1])


def test_within_one_namespace_nothing_else_counts_or_leaves(tier):
    bound = 2 * FILE + len(NAMESPACE.manifest())
    good(kvtiers("gc", tier.url, "--namespace", NAMESPACE.id, "--max-bytes", bound))
    assert (left(tier), left(tier, OTHER)) == ([2, 3], [0, 1])


def test_older_than(tier):
    for i, k in enumerate(KEYS):
        used_at = time.time() - 3600 * (i + 0.5)
        os.utime(tier.file(k), (used_at, used_at))
    good(kvtiers("gc", tier.url, "--older-than", "2h"))
    assert (left(tier), left(tier, OTHER)) == ([0, 1], [])


def test_a_dry_run_says_the_same_and_changes_nothing(tier):
    before = tier.image()
    words = ["gc", tier.url, "--max-bytes", 2 * FILE + MANIFESTS]
    would = good(kvtiers(*words, "--dry-run", "--json")).json
    assert "would delete 4 chunks" in good(kvtiers(*words, "--dry-run")).out
    assert tier.image() == before
    did = good(kvtiers(*words, "--json")).json
    assert {**would, "dry_run": False} == did


def test_what_is_used_meanwhile_stays(tier, monkeypatch):
    """An engine touches a chunk between the choice and the deletion."""
    opened = FilesPlace.open_store

    def touched(place, namespace, layout):
        if namespace == NAMESPACE:
            os.utime(tier.file(KEYS[0]))
            tier.file(KEYS[1]).unlink()
        return opened(place, namespace, layout)

    monkeypatch.setattr(FilesPlace, "open_store", touched)
    ran = good(kvtiers("gc", tier.url, "--max-bytes", "0", "--json")).json
    assert left(tier) == [0]
    assert ran["chunks"] == 4  # two of the other namespace, two of ours


def test_what_cannot_be_deleted_is_said_and_does_not_keep_the_others(tier):
    path = tier.file(KEYS[1])
    path.unlink()
    (path / "somebodys").mkdir(parents=True)
    ran = kvtiers("gc", tier.url, "--max-bytes", "0", "--json")
    assert ran.status == 1
    assert ran.json["failed"] == 1
    assert str(path) in ran.json["warnings"][0]
    assert left(tier) == [1]
    assert (path / "somebodys").is_dir()


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


def test_a_link_out_of_the_tier_is_not_followed(tier, tmp_path):
    fan = tier.file(KEYS[0]).parent
    outside = fan.rename(tmp_path / fan.name)
    fan.symlink_to(outside)
    good(kvtiers("gc", tier.url, "--max-bytes", "0"))
    assert (outside / tier.file(KEYS[0]).name).exists()
