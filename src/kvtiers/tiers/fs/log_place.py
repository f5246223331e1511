"""Layout ``log`` as tools see it: segments are read beside their owner, and nothing is changed."""

import mmap
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from kvtiers.chunks import PAGE_BYTES, ChunkLayout, Key, Namespace
from kvtiers.errors import Kind, KVTiersError, map_errors
from kvtiers.tiers.base import ChunkStore, Entry
from kvtiers.tiers.fs import names, tree
from kvtiers.tiers.fs.beside import folders_beside
from kvtiers.tiers.fs.log import format as fmt
from kvtiers.tiers.fs.log import inspection, looking
from kvtiers.tiers.fs.log.format import Header
from kvtiers.tiers.fs.log.index import Location
from kvtiers.tiers.fs.log.looking import Looked, Snapshot
from kvtiers.tiers.fs.log.maintain import maintain
from kvtiers.tiers.fs.log.ownership import LOCK, TEMP, kept_capacity, owner_of
from kvtiers.tiers.fs.log.segment import SegmentFiles
from kvtiers.tiers.fs.tools import FsPlace, FsURL
from kvtiers.tiers.places import (
    Aim,
    Complain,
    Fault,
    Part,
    Payload,
    Report,
    Usage,
    unheard,
)

_PARTS = {LOCK: Part.OTHER, TEMP: Part.TEMPORARY}
_LOOKED_AGAIN = 1 / 16
"""The part of all chunks after which another look at the segments is worth it."""


