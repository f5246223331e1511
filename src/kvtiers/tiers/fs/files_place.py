"""Layout ``files`` as tools see it: walked and read beside engines, and nothing is changed."""

import contextlib
import mmap
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvtiers.chunks import PAGE_BYTES, ChunkLayout, Key, Namespace
from kvtiers.errors import ConfigError, Kind, KVTiersError, map_errors
from kvtiers.tiers import record
from kvtiers.tiers.base import ChunkStore, Entry
from kvtiers.tiers.fs import names, stamps
from kvtiers.tiers.fs.beside import folders_beside
from kvtiers.tiers.fs.direct import DirectFiles
from kvtiers.tiers.fs.files import misfit
from kvtiers.tiers.fs.maintain import maintain
from kvtiers.tiers.fs.shared import read_quota
from kvtiers.tiers.fs.tools import FsPlace, FsURL
from kvtiers.tiers.places import (
    MAX_CHUNK_BYTES,
    Aim,
    Complain,
    Fault,
    Part,
    Payload,
    Report,
    Usage,
    unheard,
)

_CHUNK_DEPTH = 2
"""Names on the way to a chunk in its namespace."""
_OWN_PARTS = {names.TEMP: Part.TEMPORARY, names.QUARANTINE: Part.QUARANTINE}


