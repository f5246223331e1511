"""The layout ``log`` as tools see it: everything is found, nothing is changed or waited for."""

import fcntl
import os
import shutil
import struct
import subprocess
import sys
from contextlib import closing

import pytest

from kvtiers.chunks import PAGE_BYTES, Namespace
from kvtiers.errors import ConfigError, Kind, KVTiersError
from kvtiers.tiers.fs import names
from kvtiers.tiers.fs.log import format as fmt
from kvtiers.tiers.fs.log.format import Header
from kvtiers.tiers.fs.log.maintain import choose, maintain
from kvtiers.tiers.fs.log.ownership import Ownership, kept_capacity, owner_of
from kvtiers.tiers.fs.log.segment import SegmentFiles
from kvtiers.tiers.fs.log_place import LogPlace
from kvtiers.tiers.fs.tools import FsURL
from kvtiers.tiers.places import Aim, Part
from tests.unit.tiers.fs.fs_kit import flip
from tests.unit.tiers.fs.log.log_kit import CAPACITY, SEGMENT, held, kill, read, write
from tests.unit.tiers.fs.log.test_log import fill
from tests.unit.tiers.tier_kit import CHUNK, LAYOUT, NAMESPACE, key, payload

OTHER = Namespace({"model": "other", "format": 1})


@pytest.fixture
def complaints():
    return []


@pytest.fixture
def place(log, complaints):
    return LogPlace(FsURL(str(log.root)), complaints.append)


def stored(log, *ns, namespace=NAMESPACE):
    store = log.open(namespace)
    write(store, *ns)
    return store


def answers(place, *ns, namespace=NAMESPACE.id):
    return [
        got.kind if isinstance(got, KVTiersError) else bytes(got)
        for _, got in place.read(namespace, [key(n) for n in ns])
    ]


def numbers(place, namespace=NAMESPACE.id):
    return sorted(int.from_bytes(e.key[:32], "big") for e in place.entries(namespace))


def segment_of(log, n):
    """The file of a chunk and where in it its payload begins."""
    place = LogPlace(FsURL(str(log.root)), pytest.fail)
    at = place._snapshot(NAMESPACE.id).index.find(key(n))
    return log.root / "log" / f"{at.segment:08d}.kvs", at.page * PAGE_BYTES


def sealed_log(log, segments=2):
    """Some sealed segments, nobody owns them; the numbers of the chunks in them."""
    store = log.open()
    ns = fill(store, segments=segments)
    store.close()
    return ns


def image(log):
    return {
        str(p): (p.lstat().st_mode, p.lstat().st_mtime_ns, p.lstat().st_ctime_ns)
        for p in sorted(log.root.rglob("*"))
    }


# -- what is there --------------------------------------------------------------------------------


@pytest.mark.parametrize("leave", ["live", "closed", "killed"])
def test_what_an_engine_wrote_is_found(log, place, leave):
    store = stored(log, 1, 2)
    if leave != "live":
        store.close() if leave == "closed" else kill(store)
    (found,) = place.namespaces()
    assert found.namespace == NAMESPACE
    entries = {e.key: e for e in place.entries(NAMESPACE.id)}
    assert set(entries) == {key(1), key(2)}
    assert (entries[key(1)].bytes, entries[key(1)].used_at) == (CHUNK, log.wall.now)
    assert place.find(NAMESPACE.id, [key(3), key(1)]) == [None, entries[key(1)]]
    assert answers(place, 2, 1, 3) == [payload(2), payload(1), Kind.VANISHED]
    assert list(place.faults(NAMESPACE.id)) == list(place.faults("")) == []


def test_what_was_deleted_is_not_found(log, place):
    store = stored(log, 1, 2)
    store.delete([key(1)])
    assert numbers(place) == [2]
    store.close()
    assert numbers(place) == [2]


def test_namespaces_lie_apart(log, place):
    stored(log, 1, 2).close()
    stored(log, 2, 3, namespace=OTHER).close()
    assert (numbers(place), numbers(place, OTHER.id)) == ([1, 2], [2, 3])
    assert answers(place, 3, namespace=OTHER.id) == [payload(3)]
    assert answers(place, 3) == [Kind.VANISHED]
    assert numbers(place, "0" * 32) == []