class LogPlace(FsPlace):
    """A root folder of layout ``log``. See :class:`~kvtiers.tiers.places.Place`.

    ``entries`` looks at the segments anew; ``find`` and ``read`` go by what was found last. A chunk
    counts as used when its segment was begun.
    """

    layout = "log"

    def __init__(self, at: FsURL, complain: Complain) -> None:
        super().__init__(at, complain)
        self._files = SegmentFiles(os.path.join(self.root, names.LOG), self._reading, fsync=False)
        self._seen: dict[str, Snapshot] = {}

    @staticmethod
    def lies_at(root: str) -> bool:
        """Whether a folder holds a log: a folder of that name may be anybody's."""
        folder = os.path.join(root, names.LOG)
        if os.path.lexists(os.path.join(folder, LOCK)):
            return True
        try:
            return bool(SegmentFiles(folder, "off", fsync=False).numbers())
        except OSError as e:
            return isinstance(e, PermissionError)  # whoever lists it is told

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
        """One chunk after the other. What is not where it was may lie elsewhere by now: what was
        used is written again before its segment leaves.
        """
        buffer, since = _Buffer(), len(self._snapshot(namespace_id).index)
        for key in keys:
            payload = self._read_one(namespace_id, key, buffer)
            known = self._snapshot(namespace_id).index
            since += 1
            gone = isinstance(payload, KVTiersError) and payload.kind is Kind.VANISHED
            if gone and key in known and since >= len(known) * _LOOKED_AGAIN:
                self._seen[namespace_id], since = self._look(namespace_id), 0
                payload = self._read_one(namespace_id, key, buffer)
            yield key, payload

    def _read_one(self, namespace_id: str, key: Key, buffer: "_Buffer") -> Payload:
        seen = self._snapshot(namespace_id)
        at = seen.index.find(key)
        if at is None:
            return _error(Kind.VANISHED, f"there is no chunk {key.hex()}")
        view = buffer.of(at.pages * PAGE_BYTES)
        return self._read(namespace_id, key, at, seen.headers[at.segment], view) or view

    def _read(
        self, namespace_id: str, key: Key, at: Location, header: Header, view: memoryview
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
        return _error(
            Kind.CORRUPT, f"{path}: the chunk {key.hex()} is damaged: its checksum differs"
        )

    def _snapshot(self, namespace_id: str) -> Snapshot:
        if namespace_id not in self._seen:
            self._seen[namespace_id] = self._look(namespace_id)
        return self._seen[namespace_id]

    def _look(self, namespace_id: str) -> Snapshot:
        found = looking.headers(self._files, self._complain)
        return looking.look(self._files, found, namespace_id, self._complain)

    def usage(self, advance: Callable[[int], None] = unheard) -> list[Usage]:
        """Segments by namespace: what their chunks take, and the rest of them as reserved."""
        found = looking.headers(self._files, self._complain)
        usage: list[Usage] = []
        for owner in sorted({_owner(looked) for looked in found}):
            ours = [looked[1] for looked in found if _owner(looked) == owner]
            chunks = 0
            if owner:
                seen = looking.look(self._files, found, owner, self._complain)
                chunks = sum(at.pages * PAGE_BYTES for _, at in seen.index.items())
                usage.append(Usage(owner, Part.CHUNKS, len(ours), chunks))
            advance(len(ours))
            files = 0 if owner else len(ours)
            usage.append(Usage(owner, Part.RESERVED, files, sum(ours) - chunks))
        known = [self._files.path(number) for number, _, _ in found]
        usage += others(self.root, known, self._complain)
        usage = [u for u in usage if u.files or u.bytes]
        return sorted(usage, key=lambda u: (u.namespace, list(Part).index(u.part)))

    def segments(self) -> list[int]:
        """Those with chunks and those without."""
        return [nbytes for _, nbytes, _ in looking.headers(self._files, self._complain)]

    def capacity(self) -> int | None:
        """What the URL states, or else the last engine or tool that had the log open."""
        stated: int | None = self.options["capacity_bytes"]
        if stated is not None:
            return stated
        with map_errors("read", self._files.folder):
            return kept_capacity(self.root)

    def bound(self) -> int | None:
        """The capacity: a log keeps it by forgetting."""
        return self.capacity()

    def owner(self) -> int | None:
        """The engine that has the log open."""
        return owner_of(self.root)

    def faults(self, namespace_id: str) -> Iterator[Fault]:
        """Damaged headers, tables and heads of runs."""
        for _, fault in inspection.faults(self._files, self._complain):
            if fault.namespace == namespace_id:
                yield fault

    def mend(self, faults: Sequence[Fault]) -> list[Fault]:
        """Tables are written anew, and segments removed that hold nothing that can be used."""
        return inspection.mend(self.root, self._files, faults, self._complain)

    def maintain(
        self,
        aim: Aim,
        *,
        dry_run: bool = False,
        advance: Callable[[int], None] = unheard,
    ) -> Report:
        """By whole segments, the oldest first; not beside an engine."""
        report = maintain(self.root, self._files, aim, dry_run=dry_run, advance=advance)
        return report if aim.namespace else self._remove_trials(report, dry_run=dry_run)

    def open_store(self, namespace: Namespace, layout: ChunkLayout) -> ChunkStore:
        """Without a capacity in the URL the log keeps the one that it has."""
        capacity = self.capacity()
        if capacity is None:
            raise self._is_new()
        return self._store(namespace, layout, {"capacity_bytes": capacity})

    def backdate(self, namespace_id: str, copies: Sequence[Entry]) -> None:
        """Nothing to note: what is written first leaves first, and a segment has one time."""


class _Buffer:
    """Memory for one chunk, aligned, as large as the largest so far."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, PAGE_BYTES)

    def of(self, nbytes: int) -> memoryview:
        """The first ``nbytes`` of it."""
        if nbytes > len(self._memory):
            self._memory = mmap.mmap(-1, nbytes)
        return memoryview(self._memory)[:nbytes]


def others(root: str, segments: Sequence[str], complain: Complain) -> list[Usage]:
    """What lies below ``root`` besides these segments. Raises KVTiersError."""
    found: Counter[tuple[str, Part]] = Counter()
    sizes: Counter[tuple[str, Part]] = Counter()
    known = set(segments)
    with map_errors("list", root):
        for path, size in tree.files_below(root, [*names.namespaces(root), names.LOG]):
            if path not in known:
                where = _part_of(os.path.relpath(path, root))
                found[where] += 1
                sizes[where] += size
    for part, size in folders_beside(root, _is_ours, complain):
        found["", part] += 1
        sizes["", part] += size
    return [Usage(*where, found[where], sizes[where]) for where in found]


def _is_ours(folder: str) -> bool:
    return folder == names.LOG or names.is_namespace(folder)


def _part_of(below: str) -> tuple[str, Part]:
    folder, _, name = below.partition("/")
    if names.is_namespace(folder):
        return folder, Part.OTHER
    return "", _PARTS.get(name, Part.FOREIGN) if folder == names.LOG else Part.FOREIGN


def _owner(looked: Looked) -> str:
    return "" if looked[2] is None else looked[2].namespace_id


def _error(kind: Kind, what: str) -> KVTiersError:
    return KVTiersError(what, kind=kind, operation="read")
