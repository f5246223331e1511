"""Layout ``log`` as tools see it: segments are read beside their owner, and nothing is changed."""

import mmap
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from kvtiers.chunks import PAGE_BYTES, ChunkLayout, Key, Namespace
from kvtiers.errors import ConfigError, Kind, KVTiersError, map_errors
from kvtiers.tiers import fs
from kvtiers.tiers.base import ChunkStore, Entry, StoreContext
from kvtiers.tiers.fs import manifests, names
from kvtiers.tiers.fs.direct import DirectIO
from kvtiers.tiers.fs.log import format as fmt
from kvtiers.tiers.fs.log import recovery
from kvtiers.tiers.fs.log.format import Header
from kvtiers.tiers.fs.log.index import LogIndex, Place
from kvtiers.tiers.fs.log.segment import SegmentFiles
from kvtiers.tiers.options import parse
from kvtiers.tiers.places import Complain, Found, Part, Payload, Usage


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """A namespace as it was when it was looked at."""

    headers: Mapping[int, Header]
    """Of its segments, by number."""
    index: LogIndex

    def entry(self, key: Key) -> Entry | None:
        at = self.index.find(key)
        if at is None:
            return None
        return Entry(key, at.pages * PAGE_BYTES, self.headers[at.segment].created_at)


