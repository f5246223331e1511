"""The layout ``files`` as tools see it: everything is found, nothing is changed or waited for."""

import os
import shutil

import pytest

from kvtiers.chunks import PAGE_BYTES, Namespace
from kvtiers.errors import ConfigError, Kind, KVTiersError
from kvtiers.tiers.fs import names
from kvtiers.tiers.fs.files_place import FilesPlace
from kvtiers.tiers.fs.maintain import maintain
from kvtiers.tiers.fs.quota import STATE_BYTES
from kvtiers.tiers.fs.tools import FsURL
from kvtiers.tiers.places import Aim, Part
from tests.unit.tiers.fs.fs_kit import Folder, capacity, flip, write
from tests.unit.tiers.tier_kit import CHUNK, LAYOUT, NAMESPACE, key, payload


@pytest.fixture
def complaints():
    return []


@pytest.fixture
def place(folder, complaints):
    return FilesPlace(FsURL(str(folder.root)), complaints.append)


def stored(folder, *ns):
    store = folder.open()
    assert write(store, *ns) == [None] * len(ns)
    return store


def answers(place, *ns, namespace=NAMESPACE.id):
    return [
        got.kind if isinstance(got, KVTiersError) else bytes(got)
        for _, got in place.read(namespace, [key(n) for n in ns])
    ]


def test_what_an_engine_wrote_is_found(folder, place):
    stored(folder, 1, 2).close()
    folder.age(1, 5000.0)
    (found,) = place.namespaces()
    assert found.namespace == NAMESPACE
    entries = {e.key: e for e in place.entries(NAMESPACE.id)}
    assert set(entries) == {key(1), key(2)}
    assert (entries[key(1)].bytes, entries[key(1)].used_at) == (CHUNK, 5000.0)
    assert place.find(NAMESPACE.id, [key(3), key(1)]) == [None, entries[key(1)]]
    assert answers(place, 2, 1, 3) == [payload(2), payload(1), Kind.VANISHED]


def test_each_view_is_aligned_and_verified_at_its_turn(folder, place):
    stored(folder, 1, 2).close()
    reading = place.read(NAMESPACE.id, [key(1), key(2)])
    _, first = next(reading)
    assert bytes(first) == payload(1)
    flip(folder.file(2), -1)
    _, second = next(reading)
    assert second.kind is Kind.CORRUPT


def damage_payload(path):
    flip(path, -1)


def damage_header(path):
    flip(path, 20)


def cut(path):
    os.truncate(path, PAGE_BYTES + 100)


def cut_header(path):
    os.truncate(path, 10)


def lengthen(path):
    os.truncate(path, PAGE_BYTES + CHUNK + 4096)


def make_huge(path):
    os.truncate(path, 1 << 40)


def make_fifo(path):
    path.unlink()
    os.mkfifo(path)


def make_link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def make_folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "damage",
    [
        damage_payload,
        damage_header,
        cut,
        cut_header,
        lengthen,
        make_huge,
        make_fifo,
        make_link,
        make_folder,
    ],
)
def test_damage_is_told_and_left_where_it_is(folder, place, damage):
    stored(folder, 1, 2).close()
    damage(folder.file(1))
    before = folder.file(1).lstat()
    assert answers(place, 1, 2) == [Kind.CORRUPT, payload(2)]
    assert folder.file(1).lstat() == before


def test_a_chunk_of_another_key_or_namespace_is_foreign(folder, place):
    stored(folder, 1, 2).close()
    shutil.copy(folder.file(1), folder.file(2))
    other = Namespace({"model": "other"})
    (folder.root / other.id / "00").mkdir(parents=True)
    shutil.copy(folder.file(1), folder.file(1, other))
    assert answers(place, 2) == [Kind.CORRUPT]
    ((_, got),) = place.read(other.id, [key(1)])
    assert "foreign namespace" in str(got)


def test_damaged_manifests_are_told(folder, place):
    made = [Namespace({"model": str(n)}) for n in range(5)]
    for n in made:
        (folder.root / n.id).mkdir(parents=True)
    texts = [b"\xff\xfe", b"[" * 100_000, b'{"model": "7"}', b"x" * (2 << 20)]
    for n, text in zip(made, texts, strict=False):
        (folder.root / n.id / names.MANIFEST).write_bytes(text)
    os.mkfifo(folder.root / made[4].id / names.MANIFEST)
    found = place.namespaces()
    assert [f.id for f in found] == sorted(n.id for n in made)
    assert [f.namespace for f in found] == [None] * 5
    assert all("manifest.json is damaged" in f.problem for f in found)
    (folder.root / made[4].id / names.MANIFEST).unlink()
    problems = {f.id: f.problem for f in place.namespaces()}
    assert problems[made[4].id] == "it has no manifest.json"


