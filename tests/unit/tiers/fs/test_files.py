import errno
import fcntl
import os
import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtiers.chunks import PAGE_BYTES, Namespace, make_key
from kvtiers.errors import ConfigError, Kind, KVTiersError
from kvtiers.events import Reason
from kvtiers.tiers.base import Item
from kvtiers.tiers.fs.stamps import GRACE_S
from tests.unit.tiers.fs.fs_kit import Folder, flip, kinds, read, write
from tests.unit.tiers.tier_kit import NAMESPACE, filled, key, page_aligned, payload

OTHER = Namespace({"model": "other"})


@pytest.mark.parametrize("direct_io", ["auto", "off"])
@pytest.mark.parametrize("fsync", [False, True])
def test_round_trip_across_a_reopen(folder: Folder, direct_io: str, fsync: bool) -> None:
    store = folder.open(direct_io=direct_io, fsync=fsync)
    assert write(store, 1, 2) == [None, None]
    assert read(store, 2, 1) == [payload(2), payload(1)]
    store.close()
    store = folder.open(direct_io=direct_io)
    assert store.contains([key(1), key(3)]) == [True, False]
    assert read(store, 1) == [payload(1)]
    assert {(e.key, e.bytes) for e in store.scan()} == {(key(1), 8192), (key(2), 8192)}
    store.check()
    store.close()


def test_names_are_stable(folder: Folder) -> None:
    """Other engines on the mount look under the same names."""
    store = folder.open()
    write(store, 1)
    expected = "00/" + "0" * 63 + "1-g0.kvc"
    assert [str(p.relative_to(folder.root / NAMESPACE.id)) for p in folder.files()] == [
        expected,
        "manifest.json",
    ]
    assert folder.files()[0].stat().st_size == PAGE_BYTES + 8192
    store.close()


def test_short_digests_and_groups_find_their_way_back(folder: Folder) -> None:
    store = folder.open()
    keys = [make_key(d, g) for d in (b"", b"a", b"ab", b"abc") for g in (0, 7)]
    assert kinds(store.write([Item(k, filled(n)) for n, k in enumerate(keys)])) == [None] * 8
    assert {e.key for e in store.scan()} == set(keys)
    store.close()


def test_private_whatever_the_umask(folder: Folder) -> None:
    for umask in (0o000, 0o277):
        before = os.umask(umask)
        try:
            store = folder.open(OTHER if umask else NAMESPACE, direct_io="off")
            write(store, 1)
            flip(folder.file(1, OTHER if umask else NAMESPACE), -1)
            read(store, 1)
            write(store, 1)
        finally:
            os.umask(before)
        for path in [folder.root, *folder.root.rglob("*")]:
            expected = 0o700 if path.is_dir() else 0o600
            assert stat.S_IMODE(path.stat().st_mode) == expected, path
        store.close()


def test_present_chunk_is_success_without_writing(folder: Folder) -> None:
    one, two = folder.open(), folder.open()
    write(one, 1)
    before = folder.file(1).stat()
    assert write(two, 1) == [None]
    assert folder.file(1).stat().st_ino == before.st_ino
    one.close()
    two.close()


def truncate(path: Path) -> None:
    os.truncate(path, PAGE_BYTES + 4096)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def extend(path: Path) -> None:
    os.truncate(path, PAGE_BYTES + 8192 + 4096)


def zero_fill(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def zero_payload_page(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-4096] + bytes(4096))


def swap(path: Path) -> None:
    other = path.with_name(path.name.replace("2-g0", "8-g0"))
    other.rename(path)


def foreign_namespace(path: Path) -> None:
    theirs = Path(str(path).replace(NAMESPACE.id, OTHER.id))
    theirs.rename(path)


def become_a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def become_a_link(path: Path) -> None:
    path.rename(path.with_suffix(".x"))
    path.symlink_to(path.with_suffix(".x"))


def become_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE = [
    lambda path: flip(path, 0),
    lambda path: flip(path, 100),
    lambda path: flip(path, PAGE_BYTES),
    lambda path: flip(path, -1),
    truncate,
    empty,
    extend,
    zero_fill,
    zero_payload_page,
    swap,
    foreign_namespace,
    become_a_fifo,
    become_a_link,
    become_a_folder,
]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("direct_io", ["auto", "off"])
def test_damage_is_a_miss_reported_once_and_leaves_neighbours_alone(
    folder: Folder, damage: Callable[[Path], None], direct_io: str
) -> None:
    others = folder.open(OTHER)
    write(others, 2)
    store = folder.open(direct_io=direct_io)
    write(store, 1, 2, 3, 8)
    damage(folder.file(2))
    assert read(store, 1, 2, 3) == [payload(1), Kind.CORRUPT, payload(3)]
    assert folder.removed == [(key(2), Reason.CORRUPT)]
    assert store.contains([key(1), key(2), key(3)]) == [True, False, True]
    assert read(store, 2) == [Kind.VANISHED]
    assert write(store, 2) == [None]
    assert read(store, 2) == [payload(2)]
    store.close()
    others.close()


