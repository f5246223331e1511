"""The log on a real folder: who leaves, who stays, what is there after it was left."""

import errno
import fcntl
import os
import re
import shutil
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from kvtiers.chunks import PAGE_BYTES, ChunkLayout, GroupLayout, Namespace
from kvtiers.errors import ConfigError, Kind, KVTiersError
from kvtiers.events import Reason
from kvtiers.tiers.base import Item
from kvtiers.tiers.fs import layouts, locks
from kvtiers.tiers.fs.files import FilesStore
from kvtiers.tiers.fs.layouts import settle_on_layout
from kvtiers.tiers.fs.log import LogStore
from kvtiers.tiers.fs.log.opening import segment_bytes_for
from kvtiers.tiers.fs.log.pool import State
from kvtiers.tiers.fs.log.roller import Roller
from kvtiers.tiers.fs.log.segment import SegmentFiles
from kvtiers.tiers.fs.names import QUOTA
from kvtiers.tiers.urls import open_place
from tests.unit.tiers.fs.log.log_kit import (
    CAPACITY,
    SEGMENT,
    SEGMENTS,
    Log,
    held,
    kill,
    read,
    write,
)
from tests.unit.tiers.tier_kit import (
    CHUNK,
    NAMESPACE,
    ManualClock,
    context,
    filled,
    key,
    page_aligned,
    payload,
)

OTHER = Namespace({"model": "other", "format": 1})


def fill(store, first=0, segments=SEGMENTS):
    """Write chunks until another segment has been begun so often; the numbers."""
    n, seen, began = first, store._core.pool.active, 0
    while began < segments:
        write(store, n)
        n += 1
        if store._core.pool.active is not seen:
            seen, began = store._core.pool.active, began + 1
    return list(range(first, n))


# -- what leaves ----------------------------------------------------------------------------------


def test_it_never_takes_more_than_its_capacity(log):
    store = log.open()
    for n in range(200):
        write(store, n)
        assert log.disk_bytes() <= CAPACITY
        store.check()
    assert len(log.segments()) == SEGMENTS


def test_a_segment_is_begun_by_nobody_while_its_file_is_made(log, monkeypatch):
    """One lane sees to the next segment, others write on, and wait when they need that one."""
    reached, go_on = threading.Event(), threading.Event()
    make = SegmentFiles.make

    def held_make(files, number, nbytes):
        reached.set()
        assert go_on.wait(20)
        make(files, number, nbytes)

    store = log.open()
    monkeypatch.setattr(SegmentFiles, "make", held_make)
    with ThreadPoolExecutor(2) as lanes:
        first = lanes.submit(store.write, [Item(key(0), filled(0))])
        assert reached.wait(20)
        rest = [Item(key(n), filled(n)) for n in range(1, 9)]  # more than go into one segment
        second = lanes.submit(store.write, rest)
        pool = store._core.pool
        with store._core.lock:
            made = pool.segments[max(pool.segments)]
            assert (made.state, pool.free()) == (State.TAKEN, None)
        go_on.set()
        results = [*first.result(), *second.result()]
    assert results == [None] * 9
    store.check()


def test_a_segment_is_sealed_before_one_that_was_begun_later_may_leave(log, monkeypatch):
    """Else what that one says was deleted of it would be back after a restart."""
    store, prepare = log.open(), Roller.prepare

    def look_first(roller):
        full = [s for s in store._core.pool.segments.values() if s.state is State.FULL]
        assert full == [], "not sealed yet"
        prepare(roller)

    monkeypatch.setattr(Roller, "prepare", look_first)
    fill(store, segments=3)


def test_what_leaves_is_said_and_the_rest_is_there(log):
    store = log.open()
    ns = fill(store, segments=3 * SEGMENTS)
    assert log.gone()
    assert held(store, ns) == [n for n in ns if n not in log.gone()]
    assert read(store, *held(store, ns)) == [payload(n) for n in held(store, ns)]


def test_the_oldest_leave_first(log):
    store = log.open()
    fill(store, segments=2 * SEGMENTS)
    gone = sorted(log.gone())
    assert gone == list(range(len(gone)))


def test_what_was_used_stays(log):
    store = log.open()
    write(store, 0)
    for n in range(1, 300):
        write(store, n)
        read(store, 0)
    assert held(store, [0, 1]) == [0]
    assert read(store, 0) == [payload(0)]


