"""Least recently used."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from kvtiers.chunks import Key
from kvtiers.host.policies.base import Staying
from kvtiers.host.policies.taking import take_oldest


class LRUPolicy:
    """Evicts the key that was not inserted or touched for longest.

    A key that cannot be evicted when its turn comes is in use, so it counts as used now and goes
    to the end. That keeps a row of pinned keys from being walked again by every eviction.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._order: OrderedDict[Key, None] = OrderedDict()
        """Oldest first."""

    def insert(self, keys: Sequence[Key]) -> None:
        """Take in ``keys``, the last one as the most recent."""
        order = self._order
        for key in keys:
            order[key] = None

    def touch(self, keys: Sequence[Key]) -> None:
        """Make ``keys`` the most recent ones, in this order."""
        order = self._order
        for key in keys:
            if key in order:
                order.move_to_end(key)

    def evict(self, count: int, staying: Staying) -> list[Key]:
        """Remove the ``count`` oldest keys that may leave; amortised O(1) for each."""
        return evict_oldest(self._order, count, staying)

    def remove(self, keys: Sequence[Key]) -> None:
        """Forget ``keys``."""
        for key in keys:
            self._order.pop(key, None)

    def clear(self) -> None:
        """Forget everything."""
        self._order.clear()

    def __len__(self) -> int:
        return len(self._order)

    def check(self) -> None:
        """Raise AssertionError if more keys are resident than there are slots."""
        if len(self._order) > self.capacity:
            raise AssertionError(f"{self!r} holds more keys than its capacity")

    def __repr__(self) -> str:
        return f"<LRUPolicy {len(self._order)}/{self.capacity}>"


def evict_oldest(order: OrderedDict[Key, None], count: int, staying: Staying) -> list[Key]:
    """Remove up to ``count`` keys that may leave from the front of ``order``."""

    def first(n: int) -> list[Key]:
        return list(islice(order, n))

    def sort_out(met: list[Key], leaving: list[Key], staying_here: list[Key]) -> None:
        for key in staying_here:
            order.move_to_end(key)
        for key in leaving:
            del order[key]

    return take_oldest(len(order), count, staying, first, sort_out)