def test_each_view_is_aligned_and_verified_at_its_turn(log, place):
    stored(log, 1, 2).close()
    reading = place.read(NAMESPACE.id, [key(1), key(2)])
    _, first = next(reading)
    assert bytes(first) == payload(1)
    path, at = segment_of(log, 2)
    flip(path, at)
    _, second = next(reading)
    assert second.kind is Kind.CORRUPT


# -- beside a live owner --------------------------------------------------------------------------


def test_beside_an_owner_that_evicts_bytes_are_right_or_gone(log, place):
    """Its segments are used again under our hands, many times over."""
    store = log.open()
    n = 0
    for _ in range(40):
        some = numbers(place)
        for _ in range(7):
            write(store, n)
            n += 1
        for m, got in zip(some, answers(place, *some), strict=True):
            assert got in (payload(m), Kind.VANISHED)
        there = [m for m in some if m in held(store, some)]
        assert answers(place, *there) == [payload(m) for m in there]
    assert log.gone()
    store.check()


def test_what_was_overwritten_has_vanished_and_is_not_damaged(log, place):
    store = log.open()
    write(store, 0)
    assert numbers(place) == [0]
    reading = place.read(NAMESPACE.id, [key(0)])
    n = 1
    while 0 not in log.gone():
        write(store, n)
        n += 1
    fill(store, first=n, segments=2)  # and its segment is begun anew
    ((_, got),) = reading
    assert got.kind is Kind.VANISHED


def test_what_was_used_is_found_where_it_lies_now(log, place):
    """It is written again before its segment leaves, so a copy of the log lacks nothing hot."""
    store = log.open()
    write(store, 0)
    assert numbers(place) == [0]
    for n in range(1, 300):
        write(store, n)
        read(store, 0)
    assert answers(place, 0) == [payload(0)]


def test_it_does_not_look_again_for_each_that_is_gone(log, place, monkeypatch):
    """A look takes long where there is much; an owner that evicts fast would never end."""
    store = log.open(capacity_bytes=16 * CAPACITY)
    ns = fill(store, segments=20)
    assert numbers(place) == ns
    store.close()
    looks, seen = [], place._seen[NAMESPACE.id]

    def vanished(self, number, page, buffers):
        raise FileNotFoundError(2, "gone")

    monkeypatch.setattr(SegmentFiles, "read", vanished)
    monkeypatch.setattr(LogPlace, "_look", lambda self, name: looks.append(name) or seen)
    assert answers(place, *ns) == [Kind.VANISHED] * len(ns)
    assert 1 <= len(looks) <= 17


def test_a_segment_that_an_owner_removed_has_vanished(log, place):
    ns = sealed_log(log, segments=5)
    assert numbers(place) == ns
    log.open(capacity_bytes=CAPACITY - 2 * SEGMENT).close()
    gone = sorted(log.gone())
    assert gone
    assert answers(place, *gone) == [Kind.VANISHED] * len(gone)
    assert numbers(place) == [n for n in ns if n not in gone]


def test_nothing_changes_and_nothing_is_locked(log, place):
    store = stored(log, 1, 2)
    before = image(log)
    assert len(place.namespaces()) == 1
    assert numbers(place) == [1, 2]
    assert place.usage()
    assert answers(place, 1, 2) == [payload(1), payload(2)]
    assert list(place.faults(NAMESPACE.id)) == []
    assert (place.owner(), place.capacity()) == (os.getpid(), CAPACITY)
    assert image(log) == before
    store.check()
    store.close()
    assert place.owner() is None
    log.open().close()


def test_an_owner_that_comes_while_somebody_asks_whose_it_is_waits_a_moment(log):
    log.open().close()
    asking = os.open(log.root / "log" / "lock", os.O_RDONLY)
    fcntl.flock(asking, fcntl.LOCK_SH)
    waited = []

    def pause(seconds):
        waited.append(seconds)
        if len(waited) == 2:
            os.close(asking)

    owner = Ownership(str(log.root), pause)
    assert len(waited) == 2
    assert owner_of(str(log.root)) == os.getpid()
    owner.close()


def link_to_a_file(lock):
    lock.with_name("theirs").write_text("keep me")
    lock.symlink_to("theirs")


@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir, link_to_a_file], ids=lambda f: f.__name__)
@pytest.mark.parametrize("ask", [Ownership, owner_of, kept_capacity], ids=lambda f: f.__name__)
def test_a_lock_that_is_no_file_is_refused_neither_waited_for_nor_followed(tmp_path, put, ask):
    lock = tmp_path / "log" / "lock"
    lock.parent.mkdir()
    put(lock)
    with pytest.raises(ConfigError, match=f"root_dir holds {lock}, which is no file"):
        ask(str(tmp_path))
    assert [p.read_text() for p in lock.parent.glob("theirs")] in ([], ["keep me"])


