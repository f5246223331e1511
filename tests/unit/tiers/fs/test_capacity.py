import os
import threading

import pytest

from kvtiers.chunks import PAGE_BYTES, Namespace
from kvtiers.errors import Kind
from kvtiers.events import Reason
from kvtiers.tiers.base import Item
from kvtiers.tiers.fs.files import FilesStore
from kvtiers.tiers.fs.names import leaving
from kvtiers.tiers.fs.stamps import GRACE_S
from tests.unit.tiers.fs.fs_kit import STORED, Folder, capacity, flip, read, write
from tests.unit.tiers.tier_kit import NAMESPACE, filled, key, payload

OTHER = Namespace({"model": "other"})


def test_least_recently_used_leaves_before_the_next_comes(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = folder.open(capacity_bytes=capacity(2))
    most = [0]
    real = os.replace

    def replace(source: str, target: str) -> None:
        most[0] = max(most[0], folder.disk_bytes())
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    write(store, 1, 2)
    store.touch([key(1)])
    write(store, 3)
    assert store.contains([key(1), key(2), key(3)]) == [True, False, True]
    assert folder.removed == [(key(2), Reason.EVICTED)]
    folder.let_promises_end()
    read(store, 1)
    write(store, 4)
    assert folder.removed[1:] == [(key(3), Reason.EVICTED)]
    assert most[0] <= capacity(2)
    assert store.used_bytes == folder.disk_bytes()
    store.check()
    store.close()


class Watched:
    """Counts the bytes on disk: a file from before its first byte until after its unlink."""

    def __init__(self, folder: Folder, store: FilesStore, patch: pytest.MonkeyPatch) -> None:
        self.bytes = self.most = folder.disk_bytes()
        self._lock = threading.Lock()
        write_file, unlink = store._io.write, os.unlink

        def watched_write(path: str, payload: memoryview) -> None:
            self._add(PAGE_BYTES + payload.nbytes)
            write_file(path, payload)

        def watched_unlink(path: str, **where: int) -> None:
            size = 0 if where else os.lstat(path).st_size
            unlink(path, **where)
            self._add(-size)

        patch.setattr(store._io, "write", watched_write)
        patch.setattr(os, "unlink", watched_unlink)

    def _add(self, size: int) -> None:
        with self._lock:
            self.bytes += size
            self.most = max(self.most, self.bytes)


def test_never_above_the_capacity_with_many_writers(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = folder.open(capacity_bytes=capacity(6))
    watched = Watched(folder, store, monkeypatch)
    sizes = [4096, 8192, 3 * 4096]
    wrong: list[object] = []

    def work(first: int) -> None:
        for n in range(first, first + 20):
            size = sizes[n % 3]
            wrong.extend(e for e in write(store, n, size=size) if e not in (None, Kind.FULL))
            (got,) = read(store, n, size=size)
            if got not in (payload(n, size), Kind.VANISHED):
                wrong.append(got)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(0, 80, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert 5 * STORED < watched.most <= capacity(6)
    assert store.used_bytes == folder.disk_bytes() == watched.bytes
    store.check()
    store.close()


def test_recency_survives_a_restart(folder: Folder) -> None:
    store = folder.open(capacity_bytes=capacity(3))
    write(store, 1, 2, 3)
    for n in (1, 2, 3):
        folder.age(n, folder.wall.now - 10 + n)
    store.touch([key(1)])
    store.close()
    store = folder.open(capacity_bytes=capacity(3))
    write(store, 4, 5)
    assert store.contains([key(n) for n in (1, 2, 3, 4, 5)]) == [True, False, False, True, True]
    store.close()


def test_other_namespaces_under_the_root_count_and_leave_first_when_older(folder: Folder) -> None:
    old = folder.open(OTHER)
    write(old, 1, 2)
    old.close()
    for n in (1, 2):
        folder.age(n, folder.wall.now - 100, OTHER)
    store = folder.open(capacity_bytes=capacity(2))
    write(store, 1, 2)
    assert not folder.file(1, OTHER).exists()
    assert not folder.file(2, OTHER).exists()
    assert read(store, 1, 2) == [payload(1), payload(2)]
    assert folder.removed == [], "they were not chunks of this namespace"
    assert store.used_bytes == folder.disk_bytes()
    store.close()


def test_lowered_capacity_is_enforced_by_the_start_up_scan(folder: Folder) -> None:
    store = folder.open()
    write(store, *range(5))
    for n in range(5):
        folder.age(n, folder.wall.now - 100 + n)
    store.close()
    store = folder.open(capacity_bytes=capacity(2))
    assert {e.key for e in store.scan()} == {key(3), key(4)}
    assert store.used_bytes == folder.disk_bytes() <= capacity(2)
    assert [k for k, _ in folder.removed] == [key(0), key(1), key(2)]
    store.close()


def test_a_lowered_capacity_waits_for_what_was_promised(folder: Folder) -> None:
    store = folder.open(capacity_bytes=capacity(5))
    write(store, *range(5))
    assert read(store, *range(5)) == [payload(n) for n in range(5)]
    store.close()
    store = folder.open(capacity_bytes=capacity(2))
    assert len(list(store.scan())) == 5, "somebody was told that they are there"
    assert write(store, 7) == [Kind.FULL], "nothing is added meanwhile"
    store.check()
    folder.wall.advance(11)
    folder.clock.advance(11)
    assert len(list(store.scan())) == 2
    assert folder.disk_bytes() <= capacity(2)
    store.check()
    store.close()


def test_check_finds_what_lies_above_the_capacity_and_could_leave(folder: Folder) -> None:
    store = folder.open(capacity_bytes=capacity(2))
    write(store, 1, 2)
    smuggled = folder.file(3)
    smuggled.parent.mkdir(exist_ok=True)
    smuggled.write_bytes(bytes(2 * STORED))
    folder.age(3, folder.wall.now - 1)
    with pytest.raises(AssertionError, match="above the capacity"):
        store.check()
    store.close()


def test_chunk_above_the_capacity_is_full_and_evicts_nothing(folder: Folder) -> None:
    store = folder.open(capacity_bytes=capacity(2))
    write(store, 1)
    assert write(store, 2, size=3 * 8192) == [Kind.FULL]
    assert store.contains([key(1)]) == [True]
    store.check()
    store.close()


@pytest.mark.parametrize("use", ["contains", "read"])
def test_chunk_that_was_found_or_is_read_is_not_evicted(folder: Folder, use: str) -> None:
    store = folder.open(capacity_bytes=capacity(1))
    write(store, 1)
    if use == "contains":
        assert store.contains([key(1)]) == [True]
    else:
        assert read(store, 1) == [payload(1)]
    assert write(store, 2) == [Kind.FULL]
    folder.wall.advance(GRACE_S - 1)
    folder.clock.advance(GRACE_S - 1)
    assert write(store, 2) == [Kind.FULL]
    assert folder.file(1).exists()
    folder.let_promises_end()
    assert write(store, 2) == [None]
    assert store.contains([key(1), key(2)]) == [False, True]
    store.close()


def test_failed_write_gives_its_room_back(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    store = folder.open(capacity_bytes=capacity(2))
    write(store, 1)
    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", lambda *_: (_ for _ in ()).throw(OSError(5, "io")))
            assert write(store, 2) == [Kind.IO]
    assert store.used_bytes == folder.disk_bytes()
    assert write(store, 2) == [None]
    assert store.contains([key(1)]) == [True]
    store.check()
    store.close()


def test_file_that_cannot_be_deleted_is_logged_once_and_passed_over(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = folder.open(capacity_bytes=capacity(3))
    write(store, 1, 2, 3)
    real, stuck = os.unlink, {leaving(str(folder.file(n))) for n in (1, 2)}

    def unlink(path: str, **where: int) -> None:
        if path in stuck:
            raise PermissionError(1, "told to refuse")
        real(path, **where)

    monkeypatch.setattr(os, "unlink", unlink)
    assert write(store, 4, 5) == [None, None]
    assert folder.removed == [(key(3), Reason.EVICTED), (key(4), Reason.EVICTED)]
    assert store.contains([key(n) for n in (1, 2, 5)]) == [True] * 3
    assert caplog.text.count("cannot evict") == 1
    assert store.used_bytes == folder.disk_bytes() <= capacity(3)
    store.check()
    store.close()


def test_quarantine_counts_and_leaves_first(folder: Folder) -> None:
    store = folder.open(capacity_bytes=capacity(2))
    write(store, 1, 2)
    flip(folder.file(2), -1)
    read(store, 2)
    assert store.used_bytes == folder.disk_bytes()
    write(store, 3)
    assert store.contains([key(1), key(3)]) == [True, True]
    assert os.listdir(folder.root / NAMESPACE.id / "quarantine") == []
    assert folder.removed == [(key(2), Reason.CORRUPT)]
    store.check()
    store.close()


def test_file_removed_by_others_is_written_again(folder: Folder) -> None:
    store = folder.open(capacity_bytes=capacity(2))
    write(store, 1, 2)
    folder.file(1).unlink()
    assert write(store, 1) == [None]
    assert read(store, 1) == [payload(1)]
    store.delete([key(2)])
    assert list(store.scan()) != [], "it counts"
    assert store.used_bytes == folder.disk_bytes()
    assert store.write([Item(key(2), filled(2))]) == [None]
    store.check()
    store.close()


def test_a_moment_without_deletes_is_an_io_error_and_passes(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = folder.open(capacity_bytes=capacity(40))
    write(store, *range(40))
    tried: list[str] = []

    def unlink(path: str, **where: int) -> None:
        if path.endswith(".kvc"):
            tried.append(path)
        raise OSError(5, "told to fail")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink)
        assert write(store, 100) == [Kind.IO]
        assert len(tried) == 16, "one write does not try them all"
        assert write(store, 101, 102, 103) == [Kind.IO] * 3
        assert len(tried) == 40, "nor the same again and again"
    store.check()
    assert store.contains([key(n) for n in range(40)]) == [True] * 40
    folder.let_promises_end()
    folder.clock.advance(30)
    assert write(store, *range(100, 140)) == [None] * 40
    assert store.contains([key(n) for n in range(40)]) == [False] * 40
    assert store.used_bytes == folder.disk_bytes()
    store.check()
    store.close()


def test_a_lowered_capacity_that_cannot_be_enforced_tries_a_few_and_counts_all(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = folder.open()
    write(store, *range(60))
    store.close()
    store = folder.open(capacity_bytes=capacity(5))
    tried: list[str] = []

    def unlink(path: str, **where: int) -> None:
        tried.append(path)
        raise OSError(5, "told to fail")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink)
        assert len(list(store.scan())) == 60
    assert len(tried) == 16
    assert store.used_bytes == folder.disk_bytes()
    folder.clock.advance(30)
    assert len(list(store.scan())) == 5
    store.check()
    store.close()


def test_peoples_files_in_a_folder_called_quarantine_never_leave(folder: Folder) -> None:
    theirs = folder.root / ("0" * 32) / "quarantine" / "photo.jpg"
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(b"x" * STORED)
    store = folder.open(capacity_bytes=capacity(3))
    assert write(store, 1, 2, 3, 4) == [None] * 4
    assert theirs.exists()
    assert store.used_bytes == folder.disk_bytes()
    store.close()
