"""A queue of keys for policies: first in, first out, with exceptions."""

from collections import Counter, deque
from collections.abc import Iterator, Sequence

from kvtiers.chunks import Key
from kvtiers.host.policies.base import Staying
from kvtiers.host.policies.taking import take_oldest

_SLACK = 64
"""Void places that a short queue may have, and places that are looked at together."""


class KeyQueue:
    """Keys in the order in which they came; most of them leave in that order too.

    A set says who is in and a queue in which order. The queue learns late of keys that left out of
    turn, so that the rest is done for whole batches; where keys often change their places, an
    ``OrderedDict`` is cheaper.
    """

    def __init__(self) -> None:
        self._keys: set[Key] = set()
        self._order: deque[Key] = deque()
        """Oldest first, with places in it that are void."""
        self._void: Counter[Key] = Counter()
        """How many of a key's first places in the queue are void."""

    def add(self, keys: Sequence[Key]) -> None:
        """These come last. Caller guarantees: none of them is in."""
        self._keys.update(keys)
        self._order.extend(keys)

    def discard(self, key: Key) -> None:
        """``key`` leaves out of turn. Caller guarantees: it is in."""
        self._keys.remove(key)
        self._void[key] += 1
        if len(self._order) > 2 * len(self._keys) + _SLACK:
            self._order = deque(self)
            self._void.clear()

    def drop_oldest(self, count: int) -> None:
        """The ``count`` oldest leave; all of them if there are fewer."""
        self._keys.difference_update(self._first(min(count, len(self._keys))))

    def take_oldest(self, count: int, staying: Staying) -> list[Key]:
        """Take up to ``count`` keys that may leave; see :mod:`kvtiers.host.policies.taking`."""
        return take_oldest(len(self._keys), count, staying, self._first, self._sort_out)

    def isdisjoint(self, keys: Sequence[Key]) -> bool:
        """Whether none of these is in."""
        return self._keys.isdisjoint(keys)

    def clear(self) -> None:
        """All leave."""
        self._keys.clear()
        self._order.clear()
        self._void.clear()

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[Key]:
        void = self._void.copy()
        for key in self._order:
            if void[key]:
                void[key] -= 1
            else:
                yield key

    def __len__(self) -> int:
        return len(self._keys)

    def check(self) -> None:
        """Raise AssertionError if the queue and the set differ."""
        assert set(self) == self._keys, "the queue and the set of keys differ"

    def __repr__(self) -> str:
        return f"<KeyQueue {len(self)} keys>"

    def _sort_out(self, met: list[Key], leaving: list[Key], staying_here: list[Key]) -> None:
        if len(leaving) < len(met):
            self._order.extendleft(reversed(met[len(leaving) + len(staying_here) :]))
            self._order.extend(staying_here)
        self._keys.difference_update(leaving)

    def _first(self, count: int) -> list[Key]:
        """Take the first ``count`` keys off the queue, and the void places before them.

        Caller guarantees: there are so many.
        """
        first: list[Key] = []
        while len(first) < count:
            wanted = count - len(first)
            if self._void:
                wanted = min(max(wanted, _SLACK), len(self._order))
            met = [self._order.popleft() for _ in range(wanted)]
            if self._void and not self._void.keys().isdisjoint(met):
                met = [key for key in met if not self._was_void(key)]
            first += met
        if len(first) > count:
            self._order.extendleft(reversed(first[count:]))
            del first[count:]
        return first

    def _was_void(self, key: Key) -> bool:
        if key not in self._void:
            return False
        self._void[key] -= 1
        if not self._void[key]:
            del self._void[key]
        return True
