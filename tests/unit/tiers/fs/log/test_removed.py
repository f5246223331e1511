"""The folder of a log is removed under its engine: it is noticed, said, and begun anew."""

import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvtiers.errors import Kind, KVTiersError
from kvtiers.events import ChunksRemoved, Reason
from kvtiers.tiers.base import Item
from kvtiers.tiers.complaints import Complaints
from kvtiers.tiers.fs.files import FilesStore
from kvtiers.tiers.fs.log import LogStore
from kvtiers.tiers.fs.log.core import LogCore
from kvtiers.tiers.fs.log.removed import Renewal
from tests.unit.tiers.fs.log.log_kit import CAPACITY, Log, held, kill, read, write
from tests.unit.tiers.fs.log.test_hung import load, open_tier, store
from tests.unit.tiers.tier_kit import CHUNK, NAMESPACE, context, filled, key, payload

NS = range(10)


def refused(opened: LogStore, n: int = 50) -> KVTiersError:
    (error,) = opened.write([Item(key(n), filled(n))])
    assert error is not None
    return error


def removed(log: Log) -> list[int]:
    assert {reason for _, reason in log.removed} <= {Reason.VANISHED}
    return sorted(int.from_bytes(k[:32], "big") for k, _ in log.removed)


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def move(root: Path) -> None:
    root.rename(root.with_name("elsewhere"))


def clear(root: Path) -> None:
    for path in root.iterdir():
        shutil.rmtree(path)


def remove_log(root: Path) -> None:
    shutil.rmtree(root / "log")


@pytest.mark.parametrize("remove", [shutil.rmtree, move, clear, remove_log])
@pytest.mark.parametrize("noticed", ["read", "write"])
def test_a_log_that_is_removed_is_begun_anew(
    log: Log, remove: Callable[[Path], Any], noticed: str, caplog: pytest.LogCaptureFixture
) -> None:
    opened = log.open()
    write(opened, *NS)
    remove(log.root)
    if noticed == "read":
        assert read(opened, 3) == [Kind.VANISHED]
        assert removed(log) == list(NS), "one was asked for, and all are gone"
        assert held(opened, NS) == []
        assert read(opened, 99) == [Kind.VANISHED]
        assert removed(log) == [*NS, 99]
        log.removed.pop()
    write(opened, 3, 20)
    assert removed(log) == list(NS)
    assert held(opened, [*NS, 20]) == [3, 20]
    assert read(opened, 3, 20) == [payload(3), payload(20)]
    assert [line for line in caplog.messages if "begun anew" in line] == caplog.messages[-1:]
    assert (log.root / NAMESPACE.id / "manifest.json").exists()
    for n in range(100, 200):
        write(opened, n)
        assert log.disk_bytes() <= CAPACITY
    opened.check()
    with pytest.raises(KVTiersError, match="belongs to the living process"):
        log.open()
    there = held(opened, range(200))
    kill(opened)
    assert held(log.open(), range(200)) == there


def test_a_lock_that_is_removed_is_taken_again_and_nothing_is_lost(log: Log) -> None:
    opened = log.open()
    write(opened, *NS)
    (log.root / "log" / "lock").unlink()
    write(opened, 20)
    assert held(opened, [*NS, 20]) == [*NS, 20]
    assert read(opened, *NS) == [payload(n) for n in NS]
    with pytest.raises(KVTiersError, match="belongs to the living process"):
        log.open()
    opened.check()


def test_a_place_that_another_owner_took_is_left_alone_until_he_ends(
    log: Log, caplog: pytest.LogCaptureFixture
) -> None:
    opened = log.open()
    write(opened, *NS)
    shutil.rmtree(log.root)
    other = Log(log.root).open()
    write(other, *range(100, 110))
    before = contents(log.root / "log")
    for n in range(20, 30):
        error = refused(opened, n)
        assert error.kind is Kind.IO
        assert "was removed under this engine, and cannot be begun anew" in str(error)
        assert f"belongs to the living process {os.getpid()}" in str(error)
    assert caplog.text.count("belongs to the living process") == 1
    assert held(opened, range(200)) == []
    assert removed(log) == list(NS)
    with pytest.raises(KVTiersError, match="was removed"):
        opened.delete([key(1)])
    assert contents(log.root / "log") == before
    other.close()
    assert refused(opened).kind is Kind.IO
    log.clock.advance(31)
    write(opened, 50)
    assert read(opened, 50, 105) == [payload(50), payload(105)], "it is the same namespace"
    opened.check()


def test_one_error_that_is_raised_often_keeps_no_frames(log: Log) -> None:
    opened = log.open()
    shutil.rmtree(log.root)
    other = Log(log.root).open()
    lengths = set()
    for _ in range(3):
        with pytest.raises(KVTiersError, match="was removed") as refusal:
            opened.delete([key(1)])
        lengths.add(len(refusal.traceback))
    assert len(lengths) == 1
    other.close()


