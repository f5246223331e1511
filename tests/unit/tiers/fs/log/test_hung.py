"""A device that does not answer: jobs end at their deadline, the others go on, nothing is stuck."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtiers.chunks import PAGE_BYTES, Lookup
from kvtiers.errors import ConfigError, Kind
from kvtiers.tiers.base import JobOutcome, JobReleased, StoreContext
from kvtiers.tiers.fs import FsOptions, build, vectored
from kvtiers.tiers.fs.log.pool import State
from kvtiers.tiers.lanes import Inbox
from tests.unit.tiers.fs.log.log_kit import CAPACITY, SEGMENTS, Log, held, write
from tests.unit.tiers.tier_kit import LAYOUT, NAMESPACE, Bench, key, payload

IN_ONE = 6
"""So many chunks, at most, go into a segment."""
A_ROUND = SEGMENTS * IN_ONE
PATIENCE_S = 20


class Stall:
    """Holds reads or writes of some place of a file until it is told to let them through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.holds: Callable[[str, str, int], bool] = lambda call, path, page: False
        self.held = False
        self.others = set(threading.enumerate())
        """Threads that were here before; some hang, for tests that ended."""
        self._came, self._go = threading.Semaphore(0), threading.Event()
        monkeypatch.setattr(vectored, "os", self)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._let_through("read", fd, offset)
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._let_through("write", fd, offset)
        return os.pwritev(fd, buffers, offset)

    def _let_through(self, call: str, fd: int, offset: int) -> None:
        if self.holds(call, os.readlink(f"/proc/self/fd/{fd}"), offset // PAGE_BYTES):
            self.holds = lambda call, path, page: False  # one call hangs, the next is another's
            self.held = True
            self._came.release()
            assert self._go.wait(60)

    def wait_until_held(self) -> None:
        assert self._came.acquire(timeout=PATIENCE_S), "nothing came here"

    def release(self) -> None:
        self._go.set()


@pytest.fixture
def stall(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stall]:
    stall = Stall(monkeypatch)
    yield stall
    stall.release()


@pytest.fixture
def tier(stall: Stall, tmp_path: Path) -> Iterator[Bench]:
    bench = open_tier(tmp_path)
    for first in range(0, 2 * IN_ONE, 4):
        assert bench.run(bench.store_job(*range(first, first + 4))).failed == {}
    yield bench
    stall.release()
    bench.tier.shutdown(PATIENCE_S)


def open_tier(tmp_path: Path) -> Bench:
    inbox, log = Inbox(), Log(tmp_path / "kv")
    context = StoreContext("fs", "1:fs", NAMESPACE, LAYOUT, log.clock, log.wall, inbox.removed)
    options = FsOptions(root_dir=str(log.root), layout="log", capacity_bytes=CAPACITY)
    return Bench(build(context, options), inbox, n_read_threads=2, n_write_threads=2)


def one(bench: Bench) -> JobOutcome | JobReleased:
    """The next thing that ends; others are under way."""
    (found,) = bench.finished(1)
    return found


def store(bench: Bench, *ns: int) -> None:
    """A job that is not held up by the one that hangs."""
    job = bench.store_job(*ns)
    assert bench.tier.submit_store(job)
    outcome = one(bench)
    assert isinstance(outcome, JobOutcome)
    assert (outcome.job_id, outcome.failed) == (job.id, {})


def load(bench: Bench, *ns: int) -> None:
    job = bench.load_job(*ns)
    kept = [view[:] for view in job.views]
    assert bench.tier.submit_load(job)
    outcome = one(bench)
    assert isinstance(outcome, JobOutcome)
    assert (outcome.job_id, set(outcome.done)) == (job.id, {key(n) for n in ns})
    assert [bytes(view) for view in kept] == [payload(n) for n in ns]


def a_round(bench: Bench, first: int) -> None:
    """Write until every segment that can leave has left."""
    for n in range(first, first + 2 * A_ROUND, 3):
        store(bench, n, n + 1, n + 2)
    bench.store.check()


def assert_it_ends_in_time_and_lets_go_later(bench: Bench, stall: Stall, job_id: int) -> None:
    bench.clock.advance(61)
    outcome = one(bench)
    assert isinstance(outcome, JobOutcome)
    assert (outcome.job_id, outcome.done, outcome.memory_in_use) == (job_id, (), True)
    assert {error.kind for error in outcome.failed.values()} == {Kind.TIMEOUT}
    bench.until(lambda: not bench.tier.has_pending_work())  # but a look at how full it is
    stall.release()
    assert one(bench) == JobReleased(job_id)
    bench.tier.check()
    bench.store.check()


def state_of(bench: Bench, n: int) -> Any:
    at = bench.store._core.index.find(key(n))
    return bench.store._core.pool.segments[at.segment]


def test_a_read_that_hangs(tier: Bench, stall: Stall) -> None:
    segment = state_of(tier, 1)
    path = tier.store._core.files.path(segment.number)
    stall.holds = lambda call, where, page: (call, where) == ("read", path)
    job = tier.load_job(1)
    assert tier.tier.submit_load(job)
    stall.wait_until_held()
    load(tier, 9, 10)
    a_round(tier, 100)
    load(tier, 100 + 2 * A_ROUND - 1)
    assert segment.state is State.DRAINING  # its pages are not written over meanwhile
    assert tier.lookup(1) == [Lookup.MISS]
    assert_it_ends_in_time_and_lets_go_later(tier, stall, job.id)
    a_round(tier, 1000)
    assert segment.state is not State.DRAINING


def test_a_write_that_hangs(tier: Bench, stall: Stall) -> None:
    active = tier.store._core.pool.active
    path = tier.store._core.files.path(active.number)
    stall.holds = lambda call, where, page: (call, where) == ("write", path) and page > 0
    job = tier.store_job(50)
    assert tier.tier.submit_store(job)
    stall.wait_until_held()
    load(tier, 1, 9)
    a_round(tier, 100)
    load(tier, 100 + 2 * A_ROUND - 1)
    assert active.state is State.FULL  # it waits for the one that hangs
    assert tier.lookup(50) == [Lookup.MISS]
    assert_it_ends_in_time_and_lets_go_later(tier, stall, job.id)
    load(tier, 50)  # it came after all
    a_round(tier, 1000)
    assert tier.lookup(50) == [Lookup.MISS]


@pytest.mark.parametrize("where", ["header", "copy"])
def test_loads_go_on_while_it_hangs_in_the_change_of_segments(
    tier: Bench, stall: Stall, where: str
) -> None:
    if where == "copy":  # of what was used, from the segment that leaves
        a_round(tier, 100)
        oldest = tier.store._core.pool.victim()
        tier.tier.touch(list(oldest.keys))
    start = {"header": ("write", True), "copy": ("read", False)}[where]
    stall.holds = lambda call, path, page: (call, page == 0) == start
    n, hung = 500, None
    while not stall.held:
        hung = tier.store_job(n)
        assert tier.tier.submit_store(hung)
        while not stall.held and not tier.tier.get_finished_jobs():
            tier.inbox.wait(0.01)
        n += 1
    n -= 1
    assert hung is not None
    last = [n - 1] if where == "header" else [n - 1, n - 2]
    load(tier, *last)
    load(tier, *last)
    assert_it_ends_in_time_and_lets_go_later(tier, stall, hung.id)
    a_round(tier, 1000)


def test_shutdown_does_not_wait_and_the_folder_stays_ours(
    tier: Bench, stall: Stall, tmp_path: Path
) -> None:
    """What hangs may yet write: nobody else may have the log before it has ended."""
    stall.holds = lambda call, path, page: call == "write"
    assert tier.tier.submit_store(tier.store_job(50))
    stall.wait_until_held()
    lanes = [t for t in threading.enumerate() if t.name.startswith("kvtiers-1:fake-write")]
    lanes = [t for t in lanes if t not in stall.others]
    tier.tier.shutdown(0.1)
    with pytest.raises(ConfigError, match="belongs to the living process"):
        open_tier(tmp_path)
    stall.release()
    for lane in lanes:
        lane.join(PATIENCE_S)
    again = open_tier(tmp_path)
    assert again.lookup(*range(2 * IN_ONE), 50) == [Lookup.HIT] * (2 * IN_ONE + 1)
    load(again, 1, 9, 50)
    again.tier.shutdown(PATIENCE_S)


@pytest.mark.parametrize("meanwhile", ["nothing", "delete", "delete and write"])
def test_a_chunk_that_is_deleted_while_it_is_moved_stays_deleted_unless_it_is_written_anew(
    stall: Stall, log: Log, meanwhile: str
) -> None:
    store = log.open()
    write(store, *range(4))
    store.touch([key(0)])
    stall.holds = lambda call, path, page: call == "read"
    mover = threading.Thread(target=fill, args=(store,))
    mover.start()
    stall.wait_until_held()
    if meanwhile != "nothing":
        store.delete([key(0)])
    if meanwhile == "delete and write":
        write(store, 0)
    stall.release()
    mover.join(PATIENCE_S)
    there = [] if meanwhile == "delete" else [0]
    assert held(store, range(4)) == there
    store.check()
    store.close()
    assert held(log.open(), range(4)) == there


def fill(store: Any) -> None:
    """Until the first segment leaves."""
    n, first = 100, store._core.pool.active
    while first.sequence == 1:
        write(store, n)
        n += 1
