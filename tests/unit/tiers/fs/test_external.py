"""``eviction: external``: the engine deletes no chunk, whatever happens to it."""

import os
from pathlib import Path

import pytest

from kvtiers.errors import Kind, KVTiersError
from kvtiers.events import Reason
from kvtiers.tiers.fs.maintain import maintain
from kvtiers.tiers.fs.stamps import GRACE_S
from kvtiers.tiers.places import Aim
from tests.unit.tiers.fs.fs_kit import STORED, Folder, flip, read, write
from tests.unit.tiers.tier_kit import NAMESPACE, key, payload

EXTERNAL = {"eviction": "external"}


def test_a_damaged_chunk_is_absent_and_stays_in_place(folder: Folder) -> None:
    store = folder.open(**EXTERNAL)
    write(store, 1, 2)
    flip(folder.file(1), -1)
    assert read(store, 1, 2) == [Kind.CORRUPT, payload(2)]
    assert folder.removed == [(key(1), Reason.CORRUPT)]
    assert store.contains([key(1), key(2)]) == [False, True]
    assert read(store, 1) == [Kind.VANISHED]
    assert folder.file(1).exists()
    assert not (folder.root / NAMESPACE.id / "quarantine").exists()
    store.check()
    store.close()


def test_a_damaged_chunk_is_replaced_by_the_next_write(folder: Folder) -> None:
    store, other = folder.open(**EXTERNAL), folder.open(**EXTERNAL)
    write(store, 1, 2)
    for n in (1, 2):
        flip(folder.file(n), -1)
        assert read(store, n) == [Kind.CORRUPT]
    assert write(store, 1) == [None]
    assert read(store, 1) == [payload(1)]
    assert read(other, 2) == [Kind.CORRUPT]
    assert write(other, 2) == [None]
    assert store.contains([key(2)]) == [True], "another engine wrote it anew"
    assert read(store, 2) == [payload(2)]
    store.close()
    other.close()


def test_nothing_is_deleted_when_the_disk_is_full(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = folder.open(**EXTERNAL)
    write(store, *range(10))

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        assert write(store, 10, 11) == [Kind.FULL] * 2
    assert store.contains([key(n) for n in range(10)]) == [True] * 10
    assert folder.removed == []
    assert write(store, 10) == [None]
    store.close()


def test_delete_is_declared_absent(folder: Folder) -> None:
    store = folder.open(**EXTERNAL)
    write(store, 1)
    assert not store.capabilities.delete
    with pytest.raises(KVTiersError) as caught:
        store.delete([key(1)])
    assert caught.value.kind is Kind.UNSUPPORTED
    assert folder.file(1).exists()
    store.close()


def test_a_chunk_that_others_removed_is_a_miss_and_reported(folder: Folder) -> None:
    store = folder.open(**EXTERNAL)
    write(store, 1)
    folder.file(1).unlink()
    assert store.contains([key(1)]) == [False]
    assert read(store, 1) == [Kind.VANISHED]
    assert folder.removed == [(key(1), Reason.VANISHED)]
    assert write(store, 1) == [None]
    store.close()


def test_who_only_checks_marks_nothing(folder: Folder) -> None:
    store = folder.open(**EXTERNAL)
    write(store, 1, 2)
    folder.file(2).unlink()
    folder.age(1, folder.wall.now - 100)
    assert store.still_there([key(1), key(2)]) == [True, False]
    assert folder.file(1).stat().st_mtime == folder.wall.now - 100
    assert store.contains([key(1)]) == [True]
    assert folder.file(1).stat().st_mtime > folder.wall.now
    store.close()


def test_a_maintenance_process_sees_uses_and_promises(folder: Folder) -> None:
    store = folder.open(**EXTERNAL)
    write(store, 1, 2, 3)
    for n in (1, 2, 3):
        folder.age(n, folder.wall.now - 100 + n)
    assert store.contains([key(1)]) == [True]

    def never(_: float) -> None:
        raise AssertionError("these engines mark whatever they find: nobody has to wait")

    report = maintain(str(folder.root), Aim(STORED), wall_clock=folder.wall, pause=never)
    assert [Path(name).name for name, _ in report.chunks] == [folder.file(n).name for n in (2, 3)]
    assert report.in_use == 1
    assert read(store, 1) == [payload(1)]
    folder.wall.advance(GRACE_S + 1)
    maintain(str(folder.root), Aim(STORED), wall_clock=folder.wall, pause=never)
    assert read(store, 1) == [Kind.VANISHED]
    store.close()