class FilesPlace(FsPlace):
    """A root folder of layout ``files``. See :class:`~kvtiers.tiers.places.Place`."""

    layout = "files"

    def __init__(self, at: FsURL, complain: Complain) -> None:
        super().__init__(at, complain)
        self._io = DirectFiles(self._reading, fsync=False)

    @staticmethod
    def lies_at(root: str) -> bool:
        """Whether a folder holds chunks of this layout."""
        with contextlib.suppress(OSError):
            for namespace in names.namespaces(root):
                with contextlib.suppress(OSError):
                    if any(
                        names.is_fan(name) for name in os.listdir(os.path.join(root, namespace))
                    ):
                        return True
        return False

    def entries(self, namespace_id: str) -> Iterator[Entry]:
        """Every file that lies where one of its name does, as ``scan`` of a store finds it."""
        folder = os.path.join(self.root, namespace_id)
        for key, found in names.chunk_files(folder, self._scan):
            entry = _entry(key, found.path)
            if entry is not None:
                yield entry

    def _scan(self, folder: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as found:
                return list(found)
        except FileNotFoundError:
            return []  # it left meanwhile
        except OSError as e:
            self._complain(f"{folder} cannot be listed: {e.strerror}")
            return []

    def find(self, namespace_id: str, keys: Sequence[Key]) -> list[Entry | None]:
        """One question to the file system for each key."""
        folder = os.path.join(self.root, namespace_id)
        return [_entry(key, os.path.join(folder, names.chunk_path(key))) for key in keys]

    def read(self, namespace_id: str, keys: Sequence[Key]) -> Iterator[tuple[Key, Payload]]:
        """One file after the other, past the page cache where that works."""
        memory = mmap.mmap(-1, PAGE_BYTES)
        for key in keys:
            path = os.path.join(self.root, namespace_id, names.chunk_path(key))
            try:
                with map_errors("read", path):
                    size = _payload_bytes(path)
                    if size > len(memory):
                        memory = mmap.mmap(-1, size)
                    view = memoryview(memory)[:size]
                    self._read(path, key, namespace_id, view)
                yield key, view
            except KVTiersError as e:
                yield key, e

    def _read(self, path: str, key: Key, namespace_id: str, view: memoryview) -> None:
        size, expected = self._io.read(path, view), PAGE_BYTES + view.nbytes
        if size != expected:
            raise _damaged(path, misfit(size, expected))
        error = record.verify(self._io.header(), key, namespace_id, view)
        if error is not None:
            raise _damaged(path, str(error))

    def usage(self, advance: Callable[[int], None] = unheard) -> list[Usage]:
        """Every file below the root, by what its place says; of strangers' folders not too many."""
        files: Counter[tuple[str, Part]] = Counter()
        sizes: Counter[tuple[str, Part]] = Counter()
        for below, size in self._walk(self.root, (), advance):
            where = _part_of(below)
            files[where] += 1
            sizes[where] += size
        for part, size in folders_beside(self.root, names.is_namespace, self._complain):
            files["", part] += 1
            sizes["", part] += size
            advance(1)
        return [Usage(*where, files[where], sizes[where]) for where in sorted(files, key=_order)]

    def _walk(
        self, folder: str, above: tuple[str, ...], advance: Callable[[int], None]
    ) -> Iterator[tuple[tuple[str, ...], int]]:
        entries = self._scan(folder)
        advance(sum(not found.is_dir(follow_symlinks=False) for found in entries))
        for found in entries:
            below = (*above, found.name)
            if found.is_dir(follow_symlinks=False):
                if above or names.is_namespace(found.name):  # the others are looked at apart
                    yield from self._walk(found.path, below, advance)
            else:
                with contextlib.suppress(FileNotFoundError):
                    yield below, found.stat(follow_symlinks=False).st_size

    def segments(self) -> list[int]:
        """None: each chunk has a file."""
        return []

    def capacity(self) -> int | None:
        """What the URL states, or else what rules here, or ruled last."""
        stated: int | None = self.options["capacity_bytes"]
        if stated is not None:
            return stated
        quota = read_quota(self.root)
        return quota.stated if quota.capacity is None else quota.capacity

    def bound(self) -> int | None:
        """The capacity: a store keeps within it."""
        return self.capacity()

    def owner(self) -> int | None:
        """Nobody: this layout is shared."""
        return None

    def faults(self, namespace_id: str) -> Iterator[Fault]:
        """None: all that engines need of a file is in it, and says whether it is intact."""
        return iter(())

    def mend(self, faults: Sequence[Fault]) -> list[Fault]:
        """There are none."""
        return list(faults)

    def maintain(
        self,
        aim: Aim,
        *,
        dry_run: bool = False,
        advance: Callable[[int], None] = unheard,
    ) -> Report:
        """Beside engines, who keep what they promised."""
        report = maintain(self.root, aim, dry_run=dry_run, advance=advance)
        return report if aim.namespace else self._remove_trials(report, dry_run=dry_run)

    def open_store(self, namespace: Namespace, layout: ChunkLayout) -> ChunkStore:
        """Engines share this layout, so it never refuses because of one.

        Without a capacity in the URL the one that rules at this place rules for it, too.
        """
        return self._store(namespace, layout, self._bound())

    def backdate(self, namespace_id: str, copies: Sequence[Entry]) -> None:
        """The time of a file is that of its last use."""
        now = time.time()
        for copy in copies:
            path = os.path.join(self.root, namespace_id, names.chunk_path(copy.key))
            stamps.move_back(path, max(0.0, copy.used_at), now)

    def _bound(self) -> Mapping[str, Any]:
        """What has to be said of the bound to write here. Raises ConfigError."""
        capacity = self.capacity()
        if capacity is not None:
            return {"capacity_bytes": capacity}
        if read_quota(self.root).eviction == "external":
            return {"eviction": "external"}
        account = os.path.join(self.root, names.QUOTA)
        if os.path.lexists(account):
            raise ConfigError(
                f"{account} cannot be read, is damaged, or was never written by an engine, so that "
                f"nobody knows the bound of {self.url}: add &capacity= to say it"
            )
        raise self._is_new()


def _entry(key: Key, path: str) -> Entry | None:
    with map_errors("look at", path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        info = os.stat(path, follow_symlinks=False)
        used_at = stamps.used_at(info.st_mtime, time.time())
        return Entry(key, max(0, info.st_size - PAGE_BYTES), used_at)
    return None


def _payload_bytes(path: str) -> int:
    """Bytes behind the header of a file. Raises OSError, or KVTiersError if it is no chunk's."""
    info = os.stat(path, follow_symlinks=False)
    if not stat.S_ISREG(info.st_mode):
        raise _damaged(path, misfit(-1, 0))
    if info.st_size < PAGE_BYTES:
        raise _damaged(path, misfit(info.st_size, PAGE_BYTES))
    if info.st_size > MAX_CHUNK_BYTES:
        raise _damaged(path, f"it is larger than any chunk: {info.st_size} bytes")
    return info.st_size - PAGE_BYTES


def _damaged(path: str, problem: str) -> KVTiersError:
    return KVTiersError(
        f"{path}: {problem}", kind=Kind.CORRUPT, operation="read", context={"path": path}
    )


def _part_of(below: tuple[str, ...]) -> tuple[str, Part]:
    """Of the path of a file below the root: whose it is and what for."""
    if len(below) == 1:
        return "", Part.OTHER if below[0] == names.QUOTA else Part.FOREIGN
    namespace, inside = below[0], below[1:]
    if len(inside) == _CHUNK_DEPTH and names.key_at(*inside) is not None:
        return namespace, Part.CHUNKS
    part = _OWN_PARTS.get(inside[0], Part.OTHER) if len(inside) > 1 else Part.OTHER
    return namespace, part


def _order(where: tuple[str, Part]) -> tuple[str, int]:
    return where[0], list(Part).index(where[1])