@pytest.mark.parametrize("look", [lambda s: list(s.scan()), lambda s: s.used_bytes])
def test_one_look_is_at_one_log_though_it_is_begun_anew_meanwhile(
    log: Log, look: Callable[[LogStore], Any]
) -> None:
    opened = log.open()
    write(opened, *NS)
    expected, old = look(opened), opened._core
    empty = Log(log.root.with_name("other")).open()

    class BegunAnew:
        def __enter__(self) -> None:
            opened._core = empty._core

        def __exit__(self, *_: Any) -> None:
            pass

    lock, old.lock = old.lock, BegunAnew()  # type: ignore[assignment]
    assert look(opened) == expected
    old.lock, opened._core = lock, old
    empty.close()


def test_a_store_that_lost_its_place_is_closed_without_a_trace(log: Log) -> None:
    opened = log.open()
    write(opened, 1)
    shutil.rmtree(log.root)
    other = Log(log.root).open()
    write(other, 1)
    before = contents(log.root / "log")
    opened.close()
    assert contents(log.root / "log") == before
    other.close()
    shutil.rmtree(log.root)
    opened = log.open()
    write(opened, 1)
    shutil.rmtree(log.root)
    opened.close()
    assert not log.root.exists()


def test_a_place_that_the_other_layout_took_is_left_alone(log: Log) -> None:
    opened = log.open()
    write(opened, 1)
    shutil.rmtree(log.root)
    FilesStore(context(), str(log.root), capacity_bytes=1 << 20).close()
    assert "is of layout files" in str(refused(opened))
    assert not (log.root / "log").exists()


def test_it_is_not_begun_anew_on_another_file_system(log: Log) -> None:
    """A disk that was unmounted shows the folder below, on a disk that is not meant."""
    opened = log.open()
    shutil.rmtree(log.root)
    opened._renewal._device += 1
    assert "another file system is in its place" in str(refused(opened))
    assert not log.root.exists()
    opened._renewal._device -= 1
    log.clock.advance(31)
    write(opened, 1)


def test_a_folder_that_cannot_be_made_is_tried_again(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = log.open()
    write(opened, 1)
    shutil.rmtree(log.root)

    def mkdir(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(os, "mkdir", mkdir)
        assert "Permission denied" in str(refused(opened))
    assert held(opened, [1]) == []
    log.clock.advance(31)
    write(opened, 1)
    assert read(opened, 1) == [payload(1)]


def test_what_is_being_written_when_it_is_noticed_is_not_claimed(log: Log) -> None:
    """Nor is the log begun anew beside it: it might write into the new one."""
    opened = log.open()
    write(opened, 1, 2)
    core = opened._core
    with opened._writing("write"):
        room = core.find_room([(key(20), CHUNK)])
        assert room is not None
        shutil.rmtree(log.root)
        assert read(opened, 1) == [Kind.VANISHED]
        assert "writes are under way" in str(refused(opened))
        (log.root / "log").mkdir(parents=True)
        path = Path(core.files.path(room[0].number))
        path.write_bytes(bytes(room[0].nbytes))  # as if it had been open all along
        assert core.append(*room, [filled(20)]) is not None
        assert held(opened, [1, 2, 20]) == []
    shutil.rmtree(log.root)
    write(opened, 20)
    assert read(opened, 20) == [payload(20)]
    assert removed(log) == [1, 2]
    opened.check()


def test_the_tier_says_what_was_removed_and_goes_on(tmp_path: Path) -> None:
    bench = open_tier(tmp_path)
    store(bench, 1, 2, 3)
    bench.tier.take_events()
    shutil.rmtree(tmp_path / "kv")
    store(bench, 4)
    gone = [e for e in bench.tier.take_events() if isinstance(e, ChunksRemoved)]
    assert {k for e in gone for k in e.keys} == {key(n) for n in (1, 2, 3)}
    assert {e.reason for e in gone} == {Reason.VANISHED}
    store(bench, 1)
    load(bench, 1, 4)
    bench.store.check()
    bench.tier.shutdown(10)


def test_a_log_is_begun_anew_once_although_two_calls_saw_it_lost(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one saw it while the first began it anew, and goes on when that has ended."""
    opened, begun = log.open(), list[str]()
    write(opened, 1)
    shutil.rmtree(log.root)
    seen, go_on = threading.Event(), threading.Event()
    is_lost, begin = LogStore._is_lost, Renewal.begin

    def slow_look(store: LogStore, core: LogCore) -> bool:
        lost = is_lost(store, core)
        if lost and threading.current_thread().name.startswith("second"):
            seen.set()
            assert go_on.wait(20)
        return lost

    monkeypatch.setattr(LogStore, "_is_lost", slow_look)
    with ThreadPoolExecutor(1, "second") as second:
        pending = list[Any]()

        def with_a_witness(renewal: Renewal, complaints: Complaints) -> KVTiersError | None:
            begun.append(threading.current_thread().name)
            if not pending:
                pending.append(second.submit(opened.write, [Item(key(2), filled(2))]))
                assert seen.wait(20)
            return begin(renewal, complaints)

        monkeypatch.setattr(Renewal, "begin", with_a_witness)
        write(opened, 3)
        go_on.set()
        assert pending[0].result(20) == [None]
    assert len(begun) == 1
    assert held(opened, range(9)) == [2, 3]
    assert read(opened, 2, 3) == [payload(2), payload(3)]
    opened.check()
