"""Least recently used."""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from itertools import islice

from kvtiers.chunks import Key
from kvtiers.host.policies.base import Staying

FEWEST_AHEAD, MOST_AHEAD = 32, 4096
"""How many keys are asked about at once after one had to stay, at first and at most."""


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
        return take_oldest(self._order, count, staying)

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


def take_oldest(order: OrderedDict[Key, None], count: int, staying: Staying) -> list[Key]:
    """Take up to ``count`` keys that may leave from the front; those that stay go to the end.

    Where one stays many do, a request's whole prefix: after a refusal ever more are asked about.
    """
    taken: list[Key] = []
    unseen, ahead = len(order), 0
    while unseen and len(taken) < count:
        met = list(islice(order, min(max(count - len(taken), ahead), unseen)))
        stay = staying(met)
        if stay:
            ahead = min(max(FEWEST_AHEAD, 2 * ahead), MOST_AHEAD)
        leaving, staying_here = part(met, stay, count - len(taken))
        unseen -= len(leaving) + len(staying_here)
        for key in staying_here:
            order.move_to_end(key)
        for key in leaving:
            del order[key]
        taken += leaving
    return taken


def part(met: list[Key], stay: Collection[Key], count: int) -> tuple[list[Key], list[Key]]:
    """The first ``count`` of ``met`` that do not stay, and those that stay before the last one."""
    if not stay:
        return met[:count], []
    leaving: list[Key] = []
    staying_here: list[Key] = []
    for key in met:
        if key in stay:
            staying_here.append(key)
        elif len(leaving) < count:
            leaving.append(key)
        if len(leaving) == count:
            break
    return leaving, staying_here
