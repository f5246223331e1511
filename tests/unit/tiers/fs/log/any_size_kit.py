"""A log on a real folder: small segments, chunks of one, two and five pages."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtiers.chunks import PAGE_BYTES, Key
from kvtiers.errors import Kind
from kvtiers.events import Reason
from kvtiers.testing.values import LAYOUT, NAMESPACE, ManualClock, Slots, chunk
from kvtiers.testing.values import key as named
from kvtiers.tiers.base import Item, StoreContext
from kvtiers.tiers.fs.log import LogStore

GROUPS = (0, 1, 7)
SMALL = 300 * PAGE_BYTES
"""Bytes: room for about ten segments of the least length."""


def key(n: int) -> Key:
    """Key number ``n``; its chunk has one, two or five pages."""
    return named(n, GROUPS[n % len(GROUPS)])


def right(n: int) -> bytes:
    """The bytes of the chunk ``key(n)``."""
    return chunk(key(n))


class LogFolder:
    """A root folder; ``open`` gives a store whose removal reports are gathered here."""

    def __init__(self, root: Path, capacity_bytes: int = SMALL) -> None:
        self.root = root
        self.capacity_bytes = capacity_bytes
        self.clock = ManualClock()
        self.removed: list[tuple[Key, Reason]] = []

    def open(self, **options: Any) -> LogStore:
        def report(keys: Sequence[Key], reason: Reason) -> None:
            self.removed += [(k, reason) for k in keys]

        wall = ManualClock(1_700_000_000.0)
        made = StoreContext("test", "1:test", NAMESPACE, LAYOUT, self.clock, wall, report)
        chosen = {"capacity_bytes": self.capacity_bytes, "direct_io": "off"} | options
        return LogStore(made, str(self.root), **chosen)

    def take_removed(self) -> list[tuple[Key, Reason]]:
        """What was reported since the last call."""
        removed, self.removed = self.removed, []
        return removed

    def segment(self, number: int) -> Path:
        """The file of a segment."""
        return self.root / "log" / f"{number:08d}.kvs"

    def segments(self) -> list[Path]:
        """The files of all segments."""
        return sorted((self.root / "log").glob("*.kvs"))

    def disk_bytes(self) -> int:
        """Bytes of all files of ours, but for the owner's number in the lock."""
        files = (p for p in self.root.rglob("*") if p.is_file() and p.name != "lock")
        return sum(p.lstat().st_size for p in files)


def write(store: LogStore, *ns: int) -> list[Kind | None]:
    names = [key(n) for n in ns]
    views = Slots.filled(names).views(writable=False)
    results = store.write([Item(k, v) for k, v in zip(names, views, strict=True)])
    return [None if e is None else e.kind for e in results]


def read(store: LogStore, *ns: int) -> list[bytes | Kind]:
    names = [key(n) for n in ns]
    slots = Slots(names)
    items = [Item(k, v) for k, v in zip(names, slots.views(writable=True), strict=True)]
    errors = store.read(items)
    return [bytes(slots.holds(i)) if e is None else e.kind for i, e in enumerate(errors)]


def holds(store: LogStore, *ns: int) -> list[bool]:
    return store.contains([key(n) for n in ns])


def overwrite(path: Path, at: int, data: bytes) -> None:
    """Put ``data`` into a file at ``at`` (bytes)."""
    fd = os.open(path, os.O_RDWR)
    try:
        os.pwrite(fd, data, at)
    finally:
        os.close(fd)


def flip(path: Path, at: int) -> None:
    """Change one bit of the byte at ``at``."""
    with path.open("rb") as f:
        f.seek(at)
        byte = f.read(1)[0]
    overwrite(path, at, bytes([byte ^ 1]))
