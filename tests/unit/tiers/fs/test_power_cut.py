import errno
import os
from pathlib import Path

import pytest

from kvtiers.errors import ConfigError, Kind
from kvtiers.tiers.base import Item
from tests.unit.tiers.fs.fs_kit import Folder, PowerCut, read, write
from tests.unit.tiers.tier_kit import NAMESPACE, filled, key, payload


@pytest.fixture
def power(monkeypatch: pytest.MonkeyPatch) -> PowerCut:
    return PowerCut(monkeypatch)


def is_manifest(path: Path) -> bool:
    return path.name == "manifest.json"


@pytest.mark.parametrize("fsync", [False, True])
def test_no_chunk_outlives_its_manifest(folder: Folder, power: PowerCut, fsync: bool) -> None:
    store = folder.open(fsync=fsync)
    write(store, 1)
    store.close()
    power.cut(folder.root, is_manifest)
    store = folder.open()
    assert read(store, 1) == [payload(1)]
    store.close()


def test_nor_the_manifest_that_another_engine_wrote_just_now(
    folder: Folder, power: PowerCut
) -> None:
    folder.open().close()
    manifest = folder.root / NAMESPACE.id / "manifest.json"
    os.replace(manifest, manifest.with_suffix(".new"))
    os.replace(manifest.with_suffix(".new"), manifest)  # as if it was not synced yet
    store = folder.open()
    write(store, 1)
    store.close()
    power.cut(folder.root, is_manifest)
    folder.open().close()


def test_with_fsync_every_stored_chunk_survives(folder: Folder, power: PowerCut) -> None:
    folder.root = folder.root / "new" / "deep"
    in_another_folder = key(1 << 248)
    store = folder.open(fsync=True)
    assert write(store, 1, 2) == [None, None]
    assert store.write([Item(in_another_folder, filled(3))]) == [None]
    store.close()
    power.cut(folder.root)
    store = folder.open()
    assert store.contains([key(1), key(2), in_another_folder]) == [True] * 3
    assert read(store, 1, 2) == [payload(1), payload(2)]
    store.close()


def test_without_fsync_chunks_may_be_lost_but_the_folder_stays_good(
    folder: Folder, power: PowerCut
) -> None:
    store = folder.open()
    write(store, 1)
    store.close()
    power.cut(folder.root)
    store = folder.open()
    assert store.contains([key(1)]) == [False]
    write(store, 1)
    assert read(store, 1) == [payload(1)]
    store.close()


def test_without_fsync_a_name_may_come_without_its_bytes(folder: Folder, power: PowerCut) -> None:
    store = folder.open()
    write(store, 1)
    store.close()
    power.unsynced.clear()  # the names made it
    power.cut(folder.root)
    store = folder.open()
    assert read(store, 1) == [Kind.CORRUPT]
    store.close()


def sync_of_folders_fails(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    real = os.fsync

    def fsync(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(code, os.strerror(code))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)


def test_a_file_system_that_cannot_sync_folders_is_used_all_the_same(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync_of_folders_fails(monkeypatch, errno.EINVAL)
    store = folder.open(fsync=True)
    assert write(store, 1) == [None]
    assert read(store, 1) == [payload(1)]
    store.close()


def test_a_folder_whose_sync_fails_is_a_failed_write_or_start(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = folder.open(fsync=True)
    sync_of_folders_fails(monkeypatch, errno.EIO)
    assert write(store, 1) == [Kind.IO]
    store.close()
    with pytest.raises(ConfigError, match=r"root_dir is .* cannot write"):
        folder.open()


def test_a_chunk_whose_name_is_not_synced_is_neither_stored_nor_uncounted(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = folder.open(fsync=True)
    assert write(store, 1) == [None]  # the folder is there
    before = store.used_bytes
    with monkeypatch.context() as broken:
        sync_of_folders_fails(broken, errno.EIO)
        assert write(store, 2) == [Kind.IO]
    assert store.contains([key(1), key(2)]) == [True, False]
    assert store.used_bytes == before == folder.disk_bytes()
    assert write(store, 2) == [None]
    assert read(store, 2) == [payload(2)]
    store.check()
    store.close()


def test_nor_where_that_name_cannot_be_taken_back(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = folder.open(fsync=True)
    assert write(store, 1) == [None]
    real = os.unlink

    def unlink(path: str, **options: object) -> None:
        if str(path).endswith(".kvc"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(path, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as broken:
        sync_of_folders_fails(broken, errno.EIO)
        broken.setattr(os, "unlink", unlink)
        assert write(store, 2) == [Kind.IO]
    assert store.used_bytes == folder.disk_bytes()
    store.close()
