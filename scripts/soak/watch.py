"""Whether a root stays within the capacities that rule."""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from scripts.soak.chunks import CAPACITIES
from scripts.soak.workers import Worker

SETTLES_S = 20.0
"""After a smaller capacity was stated: by then it is kept."""


class Watch:
    """Looks at the bytes under ``root``."""

    def __init__(self, root: Path, workers: Sequence[Worker]) -> None:
        self.root, self._workers = root, workers
        self._stated: list[tuple[float, int]] = [(time.monotonic(), CAPACITIES[-1])]
        self.most = self._before = 0

    def changed(self) -> None:
        """A capacity was stated. The smallest of the living rules, so that while one of them was
        away another may have gone as far as its own.
        """
        now, stated = time.monotonic(), [w.capacity for w in self._workers]
        self._stated += [(now, max(stated)), (now, min(stated))]

    def look(self) -> None:
        """Raises SystemExit if there is more than allowed, or above it more than a moment ago.

        What was promised to readers before a capacity was lowered stays until they are done, who
        here read all of it again and again: it may take long, but nothing is added meanwhile.
        """
        now, rules = time.monotonic(), self._stated[-1][1]
        recent = [bound for since, bound in self._stated if now - since < SETTLES_S]
        older = [bound for since, bound in self._stated if now - since >= SETTLES_S][-1:]
        allowed = max([rules, *recent, *(older if recent else [])])
        there = disk_bytes(self.root)
        self.most = max(self.most, there)
        before, self._before = self._before, there
        if there > max(allowed, before):
            raise SystemExit(f"over capacity: {there} bytes in {self.root}, {allowed} are allowed")


def disk_bytes(root: Path) -> int:
    """Of all files but locks; one that is renamed meanwhile is counted once."""
    sizes: dict[int, int] = {}
    for path in files_below(root):
        with contextlib.suppress(FileNotFoundError):
            info = path.lstat()
            if path.name != "lock":
                sizes[info.st_ino] = info.st_size
    return sum(sizes.values())


def files_below(root: Path) -> Iterator[Path]:
    """Folders may vanish meanwhile."""
    for folder, _, names in os.walk(root):
        yield from (Path(folder, name) for name in names)
