"""Which blocks each tier holds, and of which that was said: a few bytes for each chunk.

A chunk is known by a 64-bit name: the last 8 bytes of its digest, as events carry them, mixed with
its group. Two chunks of one name would be taken for one; with a million chunks that happens once in
thirty million engines, and whoever reads the events cannot tell them apart either.

Open addressing with linear probing and deletion by moving back (Knuth, TAOCP 3, 6.4, algorithm R),
in many small shards, so that no single growth takes long. Owned by one thread.
"""

from array import array
from collections.abc import Iterator
from itertools import compress
from typing import NamedTuple

from kvtiers.chunks import Key

_MASK = (1 << 64) - 1
_MIX = 0x9E3779B97F4A7C15
"""Odd, so that groups of one digest get different names (Fibonacci hashing)."""
_SHARDS = 256
_FIRST_SLOTS = 8


def chunk_name(key: Key) -> int:
    """The 64-bit name of a chunk, never 0."""
    return named(int.from_bytes(key[-12:-4], "big"), int.from_bytes(key[-4:], "big"))


def final_hash(name: int, group: int) -> int:
    """The end of the digest of a chunk, from its name."""
    return name ^ (group * _MIX & _MASK)


def named(end: int, group: int) -> int:
    """The name of the chunk of ``group`` whose digest ends with ``end``."""
    return (end ^ (group * _MIX & _MASK)) or 1


class Known(NamedTuple):
    """What is known of one chunk."""

    place: int = 0
    """Where its description is, above 0, as ``Shelf`` has it; 0: it has none."""
    start: int = 0
    """The position of its first token in its sequence; 0 as long as it has no description."""
    resident: int = 0
    """A bit for each tier that has it; ``EXPECTED`` as long as it was described but not stored."""
    said: int = 0
    """A bit for each tier of which that was said."""
    group: int = 0
    """Index of its KV-cache group."""


EXPECTED = 1 << 15
"""In ``resident``: it is on its way, so what describes it must be kept."""
MAX_TIERS = 15

UNKNOWN = Known()


class _Shard:
    """A part of the table: parallel arrays, a name of 0 is a free slot."""

    __slots__ = ("_fields", "_names", "used")

    def __init__(self, slots: int = _FIRST_SLOTS) -> None:
        self.used = 0
        self._names = array("Q", bytes(8 * slots))
        # place, start, resident, said, group
        self._fields = tuple(array(c, bytes(array(c).itemsize * slots)) for c in "QIHHH")

    def _slot(self, name: int) -> int:
        """Where ``name`` is, or the free slot where it would be."""
        names = self._names
        mask = len(names) - 1
        slot = (name >> 8) & mask
        while names[slot] and names[slot] != name:
            slot = (slot + 1) & mask
        return slot

    def get(self, name: int) -> Known | None:
        slot = self._slot(name)
        return self._read(slot) if self._names[slot] else None

    def _read(self, slot: int) -> Known:
        place, start, resident, said, group = self._fields
        return Known(place[slot], start[slot], resident[slot], said[slot], group[slot])

    def mark(self, name: int, resident: int, said: int) -> None:
        slot = self._slot(name)
        self._fields[2][slot], self._fields[3][slot] = resident, said

    def put(self, name: int, known: Known) -> None:
        slot = self._slot(name)
        if not self._names[slot]:
            if 10 * (self.used + 1) > 7 * len(self._names):
                self._grow()
                slot = self._slot(name)
            self._names[slot] = name
            self.used += 1
        place, start, resident, said, group = self._fields
        place[slot], start[slot], resident[slot], said[slot], group[slot] = known

    def _grow(self) -> None:
        old, fields, used = self._names, self._fields, self.used
        self.__init__(2 * len(old))  # type: ignore[misc]
        names, mask, self.used = self._names, len(self._names) - 1, used
        moved = []
        for name in old:
            if name:
                slot = (name >> 8) & mask
                while names[slot]:
                    slot = (slot + 1) & mask
                names[slot] = name
                moved.append(slot)
        for column, before in zip(self._fields, fields, strict=True):
            for slot, value in zip(moved, compress(before, old), strict=True):
                column[slot] = value

    def drop(self, name: int) -> None:
        names = self._names
        mask = len(names) - 1
        hole = self._slot(name)
        if not names[hole]:
            return
        self.used -= 1
        slot = hole
        while True:
            names[hole] = 0
            while True:
                slot = (slot + 1) & mask
                if not names[slot]:
                    return
                home = (names[slot] >> 8) & mask
                if (slot - home) & mask >= (slot - hole) & mask:
                    break
            names[hole] = names[slot]
            for column in self._fields:
                column[hole] = column[slot]
            hole = slot

    def entries(self) -> Iterator[tuple[int, Known]]:
        for slot, name in enumerate(self._names):
            if name:
                yield name, self._read(slot)

    @property
    def nbytes(self) -> int:
        return sum(a.itemsize * len(a) for a in (self._names, *self._fields))


class ResidencyTable:
    """Chunks by name. At most 75 bytes for each, from a few thousand on."""

    def __init__(self) -> None:
        self._shards = [_Shard() for _ in range(_SHARDS)]

    def get(self, name: int) -> Known | None:
        """What is known of a chunk."""
        return self._shards[name % _SHARDS].get(name)

    def put(self, name: int, known: Known) -> None:
        """Keep this of a chunk."""
        self._shards[name % _SHARDS].put(name, known)

    def mark(self, name: int, resident: int, said: int) -> None:
        """Keep which tiers have a chunk that is in here, and of which that was said."""
        self._shards[name % _SHARDS].mark(name, resident, said)

    def drop(self, name: int) -> None:
        """Forget a chunk."""
        self._shards[name % _SHARDS].drop(name)

    def entries(self) -> Iterator[tuple[int, Known]]:
        """All chunks; those that are put or dropped meanwhile may be among them or not."""
        for shard in self._shards:
            yield from [*shard.entries()]

    def __len__(self) -> int:
        return sum(shard.used for shard in self._shards)

    @property
    def nbytes(self) -> int:
        """Bytes of memory, apart from a few kilobytes for an empty table."""
        return sum(shard.nbytes for shard in self._shards)

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        for shard in self._shards:
            found = [*shard.entries()]
            assert len(found) == shard.used, "a chunk is counted that is not there"
            lost = [name for name, known in found if shard.get(name) != known]
            assert not lost, f"{len(lost)} chunks cannot be found again"

    def __repr__(self) -> str:
        return f"<ResidencyTable {len(self)} chunks, {self.nbytes} bytes>"
