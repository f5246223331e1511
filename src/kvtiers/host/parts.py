"""What an index is made of, and what it says."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from kvtiers.chunks import Key


class Reservation(NamedTuple):
    """``keys[i]`` is to be written into ``slots[i]``; the ``evicted`` keys made room for them."""

    keys: tuple[Key, ...]
    slots: tuple[int, ...]
    evicted: tuple[Key, ...]


class HostUse(NamedTuple):
    """Host memory by what it is doing, in granules: those of one slot where all are equal."""

    slots: int
    """All there are."""
    resident: int
    filling: int
    pinned: int
    """Resident ones that a transfer reads."""
    orphaned: int
    per_chunk: float = 1.0
    """What a chunk takes, on average over those that are held."""


class KeyOrder(Protocol):
    """What an index tells about all its chunks: part of a policy, or of one for each size."""

    def insert(self, keys: Sequence[Key]) -> None:
        """Some became ready."""

    def touch(self, keys: Sequence[Key]) -> None:
        """Some were used; unknown ones are ignored."""

    def remove(self, keys: Sequence[Key]) -> None:
        """Some left that it did not choose."""

    def clear(self) -> None:
        """Forget everything."""

    def __len__(self) -> int: ...

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant, if any."""


class FreeSlots(Protocol):
    """Slots that are nobody's: a list of them, or what sorts them by size."""

    def append(self, slot: int, /) -> None:
        """One came free."""

    def extend(self, slots: Iterable[int], /) -> None:
        """Some came free; the one to be used again first comes last."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[int]: ...
