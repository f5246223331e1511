"""The reference tier: chunks in a dictionary. Read it before you write a tier of your own.

It keeps every obligation of ``ChunkStore`` in the plainest way; it is also useful in tests and
as a stand-in for a device that is not there.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvtiers.chunks import PAGE_BYTES, Key
from kvtiers.errors import Kind, KVTiersError
from kvtiers.events import Reason
from kvtiers.tiers import record
from kvtiers.tiers.base import Capabilities, Entry, Item, StoreContext, Usage
from kvtiers.tiers.options import RunnerOptions, require

_MAX_TOUCHED = 65536


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(RunnerOptions):
    """Options of the ``memory`` tier."""

    capacity_bytes: int
    """Bound of everything it holds, a header page per chunk included."""
    n_read_threads: int = 1
    n_write_threads: int = 1
    locality: Literal["LOCAL", "REMOTE"] = "LOCAL"
    """What tier filters and KV events call it: of this node, or of another or shared."""
    enable_kv_events: bool = False
    """Whether chunks stored in it and removed from it appear among the engine's KV events."""


@dataclass(slots=True)
class _Chunk:
    header: bytes
    payload: bytes
    used_at: float

    @property
    def bytes(self) -> int:
        return len(self.header) + len(self.payload)


class MemoryStore:
    """Chunks in least-recently-used order under one lock. Nothing survives ``close``."""

    capabilities = Capabilities(persistent=False, shared=False)

    def __init__(self, context: StoreContext, capacity_bytes: int) -> None:
        chunk = context.layout.slot_bytes + PAGE_BYTES
        require(
            capacity_bytes >= chunk,
            "capacity_bytes",
            f"is {capacity_bytes}, less than one chunk with its header: give at least {chunk}",
        )
        self._context = context
        self._capacity = capacity_bytes
        self._chunks: OrderedDict[Key, _Chunk] = OrderedDict()
        self._used = 0
        self._touched: deque[Key] = deque(maxlen=_MAX_TOUCHED)
        self._lock = threading.Lock()
        self._closed = False

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """Whether each key is present now."""
        self._refuse_if_closed("contains")
        with self._lock:
            return [key in self._chunks for key in keys]

    def write(self, items: Sequence[Item]) -> list[KVTiersError | None]:
        """Copy each item in, evicting the least recently used to make room."""
        self._refuse_if_closed("write")
        return [self._write(item) for item in items]

    def _write(self, item: Item) -> KVTiersError | None:
        header = record.pack(item.key, self._context.namespace.id, item.view)
        chunk = _Chunk(header, bytes(item.view), self._context.wall_clock())
        if chunk.bytes > self._capacity:
            return self._error(f"a chunk of {chunk.bytes} bytes exceeds the capacity", Kind.FULL)
        evicted: list[Key] = []
        with self._lock:
            if item.key in self._chunks:
                return None
            self._apply_touches()
            while self._used + chunk.bytes > self._capacity:
                evicted.append(next(iter(self._chunks)))
                self._drop(evicted[-1])
            self._chunks[item.key] = chunk
            self._used += chunk.bytes
        if evicted:
            self._context.on_removed(evicted, Reason.EVICTED)
        return None

    def read(self, items: Sequence[Item]) -> list[KVTiersError | None]:
        """Copy each chunk out, if it is there, whole, and what it claims to be."""
        self._refuse_if_closed("read")
        return [self._read(item) for item in items]

    def _read(self, item: Item) -> KVTiersError | None:
        with self._lock:
            chunk = self._chunks.get(item.key)
        if chunk is None:
            self._context.on_removed([item.key], Reason.VANISHED)
            return self._error("the chunk is gone", Kind.VANISHED)
        if len(chunk.payload) == item.view.nbytes:
            item.view[:] = chunk.payload
        error = record.verify(chunk.header, item.key, self._context.namespace.id, item.view)
        if error is None:
            self.touch([item.key])
            return None
        with self._lock:
            if self._chunks.get(item.key) is chunk:
                self._drop(item.key)
        self._context.on_removed([item.key], Reason.CORRUPT)
        return error

    def delete(self, keys: Sequence[Key]) -> None:
        """Forget these chunks."""
        self._refuse_if_closed("delete")
        with self._lock:
            for key in keys:
                if key in self._chunks:
                    self._drop(key)

    def scan(self) -> Iterable[Entry]:
        """What is stored, oldest use first."""
        self._refuse_if_closed("scan")
        with self._lock:
            self._apply_touches()
            return [Entry(k, len(c.payload), c.used_at) for k, c in self._chunks.items()]

    def touch(self, keys: Sequence[Key]) -> None:
        """Evict these last. Only noted here: a lock could be held by a lane."""
        self._refuse_if_closed("touch")
        self._touched.extend(keys)

    def close(self) -> None:
        """Free everything."""
        with self._lock:
            self._closed = True
            self._chunks.clear()
            self._used = 0

    def _apply_touches(self) -> None:
        now = self._context.wall_clock()
        for _ in range(len(self._touched)):
            key = self._touched.popleft()
            if key in self._chunks:
                self._chunks.move_to_end(key)
                self._chunks[key].used_at = now

    def _drop(self, key: Key) -> None:
        self._used -= self._chunks.pop(key).bytes

    def _refuse_if_closed(self, operation: str) -> None:
        if self._closed:
            raise self._error(f"{operation} after close", Kind.CLOSED)

    def _error(self, what: str, kind: Kind) -> KVTiersError:
        return KVTiersError(f"{self._context.name}: {what}", kind=kind)

    def usage(self) -> Usage:
        """Everything it holds is of this namespace; beside each chunk lies its identity page."""
        with self._lock:
            used, identities = self._used, len(self._chunks) * PAGE_BYTES
        return Usage(used, self._capacity, used - identities)

    def check(self) -> None:
        """Raise AssertionError if the bytes do not add up or exceed the capacity."""
        with self._lock:
            assert self._used == sum(c.bytes for c in self._chunks.values()), "bytes differ"
            assert self._used <= self._capacity, "more than the capacity"

    def __repr__(self) -> str:
        return f"<MemoryStore {len(self._chunks)} chunks, {self._used}/{self._capacity} bytes>"


def build(context: StoreContext, options: MemoryOptions) -> MemoryStore:
    """The store of a configured ``memory`` tier."""
    return MemoryStore(context, options.capacity_bytes)