def test_what_was_touched_in_a_higher_tier_stays(log):
    store = log.open()
    write(store, 0)
    for n in range(1, 300):
        write(store, n)
        store.touch([key(0)])
    assert held(store, [0, 1]) == [0]


def test_if_all_was_used_there_is_still_room(log):
    store = log.open()
    for n in range(200):
        write(store, n)
        read(store, *held(store, range(n + 1)))
        assert held(store, [n]) == [n]
    assert len(log.segments()) == SEGMENTS
    store.check()


def test_a_chunk_of_two_lives_is_not_taken_for_the_old_one(log):
    store = log.open()
    ns = fill(store, segments=2 * SEGMENTS)
    assert read(store, *ns) == [payload(n) if n in held(store, ns) else Kind.VANISHED for n in ns]


def test_other_namespaces_count_and_leave_first_as_they_are_older(log):
    other = log.open(OTHER)
    theirs = fill(other, segments=3)
    other.close()
    store = log.open()
    assert log.disk_bytes() <= CAPACITY
    fill(store, first=1000, segments=2)
    kill(store)
    left = held(log.open(OTHER), theirs)
    assert left
    assert left == theirs[-len(left) :]
    assert len(log.segments()) <= SEGMENTS


def test_a_chunk_larger_than_a_segment_is_refused_and_its_neighbours_are_not(log):
    store = log.open()
    huge = page_aligned(2 * SEGMENT).toreadonly()
    none = page_aligned()[:0].toreadonly()
    results = store.write(
        [Item(key(1), filled(1)), Item(key(2), huge), Item(key(3), none), Item(key(4), filled(4))]
    )
    assert [e and e.kind for e in results] == [None, Kind.FULL, Kind.FULL, None]
    assert held(store, [1, 2, 3, 4]) == [1, 4]


# -- what is there after it was left --------------------------------------------------------------


@pytest.mark.parametrize("leave", ["close", "kill"])
def test_all_is_there_when_it_is_opened_again(log, leave):
    store = log.open()
    ns = fill(store, segments=4)
    there = held(store, ns)
    store.close() if leave == "close" else kill(store)
    log.removed.clear()
    again = log.open()
    assert held(again, ns) == there
    assert read(again, *there) == [payload(n) for n in there]
    assert log.removed == []
    again.check()


def test_it_goes_on_in_the_segment_in_which_it_stopped(log):
    for n in range(4):
        store = log.open()
        write(store, n)
        store.close()
    assert len({at.segment for _, at in log.open()._core.index.items()}) == 1


def test_a_kill_after_it_went_on_loses_nothing(log):
    store = log.open()
    write(store, 1)
    store.close()
    store = log.open()
    write(store, 2)
    kill(store)
    assert read(log.open(), 1, 2) == [payload(1), payload(2)]


@pytest.mark.parametrize("leave", ["close", "kill"])
def test_what_was_deleted_stays_deleted(log, leave):
    store = log.open()
    write(store, 1, 2, 3)
    store.delete([key(2), key(9)])
    store.close() if leave == "close" else kill(store)
    assert held(log.open(), [1, 2, 3]) == [1, 3]


def test_what_was_written_again_after_it_was_deleted_is_there(log):
    store = log.open()
    write(store, 1)
    store.delete([key(1)])
    write(store, 1)
    store.close()
    assert read(log.open(), 1) == [payload(1)]


@pytest.mark.parametrize("leave", ["close", "kill"])
@pytest.mark.parametrize("written", ["between", "around"])
def test_a_deletion_does_not_reach_what_is_written_before_it_is_written_down(
    log, monkeypatch, leave, written
):
    """Its row lies behind the newer chunk, which was whole before it, or is whole after it."""
    store = log.open()
    write(store, 1)
    find_room, open_writes = store._roller.make_room, []

    def meanwhile(wanted):
        monkeypatch.undo()
        if written == "between":
            write(store, 1)
        else:
            open_writes.append(store._core.find_room([(key(1), CHUNK)]))
        return find_room(wanted)

    monkeypatch.setattr(store._roller, "make_room", meanwhile)
    store.delete([key(1)])
    for room in open_writes:
        assert store._core.append(*room, [filled(1)]) is None
    assert read(store, 1) == [payload(1)]
    store.close() if leave == "close" else kill(store)
    assert read(log.open(), 1) == [payload(1)]


