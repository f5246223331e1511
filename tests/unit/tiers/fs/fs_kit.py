"""A files store on a real folder, and ways to damage what it wrote."""

import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtiers.chunks import PAGE_BYTES, Key, Namespace
from kvtiers.errors import Kind, KVTiersError
from kvtiers.events import Reason
from kvtiers.tiers.base import Item
from kvtiers.tiers.fs.files import FilesStore
from kvtiers.tiers.fs.names import QUOTA
from kvtiers.tiers.fs.quota import RESERVED_BYTES, STATE_BYTES
from kvtiers.tiers.fs.stamps import GRACE_S
from tests.unit.tiers.tier_kit import NAMESPACE, ManualClock, context, filled, key, page_aligned

STORED = PAGE_BYTES + 8192
OVERHEAD = STATE_BYTES + RESERVED_BYTES + 100
"""What a capacity holds beside chunks: the quota file, what is kept free, and manifests."""


def capacity(chunks: int) -> int:
    return chunks * STORED + OVERHEAD


class Folder:
    """A root folder; ``open`` gives a store whose removal reports are gathered here."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.removed: list[tuple[Key, Reason]] = []
        self.clock = ManualClock()
        self.wall = ManualClock(time.time() + 1000)  # what the kernel stamps is long ago

    def open(self, namespace: Namespace = NAMESPACE, **options: Any) -> FilesStore:
        def report(keys: Sequence[Key], reason: Reason) -> None:
            self.removed += [(k, reason) for k in keys]

        if not {"eviction", "capacity_bytes", "capacity_fraction"} & options.keys():
            options["capacity_bytes"] = 1 << 30
        made = context(report, namespace=namespace, clock=self.clock, wall_clock=self.wall)
        return FilesStore(made, str(self.root), **options)

    def let_promises_end(self) -> None:
        """What was found or read a moment ago may leave again."""
        self.wall.advance(GRACE_S + 1)
        self.clock.advance(GRACE_S + 1)

    def file(self, n: int, namespace: Namespace = NAMESPACE) -> Path:
        digest = n.to_bytes(32, "big").hex()
        return self.root / namespace.id / digest[:2] / f"{digest}-g0.kvc"

    def age(self, n: int, used_at: float, namespace: Namespace = NAMESPACE) -> None:
        """As if the chunk was written then: the clock of the file system is not ours to set."""
        os.utime(self.file(n, namespace), (used_at, used_at))

    def files(self) -> list[Path]:
        return sorted(
            p for p in self.root.rglob("*") if p.is_file() and p.name not in ("lock", QUOTA)
        )

    def disk_bytes(self) -> int:
        return sum(p.lstat().st_size for p in self.root.rglob("*") if p.is_file())


class PowerCut:
    """What a device holds of the file system: entries of folders, and files, that were synced."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.unsynced: set[Path] = set()
        """Entries that a power cut may take away."""
        self._synced_files: set[int] = set()
        self._mkdir, self._replace, self._fsync = os.mkdir, os.replace, os.fsync
        for name in ("mkdir", "replace", "fsync"):
            monkeypatch.setattr(os, name, getattr(self, name))

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        self._mkdir(path, mode)
        self.unsynced.add(Path(path))

    def replace(self, old: str, new: str) -> None:
        self._replace(old, new)
        self.unsynced.add(Path(new))

    def fsync(self, fd: int) -> None:
        self._fsync(fd)
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path.is_dir():
            self.unsynced = {entry for entry in self.unsynced if entry.parent != path}
        else:
            self._synced_files.add(os.fstat(fd).st_ino)

    def cut(self, root: Path, may_vanish: Callable[[Path], bool] = lambda path: True) -> None:
        """Lose what was not synced: of the entries, and the bytes of files, those chosen."""
        for path in sorted(filter(may_vanish, self.unsynced), reverse=True):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        for path in filter(may_vanish, root.rglob("*")):
            if path.is_file() and path.stat().st_ino not in self._synced_files:
                os.truncate(path, 0)
        self.unsynced.clear()


def write(store: FilesStore, *ns: int, size: int = 8192) -> list[Kind | None]:
    return kinds(store.write([Item(key(n), filled(n, size)) for n in ns]))


def read(store: FilesStore, *ns: int, size: int = 8192) -> list[bytes | Kind]:
    items = [Item(key(n), page_aligned(size)) for n in ns]
    errors = store.read(items)
    return [bytes(i.view) if e is None else e.kind for i, e in zip(items, errors, strict=True)]


def kinds(results: Sequence[KVTiersError | None]) -> list[Kind | None]:
    return [None if e is None else e.kind for e in results]


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as f:
        f.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        byte = f.read(1)[0]
        f.seek(-1, os.SEEK_CUR)
        f.write(bytes([byte ^ 1]))
