"""Down 1, store: accelerator -> host memory. Which chunks get a slot, and when they count."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence, Set
from typing import NamedTuple

from kvtiers.chunks import Key, Lookup
from kvtiers.core.ledger import Departed, Ledger
from kvtiers.events import (
    PRIMARY,
    ChunksCopied,
    ChunksDeclined,
    ChunksStored,
    CopiesFailed,
    Hop,
    Reason,
    Sink,
    StoreOffered,
)


class StorePlan(NamedTuple):
    """What to copy: chunk ``keys[i]`` into slot ``slots[i]``."""

    keys: list[Key]
    slots: list[int]
    evicted: list[Key]
    declined: list[Key]
    """Chunks for which there was no room; offer them again when there is."""
    resident: list[Key]
    """Offered chunks that host memory has already."""


class UseCounter:
    """How often each chunk was offered, for the most recently offered ``capacity`` chunks."""

    def __init__(self, threshold: int, capacity: int) -> None:
        self._threshold = threshold
        self._capacity = capacity
        self._counts: OrderedDict[Key, int] = OrderedDict()

    def admit(self, keys: Sequence[Key]) -> list[Key]:
        """Count one offer of each key; those that were offered often enough."""
        admitted = []
        for key in keys:
            count = self._counts.pop(key, 0) + 1
            self._counts[key] = count
            if count >= self._threshold:
                admitted.append(key)
        while len(self._counts) > self._capacity:
            self._counts.popitem(last=False)
        return admitted

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        assert len(self._counts) <= self._capacity, "more chunks are counted than the bound"
        assert all(n > 0 for n in self._counts.values()), "a chunk was offered no times"


class Stores:
    """Reserves slots for chunks the engine offers, and confirms them when they are copied."""

    def __init__(
        self,
        ledger: Ledger,
        emit: Sink,
        departed: Departed,
        total_bytes: Callable[[Sequence[Key]], int],
        counter: UseCounter | None,
    ) -> None:
        self._ledger = ledger
        self._index = ledger.index
        self._emit = emit
        self._departed = departed
        self._total_bytes = total_bytes
        self._counter = counter
        self._began: dict[Key, float] = {}
        """When slots were reserved, by the first chunk of each plan."""

    def plan(
        self, keys: Sequence[Key], prefix: Set[Key], now: float, *, at_once: bool = False
    ) -> StorePlan:
        """Reserve slots for the offered chunks that are absent, of each size first ones first.

        None of ``prefix``, the chunks of the same request so far, is evicted for them: the end of a
        prefix is worth nothing without its beginning. ``at_once``: however rarely offered.
        """
        resident: list[Key] = []
        absent = list(keys)
        if not self._index.knows_none(keys):
            verdicts = list(map(self._index.lookup, keys))
            resident = [k for k, v in zip(keys, verdicts, strict=True) if v is Lookup.HIT]
            absent = [k for k, v in zip(keys, verdicts, strict=True) if v is Lookup.MISS]
        if resident:
            self._index.touch(resident)
        if self._counter is not None and absent and not at_once:
            absent = self._admit(absent)
        if not absent:
            return StorePlan([], [], [], [], resident)
        self._emit(StoreOffered(len(absent)))
        taken = self._index.reserve(absent, protected=prefix)
        if taken.evicted:
            self._departed(taken.evicted, Reason.EVICTED)
        if taken.keys:
            self._began[taken.keys[0]] = now
        declined: list[Key] = []
        if len(taken.keys) < len(absent):
            has_slot = set(taken.keys)
            declined = [key for key in absent if key not in has_slot]
            self._emit(ChunksDeclined(Hop.STORE, PRIMARY, len(declined), Reason.NO_ROOM))
        return StorePlan(
            list(taken.keys), list(taken.slots), list(taken.evicted), declined, resident
        )

    def complete(
        self, keys: Collection[Key], failed: Collection[Key], now: float | None
    ) -> list[Key]:
        """The device wrote, or failed to write, these chunks; those that are now resident.

        ``now``: when that was seen, if it is to be timed.
        """
        began = [self._began.pop(key) for key in self._began.keys() & keys]
        lost = sum(k in self._index.filling for k in failed) if failed else 0
        stored = self._index.commit(list(keys), failed)
        if lost:
            self._emit(CopiesFailed(Hop.STORE, PRIMARY, lost))
        if stored:
            self._emit(ChunksStored(PRIMARY, tuple(stored)))
            if began and now is not None:
                seconds, nbytes = now - min(began), self._total_bytes(stored)
                self._emit(ChunksCopied(Hop.STORE, len(stored), seconds, bytes=nbytes))
        return stored

    def forget(self) -> None:
        """Host memory was reset: what is being written is not waited for."""
        self._began.clear()

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        if self._counter is not None:
            self._counter.check()
        strays = self._began.keys() - self._index.filling.keys()
        assert not strays, f"{len(strays)} chunks are timed that nobody writes"

    def _admit(self, absent: list[Key]) -> list[Key]:
        assert self._counter is not None
        admitted = self._counter.admit(absent)
        if len(admitted) < len(absent):
            skipped = len(absent) - len(admitted)
            self._emit(ChunksDeclined(Hop.STORE, PRIMARY, skipped, Reason.THRESHOLD))
        return admitted
