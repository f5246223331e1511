"""A log on a real folder, whose removals are gathered, and which can be left as by a kill."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtiers.chunks import PAGE_BYTES, Key, Namespace
from kvtiers.errors import Kind
from kvtiers.events import Reason
from kvtiers.tiers.base import Item
from kvtiers.tiers.fs.log import LogStore
from kvtiers.tiers.fs.log import format as fmt
from tests.unit.tiers.tier_kit import (
    CHUNK,
    NAMESPACE,
    ManualClock,
    context,
    filled,
    key,
    page_aligned,
)

SEGMENT = fmt.fits(CHUNK // PAGE_BYTES, 4)
"""The shortest that there are; more chunks than four go in, if their keys are short."""
SEGMENTS = 6
CAPACITY = SEGMENTS * SEGMENT + PAGE_BYTES
"""Six segments and the manifest."""


class Log:
    """A root folder; ``open`` gives a store whose removal reports are gathered here."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.removed: list[tuple[Key, Reason]] = []
        self.clock = ManualClock()
        self.wall = ManualClock(1_700_000_000.0)

    def open(self, namespace: Namespace = NAMESPACE, **options: Any) -> LogStore:
        def report(keys: Sequence[Key], reason: Reason) -> None:
            self.removed += [(k, reason) for k in keys]

        made = context(report, namespace=namespace, clock=self.clock, wall_clock=self.wall)
        return LogStore(made, str(self.root), **{"capacity_bytes": CAPACITY, **options})

    def segments(self) -> list[Path]:
        return sorted((self.root / "log").glob("*.kvs"))

    def disk_bytes(self) -> int:
        return sum(p.lstat().st_size for p in self.root.rglob("*") if p.is_file())

    def gone(self) -> set[int]:
        """Numbers of the chunks that were reported as evicted."""
        return {int.from_bytes(k[:32], "big") for k, r in self.removed if r is Reason.EVICTED}


def write(store: LogStore, *ns: int) -> None:
    assert store.write([Item(key(n), filled(n)) for n in ns]) == [None] * len(ns)


def read(store: LogStore, *ns: int) -> list[Kind | bytes]:
    """The bytes of each, or why there are none."""
    views = [page_aligned() for _ in ns]
    results = store.read([Item(key(n), view) for n, view in zip(ns, views, strict=True)])
    return [bytes(v) if e is None else e.kind for v, e in zip(views, results, strict=True)]


def held(store: LogStore, ns: Sequence[int]) -> list[int]:
    there = store.contains([key(n) for n in ns])
    return [n for n, yes in zip(ns, there, strict=True) if yes]


def kill(store: LogStore) -> None:
    """Leave the disk as it is: only the lock goes, as it does with its process."""
    store._ownership.close()
    store._closed = True
