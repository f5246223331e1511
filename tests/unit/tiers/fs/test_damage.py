"""Whatever is done to the disk, while a tier is open or not: a miss, a count, a report, no more.

The neighbours in the same job survive, and a chunk that is written again is good again.
"""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtiers.chunks import PAGE_BYTES, Lookup, Namespace
from kvtiers.errors import Kind
from kvtiers.events import ChunksRemoved, Reason
from kvtiers.metrics import Metrics
from kvtiers.tiers.base import Job, JobKind, StoreContext
from kvtiers.tiers.fs import FsOptions, build
from kvtiers.tiers.fs.log import format as fmt
from kvtiers.tiers.lanes import Inbox
from kvtiers.tiers.views import ChunkViews
from tests.unit.tiers.fs.fs_kit import flip
from tests.unit.tiers.tier_kit import (
    CHUNK,
    LAYOUT,
    NAMESPACE,
    Bench,
    ManualClock,
    filled,
    key,
    payload,
)

OTHER = Namespace({"model": "other"})
ALL = range(1, 21)
TARGET, TWIN = 3, 18
"""Two chunks that lie in two segments."""
CAPACITY = 40 * (CHUNK + PAGE_BYTES)


class Disk:
    """A tier on a folder, which may be closed and opened, and where its chunks lie."""

    def __init__(self, root: Path, layout: str) -> None:
        self.root, self.layout = root, layout
        self.metrics = Metrics()
        self.open()

    def open(self, namespace: Namespace = NAMESPACE) -> None:
        inbox = Inbox()
        clock, wall = ManualClock(), ManualClock(1_700_000_000.0)
        context = StoreContext("fs", "1:fs", namespace, LAYOUT, clock, wall, inbox.removed)
        chosen: dict[str, Any] = {"layout": self.layout, "capacity_bytes": CAPACITY}
        store = build(context, FsOptions(root_dir=str(self.root), **chosen))
        self.bench = Bench(store, inbox, negative_ttl_s=0.0)

    def close(self) -> None:
        self.bench.tier.shutdown(10)

    def store(self, ns: list[int], shift: int = 0) -> None:
        """``shift``: of the numbers whose bytes they get."""
        views = ChunkViews.of([filled(n + shift) for n in ns])
        keys, slots = tuple(key(n) for n in ns), tuple(range(len(ns)))
        assert self.bench.run(Job(1, JobKind.STORE, keys, slots, views)).failed == {}

    def load(self) -> tuple[set[int], dict[int, Kind]]:
        """Load all that are found, in one job: those that were right, and why others were not."""
        found = [n for n, v in zip(ALL, self.bench.resolve(*ALL), strict=True) if v is Lookup.HIT]
        if not found:
            return set(), {}
        job = self.bench.load_job(*found)
        kept = {n: view[:] for n, view in zip(found, job.views, strict=True)}
        outcome = self.bench.run(job)
        right = {n for n in found if key(n) in outcome.done}
        assert all(bytes(kept[n]) == payload(n) for n in right), "wrong bytes"
        return right, {n: outcome.failed[key(n)].kind for n in found if n not in right}

    def removals(self) -> dict[int, str]:
        """Why chunks left, as the events say that gathered; they are counted as well."""
        left = {}
        for event in self.bench.tier.take_events():
            self.metrics(event)
            if isinstance(event, ChunksRemoved):
                left.update((int.from_bytes(k[:32], "big"), event.reason) for k in event.keys)
        return left

    def counted(self) -> float:
        counters = self.metrics.take().counters
        return sum(n for (name, _), n in counters.items() if name == "removed")

    # -- where things lie -----------------------------------------------------------------------

    def find(self, n: int) -> tuple[Path, int]:
        """The file of a chunk and where in it its bytes begin."""
        if self.layout == "files":
            digest = n.to_bytes(32, "big").hex()
            folder = self.root / NAMESPACE.id / digest[:2]
            return folder / f"{digest}-g0.kvc", PAGE_BYTES
        at = self.bench.store._core.index.find(key(n))
        return self.root / "log" / f"{at.segment:08d}.kvs", at.page * PAGE_BYTES

    def mates(self, n: int) -> set[int]:
        """The chunks in the same file."""
        path, _ = self.find(n)
        return {m for m in ALL if self.find(m)[0] == path}


