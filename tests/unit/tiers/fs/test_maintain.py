"""A maintenance pass beside living engines, dead ones, and none."""

import os
from pathlib import Path
from typing import Any

import pytest

from kvtiers.chunks import Namespace
from kvtiers.errors import ConfigError, KVTiersError
from kvtiers.tiers.fs.maintain import maintain
from kvtiers.tiers.fs.names import QUOTA, leaving
from kvtiers.tiers.fs.stamps import GRACE_S
from kvtiers.tiers.places import Aim, Report
from tests.unit.tiers.fs.fs_kit import STORED, Folder, capacity, flip, read, write
from tests.unit.tiers.fs.test_open import dead_scratch
from tests.unit.tiers.tier_kit import NAMESPACE, key, payload

OTHER = Namespace({"model": "other"})


def run(folder: Folder, **options: Any) -> Report:
    """A pass that waits for nobody; promises end by themselves meanwhile."""
    options.setdefault("pause", folder.wall.advance)
    aim = Aim(**{k: options.pop(k) for k in list(options) if k in Aim.__slots__})
    return maintain(str(folder.root), aim, wall_clock=folder.wall, **options)


def fill(folder: Folder, *ns: int, namespace: Namespace = NAMESPACE, **options: Any) -> None:
    """Chunks that were used in this order, 100 s ago and later."""
    store = folder.open(namespace, **options)
    write(store, *ns)
    store.close()
    for n in ns:
        folder.age(n, folder.wall.now - 100 + n, namespace)


def names_of(*ns: int, namespace: Namespace = NAMESPACE) -> list[str]:
    return [f"{namespace.id}/00/{n.to_bytes(32, 'big').hex()}-g0.kvc" for n in ns]


def test_the_least_recently_used_leave_down_to_the_size(folder: Folder) -> None:
    fill(folder, 5, 3, 1, 4, 2)
    rest = folder.disk_bytes() - 2 * STORED
    report = run(folder, max_bytes=rest)
    assert [name for name, _ in report.chunks] == names_of(1, 2)
    assert report.bytes == 2 * STORED
    assert folder.disk_bytes() == rest
    assert run(folder, max_bytes=rest).chunks == []
    store = folder.open()
    assert store.used_bytes == folder.disk_bytes(), "the books know"
    store.close()


def test_dry_run_says_the_same_and_changes_nothing(folder: Folder) -> None:
    fill(folder, 1, 2, 3)
    dead_scratch(folder.root / NAMESPACE.id)
    (folder.root / NAMESPACE.id / "7f").mkdir()
    (folder.root / QUOTA).unlink()
    before = sorted(folder.root.rglob("*"))
    said = run(folder, max_bytes=STORED * 2, dry_run=True)
    assert sorted(folder.root.rglob("*")) == before
    done = run(folder, max_bytes=STORED * 2)
    assert (said.chunks, said.temporary) == (done.chunks, done.temporary)
    assert len(done.chunks) == 2, "the manifest and the quota file count too"
    assert said.empty_folders == [f"{NAMESPACE.id}/7f"]


def test_old_chunks_leave_whatever_the_size(folder: Folder) -> None:
    fill(folder, 1, 2, 50)
    report = run(folder, older_than_s=60)
    assert [name for name, _ in report.chunks] == names_of(1, 2)
    assert folder.file(50).exists()


def test_what_was_put_aside_leaves_for_the_size_and_not_for_its_age(folder: Folder) -> None:
    fill(folder, 1, 2)
    aside = folder.root / NAMESPACE.id / "quarantine"
    aside.mkdir()
    (aside / "01-g0.kvc").write_bytes(b"x")
    assert [name for name, _ in run(folder, older_than_s=98.5).chunks] == names_of(1)
    assert (aside / "01-g0.kvc").exists()
    report = run(folder, max_bytes=folder.disk_bytes() - 1)
    assert (report.chunks, len(report.quarantined)) == ([], 1)


def test_links_are_not_followed(folder: Folder, tmp_path: Path) -> None:
    fill(folder, 1)
    outside = tmp_path / "outside"
    outside.mkdir()
    for n in range(6):
        (outside / f"0{n}-g0.kvc").write_bytes(b"x")
    for name in ("ab", "quarantine"):
        (folder.root / NAMESPACE.id / name).symlink_to(outside)
    run(folder, max_bytes=0)
    assert len(list(outside.iterdir())) == 6


def test_one_namespace_only(folder: Folder) -> None:
    fill(folder, 1)
    fill(folder, 2, namespace=OTHER)
    dead_scratch(folder.root / NAMESPACE.id)
    report = run(folder, max_bytes=0, namespace=OTHER.id)
    assert [name for name, _ in report.chunks] == names_of(2, namespace=OTHER)
    assert report.temporary == []
    assert folder.file(1).exists()