def test_a_deletion_that_could_not_be_written_down_is_so_later(log, monkeypatch):
    store = log.open()
    write(store, 1, 2)

    def broken(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(SegmentFiles, "_write", broken)
        with pytest.raises(KVTiersError):
            store.delete([key(1)])
    write(store, 3)
    kill(store)
    assert held(log.open(), [1, 2, 3]) == [2, 3]


def test_what_was_found_damaged_stays_away(log):
    store = log.open()
    write(store, 1, 2)
    at = store._core.index.find(key(1))
    store._core.files.write_pages(at.segment, at.page, bytes(PAGE_BYTES))
    assert read(store, 1, 2) == [Kind.CORRUPT, payload(2)]
    assert log.removed == [(key(1), Reason.CORRUPT)]
    store.close()
    assert held(log.open(), [1, 2]) == [2]


def test_opening_evicts_nothing(log):
    store = log.open()
    fill(store, segments=2 * SEGMENTS)
    ns = [int.from_bytes(k[:32], "big") for k, _ in store._core.index.items()]
    store.close()
    log.removed.clear()
    for _ in range(3):
        log.open().close()
    assert sorted(held(log.open(), ns)) == sorted(ns)
    assert log.removed == []


def test_a_smaller_capacity_is_kept_at_once(log):
    store = log.open()
    ns = fill(store, segments=SEGMENTS)
    store.close()
    less = CAPACITY - 2 * SEGMENT
    store = log.open(capacity_bytes=less)
    assert log.disk_bytes() <= less
    there = held(store, ns)
    assert there
    assert there == ns[-len(there) :]
    write(store, 1000)
    store.check()


def test_a_larger_capacity_is_used(log):
    store = log.open()
    ns = fill(store, segments=SEGMENTS - 1)
    store.close()
    store = log.open(capacity_bytes=2 * CAPACITY)
    fill(store, first=1000, segments=SEGMENTS)
    assert held(store, ns) == ns
    assert SEGMENTS < len(log.segments()) <= 2 * SEGMENTS
    store.check()


# -- memory and sizes -----------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, 100, PAGE_BYTES - 1, PAGE_BYTES + 1])
@pytest.mark.parametrize("direct_io", ["auto", "off"])
def test_odd_sizes_and_addresses(log, nbytes, direct_io):
    store = log.open(direct_io=direct_io)
    source, target = page_aligned(3 * PAGE_BYTES), page_aligned(3 * PAGE_BYTES)
    source[7 : 7 + nbytes] = payload(5, nbytes)
    items = [Item(key(5), source[7 : 7 + nbytes]), Item(key(6), filled(6))]
    assert store.write(items) == [None, None]
    back = page_aligned()
    assert store.read([Item(key(6), back), Item(key(5), target[3 : 3 + nbytes])]) == [None, None]
    assert target[3 : 3 + nbytes] == payload(5, nbytes)
    assert not any(target[:3])
    assert not any(target[3 + nbytes :])
    assert back == payload(6)


def test_a_view_of_another_size_is_not_filled(log):
    store = log.open()
    write(store, 1)
    (error,) = store.read([Item(key(1), page_aligned(4 * CHUNK))])
    assert error.kind is Kind.CORRUPT


def test_unaligned_memory_does_not_end_o_direct(log):
    store = log.open()
    if not store.direct:
        pytest.fail("the folder for temporary files needs a file system with O_DIRECT")
    odd = page_aligned(CHUNK + 4096)[5 : 5 + CHUNK]
    assert store.write([Item(key(1), odd)]) == [None]
    assert store.read([Item(key(1), odd)]) == [None]
    assert store.direct


def test_segments_suit_capacity_and_chunks():
    assert segment_bytes_for(1 << 40, 1 << 16) == 256 << 20
    assert segment_bytes_for(1 << 42, 1 << 16) == 1 << 30
    assert segment_bytes_for(1 << 30, 1 << 16) == 16 << 20
    assert segment_bytes_for(1 << 30, 64 << 20) >= 4 * (64 << 20)
    assert all(segment_bytes_for(c, 4096) % PAGE_BYTES == 0 for c in (1, 10**9 + 1, 10**13 + 7))


# -- who may open it ------------------------------------------------------------------------------


def test_a_second_owner_is_refused_by_the_name_of_the_first(log):
    store = log.open()
    with pytest.raises(ConfigError, match=rf"belongs to the living process {os.getpid()}"):
        log.open()
    store.close()
    log.open().close()


def files_at(log, **options):
    return FilesStore(context(), str(log.root), **(options or {"capacity_bytes": 1 << 20}))


@pytest.mark.parametrize("lives", [True, False])
@pytest.mark.parametrize("chunks", [0, 1])
@pytest.mark.parametrize("bound", [{"capacity_bytes": 1 << 20}, {"eviction": "external"}])
def test_a_folder_of_layout_files_is_refused_and_left_as_it_is(log, bound, chunks, lives):
    """An engine that has stored nothing yet will: what it left there says that it was there."""
    store = files_at(log, **bound)
    store.write([Item(key(n), filled(n)) for n in range(chunks)])
    if not lives:
        store.close()
    with pytest.raises(ConfigError, match=r"is of layout files: .* kvtiers migrate 'fs://") as e:
        log.open()
    assert e.value.context["key"] == "root_dir"
    assert not (log.root / "log").exists()
    store.close()
    files_at(log, **bound).close()


def test_files_are_seen_where_there_is_no_account_of_them(log):
    """On a file system without locks none is kept; the folder for temporary files is made."""
    store = files_at(log, eviction="external")
    (log.root / QUOTA).unlink()
    with pytest.raises(ConfigError, match="is of layout files"):
        log.open()
    store.close()


@pytest.mark.parametrize("lives", [True, False])
def test_the_other_layout_refuses_a_log_and_leaves_it_as_it_is(log, lives):
    store = log.open()
    if not lives:
        store.close()
    before = sorted(log.root.rglob("*"))
    with pytest.raises(ConfigError, match=r"is of layout log: .* kvtiers migrate 'fs://"):
        files_at(log)
    assert sorted(log.root.rglob("*")) == before
    store.close()


@pytest.mark.parametrize("first", ["files", "log"])
def test_of_two_first_owners_with_different_layouts_one_is_refused(log, first, monkeypatch):
    """The second comes when the first has found nothing, and has left nothing yet."""
    opened = {"files": lambda: files_at(log), "log": log.open}
    (second,) = opened.keys() - {first}

    def look_while_the_other_comes(root):
        monkeypatch.undo()
        monkeypatch.setattr(locks, "PATIENCE_S", 0)
        with pytest.raises(ConfigError, match="another engine has been starting there"):
            opened[second]()
        return False

    looks = {**layouts._TRACES, "log": look_while_the_other_comes}
    monkeypatch.setattr(layouts, "_TRACES", looks)
    store = opened[first]()
    with pytest.raises(ConfigError, match=f"is of layout {first}"):
        opened[second]()
    assert store.write([Item(key(1), filled(1))]) == [None]
    store.close()


def test_who_settles_on_a_layout_waits_for_who_is_at_it_but_not_for_ever(log):
    log.root.mkdir(parents=True, exist_ok=True)
    other, clock, waits = os.open(log.root, os.O_RDONLY), ManualClock(), []
    fcntl.flock(other, fcntl.LOCK_EX)

    def sleep(seconds):
        waits.append(seconds)
        clock.advance(seconds)

    with pytest.raises(ConfigError, match=r"another engine has been starting there for 10 s"):
        settle_on_layout(str(log.root), "log", clock, sleep)
    assert sum(waits) == pytest.approx(10, abs=0.1)
    assert list(log.root.iterdir()) == []

    def let_go(seconds):
        fcntl.flock(other, fcntl.LOCK_UN)

    fcntl.flock(other, fcntl.LOCK_EX)
    settle_on_layout(str(log.root), "log", clock, let_go)
    assert [p.name for p in log.root.iterdir()] == ["log"]
    os.close(other)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EBADF])