def test_error_of_a_damaged_chunk_names_file_and_field(folder: Folder) -> None:
    store = folder.open()
    write(store, 1)
    flip(folder.file(1), -1)
    (error,) = store.read([Item(key(1), page_aligned())])
    assert str(folder.file(1)) in str(error)
    assert "payload is damaged" in str(error)
    store.close()


def test_damage_is_said_once(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    store = folder.open()
    write(store, 1, 2)
    flip(folder.file(1), -1)
    flip(folder.file(2), -1)
    read(store, 1, 2)
    (said,) = [r.getMessage() for r in caplog.records if "damaged" in r.getMessage()]
    assert str(folder.file(1)) in said
    store.close()


def test_quarantine_is_bounded(folder: Folder) -> None:
    store = folder.open()
    for n in range(10):
        write(store, n)
        flip(folder.file(n), -1)
        assert read(store, n) == [Kind.CORRUPT]
    assert len(os.listdir(folder.root / NAMESPACE.id / "quarantine")) == 4
    assert len(folder.removed) == 10
    store.close()


def test_a_folder_in_the_quarantine_does_not_end_its_trimming(folder: Folder) -> None:
    store = folder.open(capacity_bytes=1 << 20)
    aside = folder.root / NAMESPACE.id / "quarantine"
    for n in range(10):
        write(store, n)
        if n % 4 == 0:
            become_a_folder(folder.file(n))
        elif n % 4 == 1:
            become_a_folder(folder.file(n))
            (folder.file(n) / "mine").touch()
        else:
            flip(folder.file(n), -1)
        assert read(store, n) == [Kind.CORRUPT]
    assert len([p for p in aside.iterdir() if p.is_file()]) == 4
    assert len([p for p in aside.iterdir() if p.is_dir()]) == 3, "with something in them"
    store.check()
    store.close()


def test_absent_chunk_vanished(folder: Folder) -> None:
    store = folder.open()
    write(store, 1)
    folder.file(1).unlink()
    assert read(store, 1) == [Kind.VANISHED]
    assert folder.removed == [(key(1), Reason.VANISHED)]
    store.close()


def failing(times: int, code: int) -> Callable[..., int]:
    real, left = os.pwritev, [times]

    def pwritev(fd: int, buffers: list[memoryview], offset: int) -> int:
        if left[0] and offset > 0:
            left[0] -= 1
            raise OSError(code, os.strerror(code))
        return real(fd, buffers[:1], offset)  # short: the rest is asked for again

    return pwritev


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_fails_that_chunk_and_leaves_nothing(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    store = folder.open()
    before = folder.files()
    monkeypatch.setattr(os, "pwritev", failing(1, code))
    assert write(store, 1, 2) == [Kind.FULL, None]
    monkeypatch.undo()
    assert folder.files() == sorted([*before, folder.file(2)])
    assert read(store, 2) == [payload(2)]
    store.close()


def test_no_o_direct_is_remembered(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    real, flags = os.open, []

    def open_(path: str, how: int, mode: int = 0o777, **where: int) -> int:
        flags.append(bool(how & os.O_DIRECT))
        if how & os.O_DIRECT:
            raise OSError(errno.EINVAL, "told to refuse")
        return real(path, how, mode, **where)

    monkeypatch.setattr(os, "open", open_)
    store = folder.open()
    assert sum(flags) == 1, "the probe found out"
    write(store, 1)
    assert read(store, 1) == [payload(1)]
    assert sum(flags) == 1
    store.close()
    with pytest.raises(ConfigError, match=r'direct_io is "on", but .* refuses it'):
        folder.open(direct_io="on")


def test_o_direct_refused_by_the_operation_itself(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refusals = os.pwritev, []

    def pwritev(fd: int, buffers: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refusals.append(fd)
            raise OSError(errno.EINVAL, "told to refuse")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    store = folder.open()
    assert write(store, 1, 2) == [None, None]
    assert read(store, 1) == [payload(1)]
    assert len(refusals) <= 1
    store.close()


def test_unaligned_memory_goes_the_buffered_way(folder: Folder) -> None:
    store = folder.open()
    odd = page_aligned(8192 + 4096)[64 : 64 + 8192]
    odd[:] = payload(1)
    assert store.write([Item(key(1), odd)]) == [None]
    assert store.write([Item(key(2), memoryview(payload(2, 100)))]) == [None]
    assert read(store, 1) == [payload(1)]
    back = page_aligned(8192 + 4096)[64 : 64 + 8192]
    assert store.read([Item(key(1), back)]) == [None]
    assert bytes(back) == payload(1)
    assert read(store, 2, size=100) == [payload(2, 100)]
    store.close()


def test_a_folder_cleared_under_a_running_engine_is_made_again(folder: Folder) -> None:
    store = folder.open()
    write(store, 1)
    shutil.rmtree(folder.root)
    assert write(store, 2) == [None]
    assert read(store, 2) == [payload(2)]
    assert (folder.root / NAMESPACE.id / "manifest.json").exists()
    assert read(store, 1) == [Kind.VANISHED]
    store.close()


@pytest.mark.parametrize("at", ["open", "replace"])
def test_a_folder_cleared_in_the_middle_of_a_write(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Whenever the files go, those that come after are in a namespace with a manifest."""
    store = folder.open(direct_io="off")
    namespace, times, real = folder.root / NAMESPACE.id, [3], getattr(os, at)

    def clear_then(*args: Any, **options: Any) -> Any:
        if times[0] and "/tmp/" in str(args[0]).removeprefix(str(folder.root.parent)):
            times[0] -= 1
            shutil.rmtree(namespace, ignore_errors=True)
        return real(*args, **options)

    monkeypatch.setattr(os, at, clear_then)
    assert write(store, 1) == [None]
    monkeypatch.undo()
    assert times == [0]
    assert read(store, 1) == [payload(1)]
    assert (namespace / "manifest.json").exists()
    store.close()
    folder.open().close()


def test_a_manifest_lost_with_the_scratch_folder_is_made_again(folder: Folder) -> None:
    store = folder.open()
    write(store, 1)
    shutil.rmtree(folder.root / NAMESPACE.id / "tmp")
    (folder.root / NAMESPACE.id / "manifest.json").unlink()
    assert write(store, 2) == [None]
    assert (folder.root / NAMESPACE.id / "manifest.json").exists()
    assert read(store, 1, 2) == [payload(1), payload(2)]
    store.close()


def test_a_folder_that_cannot_be_made_again_closes_no_file_of_others(
    folder: Folder, tmp_path: Path
) -> None:
    store = folder.open()
    namespace = folder.root / NAMESPACE.id
    shutil.rmtree(namespace)
    namespace.mkdir()
    (namespace / "theirs").touch()
    assert write(store, 1) == [Kind.CONFIG]
    store._place._scratch.close()
    others = [os.open(tmp_path, os.O_RDONLY) for _ in range(32)]
    for _ in range(3):
        assert write(store, 1) == [Kind.CONFIG]
    store._place._scratch.close()
    for fd in others:
        os.fstat(fd)
        os.close(fd)
    (namespace / "theirs").unlink()
    assert write(store, 1) == [None]
    store.close()


def test_use_is_written_down_in_batches_and_at_close(folder: Folder) -> None:
    store = folder.open()
    write(store, 1, 2)
    store.touch([key(1), key(99)])
    write(store, 3)
    assert folder.file(1).stat().st_mtime != folder.wall.now
    folder.clock.advance(10)
    write(store, 4)
    assert folder.file(1).stat().st_mtime == folder.wall.now
    folder.wall.advance(100)
    read(store, 2)
    assert folder.file(2).stat().st_mtime == folder.wall.now + GRACE_S, "promised to its reader"
    store.close()
    assert folder.file(2).stat().st_mtime == folder.wall.now + GRACE_S


def test_delete_and_close(folder: Folder) -> None:
    store = folder.open()
    write(store, 1, 2)
    store.delete([key(1), key(7)])
    assert store.contains([key(1), key(2)]) == [False, True]
    assert folder.removed == []
    store.close()
    store.close()
    for call in (store.contains, store.write, store.read, store.delete, store.touch):
        with pytest.raises(KVTiersError, match="after close"):
            call([])
    with pytest.raises(KVTiersError, match="after close"):
        store.scan()
    assert os.listdir(folder.root / NAMESPACE.id / "tmp") == []
    assert "FilesStore" in repr(store)


def test_what_is_not_a_chunk_is_not_scanned(folder: Folder) -> None:
    store = folder.open()
    write(store, 1)
    for name in ("readme.txt", "zz-g0.kvc", "00-gx.kvc", f"{'00' * 8}-g99999999999.kvc"):
        folder.file(1).with_name(name).touch()
    (folder.root / NAMESPACE.id / "notes").mkdir()
    assert [e.key for e in store.scan()] == [key(1)]
    store.close()


def test_threads_write_and_read_side_by_side(folder: Folder) -> None:
    store = folder.open()
    wrong: list[object] = []

    def work(first: int) -> None:
        for n in range(first, first + 20):
            wrong.extend(e for e in write(store, n % 30) if e is not None)
            wrong.extend(r for r in read(store, n % 30) if r != payload(n % 30))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(0, 40, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert len(list(store.scan())) == 30
    store.close()


def test_of_two_writers_of_one_chunk_and_a_deletion_the_last_one_holds(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a restart: what the names say is all that there is."""
    store = folder.open()
    write_file = store._io.write

    def meanwhile(path: str, view: memoryview) -> None:
        write_file(path, view)
        monkeypatch.undo()
        assert write(store, 1) == [None]
        store.delete([key(1)])
        assert store.contains([key(1)]) == [False]

    monkeypatch.setattr(store._io, "write", meanwhile)
    assert write(store, 1) == [None]
    assert read(store, 1) == [payload(1)]
    assert store.used_bytes == folder.disk_bytes()
    store.close()
    assert read(folder.open(), 1) == [payload(1)]
