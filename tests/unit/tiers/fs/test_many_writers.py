"""Several engines under one quota, real processes among them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvtiers.chunks import Namespace
from kvtiers.errors import ConfigError, Kind
from kvtiers.events import Reason
from kvtiers.tiers.fs import locks
from kvtiers.tiers.fs.names import QUOTA
from kvtiers.tiers.fs.shared import QuotaFile, read_quota
from tests.unit.tiers.fs.fs_kit import STORED, Folder, capacity, read, write
from tests.unit.tiers.tier_kit import NAMESPACE, ManualClock, key, payload

CHILD = """
import itertools, sys, time
from pathlib import Path
sys.path[:0] = sys.argv[4:]
from kvtiers.errors import Kind
from tests.unit.tiers.fs.fs_kit import Folder, capacity, read, write
from tests.unit.tiers.tier_kit import payload
folder = Folder(Path(sys.argv[1]))
folder.wall = time.time
folder.clock = time.monotonic
store = folder.open(capacity_bytes=capacity(int(sys.argv[2])))
first = int(sys.argv[3])
"""
WRITER = """
for n in itertools.count(first):
    size = (1 + n % 3) * 4096
    (kind,) = write(store, n, size=size)
    assert kind in (None, Kind.FULL), kind
    if n % 7 == 0:
        (got,) = read(store, n, size=size)
        assert got in (payload(n, size), Kind.VANISHED), got
    print(n, flush=True)
"""
HOLDER = """
write(store, first)
print(first, flush=True)
time.sleep(600)
"""
EVICTOR = """
for n in itertools.count(first):
    assert write(store, n) in ([None], [Kind.FULL])
    print(n, flush=True)
