"""The power is cut: of what was not synced any pages may be as they were before."""

import os
import random
from collections.abc import Sequence
from typing import Any

import pytest

from kvtiers.chunks import PAGE_BYTES
from kvtiers.errors import Kind
from kvtiers.tiers.fs import vectored
from kvtiers.tiers.fs.log import segment
from tests.unit.tiers.fs.log.log_kit import Log, held, kill, read, write
from tests.unit.tiers.tier_kit import key, payload

ALL = range(60)


class Power:
    """Stands in for ``os``: remembers what pages held before writes that were not synced."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.before: dict[str, list[tuple[int, bytes]]] = {}
        monkeypatch.setattr(vectored, "os", self)
        monkeypatch.setattr(segment, "os", self)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        path = os.readlink(f"/proc/self/fd/{fd}")
        old = self.before.setdefault(path, [])
        with open(path, "rb") as f:
            f.seek(offset)
            for at in range(offset, offset + sum(b.nbytes for b in buffers), PAGE_BYTES):
                old.append((at, f.read(PAGE_BYTES)))
        return os.pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        self.before.pop(os.readlink(f"/proc/self/fd/{fd}"), None)
        os.fdatasync(fd)

    def cut(self, dice: random.Random) -> int:
        """How many pages are as they were."""
        lost = 0
        for path, pages in self.before.items():
            with open(path, "r+b") as f:
                for at, old in reversed(pages):
                    if dice.random() < 0.5:
                        f.seek(at)
                        f.write(old)
                        lost += 1
        self.before.clear()
        return lost


@pytest.fixture
def power(monkeypatch: pytest.MonkeyPatch) -> Power:
    return Power(monkeypatch)


def live(store: Any, log: Log, dice: random.Random) -> list[int]:
    """Store, use and delete; what must be there."""
    deleted: set[int] = set()
    stored = list(range(dice.randint(5, len(ALL))))
    for n in stored:
        write(store, n)
        store.touch([key(n - n % 4)])
        if dice.random() < 0.1:
            store.delete([key(n)])
            deleted.add(n)
    return [n for n in stored if n not in deleted and n not in log.gone()]


@pytest.mark.parametrize("seed", range(10))
def test_with_fsync_what_was_stored_is_there_and_what_was_deleted_is_not(
    log: Log, power: Power, seed: int
) -> None:
    dice = random.Random(seed)
    store = log.open(fsync=True)
    kept = live(store, log, dice)
    assert held(store, ALL) == kept
    kill(store)
    assert power.cut(dice) == 0
    store = log.open(fsync=True)
    assert held(store, ALL) == kept
    assert read(store, *kept) == [payload(n) for n in kept]
    store.check()


@pytest.mark.parametrize("seed", range(20))
def test_without_fsync_chunks_may_be_lost_and_none_is_wrong(
    log: Log, power: Power, seed: int
) -> None:
    dice = random.Random(seed)
    store = log.open()
    live(store, log, dice)
    kill(store)
    assert power.cut(dice) > 0
    store = log.open()
    for n, got in zip(ALL, read(store, *ALL), strict=True):
        assert got in (payload(n), Kind.CORRUPT, Kind.VANISHED)
    store.check()
    for n in ALL[:12]:
        write(store, n)
    assert read(store, *ALL[8:12]) == [payload(n) for n in ALL[8:12]]
    store.check()