def test_what_is_not_named_as_ours_is_no_chunk(folder, place):
    stored(folder, 1).close()
    inside = folder.root / NAMESPACE.id
    (inside / "zz").mkdir()
    shutil.copy(folder.file(1), inside / "zz" / folder.file(1).name)
    shutil.copy(folder.file(1), inside / folder.file(1).name)
    (inside / "ff").symlink_to(folder.file(1).parent)
    (inside / "fe").mkdir()
    shutil.copy(folder.file(1), inside / "fe" / folder.file(1).name)  # of another fan
    (folder.root / ("a" * 32)).symlink_to(inside)
    assert [e.key for e in place.entries(NAMESPACE.id)] == [key(1)]
    assert [f.id for f in place.namespaces()] == [NAMESPACE.id]


def test_a_chunk_in_the_wrong_folder_is_nobodys_and_leaves_first(folder, place):
    store = folder.open(capacity_bytes=capacity(3))
    assert write(store, 1, 2) == [None, None]
    astray = folder.root / NAMESPACE.id / "fe" / folder.file(1).name
    astray.parent.mkdir()
    shutil.copy(folder.file(1), astray)
    assert {e.key for e in place.entries(NAMESPACE.id)} == {key(1), key(2)}
    assert sorted(e.key for e in store.scan()) == [key(1), key(2)]
    assert (NAMESPACE.id, Part.CHUNKS, 2) in [(u.namespace, u.part, u.files) for u in place.usage()]
    assert store.used_bytes == folder.disk_bytes(), "it counts"
    assert write(store, 3) == [None]
    assert not astray.exists()
    assert folder.removed == []
    assert store.contains([key(1), key(2), key(3)]) == [True] * 3
    store.close()


def test_nor_does_a_maintenance_pass_take_a_chunk_for_it(folder, place):
    stored(folder, 1, 2).close()
    astray = folder.root / NAMESPACE.id / "fe" / folder.file(1).name
    astray.parent.mkdir()
    shutil.copy(folder.file(1), astray)
    maintain(str(folder.root), Aim(max_bytes=folder.disk_bytes() - 1), pause=lambda seconds: None)
    assert not astray.exists()
    assert {e.key for e in place.entries(NAMESPACE.id)} == {key(1), key(2)}


def test_every_byte_is_accounted_for(folder, place):
    store = stored(folder, 1, 2)
    flip(folder.file(2), -1)
    store.read([])
    assert len([1 for _ in place.entries(NAMESPACE.id)]) == 2
    aside = folder.root / NAMESPACE.id / names.QUARANTINE
    aside.mkdir()
    folder.file(2).rename(aside / folder.file(2).name)
    (folder.root / "stranger").write_bytes(b"123")
    (folder.root / "folder").mkdir()
    (folder.root / "folder" / "inside").write_bytes(b"not ours, but it takes room")
    (folder.root / f"{names.TRIAL}x" / "tier").mkdir(parents=True)
    (folder.root / f"{names.TRIAL}x" / "tier" / "1").write_bytes(b"12345")
    whole = {(u.namespace, u.part): (u.files, u.bytes) for u in place.usage()}
    manifest = len(NAMESPACE.manifest())
    assert whole == {
        ("", Part.OTHER): (1, STATE_BYTES),
        ("", Part.FOREIGN): (2, 3 + len(b"not ours, but it takes room")),
        ("", Part.TRIAL): (1, 5),
        (NAMESPACE.id, Part.CHUNKS): (1, PAGE_BYTES + CHUNK),
        (NAMESPACE.id, Part.TEMPORARY): (1, 0),
        (NAMESPACE.id, Part.QUARANTINE): (1, PAGE_BYTES + CHUNK),
        (NAMESPACE.id, Part.OTHER): (1, manifest),
    }
    store.close()