"""


@contextmanager
def child(body: str, root: Path, chunks: int, first: int) -> Iterator[subprocess.Popen[str]]:
    arguments = [str(root), str(chunks), str(first), *sys.path]
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD + body, *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def progress(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the writer ended"
    return int(line)


def frozen_bytes(root: Path, processes: list[subprocess.Popen[str]]) -> int:
    """What lies there at one instant: nobody moves while it is looked at."""
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    for process in processes:
        while Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
            os.sched_yield()
    found = sum(p.lstat().st_size for p in root.rglob("*") if p.is_file())
    for process in processes:
        process.send_signal(signal.SIGCONT)
    return found


def test_processes_under_one_quota_are_never_above_it(folder: Folder) -> None:
    """Some are killed, and others take their place."""
    chunks, most = 24, 0
    with ExitStack() as children:

        def start(first: int) -> subprocess.Popen[str]:
            return children.enter_context(child(WRITER, folder.root, chunks, first))

        processes = [start(0), start(10_000), start(20_000)]
        for turn in range(80):
            for process in processes:
                progress(process)
            found = frozen_bytes(folder.root, processes)
            assert found <= capacity(chunks)
            most = max(most, found)
            if turn % 20 == 19:
                processes.pop(0).kill()
                processes.append(start((turn + 20) * 10_000))
    assert most > 0.6 * capacity(chunks), "they do use it"
    store = folder.open(capacity_bytes=capacity(chunks))
    assert len(list(store.scan())) > chunks // 2
    assert store.used_bytes == folder.disk_bytes() <= capacity(chunks)
    store.check()
    store.close()


def test_the_grant_of_a_killed_writer_comes_back(folder: Folder) -> None:
    chunks = 1024
    with child(HOLDER, folder.root, chunks, 5000) as holder:
        progress(holder)
        store = folder.open(capacity_bytes=capacity(chunks))
        write(store, 0)
        held = [m.held for m in read_quota(str(folder.root)).members.values()]
        assert len(held) == 2
        assert max(held) > 10 * STORED, "it holds a portion"
    folder.clock.advance(10)
    assert write(store, *range(chunks - 1)) == [None] * (chunks - 1)
    assert folder.removed == [], "all of it could be used"
    assert list(read_quota(str(folder.root)).members) == [
        os.path.relpath(store._place._scratch.folder, folder.root)
    ]
    assert store.contains([key(5000)]) == [True]
    store.check()
    store.close()


def test_what_was_found_is_read_although_another_process_evicts(folder: Folder) -> None:
    chunks = 300
    folder.wall.now = time.time()
    with child(EVICTOR, folder.root, chunks, 0) as evictor:
        store = folder.open(capacity_bytes=capacity(chunks))
        found = oldest = 0
        for _ in range(120):
            newest = progress(evictor)
            while newest < chunks + 50 + 3 * found:
                newest = progress(evictor)
            folder.wall.now = time.time()
            while store.contains([key(oldest)]) == [False]:
                oldest += 1  # the next of them would leave now
            for _ in range(6):  # it evicts a portion and more meanwhile
                progress(evictor)
            assert read(store, oldest) == [payload(oldest)]
            oldest += 1
            found += 1
        assert found == 120
        store.close()


@pytest.mark.parametrize("use", ["contains", "read"])
def test_a_chunk_that_is_found_while_it_leaves_stays(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    """Between the look of the one who evicts and the deletion, by another engine."""
    one, two = (folder.open(capacity_bytes=capacity(2)) for _ in range(2))
    write(one, 1, 2)
    real, oldest = os.replace, str(folder.file(1))

    def replace(source: str, target: str) -> None:
        if source == oldest:
            assert two.contains([key(1)]) == [True]
        real(source, target)
        if source == oldest and use == "read":
            assert read(two, 1) == [payload(1)], "under its other name"

    monkeypatch.setattr(os, "replace", replace)
    assert write(one, 3) == [None]
    assert folder.removed == [(key(2), Reason.EVICTED)]
    assert read(two, 1) == [payload(1)]
    assert folder.disk_bytes() <= capacity(2)
    one.close()
    two.close()


def test_what_was_about_to_leave_when_its_engine_died_leaves_first(folder: Folder) -> None:
    store = folder.open(capacity_bytes=capacity(2))
    write(store, 1, 2)
    folder.file(2).rename(folder.file(2).with_name(f"leaving-{folder.file(2).name}"))
    assert write(store, 3) == [None]
    assert store.contains([key(1), key(2), key(3)]) == [True, False, True]
    assert store.used_bytes == folder.disk_bytes()
    assert read(store, 2) == [Kind.VANISHED]
    store.close()


def test_the_smaller_capacity_rules_while_its_engine_lives(
    folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    large = folder.open(capacity_bytes=capacity(10))
    write(large, *range(10))
    small = folder.open(capacity_bytes=capacity(4))
    assert len(list(small.scan())) in (3, 4), "what the other may still write is its"
    assert write(large, *range(20, 30)) == [None] * 10
    assert folder.disk_bytes() <= capacity(4)
    late = folder.open(capacity_bytes=capacity(10))
    assert "is kept within" in caplog.text
    assert caplog.text.count("as another engine states") == 1
    small.close()
    assert write(late, *range(30, 36)) == [None] * 6
    assert len(list(late.scan())) in (9, 10)
    large.close()
    late.close()


def test_one_reports_what_it_evicts_and_the_others_find_out(folder: Folder) -> None:
    one, theirs = folder.open(capacity_bytes=capacity(2)), Folder(folder.root)
    two = theirs.open(capacity_bytes=capacity(2))
    write(one, 1, 2)
    assert write(two, 3) == [None]
    assert theirs.removed == [(key(1), Reason.EVICTED)]
    assert folder.removed == []
    assert one.contains([key(1)]) == [False]
    assert read(one, 1) == [Kind.VANISHED]
    assert folder.removed == [(key(1), Reason.VANISHED)]
    one.close()
    two.close()


def test_a_use_in_one_engine_counts_in_the_other(folder: Folder) -> None:
    one, theirs = folder.open(capacity_bytes=capacity(3)), Folder(folder.root)
    two = theirs.open(capacity_bytes=capacity(3))
    write(one, 1, 2, 3)
    for n in (1, 2, 3):
        folder.age(n, folder.wall.now - 50 + n)
    one.touch([key(1)])
    folder.clock.advance(11)
    one.write([])  # its turn to pass uses on
    assert write(two, 4) == [None]
    assert theirs.removed == [(key(2), Reason.EVICTED)]
    assert write(two, 5) == [None]
    assert theirs.removed[1:] == [(key(3), Reason.EVICTED)], "not the one that was touched"
    one.close()
    two.close()


@pytest.mark.parametrize(("first", "second"), [("own", "external"), ("external", "own")])
def test_engines_that_disagree_on_who_evicts_are_refused(
    folder: Folder, first: str, second: str
) -> None:
    bound = {"own": {"capacity_bytes": capacity(9)}, "external": {"eviction": "external"}}
    store = folder.open(**bound[first])
    with pytest.raises(ConfigError) as caught:
        folder.open(**bound[second])
    assert str(caught.value).startswith(f'eviction is "{second}", but another engine')
    assert len(read_quota(str(folder.root)).members) == 1
    store.close()
    folder.open(**bound[second]).close()


def test_a_process_that_hangs_with_the_lock_does_not_hang_the_others(folder: Folder) -> None:
    folder.open(capacity_bytes=capacity(2)).close()
    held, clock, waits = QuotaFile(str(folder.root)), ManualClock(), list[float]()

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        clock.advance(seconds)

    waiting = QuotaFile(str(folder.root), clock, sleep)
    with held.locked(), pytest.raises(TimeoutError, match="another process has held it for 10 s"):
        waiting.locked().__enter__()
    assert 10 <= sum(waits) < 10.1
    with waiting.locked() as quota:
        assert quota.stated == capacity(2)
    held.close()
    waiting.close()


def test_a_start_beside_such_a_process_names_the_file_and_what_to_do(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.open(capacity_bytes=capacity(2)).close()
    monkeypatch.setattr(locks, "PATIENCE_S", 0)
    with QuotaFile(str(folder.root)) as held, held.locked():
        refusal = f"{QUOTA} is locked: another process has held it.* end it"
        with pytest.raises(ConfigError, match=refusal):
            folder.open(capacity_bytes=capacity(2))
    folder.open(capacity_bytes=capacity(2)).close()


@pytest.mark.parametrize("how", ["removed", "damaged", "emptied"])
def test_a_lost_quota_file_is_made_again_by_counting(folder: Folder, how: str) -> None:
    one, two = (folder.open(capacity_bytes=capacity(4)) for _ in range(2))
    write(one, 1, 2)
    quota = folder.root / QUOTA
    if how == "removed":
        quota.unlink()
    elif how == "damaged":
        quota.write_bytes(quota.read_bytes().replace(b"claimed", b"clammed"))
    else:
        os.truncate(quota, 0)
    assert write(two, 3, 4, 5) == [None] * 3
    assert write(one, 6) == [None]
    assert folder.disk_bytes() <= capacity(4)
    assert two.used_bytes == folder.disk_bytes()
    assert len(read_quota(str(folder.root)).members) == 2
    one.close()
    two.close()


def test_what_strangers_delete_is_found_out_before_there_is_no_room(folder: Folder) -> None:
    store = folder.open(capacity_bytes=capacity(3))
    write(store, 1, 2, 3)
    for n in (1, 2, 3):
        folder.file(n).unlink()
    assert write(store, 4) == [Kind.FULL]
    folder.wall.advance(61)
    folder.clock.advance(61)
    assert write(store, 4, 5, 6) == [None] * 3
    assert store.used_bytes == folder.disk_bytes()
    assert folder.removed == []
    store.close()


def test_what_strangers_delete_is_found_out_in_time(folder: Folder) -> None:
    """E.g. a namespace of another model that somebody removed, while there is enough to evict."""
    store = folder.open(capacity_bytes=capacity(10))
    write(store, *range(10))
    for n in range(5):
        folder.file(n).unlink()
    assert write(store, 10) == [None]
    assert folder.removed == [(key(5), Reason.EVICTED)], "not yet"
    folder.wall.advance(601)
    assert write(store, 11, *range(12, 15)) == [None] * 4
    assert len(folder.removed) == 2
    assert store.used_bytes == folder.disk_bytes()
    store.close()


def test_an_engine_that_ends_gives_back_what_it_did_not_use(folder: Folder) -> None:
    one, two = (folder.open(capacity_bytes=capacity(2000)) for _ in range(2))
    write(one, 1)
    write(two, 2)
    assert sum(m.held for m in read_quota(str(folder.root)).members.values()) > 10 * STORED
    one.close()
    two.close()
    quota = read_quota(str(folder.root))
    assert quota.members == {}
    assert quota.claimed == folder.disk_bytes()


def test_a_store_opens_within_a_full_quota(folder: Folder) -> None:
    """It tries the disk within what is kept free for that, and nothing has to leave."""
    store = folder.open(capacity_bytes=capacity(3))
    write(store, 1, 2, 3)
    store.close()
    most = 0
    real = os.unlink

    def unlink(path: str, **where: int) -> None:
        nonlocal most
        most = max(most, folder.disk_bytes())
        real(path, **where)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "unlink", unlink)
        store = folder.open(capacity_bytes=capacity(3))
    assert 3 * STORED < most <= capacity(3)
    assert len(list(store.scan())) == 3
    store.close()


def test_a_new_namespace_makes_room_for_its_manifest(folder: Folder) -> None:
    store = folder.open(capacity_bytes=capacity(3))
    write(store, 1, 2, 3)
    store.close()
    large = folder.open(Namespace({"model": "x" * 2000}), capacity_bytes=capacity(3))
    assert folder.disk_bytes() <= capacity(3)
    assert large.used_bytes == folder.disk_bytes()
    large.close()
    assert (folder.root / NAMESPACE.id).exists()