def test_a_folder_that_cannot_be_locked_is_looked_at_all_the_same(log, code, monkeypatch):
    files_at(log).close()
    real = fcntl.flock

    def of_files_only(fd, how):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(code, os.strerror(code))
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", of_files_only)
    with pytest.raises(ConfigError, match="is of layout files"):
        log.open()


def test_a_folder_where_both_layouts_were_used_says_so_to_both(log):
    """As engines before this check could leave one."""
    store = log.open()
    write(store, 1)
    store.close()
    (log.root / "log").rename(log.root.parent / "aside")
    store = files_at(log)
    store.write([Item(key(2), filled(2))])
    store.close()
    (log.root.parent / "aside").rename(log.root / "log")
    for opened in (log.open, lambda: files_at(log)):
        with pytest.raises(ConfigError, match=r"where both layouts were used.* migrate") as refused:
            opened()
        for layout in ("files", "log"):
            assert f"'fs://{log.root}?layout={layout}'" in str(refused.value)
    with pytest.raises(ConfigError, match=r"layouts files and log, so that no engine .*migrate"):
        open_place(f"fs://{log.root}", pytest.fail)


def test_too_little_capacity_is_refused_with_what_would_do(log):
    with pytest.raises(ConfigError, match="capacity_bytes gives the log") as refused:
        log.open(capacity_bytes=3 * SEGMENT)
    assert refused.value.context["key"] == "capacity_bytes"
    needed = int(re.search(r"give at least (\d+) bytes", str(refused.value))[1])
    with pytest.raises(ConfigError):
        log.open(capacity_bytes=needed - 1)
    store = log.open(capacity_bytes=needed)
    fill(store, segments=6)
    store.check()