def at(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as f:
        f.seek(offset)
        f.write(data)


# -- damage: each gives the chunks that it hits, and those that it may take along -----------------

Hit = tuple[set[int], set[int]]


def first_bit(disk: Disk) -> Hit:
    path, offset = disk.find(TARGET)
    flip(path, offset)
    return {TARGET}, set()


def last_bit(disk: Disk) -> Hit:
    path, offset = disk.find(TARGET)
    flip(path, offset + CHUNK - 1)
    return {TARGET}, set()


def zero_fill(disk: Disk) -> Hit:
    path, offset = disk.find(TARGET)
    at(path, offset, bytes(CHUNK))
    return {TARGET}, set()


def swapped_chunks(disk: Disk) -> Hit:
    (a, i), (b, j) = disk.find(TARGET), disk.find(TWIN)
    at(a, i, payload(TWIN))
    at(b, j, payload(TARGET))
    return {TARGET, TWIN}, set()


def another_chunk(disk: Disk) -> Hit:
    path, offset = disk.find(TARGET)
    at(path, offset, payload(TWIN))
    return {TARGET}, set()


def swapped_files(disk: Disk) -> Hit:
    (a, _), (b, _) = disk.find(TARGET), disk.find(TWIN)
    aside = a.with_suffix(".aside")
    lost = disk.mates(TARGET) | disk.mates(TWIN)
    a.rename(aside)
    b.rename(a)
    aside.rename(b)
    return (lost, set()) if disk.layout == "files" else (set(), lost)


def cut_in_half(disk: Disk) -> Hit:
    path, offset = disk.find(TARGET)
    hit = {n for n in disk.mates(TARGET) if disk.find(n)[1] >= offset}
    os.truncate(path, offset + CHUNK // 2)
    return hit, set()


def cut_within_a_page(disk: Disk) -> Hit:
    path, offset = disk.find(TARGET)
    hit = {n for n in disk.mates(TARGET) if disk.find(n)[1] >= offset}
    os.truncate(path, offset + 100)
    return hit, set()


def cut_to_nothing(disk: Disk) -> Hit:
    path, _ = disk.find(TARGET)
    hit = disk.mates(TARGET)
    os.truncate(path, 0)
    return hit, set()


def extended(disk: Disk) -> Hit:
    path, _ = disk.find(TARGET)
    with path.open("ab") as f:
        f.write(b"more" * PAGE_BYTES)
    return ({TARGET}, set()) if disk.layout == "files" else (set(), set())


def all_zero(disk: Disk) -> Hit:
    path, _ = disk.find(TARGET)
    hit = disk.mates(TARGET)
    at(path, 0, bytes(path.stat().st_size))
    return hit, set()


def random_bytes(disk: Disk) -> Hit:
    path, _ = disk.find(TARGET)
    hit = disk.mates(TARGET)
    at(path, 0, random.Random(1).randbytes(path.stat().st_size))
    return hit, set()


def header_flip(disk: Disk) -> Hit:
    """Of a segment: it is read when the log is opened, and then the segment is as if unused."""
    path, _ = disk.find(TARGET)
    flip(path, 20)
    return ({TARGET}, set()) if disk.layout == "files" else (set(), disk.mates(TARGET))


def of_another_namespace(disk: Disk) -> Hit:
    """A real one, of the same keys, in the place of ours."""
    path, _ = disk.find(TARGET)
    hit = disk.mates(TARGET)
    aside = Disk(disk.root.with_name("other"), disk.layout)
    aside.close()
    aside.open(OTHER)
    for first in range(0, len(ALL), 5):
        aside.store(list(ALL[first : first + 5]), shift=100)
    theirs = Path(str(aside.find(TARGET)[0]).replace(NAMESPACE.id, OTHER.id))
    aside.close()
    shutil.copyfile(theirs, path)
    return hit, set()


def removed(disk: Disk) -> Hit:
    hit = disk.mates(TARGET)
    disk.find(TARGET)[0].unlink()
    return hit, set()


def a_fifo(disk: Disk) -> Hit:
    path, hit = disk.find(TARGET)[0], disk.mates(TARGET)
    path.unlink()
    os.mkfifo(path)
    return hit, set()


def a_folder(disk: Disk) -> Hit:
    path, hit = disk.find(TARGET)[0], disk.mates(TARGET)
    path.unlink()
    path.mkdir()
    return hit, set()


def a_link(disk: Disk) -> Hit:
    """To what it was: a link is not followed, wherever it goes."""
    path, hit = disk.find(TARGET)[0], disk.mates(TARGET)
    aside = path.with_suffix(".x")
    path.rename(aside)
    path.symlink_to(aside)
    return hit, set()


DAMAGE = [
    first_bit,
    last_bit,
    zero_fill,
    swapped_chunks,
    another_chunk,
    swapped_files,
    cut_in_half,
    cut_within_a_page,
    cut_to_nothing,
    extended,
    all_zero,
    random_bytes,
    header_flip,
    of_another_namespace,
    removed,
    a_fifo,
    a_folder,
    a_link,
]


# -- of a log alone: what says where things lie ----------------------------------------------------


def head_flip(disk: Disk) -> Hit:
    """It counts only while its segment has no table."""
    path, offset = disk.find(TARGET)
    with path.open("rb") as f:
        heads = [p for p in range(offset // PAGE_BYTES) if _page(f.fileno(), p)[:8] == b"KVTrunhd"]
    flip(path, heads[-1] * PAGE_BYTES + 100)
    return set(), set()


def _page(fd: int, number: int) -> bytes:
    return os.pread(fd, PAGE_BYTES, number * PAGE_BYTES)


def table_flip(disk: Disk) -> Hit:
    path, _ = disk.find(TARGET)
    flip(path, path.stat().st_size - 2 * PAGE_BYTES + 30)
    return set(), set()


def trailer_flip(disk: Disk) -> Hit:
    path, _ = disk.find(TARGET)
    flip(path, path.stat().st_size - PAGE_BYTES + 30)
    return set(), set()


def trailer_flip_and_payload(disk: Disk) -> Hit:
    trailer_flip(disk)
    return first_bit(disk)


OF_A_LOG = [head_flip, table_flip, trailer_flip, trailer_flip_and_payload]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[str], Disk]]:
    made: list[Disk] = []

    def make(layout: str) -> Disk:
        made.append(Disk(tmp_path / "kv", layout))
        for first in range(0, len(ALL), 5):
            made[-1].store(list(ALL[first : first + 5]))
        made[-1].removals()
        return made[-1]

    yield make
    for disk in made:
        disk.close()


CASES = [(layout, damage) for layout in ("files", "log") for damage in DAMAGE]
CASES += [("log", damage) for damage in OF_A_LOG]


@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
@pytest.mark.parametrize(("layout", "damage"), CASES)
def test_damage_costs_what_it_hits(
    make: Callable[[str], Disk], layout: str, damage: Callable[[Disk], Hit], closed: bool
) -> None:
    disk = make(layout)
    if layout == "log":
        assert disk.find(TARGET)[0] != disk.find(TWIN)[0]
        sealed = disk.bench.store._core.pool.segments[int(disk.find(TARGET)[0].stem)]
        assert sealed.state.value == "sealed"
    direct = disk.bench.store.direct
    if closed:
        places = {n: disk.find(n) for n in ALL}
        disk.close()
        disk.find = places.__getitem__  # type: ignore[method-assign]
    hit, may_be_lost = damage(disk)
    if closed:
        del disk.find
        disk.open()

    right, failed = disk.load()
    assert not right & hit, "it was damaged"
    assert set(ALL) - right <= hit | may_be_lost, "neighbours were lost"
    assert set(failed.values()) <= {Kind.CORRUPT, Kind.VANISHED}
    said = disk.removals()
    assert set(said) >= set(failed), "a removal was not reported"
    assert set(said.values()) <= {Reason.CORRUPT, Reason.VANISHED}
    assert disk.counted() == len(said)
    assert disk.bench.store.direct == direct
    if not closed:
        assert set(failed) == set(ALL) - right, "it was there"
    disk.bench.store.check()

    lost = sorted(set(ALL) - right)
    if lost:
        disk.store(lost)
    assert disk.load() == (set(ALL), {})
    disk.close()
    disk.open()
    right, failed = disk.load()
    assert set(ALL) - right <= may_be_lost
    assert set(failed) <= may_be_lost
    disk.bench.store.check()


def test_a_log_that_is_damaged_goes_on_round(make: Callable[[str], Disk]) -> None:
    """Every segment is no file any more: what is written afterwards is served."""
    disk = make("log")
    for path in (disk.root / "log").glob("*.kvs"):
        path.unlink()
        os.mkfifo(path)
    right, failed = disk.load()
    assert (right, set(failed.values())) == (set(), {Kind.CORRUPT})
    segments = CAPACITY // fmt.fits(CHUNK // PAGE_BYTES, 4)
    stored: list[int] = []
    for n in range(100, 100 + 6 * segments):
        stored += [n for _ in disk.bench.run(disk.bench.store_job(n)).done]
    assert len(stored) > 4 * segments
