"""Chunks that wait for one tier, in the order in which they came."""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence

from kvtiers.chunks import Key


class ChunkQueue:
    """First in, first out, each chunk once, and any of them may leave at any time.

    A tier that keeps up is sent in one go what came in a step: for that a plain dict will do, at a
    third of the cost. Only what has to wait longer goes into one that is cheap to take from in
    parts.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[Key, None] = OrderedDict()
        self._fresh: dict[Key, None] = {}
        """Holds something only while ``_waiting`` is empty."""

    def add(self, keys: Sequence[Key]) -> None:
        """These come last; one that waits already keeps its place."""
        (self._waiting or self._fresh).update(dict.fromkeys(keys))

    def put_back(self, keys: Sequence[Key]) -> None:
        """These come first again."""
        self._settle_down()
        for key in reversed(keys):
            self._waiting[key] = None
            self._waiting.move_to_end(key, last=False)

    def take(self, count: int) -> tuple[Key, ...]:
        """Remove and return the first ``count``, or all if there are fewer."""
        if len(self._fresh) <= count and not self._waiting:
            taken = tuple(self._fresh)
            self._fresh.clear()
            return taken
        self._settle_down()
        count = min(count, len(self._waiting))
        return tuple(self._waiting.popitem(last=False)[0] for _ in range(count))

    def discard(self, keys: Sequence[Key]) -> Collection[Key]:
        """These wait no longer; returns those that did."""
        here = self._waiting or self._fresh
        if here.keys().isdisjoint(keys):
            return ()
        gone = [key for key in keys if key in here]
        for key in gone:
            del here[key]
        return gone

    def clear(self) -> None:
        """Nothing waits any longer."""
        self._waiting.clear()
        self._fresh.clear()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._fresh)

    def __iter__(self) -> Iterator[Key]:
        yield from self._waiting
        yield from self._fresh

    def check(self) -> None:
        """Raise AssertionError if chunks wait in both places, so that their order is lost."""
        assert not (self._waiting and self._fresh), "fresh chunks wait beside older ones"

    def __repr__(self) -> str:
        return f"<ChunkQueue {len(self)} chunks>"

    def _settle_down(self) -> None:
        self._waiting.update(self._fresh)
        self._fresh.clear()