def test_what_vanishes_while_it_is_looked_at_is_left_out(folder, place):
    stored(folder, 1, 0x100).close()  # of one fan
    entries = place.entries(NAMESPACE.id)
    first = next(entries)
    for n in (1, 0x100):
        if key(n) != first.key:
            folder.file(n).unlink()
    assert list(entries) == []
    shutil.rmtree(folder.root / NAMESPACE.id)
    assert list(place.entries(NAMESPACE.id)) == []
    assert [(u.namespace, u.bytes) for u in place.usage()] == [("", STATE_BYTES)]
    assert place.namespaces() == []


def test_a_root_that_is_gone_is_an_error(folder, place):
    with pytest.raises(KVTiersError, match="No such file"):
        place.namespaces()


def test_nothing_changes_and_nothing_is_locked(folder, place):
    store = stored(folder, 1, 2)
    before = [(p, p.lstat().st_mtime_ns, p.lstat().st_ctime_ns) for p in folder.root.rglob("*")]
    assert len(place.namespaces()) == 1
    assert len(list(place.entries(NAMESPACE.id))) == 2
    assert place.usage()
    assert answers(place, 1, 2) == [payload(1), payload(2)]
    after = [(p, p.lstat().st_mtime_ns, p.lstat().st_ctime_ns) for p in folder.root.rglob("*")]
    assert after == before
    store.check()
    store.close()


def test_its_store_is_the_one_that_engines_use(folder, place):
    stored(folder, 1, 2).close()
    store = place.open_store(NAMESPACE, LAYOUT)
    store.delete([key(1)])
    store.close()
    assert [e.key for e in place.entries(NAMESPACE.id)] == [key(2)]


def test_the_capacity_is_what_the_url_says_or_what_rules_here(folder, place):
    assert (place.capacity(), place.bound()) == (None, None)
    with pytest.raises(ConfigError, match="add &capacity= to say so"):
        place.open_store(NAMESPACE, LAYOUT)
    folder.open(capacity_bytes=capacity(7)).close()
    assert place.capacity() == capacity(7)
    store = folder.open(capacity_bytes=capacity(5))
    assert place.capacity() == capacity(5)
    store.close()
    assert (
        FilesPlace(FsURL(str(folder.root), capacity_bytes=1 << 20), pytest.fail).capacity()
        == 1 << 20
    )


def test_where_others_evict_its_store_leaves_it_to_them(folder, place):
    folder.open(eviction="external").close()
    store = place.open_store(NAMESPACE, LAYOUT)
    assert place.capacity() is None
    assert write(store, 1) == [None]
    store.close()


def damage_account(root):
    flip(root / names.QUOTA, 20)


def clear_account(root):
    (root / names.QUOTA).write_bytes(b"")


def make_a_folder_of_the_account(root):
    (root / names.QUOTA).unlink()
    (root / names.QUOTA).mkdir()


def have_maintenance_make_the_account(root):
    (root / names.QUOTA).unlink()
    report = maintain(str(root), Aim(max_bytes=0), pause=lambda seconds: None)
    assert len(report.chunks) == 1


@pytest.mark.parametrize(
    "harm",
    [
        damage_account,
        clear_account,
        make_a_folder_of_the_account,
        have_maintenance_make_the_account,
    ],
)
def test_an_account_that_does_not_say_who_evicts_is_no_leave_to_write(folder, place, harm):
    stored(folder, 1).close()
    harm(folder.root)
    with pytest.raises(ConfigError, match=r"quota .*nobody knows the bound of .*add &capacity="):
        place.open_store(NAMESPACE, LAYOUT)


def test_maintenance_leaves_it_at_external(folder, place):
    store = folder.open(eviction="external")
    assert write(store, 1) == [None]
    store.close()
    maintain(str(folder.root), Aim(max_bytes=0), pause=lambda seconds: None)
    place.open_store(NAMESPACE, LAYOUT).close()


def test_which_layout_lies_there(folder, tmp_path):
    assert not FilesPlace.lies_at(str(tmp_path / "absent"))
    assert not FilesPlace.lies_at(str(tmp_path))
    stored(folder, 1).close()
    assert FilesPlace.lies_at(str(folder.root))


def test_it_says_where_it_is(folder):
    strange = Folder(folder.root / "a b?c")
    place = FilesPlace(FsURL(str(strange.root)), lambda sentence: None)
    assert place.url.endswith("/a%20b%3Fc?layout=files")
    assert repr(place).startswith("<FilesPlace ")