# -- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [0, CHUNK - 1])
def test_a_damaged_chunk_is_told_and_left_where_it_is(log, place, where):
    ns = sealed_log(log)
    path, at = segment_of(log, 1)
    flip(path, at + where)
    before = image(log)
    assert numbers(place) == ns
    assert answers(place, 0, 1, 2) == [payload(0), Kind.CORRUPT, payload(2)]
    assert list(place.faults(NAMESPACE.id)) == []
    assert image(log) == before


def test_a_damaged_table_is_told_and_its_chunks_are_found(log, place):
    ns = sealed_log(log)
    first = log.segments()[0]
    flip(first, SEGMENT - 2 * PAGE_BYTES)
    assert numbers(place) == ns
    (fault,) = place.faults(NAMESPACE.id)
    assert fault.problem.startswith(f"{first}: the table is damaged")
    (mended,) = place.mend([fault])
    assert mended.outcome == "written anew"
    assert list(place.faults(NAMESPACE.id)) == []
    assert answers(place, *ns) == [payload(n) for n in ns]


def test_a_damaged_trailer_is_told_too(log, place):
    ns = sealed_log(log)
    flip(log.segments()[0], SEGMENT - 1)
    (fault,) = place.faults(NAMESPACE.id)
    assert "the table is damaged" in fault.problem
    assert numbers(place) == ns


def test_a_damaged_head_is_told_and_the_table_has_its_chunks(log, place):
    ns = sealed_log(log)
    path, at = segment_of(log, 1)
    flip(path, at - PAGE_BYTES + 20)
    (fault,) = place.faults(NAMESPACE.id)
    assert "the heads of 1 chunks are damaged; the table has them" in fault.problem
    assert numbers(place) == ns
    assert [f.outcome for f in place.mend([fault])] == ["left"]


@pytest.mark.parametrize("byte", [9, 300])
def test_a_damaged_head_in_a_segment_without_table_costs_its_chunks(log, place, byte):
    store = log.open()
    for n in range(3):
        write(store, n)
    kill(store)
    path, at = segment_of(log, 1)
    head = at - PAGE_BYTES
    flip(path, head + (byte if byte == 9 else struct.calcsize("<8sHHIQQQ16sQ") + 3))
    (fault,) = place.faults(NAMESPACE.id)
    assert "1 heads of runs are damaged, so their chunks are lost" in fault.problem
    assert numbers(place) == [0, 2]


def test_a_write_that_a_kill_cut_off_is_no_damage(log, place):
    store = log.open()
    for n in range(3):
        write(store, n)
    kill(store)
    path, at = segment_of(log, 1)
    with path.open("r+b") as f:
        f.seek(at)
        f.write(bytes(CHUNK))  # the head arrived, the payload did not
    assert list(place.faults(NAMESPACE.id)) == []
    assert numbers(place) == [0, 2]


def test_a_damaged_header_is_told_and_mending_removes_what_nobody_can_use(log, place):
    ns = sealed_log(log)
    first = log.segments()[0]
    flip(first, 30)
    lost = [n for n in ns if n not in numbers(place)]
    assert lost
    assert list(place.faults(NAMESPACE.id)) == []
    (fault,) = place.faults("")
    assert fault.problem == f"{first}: the header is damaged, so what it held is lost"
    assert [f.outcome for f in place.mend([fault])] == ["removed"]
    assert not first.exists()
    assert held(log.open(), ns) == [n for n in ns if n not in lost]


@pytest.mark.parametrize("more", [-PAGE_BYTES, -100, 100, PAGE_BYTES])
def test_a_segment_of_another_length_is_told_and_mended(log, place, more):
    ns = sealed_log(log)
    first = log.segments()[0]
    os.truncate(first, SEGMENT + more)
    (fault,) = place.faults(NAMESPACE.id)
    assert fault.problem.startswith(f"{first} is {SEGMENT + more} bytes long and should be")
    assert set(numbers(place)) < set(ns)
    assert [f.outcome for f in place.mend([fault])] == ["given its length again"]
    assert numbers(place) == ns
    assert answers(place, *ns) == [payload(n) for n in ns]