def test_leftovers_of_dead_engines_quarantine_and_empty_folders_go(folder: Folder) -> None:
    store = folder.open()
    for n in range(6):
        write(store, n)
        flip(folder.file(n), -1)
        read(store, n)
    aside = folder.root / NAMESPACE.id / "quarantine"
    for n in range(3):
        (aside / f"0{n}-g0.kvc").write_bytes(b"x")
        os.utime(aside / f"0{n}-g0.kvc", (n, n))
    dead = dead_scratch(folder.root / NAMESPACE.id)
    report = run(folder)
    assert report.temporary == [(f"{NAMESPACE.id}/tmp/1-dead", len("half a chunk"))]
    assert not dead.exists()
    assert Path(store._place._scratch.folder).exists(), "of one that lives"
    assert [Path(name).name for name, _ in report.quarantined] == [f"0{n}-g0.kvc" for n in range(3)]
    assert report.empty_folders == [f"{NAMESPACE.id}/00"]
    assert write(store, 1) == [None]
    assert read(store, 1) == [payload(1)]
    store.close()


def test_what_an_engine_found_or_reads_stays(folder: Folder) -> None:
    fill(folder, 1, 2, 3)
    store = folder.open(capacity_bytes=capacity(4))
    assert store.contains([key(1)]) == [True]
    assert read(store, 2) == [payload(2)]
    report = run(folder, max_bytes=0, pause=lambda _: None)
    assert [name for name, _ in report.chunks] == names_of(3)
    assert report.in_use == 2
    assert read(store, 1, 2) == [payload(1), payload(2)]
    store.close()


def test_engines_with_room_are_warned_first(folder: Folder) -> None:
    """They do not mark what they find while evictions are far away; a pass gives them time."""
    fill(folder, 1, 2, capacity_fraction=0.9)
    store = folder.open(capacity_fraction=0.9)
    paused: list[float] = []

    def ask_meanwhile(seconds: float) -> None:
        paused.append(seconds)
        assert store.contains([key(1)]) == [True]

    report = run(folder, max_bytes=0, pause=ask_meanwhile)
    assert paused == [GRACE_S]
    assert [name for name, _ in report.chunks] == names_of(2)
    assert report.in_use == 1
    assert read(store, 1) == [payload(1)]
    store.close()


def test_a_pass_frees_room_for_living_engines(folder: Folder) -> None:
    store = folder.open(capacity_bytes=capacity(2))
    write(store, 1, 2)
    report = run(folder, max_bytes=0)
    assert len(report.chunks) == 2
    assert write(store, 3, 4) == [None, None]
    assert folder.removed == [], "nothing of theirs had to leave for it"
    assert store.used_bytes == folder.disk_bytes()
    store.close()


def test_what_cannot_be_deleted_is_said(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(folder, 1, 2)
    real = os.unlink

    def unlink(path: str, **where: int) -> None:
        if path == leaving(str(folder.file(1))):
            raise PermissionError(1, "told to refuse")
        real(path, **where)

    monkeypatch.setattr(os, "unlink", unlink)
    report = run(folder, max_bytes=0)
    assert report.failed == names_of(1)
    assert folder.file(1).exists(), "it has its name back"
    assert [name for name, _ in report.chunks] == names_of(2)


def test_what_is_not_ours_stays(folder: Folder) -> None:
    fill(folder, 1)
    others = folder.root / ("0" * 32) / "00"
    others.mkdir(parents=True)
    (others / "00-g0.kvc").write_bytes(b"no manifest of ours lies beside it")
    (folder.root / NAMESPACE.id / "00" / "notes.txt").touch()
    dead_scratch(others.parent)
    report = run(folder, max_bytes=0)
    assert [name for name, _ in report.chunks] == names_of(1)
    assert report.temporary == report.empty_folders == []
    assert (others / "00-g0.kvc").exists()


def test_wrong_calls_are_one_sentence(folder: Folder) -> None:
    fill(folder, 1)
    for options, says in (
        ({"max_bytes": -1}, "max_bytes is -1: give 0 or more"),
        ({"older_than_s": -0.5}, "older_than_s is -0.5: give 0 or more"),
        ({"namespace": "../x\n"}, "namespace is '../x\\n', which"),
    ):
        with pytest.raises(ConfigError) as caught:
            run(folder, **options)
        assert str(caught.value).startswith(says)
    with pytest.raises(KVTiersError, match=r"maintain .*/nowhere failed: No such file"):
        maintain(str(folder.root / "nowhere"), Aim())
