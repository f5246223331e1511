"""Any sequence of calls, restarts and kills, beside a set that says what must be there."""

import errno
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtiers.chunks import PAGE_BYTES
from kvtiers.errors import Kind
from kvtiers.events import Reason
from kvtiers.tiers.fs.log import LogStore
from kvtiers.tiers.fs.log.segment import SegmentFiles
from tests.unit.tiers.fs.log.any_size_kit import (
    SMALL,
    LogFolder,
    flip,
    holds,
    key,
    overwrite,
    read,
    right,
    write,
)

NUMBERS = range(60)
NUMBER_OF = {key(n): n for n in NUMBERS}
SOME = st.lists(st.sampled_from(NUMBERS), unique=True, min_size=1, max_size=12)
CAPACITIES = st.sampled_from([SMALL // 2, SMALL, SMALL * 4, SMALL * 20])


class LogMachine(RuleBasedStateMachine):
    """``held``: stored, neither deleted nor reported. What is not in ``seen`` never comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.place = Path(tempfile.mkdtemp(prefix="kvtiers-log-model-"))
        self.lives = 0
        self.folder = LogFolder(self.place / "0")
        self.store: LogStore = self.folder.open()
        self.held: set[int] = set()
        self.seen: set[int] = set()
        self.damaged: set[int] = set()

    def heed_removals(self) -> None:
        for name, reason in self.folder.take_removed():
            if reason is Reason.EVICTED:
                assert NUMBER_OF[name] in self.held, "evicted what was not there"
            self.held.discard(NUMBER_OF[name])

    @rule(ns=SOME)
    def write(self, ns: list[int]) -> None:
        absent = [n for n in ns if n not in self.held]
        assert write(self.store, *ns) == [None] * len(ns)
        self.held.update(ns)
        self.seen.update(ns)
        self.damaged.difference_update(absent)
        self.heed_removals()

    @rule(ns=SOME)
    def read(self, ns: list[int]) -> None:
        for n, got in zip(ns, read(self.store, *ns), strict=True):
            if n not in self.held:
                assert got is Kind.VANISHED
            elif n in self.damaged:
                assert got is Kind.CORRUPT
            else:
                assert got == right(n)
        self.damaged.difference_update(ns)
        self.heed_removals()

    @rule(ns=SOME)
    def touch(self, ns: list[int]) -> None:
        self.store.touch([key(n) for n in ns])

    @rule(ns=SOME)
    def delete(self, ns: list[int]) -> None:
        self.store.delete([key(n) for n in ns])
        self.heed_removals()
        self.held.difference_update(ns)
        self.seen.difference_update(ns)
        self.damaged.difference_update(ns)

    @rule(n=st.sampled_from(NUMBERS))
    def damage(self, n: int) -> None:
        at = self.store._core.index.find(key(n))
        if at is not None and n not in self.damaged:
            flip(self.folder.segment(at.segment), at.page * PAGE_BYTES)
            self.damaged.add(n)

    @rule(capacity=CAPACITIES)
    def reopen(self, capacity: int) -> None:
        self.store.close()
        self.folder.capacity_bytes = capacity
        self.open()

    @rule(capacity=CAPACITIES)
    def kill(self, capacity: int) -> None:
        self.lives += 1
        dead, root = self.store, self.place / str(self.lives)
        shutil.copytree(self.folder.root, root)
        dead.close()
        shutil.rmtree(self.folder.root)
        self.folder.root, self.folder.capacity_bytes = root, capacity
        self.folder.take_removed()  # nobody was there any more to hear of it
        self.open()

    @rule(left=st.integers(0, 3))
    def kill_in_the_middle_of_a_write(self, left: int) -> None:
        """Of the last chunk that was written only the first pages reached the disk."""
        active = self.store._core.pool.active
        if active is None or not active.rows:
            return
        name, page, nbytes, _ = active.rows[-1]
        pages = -(-nbytes // PAGE_BYTES)
        at = self.store._core.index.find(name)
        if left >= pages or at is None or (at.segment, at.page) != (active.number, page):
            return
        path = self.folder.segment(active.number)
        overwrite(path, (page + left) * PAGE_BYTES, bytes((pages - left) * PAGE_BYTES))
        self.held.discard(NUMBER_OF[name])
        self.damaged.discard(NUMBER_OF[name])
        self.kill(self.folder.capacity_bytes)

    def open(self) -> None:
        """What is not reported is still there; what was evicted may be there again."""
        self.store = self.folder.open()
        evicted = {NUMBER_OF[name] for name, _ in self.folder.take_removed()}
        assert evicted <= self.seen
        self.held -= evicted
        there = {n for n, is_ in zip(NUMBERS, holds(self.store, *NUMBERS), strict=True) if is_}
        assert self.held - self.damaged <= there, "lost"
        assert there <= self.seen, "came back after it was deleted"
        self.damaged &= there
        self.held = there
        for n, got in zip(NUMBERS, read(self.store, *NUMBERS), strict=True):
            assert got in (right(n), Kind.CORRUPT, Kind.VANISHED), "wrong bytes"
            assert got == right(n) or n not in there or n in self.damaged or got is Kind.CORRUPT
        self.damaged.clear()
        self.heed_removals()

    @invariant()
    def it_is_sound(self) -> None:
        self.store.check()
        found = {n for n, there in zip(NUMBERS, holds(self.store, *NUMBERS), strict=True) if there}
        assert found == self.held
        assert {e.key for e in self.store.scan()} == {key(n) for n in self.held}
        on_disk = self.folder.disk_bytes()
        assert on_disk <= self.folder.capacity_bytes, "above the capacity"
        manifests = on_disk - sum(p.stat().st_size for p in self.folder.segments())
        assert self.store.used_bytes == on_disk - manifests, "the accounts are wrong"

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.place)


class SmallDiskMachine(LogMachine):
    """There is room for one segment only, whatever the capacity: it goes round in it."""

    def __init__(self) -> None:
        self.patch = pytest.MonkeyPatch()
        made = SegmentFiles.make

        def make(files: SegmentFiles, number: int, nbytes: int) -> None:
            if files.numbers():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            made(files, number, nbytes)

        self.patch.setattr(SegmentFiles, "make", make)
        super().__init__()

    def teardown(self) -> None:
        self.patch.undo()
        super().teardown()


TestLog = LogMachine.TestCase
TestSmallDisk = SmallDiskMachine.TestCase
TestLog.settings = TestSmallDisk.settings = settings(
    max_examples=40,
    phases=[__import__("hypothesis").Phase.generate],
    stateful_step_count=40,
)
