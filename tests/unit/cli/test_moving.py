"""``export``, ``import``, ``migrate``: chunks arrive whole and verified, or it is said that not."""

import io
import json
import os
import tarfile
import time

import pytest

from kvtiers.chunks import PAGE_BYTES, make_key
from kvtiers.cli.archive import writing
from kvtiers.cli.commands import migrate
from kvtiers.hashing import chunk_keys
from kvtiers.tiers.base import Entry, Item
from tests.unit.cli.cli_kit import (
    CAPACITY,
    CHUNK,
    KEYS,
    NAMESPACE,
    OTHER,
    WALL,
    Tier,
    good,
    in_private_mounts,
    kvtiers,
    manifest,
    only_files,
    write_json,
)
from tests.unit.tiers.fs.fs_kit import OVERHEAD
from tests.unit.tiers.tier_kit import filled


@pytest.fixture
def archive(tier, tmp_path):
    good(kvtiers("export", tier.url, tmp_path / "chunks.tar"))
    return tmp_path / "chunks.tar"


@pytest.fixture(params=["files", "log"])
def target_layout(request):
    return request.param


@pytest.fixture
def target(tmp_path, target_layout):
    return Tier(tmp_path / "target", target_layout)


to_files = pytest.mark.parametrize("target_layout", ["files"])
to_log = pytest.mark.parametrize("target_layout", ["log"])


def same_chunks(one, other, namespace=NAMESPACE):
    """How many there are, if both hold the same."""
    assert one.chunks(namespace) == other.chunks(namespace)
    return len(one.chunks(namespace))


# -- export and import ----------------------------------------------------------------------------


def test_what_was_exported_is_imported_bit_for_bit(tier, archive, target):
    ran = good(kvtiers("import", archive, target.new, "--json")).json
    assert {n["namespace"]: n["chunks"] for n in ran["namespaces"]} == {
        NAMESPACE.id: 4,
        OTHER.id: 2,
    }
    assert same_chunks(tier, target) == 4
    assert same_chunks(tier, target, OTHER) == 2
    again = good(kvtiers("import", archive, target.new, "--json")).json
    assert [(n["chunks"], n["present"]) for n in again["namespaces"]] == [(0, 2), (0, 4)]


def test_an_engine_finds_what_was_imported(archive, target):
    good(kvtiers("import", archive, target.new))
    store = target.open()
    assert store.contains(KEYS) == [True] * 4
    store.close()


def test_anybody_can_list_an_archive(archive):
    with tarfile.open(archive) as tar:
        listed = tar.getnames()
        first = json.load(tar.extractfile(listed[0]))
    assert (listed[0], listed[-1]) == ("kvtiers-archive.json", "kvtiers-end.json")
    assert first["version"] == 1
    assert set(first["namespaces"]) == {NAMESPACE.id, OTHER.id}
    digests = [k[:-4].hex() for k in KEYS]
    assert f"{NAMESPACE.id}/{digests[0]}-g0.kvc" in listed
    assert oct(archive.stat().st_mode & 0o777) == "0o600"


def test_only_a_prompt_or_a_namespace(tier, prompt, tmp_path, target):
    good(kvtiers("export", tier.url, tmp_path / "a", "--namespace", OTHER.id))
    good(kvtiers("import", tmp_path / "a", target.new))
    assert same_chunks(tier, target, OTHER) == 2
    assert not (target.root / NAMESPACE.id).exists()
    stranger = make_key(bytes(32), 0)
    tier.fill([stranger])
    tier.damage(stranger)  # but it is of no prompt
    ran = good(kvtiers("export", tier.url, tmp_path / "b", "--tokens", prompt, "--json")).json
    assert ran["chunks"] == 6


def test_damaged_chunks_are_left_out_and_said(tier, tmp_path):
    tier.damage(KEYS[1])
    ran = kvtiers("export", tier.url, tmp_path / "a", "--json")
    assert ran.status == 1
    assert [x["key"] for x in ran.json["left_out"]] == [KEYS[1].hex()]
    assert ran.json["chunks"] == 5


def test_an_archive_is_not_replaced_unasked(tier, archive):
    before = archive.read_bytes()
    assert kvtiers("export", tier.url, archive).status == 2
    assert archive.read_bytes() == before
    good(kvtiers("export", tier.url, archive, "--force", "--namespace", OTHER.id))
    assert len(archive.read_bytes()) < len(before)