def test_what_the_next_owner_put_into_a_torn_run_has_its_head(log, place):
    """The head of the torn run still says that the pages are its own."""
    store = log.open()
    write(store, 0, 1)
    kill(store)
    path, at = segment_of(log, 1)
    with path.open("r+b") as f:
        f.seek(at)
        f.write(bytes(CHUNK))
    store = log.open()
    write(store, 2, 3)
    assert list(place.faults(NAMESPACE.id)) == []
    store.close()
    assert list(place.faults(NAMESPACE.id)) == []
    assert numbers(place) == [0, 2, 3]


def test_a_segment_of_another_version_is_told_and_left(log, place):
    sealed_log(log)
    first = log.segments()[0]
    page = bytearray(first.read_bytes()[: PAGE_BYTES - 8])
    page[8] = 9
    with first.open("r+b") as f:
        f.write(fmt._sealed(bytes(page)))
    (fault,) = place.faults("")
    assert "is of version 9 of the log, not 1" in fault.problem
    assert [f.outcome for f in place.mend([fault])] == ["left"]
    assert first.exists()


def test_mending_looks_again_and_not_beside_an_owner(log, place):
    sealed_log(log)
    flip(log.segments()[0], SEGMENT - 2 * PAGE_BYTES)
    known = list(place.faults(NAMESPACE.id))
    store = log.open()
    with pytest.raises(ConfigError, match=f"the living process {os.getpid()}"):
        place.mend(known)
    store.close()  # which wrote the table anew when it opened
    assert [f.outcome for f in place.mend(known)] == ["gone by now"]


# -- hostile folders ------------------------------------------------------------------------------


def test_what_is_no_segment_is_left_alone_and_counted_as_foreign(log, place, complaints):
    stored(log, 1).close()
    folder = log.root / "log"
    (folder / "notes.txt").write_text("mine")
    (folder / "00000077.kvs").symlink_to(log.segments()[0])
    os.mkfifo(folder / "00000078.kvs")
    (folder / "00000079.kvs").mkdir()
    (folder / "00000080.kvs").write_bytes(b"short")
    (folder / "00000081.kvs").touch()
    with (folder / "00000082.kvs").open("wb") as f:
        f.write(fmt.pack_header(Header(9, 1 << 20, 0.0, NAMESPACE.id)))
        f.truncate(1 << 40)
    assert numbers(place) == [1]
    assert answers(place, 1) == [payload(1)]
    assert {u.part for u in place.usage() if not u.namespace} == {
        Part.RESERVED,
        Part.OTHER,
        Part.FOREIGN,
    }
    (fault,) = place.faults(NAMESPACE.id)
    assert "00000082.kvs is 1099511627776 bytes long and should be 1048576" in fault.problem
    assert [f.outcome for f in place.mend([fault])] == ["given its length again"]
    assert complaints == []


def forged(log, rows, sequence=1):
    """A segment whose table is sound and says what no log ever wrote."""
    path = log.root / "log" / "00000000.kvs"
    table = fmt.pack_table(rows, sequence) if isinstance(rows, list) else forged_table(rows)
    with path.open("r+b") as f:
        f.write(fmt.pack_header(Header(sequence, SEGMENT, 0.0, NAMESPACE.id)))
        f.seek(SEGMENT - len(table))
        f.write(table)


def forged_table(packed):
    trailer = fmt._sealed(fmt._pack_list(fmt._TRAILER_MAGIC, 1, 1, packed))
    return packed.ljust(PAGE_BYTES, b"\0") + trailer


@pytest.mark.parametrize(
    "rows",
    [
        [(key(1), 1 << 30, CHUNK, 0)],
        [(key(1), 1, 0xFFFFFFFF, 0)],
        [(key(1), 0, CHUNK, 0)],
        struct.pack("<HI", 32, 1 << 31),
        struct.pack("<HI", 65535, 1) + bytes(3000),
        b"abc",
    ],
    ids=range(6),
)
def test_forged_tables_do_no_harm(log, place, rows):
    stored(log).close()
    forged(log, rows)
    assert numbers(place) == []
    assert answers(place, 1) == [Kind.VANISHED]
    (fault,) = place.faults(NAMESPACE.id)
    assert "the table is damaged" in fault.problem
    log.open().close()


def test_a_forged_row_that_fits_serves_no_wrong_bytes(log, place):
    stored(log).close()
    forged(log, [(key(1), 2, CHUNK, 7)])
    assert numbers(place) == [1]
    assert answers(place, 1) == [Kind.CORRUPT]