def test_a_log_that_is_refused_for_its_bound_leaves_no_trace(log):
    """What counts beside its segments is known before it settles there."""
    manifest = log.root / OTHER.id / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(OTHER.manifest())
    with pytest.raises(ConfigError, match="capacity_bytes gives the log") as refused:
        log.open(capacity_bytes=4 * SEGMENT)
    needed = int(re.search(r"give at least (\d+) bytes", str(refused.value))[1])
    with pytest.raises(ConfigError):
        log.open(capacity_bytes=needed - 1)
    assert [p.name for p in log.root.iterdir()] == [OTHER.id]
    files_at(log).close()
    shutil.copytree(manifest.parent, log.root.with_name("new") / OTHER.id)
    Log(log.root.with_name("new")).open(capacity_bytes=needed).close()


def test_too_little_of_the_disk_is_refused_by_the_option_that_was_given(log):
    log.open().close()
    disk = os.statvfs(log.root)
    share = 2 * SEGMENT / (disk.f_blocks * disk.f_frsize)
    with pytest.raises(ConfigError, match="capacity_fraction gives the log") as refused:
        log.open(capacity_bytes=None, capacity_fraction=share)
    assert refused.value.context["key"] == "capacity_fraction"


def test_chunks_that_no_segment_takes_are_refused_when_it_is_opened(log):
    made = replace(context(), layout=ChunkLayout((GroupLayout(0, 1 << 30, 16),)))
    with pytest.raises(ConfigError, match="layout files, or smaller chunks") as refused:
        LogStore(made, str(log.root), capacity_bytes=CAPACITY)
    assert refused.value.context["key"] == "layout"


def test_what_it_makes_is_private(log):
    old = os.umask(0)
    try:
        write(log.open(), 1)
    finally:
        os.umask(old)
    for path in log.root.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_foreign_things_among_the_segments_are_left_alone(log):
    store = log.open()
    write(store, 1)
    kill(store)
    folder = log.root / "log"
    (folder / "notes.txt").write_text("mine")
    (folder / "x.kvs").write_text("no number")
    (folder / "77.kvs").symlink_to(folder / "notes.txt")
    kill_target = folder / "00000099.kvs"
    kill_target.write_bytes(b"too short")
    store = log.open()
    assert held(store, [1]) == [1]
    fill(store, first=10, segments=2 * SEGMENTS)
    assert (folder / "notes.txt").read_text() == "mine"
    assert (folder / "x.kvs").exists()
    assert (folder / "77.kvs").is_symlink()
    assert not kill_target.exists()  # one of ours by name, and of no use


# -- trouble --------------------------------------------------------------------------------------


def room_for(count, monkeypatch, code=errno.ENOSPC):
    """No more segments than so many can be made."""
    made = SegmentFiles.make

    def make(self, number, nbytes):
        if number >= count:
            raise OSError(code, os.strerror(code))
        made(self, number, nbytes)

    monkeypatch.setattr(SegmentFiles, "make", make)


FULL_OR_BROKEN = [
    (errno.ENOSPC, Kind.FULL),
    (errno.EDQUOT, Kind.FULL),
    (errno.EIO, Kind.IO),
    (errno.EROFS, Kind.IO),
    (errno.EACCES, Kind.IO),
]