def test_an_export_that_ends_early_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), writing(str(tmp_path / "a"), [NAMESPACE]):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_what_is_written_is_not_remembered(tmp_path):
    with writing(str(tmp_path / "a"), [NAMESPACE]) as archive:
        for key in KEYS:
            archive.add(NAMESPACE.id, Entry(key, CHUNK, WALL), memoryview(bytes(CHUNK)))
            assert len(archive._tar.getmembers()) == 0
    with tarfile.open(tmp_path / "a") as tar:
        assert len(tar.getnames()) == 1 + len(KEYS) + 1


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_nothing_to_export_is_said_and_no_archive_is_left(tier, tmp_path, force):
    tokens = write_json(tmp_path / "tokens", [])
    bare = Tier(tmp_path / "bare", tier.layout)
    bare.fill(KEYS[:1])
    bare.forget(KEYS[0])
    for words, why in (
        ([tier.url, tmp_path / "a", "--tokens", tokens], "no chunk of this prompt"),
        ([bare.url, tmp_path / "a"], "holds no chunk"),
        ([tier.url, "-"], "write ./- if that is the name"),
    ):
        ran = kvtiers("export", *words, *force)
        assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1)
        assert why in ran.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bare", "kv", "tokens"]


def test_if_all_chunks_are_damaged_there_is_no_archive(tmp_path, layout):
    tier = Tier(tmp_path / "kv", layout).fill(KEYS[:2])
    for key in KEYS[:2]:
        tier.damage(key)
    ran = kvtiers("export", tier.url, tmp_path / "a", "--json")
    assert (ran.status, ran.out, ran.err.count("\n")) == (1, "", 1)
    assert "none of 2 chunks can be exported" in ran.err
    assert "checksum differs" in ran.err
    assert not (tmp_path / "a").exists()


def rewritten(archive, change):
    """The archive with ``change(name, data)`` applied: other members, or None for none."""
    made = archive.with_name("changed.tar")
    with tarfile.open(archive) as old, tarfile.open(made, "w") as new:
        for member in old:
            changed = change(member.name, old.extractfile(member).read())
            for name, data in changed or []:
                info = tarfile.TarInfo(name)
                info.size = len(data)
                new.addfile(info, io.BytesIO(data))
    return made


def chunk_name(key, namespace=NAMESPACE):
    return f"{namespace.id}/{key[:-4].hex()}-g0.kvc"


BAD = chunk_name(KEYS[1])


def flipped(name, data):
    if name != BAD:
        return [(name, data)]
    return [(name, data[:-1] + bytes([data[-1] ^ 1]))]


def foreign(name, data):
    return [(chunk_name(KEYS[1], OTHER) if name == BAD else name, data)]


def renamed(name, data):
    return [(f"{NAMESPACE.id}/{'0' * 64}-g0.kvc" if name == BAD else name, data)]


def shortened(name, data):
    return [(name, data[:-4096] if name == BAD else data)]


def escaping(name, data):
    return [("../../etc/passwd" if name == BAD else name, data)]


def of_no_namespace(name, data):
    return [(f"{'0' * 32}/{name.partition('/')[2]}" if name == BAD else name, data)]


@pytest.mark.parametrize(
    "change", [flipped, foreign, renamed, shortened, escaping, of_no_namespace]
)
def test_one_bad_member_and_nothing_is_imported(archive, target, change):
    made = rewritten(archive, change)
    ran = kvtiers("import", made, target.new)
    assert ran.status == 1
    assert "nothing was imported, for 1 members" in ran.err
    assert ran.err.count("\n") == 1
    assert not target.root.exists()
    ran = kvtiers("import", made, target.new, "--skip-damaged", "--json")
    assert ran.status == 1
    assert len(ran.json["warnings"]) == 1
    assert sum(n["chunks"] for n in ran.json["namespaces"]) == 5
    assert target.numbers() == [0, 2, 3]


def test_a_link_in_an_archive_is_not_followed(archive, target):
    made = archive.with_name("links.tar")
    with tarfile.open(archive) as old, tarfile.open(made, "w") as new:
        for member in old:
            if member.name == BAD:
                link = tarfile.TarInfo(BAD)
                link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
                new.addfile(link)
            else:
                new.addfile(member, old.extractfile(member))
    ran = kvtiers("import", made, target.new)
    assert ran.status == 1
    assert "is no plain file" in ran.err