def test_one_segment_that_cannot_be_read_does_not_hide_the_others(
    log, place, complaints, monkeypatch
):
    ns = sealed_log(log)
    read_segment = SegmentFiles.read

    def broken(self, number, page, buffers):
        if number == 0:
            raise PermissionError(13, os.strerror(13))
        return read_segment(self, number, page, buffers)

    monkeypatch.setattr(SegmentFiles, "read", broken)
    there = numbers(place)
    assert there
    assert set(there) < set(ns)
    assert complaints[0] == f"{log.segments()[0]} cannot be read: Permission denied"


# -- bytes, and changes ---------------------------------------------------------------------------


def test_every_byte_is_accounted_for(log, place):
    sealed_log(log)
    (log.root / "stranger").write_bytes(b"123")
    (log.root / "folder").mkdir()
    (log.root / "folder" / "inside").write_bytes(b"not ours, but it takes room")
    (log.root / f"{names.TRIAL}x" / "tier").mkdir(parents=True)
    (log.root / f"{names.TRIAL}x" / "tier" / "1").write_bytes(b"12345")
    (log.root / "log" / "manifest.tmp").write_bytes(b"{}")
    usage = {(u.namespace, u.part): u.bytes for u in place.usage()}
    lock = len(f"{os.getpid()}\n{CAPACITY}\n")
    assert usage[NAMESPACE.id, Part.OTHER] == len(NAMESPACE.manifest())
    assert usage[NAMESPACE.id, Part.CHUNKS] == len(numbers(place)) * CHUNK
    assert usage["", Part.FOREIGN] == 3 + len(b"not ours, but it takes room")
    assert usage["", Part.OTHER] == lock
    assert usage["", Part.TEMPORARY] == 2
    assert usage["", Part.TRIAL] == 5
    assert sum(usage.values()) == log.disk_bytes()


def test_its_store_is_the_one_that_engines_use_and_no_larger_than_it_was(log, place):
    ns = sealed_log(log, segments=5)
    before = log.disk_bytes()
    store = place.open_store(NAMESPACE, LAYOUT)
    assert held(store, ns) == ns
    store.delete([key(0)])
    store.close()
    assert numbers(place) == ns[1:]
    assert log.disk_bytes() == before
    assert place.bound() == CAPACITY


def test_a_new_namespace_goes_into_a_full_log_at_once(log, place):
    """What was found and read a moment ago leaves all the same: a log promises nothing."""
    store = log.open()
    ns = range(100)
    for n in ns:
        write(store, n)
    there = held(store, ns)
    read(store, *there)
    store.close()
    assert answers(place, *there) == [payload(n) for n in there]
    with closing(place.open_store(OTHER, LAYOUT)) as new:
        for n in range(200):
            write(new, n)
        assert log.disk_bytes() <= CAPACITY
        assert read(new, 199) == [payload(199)]


def test_a_young_log_may_be_repaired_without_its_capacity(log, place):
    """One segment, where an engine wants four at least."""
    stored(log, 1, 2).close()
    store = place.open_store(NAMESPACE, LAYOUT)
    store.delete([key(1)])
    store.close()
    assert numbers(place) == [2]
    assert {p.stat().st_size for p in log.segments()} == {SEGMENT}


def test_a_log_keeps_its_capacity_whatever_namespaces_come(log, place):
    """Each costs its manifest, and no more: the log does not shrink by looking at what it has."""
    ns = sealed_log(log, segments=5)
    for n in range(5):
        place.open_store(Namespace({"model": f"new {n}", "format": 1}), LAYOUT).close()
        assert place.bound() == CAPACITY
    assert numbers(place) == ns
    log.open(capacity_bytes=2 * CAPACITY).close()
    with closing(Ownership(str(log.root))):  # as tools do that write no chunks
        assert place.owner() == os.getpid()
    assert place.capacity() == 2 * CAPACITY
    with pytest.raises(ConfigError, match="capacity_bytes"):
        log.open(capacity_bytes=SEGMENT)
    assert place.capacity() == 2 * CAPACITY


@pytest.mark.parametrize("said", [b"", b"123\n", b"123\n12 GiB\n", b"\n\n", b"\xff\xff\n5"])
def test_a_log_that_does_not_say_its_capacity_asks_for_it(log, place, said):
    stored(log, 1).close()
    (log.root / "log" / "lock").write_bytes(said)
    if said.endswith(b"5"):
        assert place.capacity() == 5
        return
    assert place.bound() is None
    with pytest.raises(ConfigError, match="add &capacity="):
        place.open_store(NAMESPACE, LAYOUT)


