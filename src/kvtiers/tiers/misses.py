"""Why a tier over a store has missed: what is remembered beside what is known to be there.

Pure and owned by one thread.
"""

from collections import OrderedDict
from collections.abc import Iterable

from kvtiers.chunks import Key
from kvtiers.errors import Kind
from kvtiers.events import MissReason

MAX_DAMAGED = 4096
"""Chunks remembered as lost to damage, a few hundred KiB; an older one is said to be absent."""

_BY_KIND = {
    Kind.TIMEOUT: MissReason.PENDING,
    Kind.CORRUPT: MissReason.CORRUPT,
    Kind.VANISHED: MissReason.ABSENT,
    Kind.CLOSED: MissReason.TIER_DOWN,
}


def miss_of(kind: Kind) -> MissReason:
    """The miss that a chunk ends with whose promotion failed so."""
    return _BY_KIND.get(kind, MissReason.FAILED)


class LostToDamage:
    """Chunks that left because they were damaged, until they are stored again."""

    def __init__(self) -> None:
        self._keys: OrderedDict[Key, None] = OrderedDict()

    def add(self, keys: Iterable[Key]) -> None:
        """These were damaged, and are gone."""
        for key in keys:
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > MAX_DAMAGED:
            self._keys.popitem(last=False)

    def forget(self, keys: Iterable[Key]) -> None:
        """These are whole."""
        if self._keys:
            for key in keys:
                self._keys.pop(key, None)

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def check(self) -> None:
        """Raise AssertionError if more is remembered than may be."""
        assert len(self._keys) <= MAX_DAMAGED, "more damaged chunks than the bound"

    def __repr__(self) -> str:
        return f"<LostToDamage {len(self._keys)} chunks>"