@pytest.mark.parametrize("kept", [0.1, 0.3, 0.7, 0.85])
def test_an_archive_that_was_cut_short_is_refused(archive, target, kept):
    os.truncate(archive, int(archive.stat().st_size * kept))
    ran = kvtiers("import", archive, target.new)
    assert ran.status in (1, 2)
    assert "cut short" in ran.err or "is no archive" in ran.err
    assert not target.root.exists()


def head(**changes):
    def change(name, data):
        if name != "kvtiers-archive.json":
            return [(name, data)]
        return [(name, json.dumps({**json.loads(data), **changes}).encode())]

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (head(version=2), "has version 2"),
        (head(format="other"), "is no archive"),
        (head(namespaces={}), "names no namespace"),
        (head(namespaces={NAMESPACE.id: {"model": "another"}}), "damaged or another's"),
        (head(namespaces={"../x": {"model": "m"}}), "damaged or another's"),
        (lambda name, data: [(name, b"[" * 99999)] if "archive" in name else [], "is no archive"),
        (lambda name, data: None if "end" in name else [(name, data)], "cut short"),
        (lambda name, data: None if name == BAD else [(name, data)], "cut short"),
        (lambda name, data: None, "is empty"),
    ],
)
def test_what_is_no_whole_archive(archive, target, change, why):
    ran = kvtiers("import", rewritten(archive, change), target.new)
    assert ran.status in (1, 2)
    assert why in ran.err
    assert not target.root.exists()


def test_a_fifo_is_no_archive(tmp_path, target):
    os.mkfifo(tmp_path / "fifo")
    ran = kvtiers("import", tmp_path / "fifo", target.new)
    assert ran.status == 2
    assert "no regular file" in ran.err


def test_a_dry_import_makes_nothing(archive, target):
    ran = good(kvtiers("import", archive, target.new, "--dry-run", "--json")).json
    assert sum(n["chunks"] for n in ran["namespaces"]) == 6
    assert not target.root.exists()


@only_files
def test_a_full_target_says_how_far_it_got(archive, tmp_path):
    """A file system for three chunks, where others evict; with more room the rest comes in."""
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    make = "Tier(Path(sys.argv[1])).open(eviction='external').close()"
    ran = in_private_mounts(
        f"""
        mount -t tmpfs -o size=64k,mode=700 tmpfs {mounted} || exit 9
        "$0" -c "import sys
from pathlib import Path
from tests.unit.cli.cli_kit import Tier
{make}" {mounted}/kv || exit 9
        "$0" -m kvtiers.cli import {archive} fs://{mounted}/kv && exit 9
        mount -o remount,size=4m {mounted} || exit 9
        "$0" -m kvtiers.cli import {archive} fs://{mounted}/kv --json
        """
    )
    assert ran.status == 0
    (said,) = ran.err.splitlines()
    assert "there is no more room, after" in said
    results = ran.json["namespaces"]
    written, present = (sum(n[what] for n in results) for what in ("chunks", "present"))
    assert written + present == 6
    assert min(written, present) > 0


# -- migrate --------------------------------------------------------------------------------------


def test_migrate_copies_all_and_goes_on_where_it_ended(tier, target):
    target.fill(KEYS[1:2])
    ran = good(kvtiers("migrate", tier.url, target.new, "--json")).json
    ours = next(n for n in ran["namespaces"] if n["namespace"] == NAMESPACE.id)
    assert (ours["chunks"], ours["bytes"], ours["present"]) == (3, 3 * CHUNK, 1)
    assert same_chunks(tier, target) == 4
    assert same_chunks(tier, target, OTHER) == 2
    again = good(kvtiers("migrate", tier.url, target.new, "--json")).json
    assert [n["chunks"] for n in again["namespaces"]] == [0, 0]


@only_files
@to_files
def test_when_a_chunk_was_used_travels_along(tier, archive, target, tmp_path):
    good(kvtiers("migrate", tier.url, target.new))
    imported = Tier(tmp_path / "imported")
    good(kvtiers("import", archive, imported.new))
    for copy in (target, imported):
        times = [copy.file(k).stat().st_mtime for k in KEYS]
        assert times == [WALL, WALL + 1, WALL + 2, WALL + 3]