def test_a_new_log_needs_a_capacity_and_an_owned_one_is_refused(log, place, tmp_path):
    with pytest.raises(ConfigError, match="how large it may become: add &capacity="):
        place.open_store(NAMESPACE, LAYOUT)
    with_capacity = LogPlace(FsURL(str(log.root), capacity_bytes=CAPACITY), pytest.fail)
    store = with_capacity.open_store(NAMESPACE, LAYOUT)
    assert with_capacity.capacity() == with_capacity.bound() == CAPACITY
    with pytest.raises(ConfigError, match=f"the living process {os.getpid()}"):
        with_capacity.open_store(NAMESPACE, LAYOUT)
    store.close()


def test_which_layout_lies_there(log, tmp_path):
    assert not LogPlace.lies_at(str(tmp_path / "absent"))
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "engine.txt").touch()
    assert not LogPlace.lies_at(str(tmp_path))
    stored(log, 1).close()
    assert LogPlace.lies_at(str(log.root))
    (log.root / "log" / "lock").unlink()
    assert LogPlace.lies_at(str(log.root))


def test_a_root_that_is_gone_is_an_error(log, place):
    with pytest.raises(KVTiersError, match="No such file"):
        place.namespaces()
    assert place.owner() is None
    assert list(place.entries(NAMESPACE.id)) == list(place.faults("")) == []


def test_it_says_where_it_is(tmp_path):
    place = LogPlace(FsURL(str(tmp_path / "a b?c")), pytest.fail)
    assert place.url.endswith("/a%20b%3Fc?layout=log")
    assert repr(place).startswith("<LogPlace ")


WRITER = """
import sys, time
from pathlib import Path
from tests.unit.tiers.fs.log.log_kit import CAPACITY, Log, write
store = Log(Path(sys.argv[1])).open(capacity_bytes=64 * CAPACITY)
n = 0
while True:
    write(store, n)
    n += 1
    if n == 3000:
        print("at work", flush=True)
"""