class LogPlace:
    """A root folder of layout ``log``. See :class:`~kvtiers.tiers.places.Place`.

    ``entries`` looks at the segments anew; ``find`` and ``read`` go by what was found last. A chunk
    counts as used when its segment was begun.
    """

    layout = "log"

    def __init__(
        self,
        root: str,
        complain: Complain,
        capacity_bytes: int | None = None,
        direct_io: str = "auto",
    ) -> None:
        self.root = root
        self.url = f"fs://{quote(root)}?layout={self.layout}"
        self.options: Mapping[str, Any] = {
            "type": "fs",
            "root_dir": root,
            "layout": self.layout,
            "capacity_bytes": capacity_bytes,
            "direct_io": direct_io,
        }
        self._complain = complain
        mode: DirectIO = "off" if direct_io == "off" else "auto"
        self._files = SegmentFiles(os.path.join(root, names.LOG), mode, fsync=False)
        self._seen: dict[str, _Snapshot] = {}

    @staticmethod
    def lies_at(root: str) -> bool:
        """Whether a folder holds a log."""
        return os.path.isdir(os.path.join(root, names.LOG))

    def namespaces(self) -> list[Found]:
        """Every folder named like a namespace."""
        return manifests.namespaces(self.root)

    def entries(self, namespace_id: str) -> Iterator[Entry]:
        """What the tables of the segments say, and the one that is being filled."""
        seen = self._seen[namespace_id] = self._look(namespace_id)
        for key, at in seen.index.items():
            yield Entry(key, at.pages * PAGE_BYTES, seen.headers[at.segment].created_at)

    def find(self, namespace_id: str, keys: Sequence[Key]) -> list[Entry | None]:
        """From memory, once the namespace was looked at."""
        seen = self._snapshot(namespace_id)
        return [seen.entry(key) for key in keys]

    def read(self, namespace_id: str, keys: Sequence[Key]) -> Iterator[tuple[Key, Payload]]:
        """One chunk after the other. What its owner wrote over meanwhile has vanished."""
        seen, memory = self._snapshot(namespace_id), mmap.mmap(-1, PAGE_BYTES)
        for key in keys:
            at = seen.index.find(key)
            if at is None:
                yield key, _error(Kind.VANISHED, f"there is no chunk {key.hex()}")
                continue
            if at.pages * PAGE_BYTES > len(memory):
                memory = mmap.mmap(-1, at.pages * PAGE_BYTES)
            view = memoryview(memory)[: at.pages * PAGE_BYTES]
            error = self._read(namespace_id, key, at, seen.headers[at.segment], view)
            yield key, view if error is None else error

    def _read(
        self, namespace_id: str, key: Key, at: Place, header: Header, view: memoryview
    ) -> KVTiersError | None:
        path = self._files.path(at.segment)
        try:
            with map_errors("read", path):
                whole = self._files.read(at.segment, at.page, [view])
                namespace = bytes.fromhex(namespace_id)
                if whole and fmt.checksum(namespace, key, view) == at.checksum:
                    return None
                now = self._files.header(at.segment)
        except KVTiersError as e:
            return e
        if now != header:
            return _error(Kind.VANISHED, f"{path} holds other chunks than {key.hex()} by now")
        return _error(Kind.CORRUPT, f"{path}: the checksum of the chunk {key.hex()} differs")

    def _snapshot(self, namespace_id: str) -> _Snapshot:
        if namespace_id not in self._seen:
            self._seen[namespace_id] = self._look(namespace_id)
        return self._seen[namespace_id]

    def _look(self, namespace_id: str) -> _Snapshot:
        index = LogIndex()
        ours = {
            number: header
            for number, _, header in self._headers()
            if header is not None and header.namespace_id == namespace_id
        }
        for number, header in sorted(ours.items(), key=lambda pair: pair[1].sequence):
            try:
                rows, _ = recovery.rows_of(self._files, number, header)
            except FileNotFoundError:
                continue  # it left meanwhile
            except OSError as e:
                self._complain(f"{self._files.path(number)} cannot be read: {e.strerror}")
                continue
            index.put(number, rows)
        return _Snapshot(ours, index)

    def _headers(self) -> list[tuple[int, int, Header | None]]:
        try:
            return list(recovery.headers(self._files))
        except FileNotFoundError:
            return []
        except OSError as e:
            self._complain(f"{self._files.folder} cannot be listed: {e.strerror}")
            return []

    def usage(self) -> list[Usage]:
        """Segments by namespace: what their chunks take, and the rest of them as reserved."""
        found: list[Usage] = []
        lengths: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for _, nbytes, header in self._headers():
            owner = "" if header is None else header.namespace_id
            lengths[owner] += nbytes
            counts[owner] += 1
        for owner in sorted(lengths):
            chunks = sum(entry.bytes for entry in self.entries(owner)) if owner else 0
            if chunks:
                found.append(Usage(owner, Part.CHUNKS, counts[owner], chunks))
            files = 0 if chunks else counts[owner]
            found.append(Usage(owner, Part.RESERVED, files, lengths[owner] - chunks))
        found += self._others()
        return sorted(found, key=lambda usage: (usage.namespace, list(Part).index(usage.part)))

    def _others(self) -> Iterator[Usage]:
        with map_errors("list", self.root):
            known = names.namespaces(self.root)
        for owner in known:
            with suppress(OSError):
                manifest = os.stat(os.path.join(self.root, owner, names.MANIFEST))
                yield Usage(owner, Part.OTHER, 1, manifest.st_size)

    def open_store(
        self,
        namespace: Namespace,
        layout: ChunkLayout,
        wall_clock: Callable[[], float] = time.time,
    ) -> ChunkStore:
        """Without a capacity in the URL the log stays as large as it is."""
        context = StoreContext(
            "fs", "tool:fs", namespace, layout, time.monotonic, wall_clock, _unheard
        )
        options = {key: value for key, value in self.options.items() if key != "type"}
        if options["capacity_bytes"] is None:
            options["capacity_bytes"] = sum(usage.bytes for usage in self.usage()) or None
        if options["capacity_bytes"] is None:
            raise ConfigError(f"{self.url} is new: add &capacity= to say how large it may become")
        return fs.build(context, parse(fs.FsOptions, options))

    def __repr__(self) -> str:
        return f"<LogPlace {self.root}>"


def _error(kind: Kind, what: str) -> KVTiersError:
    return KVTiersError(what, kind=kind, operation="read")


def _unheard(keys: Sequence[Key], reason: object) -> None:
    """Nobody listens to a tool's store: it says itself what it did."""