@pytest.mark.parametrize("code", [code for code, _ in FULL_OR_BROKEN])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_disk_without_room_is_used_as_far_as_it_goes(log, count, code, monkeypatch, caplog):
    caplog.set_level("INFO", logger="kvtiers")
    ns = range(100)
    with monkeypatch.context() as patched:
        room_for(count, patched, code)
        store = log.open()
        for n in ns:
            write(store, n)
            assert held(store, [n]) == [n]
            store.check()
    assert len(log.segments()) == count
    kept = [n for n in ns if n not in log.gone()]
    assert held(store, ns) == kept
    assert read(store, *kept) == [payload(n) for n in kept]
    (line,) = caplog.messages
    assert "cannot grow, so what it has is used again" in line
    assert os.strerror(code) in line
    log.clock.advance(31)
    fill(store, first=1000, segments=2 * SEGMENTS)
    assert len(log.segments()) == SEGMENTS
    assert caplog.messages[1:] == [f"{log.root}/log grows again"]


@pytest.mark.parametrize("leave", ["close", "kill"])
def test_the_only_segment_goes_round_and_what_it_held_stays_away(log, leave, monkeypatch):
    room_for(1, monkeypatch)
    store = log.open()
    for life in range(6):
        ns = range(10 * life, 10 * life + 7)
        for n in ns:
            write(store, n)
        store.delete([key(ns[-1])])
        there = held(store, range(100))
        assert set(there) <= set(range(ns[0] - 10, ns[-1]))
        store.close() if leave == "close" else kill(store)
        store = log.open()
        assert held(store, range(100)) == there
        assert read(store, *there) == [payload(n) for n in there]


def test_a_kill_while_the_only_segment_is_begun_anew_brings_nothing_back(log, monkeypatch):
    """The number of its last use is told by nothing else on the disk."""
    room_for(1, monkeypatch)
    store = log.open()
    write(store, 1)
    write(store, 2)
    write(store, 3)
    store._roller.empty(store._roller._retire())
    kill(store)
    store = log.open()
    write(store, 4)
    kill(store)
    assert held(log.open(), [1, 2, 3, 4]) == [4]


@pytest.mark.parametrize("count", [1, 2, SEGMENTS])
def test_a_chunk_as_large_as_a_segment_takes_goes_round(log, count, monkeypatch):
    room_for(count, monkeypatch)
    store = log.open()
    size = store._core.pool.largest
    for n in range(10):
        assert store.write([Item(key(n), filled(n, size))]) == [None]
        view = page_aligned(size)
        assert store.read([Item(key(n), view)]) == [None]
        assert view == payload(n, size)
    (error,) = store.write([Item(key(10), filled(10, size + 1))])
    assert error.kind is Kind.FULL
    store.check()


def test_what_is_read_from_the_only_segment_stays_as_it_is(log, monkeypatch):
    room_for(1, monkeypatch)
    store = log.open()
    write(store, 1)
    segment = store._core.pool.active
    segment.begin_read()
    results = [store.write([Item(key(n), filled(n))])[0] for n in range(2, 20)]
    assert results[-1].kind is Kind.FULL
    assert segment.sequence == 1
    segment.end_read()
    write(store, 20)
    assert held(store, range(21)) == [20]
    store.check()


@pytest.mark.parametrize(("code", "kind"), FULL_OR_BROKEN)
def test_a_broken_disk_is_not_called_full(log, code, kind, monkeypatch, caplog):
    """It cannot grow, and what it has is in use."""
    room_for(1, monkeypatch, code)
    store = log.open()
    write(store, 1)
    store._core.pool.active.begin_read()
    results = [store.write([Item(key(n), filled(n))])[0] for n in range(2, 20)]
    assert {e.kind for e in results if e is not None} == {kind}
    assert os.strerror(code) in str(results[-1])
    assert caplog.text.count(os.strerror(code)) == 1


@pytest.mark.parametrize("count", [1, 2, SEGMENTS])
def test_nothing_leaves_for_a_disk_that_takes_no_writes(log, count, monkeypatch):
    """Whether a segment is free in advance or not: what is there may be read yet."""
    room_for(count, monkeypatch)
    store = log.open()
    ns = range(100)
    for n in ns:
        write(store, n)
    there, gone = held(store, ns), log.gone()
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", refuse(errno.EROFS))
        for n in range(1000, 1050):
            (error,) = store.write([Item(key(n), filled(n))])
            assert error.kind is Kind.IO
    assert held(store, ns) == there
    assert log.gone() == gone
    assert read(store, *there) == [payload(n) for n in there]
    for n in range(1000, 1050):
        write(store, n)
    store.check()