def test_beside_another_process_that_writes_as_fast_as_it_can(log, place):
    """Real races: what is read is right or gone, and nothing looks damaged that is not."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(log.root)], stdout=subprocess.PIPE, text=True
    ) as writer:
        try:
            assert writer.stdout.readline() == "at work\n"
            seen = set()
            for _ in range(30):
                some = numbers(place)[::-1]  # the last ones stay for a while
                seen |= {
                    got if isinstance(got, Kind) else got == payload(n)
                    for n, got in zip(some, answers(place, *some), strict=True)
                }
                assert list(place.faults(NAMESPACE.id)) == list(place.faults("")) == []
                assert place.owner() == writer.pid
            assert True in seen
            assert seen <= {True, Kind.VANISHED}
            assert writer.poll() is None
        finally:
            writer.kill()
    shutil.rmtree(log.root)


# -- making it smaller ----------------------------------------------------------------------------


def begun(log, place):
    """Numbers of the segments in the order in which they were begun, with their chunks."""
    seen = place._look(NAMESPACE.id)
    order = sorted(seen.headers, key=lambda number: seen.headers[number].sequence)
    return [
        sorted(int.from_bytes(k[:32], "big") for k, at in seen.index.items() if at.segment == n)
        for n in order
    ]


def test_the_oldest_segments_leave_down_to_the_size(log, place):
    ns = sealed_log(log, segments=4)
    chunks = begun(log, place)
    total = sum(u.bytes for u in place.usage())
    empty = total // SEGMENT - len(chunks)
    bound = total - (empty + 2) * SEGMENT
    said = place.maintain(Aim(bound), dry_run=True)
    assert sum(u.bytes for u in place.usage()) == total
    done = place.maintain(Aim(bound))
    assert said == done
    assert (done.before_bytes, done.bytes) == (total, (empty + 2) * SEGMENT)
    assert done.by_namespace == {NAMESPACE.id: len(chunks[0] + chunks[1])}
    assert sum(u.bytes for u in place.usage()) == bound
    left = [n for n in ns if n not in chunks[0] + chunks[1]]
    assert numbers(place) == left
    assert held(log.open(), ns) == left


def test_segments_that_hold_nothing_leave_first_and_only_for_the_size(log, place):
    stored(log, 1).close()
    SegmentFiles(str(log.root / "log"), "off", fsync=False).make(40, SEGMENT)
    assert place.maintain(Aim(older_than_s=0.0)).by_namespace == {NAMESPACE.id: 1}
    assert "00000040.kvs" in [p.name for p in log.segments()]
    place.maintain(Aim(0))
    SegmentFiles(str(log.root / "log"), "off", fsync=False).make(40, SEGMENT)
    stored(log, 1).close()
    files = [p for p in log.segments() if p.read_bytes()[:8] == b"KVTsegmt"]
    beside = sum(u.bytes for u in place.usage()) - len(log.segments()) * SEGMENT
    done = place.maintain(Aim(beside + SEGMENT))
    assert not done.by_namespace
    assert log.segments() == files


def test_old_segments_leave_and_those_begun_before_a_young_one_stay(log, place):
    store = log.open()
    fill(store, segments=3)
    log.wall.now += 3600
    fill(store, first=1000, segments=1)
    store.close()
    chunks = begun(log, place)
    log.wall.now += 1800

    def old(seconds):
        aim = Aim(older_than_s=seconds)
        return maintain(str(log.root), place._files, aim, dry_run=True, wall_clock=log.wall)

    assert len(old(3600).segments) == len(chunks) - 1
    assert len(old(1000).segments) == len(chunks)
    assert not old(6000).segments


def test_a_clock_that_was_set_back_keeps_nothing_for_ever(log, place):
    def looked(number, sequence, created):
        return number, SEGMENT, Header(sequence, SEGMENT, created, NAMESPACE.id)

    future, past, now = looked(0, 1, 9e9), looked(1, 2, 100.0), looked(2, 3, 1000.0)
    assert choose([now, future, past], 0, Aim(older_than_s=500.0), 1100.0) == [future, past]


def test_one_namespace_only(log, place):
    stored(log, 1).close()
    stored(log, 2, namespace=OTHER).close()
    done = place.maintain(Aim(0, namespace=OTHER.id))
    assert done.by_namespace == {OTHER.id: 1}
    assert (numbers(place), numbers(place, OTHER.id)) == ([1], [])
    with pytest.raises(ConfigError, match="does not hold"):
        place.maintain(Aim(0, namespace="0" * 32))


def test_what_was_deleted_does_not_come_back(log, place):
    """The segment that says so outlives the one that has the chunk."""
    store = log.open()
    ns = fill(store, segments=3)
    store.delete([key(0)])
    store.close()
    for keep in range(len(log.segments()), -1, -1):
        place.maintain(Aim(keep * SEGMENT))
        assert 0 not in numbers(place)
        assert numbers(place) == [n for n in ns if n in numbers(place)]


def test_a_log_with_an_owner_is_not_touched(log, place):
    store = stored(log, 1)
    before = image(log)
    with pytest.raises(ConfigError, match=f"the living process {os.getpid()}"):
        place.maintain(Aim(0))
    assert image(log) == before
    assert read(store, 1) == [payload(1)]
    store.close()


def test_what_a_killed_owner_left_goes_and_manifests_stay(log, place):
    stored(log, 1).close()
    (log.root / "log" / "manifest.tmp").write_bytes(b"{}")
    done = place.maintain(Aim())
    assert (done.temporary, done.segments) == ([("log/manifest.tmp", 2)], [])
    place.maintain(Aim(0))
    assert log.segments() == []
    assert (log.root / NAMESPACE.id / "manifest.json").exists()
    write(log.open(), 1)


def test_where_there_is_no_log_nothing_is_made(tmp_path):
    place = LogPlace(FsURL(str(tmp_path)), pytest.fail)
    assert place.maintain(Aim(0)).bytes == 0
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_deleted_is_said_and_ends_it(log, place, monkeypatch):
    sealed_log(log, segments=3)

    def refuse(self, number):
        raise PermissionError(1, "told to refuse")

    before = numbers(place)
    monkeypatch.setattr(SegmentFiles, "remove", refuse)
    done = place.maintain(Aim(0))
    assert (len(done.failed), done.segments) == (1, [])
    assert numbers(place) == before


def test_wrong_aims_are_refused(log, place):
    for aim in (Aim(-1), Aim(older_than_s=-0.5)):
        with pytest.raises(ConfigError, match="give 0 or more"):
            place.maintain(aim)
