"""What both layouts have in common where tools see them: their options, and the store to write."""

import mmap
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from kvtiers.chunks import PAGE_BYTES, ChunkLayout, GroupLayout, Key, Namespace
from kvtiers.errors import ConfigError, Kind, map_errors
from kvtiers.tiers import fs
from kvtiers.tiers.base import ChunkStore, Entry, Item, StoreContext
from kvtiers.tiers.fs import manifests, trials
from kvtiers.tiers.fs.beside import bytes_below
from kvtiers.tiers.fs.direct import DirectIO
from kvtiers.tiers.options import parse
from kvtiers.tiers.places import MAX_CHUNK_BYTES, Complain, Found, Report


@dataclass(frozen=True, slots=True)
class FsURL:
    """What a URL of an ``fs`` tier says."""

    path: str
    layout: str | None = None
    capacity_bytes: int | None = None
    direct_io: str = "auto"


class FsPlace(ABC):
    """A root folder of ``fs``; a layout adds how its bytes are seen.

    See :class:`~kvtiers.tiers.places.Place`.
    """

    layout: str

    def __init__(self, at: FsURL, complain: Complain) -> None:
        self.root = at.path
        self.url = f"fs://{quote(at.path)}?layout={self.layout}"
        self.options: Mapping[str, Any] = {
            "type": "fs",
            "root_dir": at.path,
            "layout": self.layout,
            "capacity_bytes": at.capacity_bytes,
            "direct_io": at.direct_io,
        }
        self.site = ("fs", *os.path.realpath(at.path).split(os.sep)[1:])
        self._complain = complain
        self._reading: DirectIO = "off" if at.direct_io == "off" else "auto"

    def namespaces(self) -> list[Found]:
        """Every folder named like a namespace."""
        return manifests.namespaces(self.root)

    def free(self) -> tuple[int, int] | None:
        """Of the disk below."""
        with map_errors("look at", self.root):
            disk = os.statvfs(self.root)
        return disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize

    def repair(self, namespace: Namespace, damaged: Sequence[Entry]) -> list[str]:
        """Have the store read again: what it finds damaged, by now, it takes away itself."""
        store = self.open_store(namespace, _UNWRITTEN)
        try:
            return [_take_away(store, entry) for entry in damaged]
        finally:
            store.close()

    @abstractmethod
    def open_store(self, namespace: Namespace, layout: ChunkLayout) -> ChunkStore:
        """See :class:`~kvtiers.tiers.places.Place`."""

    def _remove_trials(self, report: Report, *, dry_run: bool) -> Report:
        """What measurements that were killed left goes, too."""
        found = [(path, bytes_below(path)) for path in trials.left_behind(self.root)]
        report.before_bytes += sum(nbytes for _, nbytes in found)
        if not dry_run:
            trials.remove([path for path, _ in found])
        for path, nbytes in found:
            name = os.path.basename(path)
            if dry_run or not os.path.lexists(path):
                report.temporary.append((name, nbytes))
            else:
                report.failed.append(name)
        return report

    def _store(
        self, namespace: Namespace, layout: ChunkLayout, bound: Mapping[str, Any]
    ) -> ChunkStore:
        """The store that an engine would use, within ``bound``."""
        context = StoreContext(
            "fs", "tool:fs", namespace, layout, time.monotonic, time.time, _unheard
        )
        options = {key: value for key, value in self.options.items() if key != "type"}
        return fs.build(context, parse(fs.FsOptions, {**options, **bound}))

    def _is_new(self) -> ConfigError:
        return ConfigError(
            f"{self.url} does not say how large it may become: add &capacity= to say so"
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.root}>"


_UNWRITTEN = ChunkLayout((GroupLayout(0, PAGE_BYTES, 1),))
"""Of a store that gets nothing to write."""


def _take_away(store: ChunkStore, entry: Entry) -> str:
    length = entry.bytes if 0 < entry.bytes < MAX_CHUNK_BYTES else PAGE_BYTES
    view = memoryview(mmap.mmap(-1, length))
    (error,) = store.read([Item(entry.key, view)])
    if error is None:
        return "intact by now"
    if error.kind is Kind.VANISHED:
        return "gone by now"
    if not store.capabilities.delete:
        return "left: what evicts here has to take it away"
    still_there = store.contains([Key(entry.key)])[0]
    return f"cannot be removed: {error}" if still_there else "removed"


def _unheard(keys: Sequence[Key], reason: object) -> None:
    """Nobody listens to a tool's store: it says itself what it did."""