@only_files
@to_files
def test_what_an_engine_found_meanwhile_is_not_set_back(tier, target):
    """Its time is a promise."""
    good(kvtiers("migrate", tier.url, target.new))
    promised = time.time() + 20
    os.utime(target.file(KEYS[0]), (promised, promised))
    copies = list(tier.place().entries(NAMESPACE.id))
    target.place().backdate(NAMESPACE.id, copies)
    assert target.file(KEYS[0]).stat().st_mtime == pytest.approx(promised)
    assert target.file(KEYS[1]).stat().st_mtime == WALL + 1


@to_log
def test_a_log_keeps_its_capacity_and_what_will_not_stay_is_said(tier, target):
    good(kvtiers("migrate", tier.url, target.new, "--namespace", OTHER.id))
    many = chunk_keys(list(range(16 * 200)), 0, 16, 16)
    tier.fill(many)
    ran = kvtiers("migrate", tier.url, target.url, "--namespace", NAMESPACE.id)
    assert ran.status == (1 if tier.layout == "files" else 0)
    sizes = [p.stat().st_size for p in target.root.rglob("*.kvs")]
    assert 4 * max(sizes) < sum(sizes) <= CAPACITY["log"]
    assert ("will not stay" in ran.err) is (tier.layout == "files")  # a log holds fewer itself
    assert many[-1] in target.chunks()


@only_files
@to_files
def test_a_use_in_the_future_is_now(tier, target):
    os.utime(tier.file(KEYS[0]), (1 << 40, 1 << 40))
    good(kvtiers("migrate", tier.url, target.new))
    assert target.file(KEYS[0]).stat().st_mtime <= time.time()


def test_a_dry_migration_makes_nothing(tier, target):
    ran = good(kvtiers("migrate", tier.url, target.new, "--dry-run", "--json")).json
    assert sum(n["chunks"] for n in ran["namespaces"]) == 6
    assert not target.root.exists()


@pytest.mark.parametrize("below", ["sub", "log/x", NAMESPACE.id])
@pytest.mark.parametrize("by_link", [False, True])
def test_a_tier_inside_another_is_refused(tier, target_layout, tmp_path, below, by_link):
    """Its bytes would be within nobody's bound."""
    (tmp_path / "link").symlink_to(tier.root)
    inner = Tier((tmp_path / "link" if by_link else tier.root) / below, target_layout)
    before = tier.image()
    ran = kvtiers("migrate", tier.url, inner.new)
    assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert f"TO lies inside FROM, {inner.url}?layout={target_layout} in {tier.url}" in ran.err
    outer = Tier(tmp_path, target_layout)
    ran = kvtiers("migrate", f"fs://{tmp_path}/link" if by_link else tier.url, outer.new)
    assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert "FROM lies inside TO" in ran.err
    assert tier.image() == before


@only_files
def test_both_layouts_of_one_folder_are_the_same_folder(tier, tmp_path):
    """No engine can work there, and each is to come to a folder of its own."""
    log = Tier(tmp_path / "other", "log").fill(KEYS[:1])
    (log.root / "log").rename(tier.root / "log")
    (tmp_path / "link").symlink_to(tier.root)
    words = [f"{tier.url}?layout=files", f"fs://{tmp_path}/link?layout=log"]
    for one, other in (words, words[::-1]):
        ran = kvtiers("migrate", one, other)
        assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1)
        assert f"FROM and TO are the same place: {one}" in ran.err


def test_a_folder_whose_name_begins_alike_is_another(tier, tmp_path, target_layout):
    good(kvtiers("migrate", tier.url, Tier(tmp_path / f"{tier.root.name}2", target_layout).new))


def test_damaged_chunks_do_not_travel(tier, target):
    tier.damage(KEYS[1])
    ran = kvtiers("migrate", tier.url, target.new, "--json")
    assert ran.status == 1
    failed = [f for n in ran.json["namespaces"] for f in n["failed"]]
    assert [f["key"] for f in failed] == [KEYS[1].hex()]
    assert target.numbers() == [0, 2, 3]
    assert "checksum differs" in kvtiers("migrate", tier.url, target.new).out


