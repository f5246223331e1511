"""Chunks on their way into a store: batched, counted, and what is there already passed over."""

import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvtiers.chunks import Key, Namespace, round_up
from kvtiers.cli.common import batched, layout_of
from kvtiers.errors import Kind, KVTiersError
from kvtiers.tiers.base import ChunkStore, Entry, Item
from kvtiers.tiers.places import Payload, Place

_BATCH_BYTES = 8 << 20


@dataclass(slots=True)
class Moved:
    """What became of the chunks of one namespace."""

    namespace: str
    chunks: int = 0
    """Written, or with ``--dry-run`` to be written."""
    bytes: int = 0
    present: int = 0
    """There already: equal keys have equal bytes."""
    keys: list[Key] = field(default_factory=list)
    """Of those written and those there already."""
    failed: list[tuple[str, str]] = field(default_factory=list)
    """Key and why."""
    there: int | None = None
    """How many of ``keys`` were there at the end; None: not asked."""

    @property
    def gone(self) -> int:
        """Those that left again meanwhile, to make room for others."""
        return 0 if self.there is None else len(self.keys) - self.there

    @property
    def arrived(self) -> bool:
        """Whether all are there."""
        return not self.failed and not self.gone

    def document(self) -> dict[str, object]:
        """As JSON."""
        failed = [{"key": key, "problem": problem} for key, problem in self.failed]
        return {
            "namespace": self.namespace,
            "chunks": self.chunks,
            "bytes": self.bytes,
            "present": self.present,
            "there_at_the_end": self.there,
            "failed": failed,
        }


class Batch:
    """Copies of chunks, page-aligned, until they are worth a call of the store."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _BATCH_BYTES)
        self._used = 0
        self.items: list[Item] = []

    def takes(self, nbytes: int) -> bool:
        """Whether there is room for a chunk; for the first there always is."""
        return not self.items or self._used + nbytes <= len(self._memory)

    def add(self, key: Key, payload: memoryview) -> None:
        """Copy a chunk in."""
        if payload.nbytes > len(self._memory):
            self._memory = mmap.mmap(-1, round_up(payload.nbytes))
        view = memoryview(self._memory)[self._used : self._used + payload.nbytes]
        view[:] = payload
        self.items.append(Item(key, view.toreadonly()))
        self._used += round_up(payload.nbytes)

    def clear(self) -> None:
        """Start anew."""
        self.items.clear()
        self._used = 0


def absent(
    place: Place, namespace_id: str, entries: Iterable[Entry], moved: Moved
) -> Iterator[Entry]:
    """Those that ``place`` does not hold yet; the others are counted."""
    for some in batched(entries):
        there = place.find(namespace_id, [e.key for e in some])
        for entry, found in zip(some, there, strict=True):
            if found is None:
                yield entry
            else:
                moved.present += 1
                moved.keys.append(entry.key)


def look_again(place: Place, moved: Moved) -> None:
    """Count what is there at the end. ``place`` was opened after the last write."""
    moved.there = sum(
        found is not None
        for keys in batched(moved.keys)
        for found in place.find(moved.namespace, keys)
    )


def write_all(
    place: Place,
    namespace: Namespace,
    wanted: Sequence[Entry],
    payloads: Iterable[tuple[Key, Payload]],
    moved: Moved,
    advance: Callable[[int], None],
) -> None:
    """Write verified chunks. Raises KVTiersError when there is no more room, saying how far it got.

    ``wanted`` says how large they are, and when they were used: that stays as it was.
    """
    originals = {e.key: e for e in wanted}
    store = place.open_store(namespace, layout_of(wanted))
    batch = Batch()
    try:
        for key, payload in payloads:
            if isinstance(payload, KVTiersError) and payload.kind is Kind.VANISHED:
                continue  # an engine took it away meanwhile
            if isinstance(payload, KVTiersError):
                moved.failed.append((key.hex(), str(payload)))
                continue
            if not batch.takes(payload.nbytes):
                place.backdate(namespace.id, [originals[k] for k in _flush(store, batch, moved)])
            batch.add(key, payload)
            advance(payload.nbytes)
        place.backdate(namespace.id, [originals[k] for k in _flush(store, batch, moved)])
    finally:
        store.close()


def _flush(store: ChunkStore, batch: Batch, moved: Moved) -> list[Key]:
    """Write what is in ``batch``; what arrived."""
    items = list(batch.items)
    batch.clear()
    arrived: list[Key] = []
    for item, error in zip(items, store.write(items) if items else [], strict=True):
        if error is None:
            moved.chunks += 1
            moved.bytes += item.view.nbytes
            arrived.append(item.key)
            moved.keys.append(item.key)
        elif error.kind is Kind.FULL:
            raise KVTiersError(
                f"there is no more room, after {moved.chunks} chunks of namespace "
                f"{moved.namespace} were written: {error}; make room and call again, what is "
                "there is passed over",
                kind=Kind.FULL,
            )
        else:
            moved.failed.append((item.key.hex(), str(error)))
    return arrived