def refuse(code):
    def refused(*_, **__):
        raise OSError(code, os.strerror(code))

    return refused


def test_a_write_that_fails_is_not_there_and_the_next_one_is(log, monkeypatch):
    store = log.open()
    write(store, 1)
    whole = SegmentFiles._write

    def broken(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(SegmentFiles, "_write", broken)
    (error,) = store.write([Item(key(2), filled(2))])
    assert error.kind is Kind.IO
    monkeypatch.setattr(SegmentFiles, "_write", whole)
    write(store, 3)
    assert held(store, [1, 2, 3]) == [1, 3]
    store.close()
    assert read(log.open(), 1, 2, 3) == [payload(1), Kind.VANISHED, payload(3)]


def test_a_segment_that_somebody_removed_is_a_miss(log):
    store = log.open()
    write(store, 1)
    for path in log.segments():
        path.unlink()
    assert read(store, 1) == [Kind.VANISHED]
    assert log.removed == [(key(1), Reason.VANISHED)]
    assert held(store, [1]) == []


def test_the_manifest_of_the_namespace_is_held_against_the_engine(log):
    log.open().close()
    (log.root / NAMESPACE.id / "manifest.json").write_text("{}")
    with pytest.raises(ConfigError, match="disagrees"):
        log.open()


def misfit_log(log):
    """A log whose segments are of another length than those that it makes from now on."""
    store = log.open(capacity_bytes=2 * CAPACITY)
    ns = fill(store, segments=2 * SEGMENTS - 1)
    store.close()
    return ns


def refuse_to_remove(monkeypatch):
    def refused(self, number):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(SegmentFiles, "remove", refused)


def test_a_segment_that_cannot_be_removed_costs_no_report_and_no_write(log, monkeypatch, caplog):
    store = log.open()
    ns = fill(store, segments=SEGMENTS)
    store._core.pool.segment_bytes += PAGE_BYTES  # as after another capacity
    refuse_to_remove(monkeypatch)
    for n in range(1000, 1100):
        store.write([Item(key(n), filled(n))])
    ns += range(1000, 1100)
    assert [n for n in ns if n in log.gone()]
    assert [n for n in held(store, ns) if n in log.gone()] == []
    assert len([r for r in caplog.records if "cannot be made smaller" in r.message]) == 1


def test_a_log_that_cannot_be_made_smaller_is_not_opened_and_evicts_no_more_for_it(
    log, monkeypatch
):
    ns = misfit_log(log)
    with monkeypatch.context() as patched:
        refuse_to_remove(patched)
        with pytest.raises(ConfigError, match="Operation not permitted"):
            log.open()
    log.removed.clear()
    assert len(held(log.open(capacity_bytes=2 * CAPACITY), ns)) >= len(ns) // 2


def test_tables_that_cannot_be_written_are_said_once_until_they_can(log, monkeypatch, caplog):
    caplog.set_level("INFO", logger="kvtiers")
    store = log.open()

    def broken(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(store._core, "write_table", broken)
        there = fill(store, segments=4)
        log.clock.advance(61)
        there += fill(store, first=len(there), segments=4)
    (said,) = caplog.messages
    assert "writing a table fails, which costs time when it is opened and nothing else" in said
    fill(store, first=len(there))
    assert caplog.messages == [said, f"{log.root}/log: writing a table works again"]
    store.check()


def test_the_folder_is_given_up_whatever_goes_wrong(log, monkeypatch):
    store = log.open()
    write(store, 1)

    def broken(*_):
        raise RuntimeError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(store._core, "seal", broken)
        with pytest.raises(RuntimeError):
            store.close()
    assert read(log.open(), 1) == [payload(1)]


def test_evictions_are_told_while_others_may_change_segments(log):
    store = log.open()
    free = []

    class Told(list):
        def __iadd__(self, more):
            free.append(store._roller._rolling.acquire(blocking=False))
            if free[-1]:
                store._roller._rolling.release()
            return super().__iadd__(more)

    log.removed = Told()
    fill(store, segments=2 * SEGMENTS)
    assert free
    assert all(free)