@to_files
def test_a_target_that_is_too_small_is_warned_of_and_keeps_what_was_used_last(tier, target):
    capacity = 2 * (CHUNK + PAGE_BYTES) + len(NAMESPACE.manifest()) + OVERHEAD
    words = [tier.url, f"{target.url}?capacity={capacity}", "--namespace", NAMESPACE.id]
    ran = kvtiers("migrate", *words)
    assert ran.status == 1
    better = f"'{target.url}?layout={target.layout}&capacity=200GiB'"
    assert "will not stay" in ran.err
    assert better in ran.err
    left = target.numbers()
    assert left[-1] == 3
    assert 0 < len(left) < 4
    (said,) = (line for line in ran.out.splitlines() if "at the end" in line)
    assert f"{len(left)} of 4 chunks are there at the end: {4 - len(left)} left again" in said
    assert better in said


def test_an_import_says_how_many_chunks_stayed(tmp_path, layout, target):
    many = chunk_keys(list(range(16 * 200)), 0, 16, 16)
    tier = Tier(tmp_path / "kv", layout)
    store = tier.open(capacity_bytes=1 << 24)
    assert store.write([Item(k, filled(i, CHUNK)) for i, k in enumerate(many)]) == [None] * 200
    store.close()
    good(kvtiers("export", tier.url, tmp_path / "a"))
    words = ["import", tmp_path / "a", f"{target.url}?layout={target.layout}&capacity=1MiB"]
    dry = good_but_warned(kvtiers(*words, "--dry-run", "--json")).json
    assert [n["there_at_the_end"] for n in dry["namespaces"]] == [None]
    ran = kvtiers(*words, "--json")
    (ours,) = ran.json["namespaces"]
    assert (ran.status, ours["chunks"]) == (1, 200)
    assert ours["there_at_the_end"] == len(target.chunks()) < 200
    roomy = good(kvtiers(*words[:2], f"fs://{tmp_path}/roomy?capacity=16MiB", "--json")).json
    assert [n["there_at_the_end"] for n in roomy["namespaces"]] == [200]


@only_files
def test_one_that_left_again_is_missed_though_one_that_failed_is_there(tier, target, monkeypatch):
    real = migrate.write_all

    def write_all(*arguments):
        tier.file(KEYS[1]).unlink()  # an engine took it away
        real(*arguments)
        target.forget(KEYS[2])
        target.fill(KEYS[1:2])  # and brought it here

    monkeypatch.setattr(migrate, "write_all", write_all)
    ran = kvtiers("migrate", tier.url, target.new, "--namespace", NAMESPACE.id, "--json")
    assert ran.status == 1
    (ours,) = ran.json["namespaces"]
    assert (ours["chunks"], ours["there_at_the_end"], ours["failed"]) == (3, 2, [])


def good_but_warned(ran):
    assert ran.status == 0
    assert "will not stay" in ran.err
    return ran


def test_large_and_small_chunks_fit_one_batch_or_one_each(tmp_path, layout, target):
    tier = Tier(tmp_path / "kv", layout)
    store = tier.open(capacity_bytes=1 << 30)
    sizes = [4 << 20, 12 << 20, 4096, 3 << 20, 8192]
    many = [(k, s) for k, s in zip(KEYS, sizes, strict=False)]
    assert store.write([Item(k, filled(i, s)) for i, (k, s) in enumerate(many)]) == [None] * 4
    store.close()
    good(kvtiers("migrate", tier.url, f"{target.url}?layout={target.layout}&capacity=1GiB"))
    assert same_chunks(tier, target) == 4
    assert good(kvtiers("verify", target.url, "--json")).json["chunks"] == 4


def test_only_one_namespace_is_copied_if_asked(tier, target):
    good(kvtiers("migrate", tier.url, target.new, "--namespace", OTHER.id[:5]))
    assert {p.name for p in target.root.iterdir() if len(p.name) == 32} == {OTHER.id}


def test_manifests_travel_as_they_are(tmp_path, layout, target):
    namespace = manifest("\u00e9\x1b", nested={"a": [1.5, None, {"b": 1e300}]})
    tier = Tier(tmp_path / "kv", layout).fill(KEYS, namespace)
    good(kvtiers("export", tier.url, tmp_path / "a"))
    good(kvtiers("import", tmp_path / "a", target.new))
    paths = [t.root / namespace.id / "manifest.json" for t in (tier, target)]
    assert paths[0].read_bytes() == paths[1].read_bytes()
