"""Which size class should give up a slab for another one. Numbers in, numbers out.

The pressure on a class is what it lacked lately, free room asked for and not found, over what it
has: the inverse of the time in which its chunks are all replaced. A slab moves to a class whose
pressure is clearly higher, so that in the end a chunk stays as long in one class as in another.
memcached's slab automover (``slab_automove.c``, 2017; release notes of 1.4.38) keeps the age of
the youngest evicting class within 80 % of the oldest one's, and moves one slab at a time; it
measures in seconds, and we count what is asked for, so that equal calls give equal moves.
"""

from collections.abc import Collection, Sequence

_RATIO = 0.8
"""The giver's pressure must be below this part of the taker's, both as they would be after."""


class Pressure:
    """What each class lacked. Old needs fade: all are halved whenever they add up to ``memory``."""

    def __init__(self, num_classes: int, memory: int) -> None:
        self._memory = memory
        self._lacked = [0.0] * num_classes

    def lacked(self, size_class: int, amount: int) -> None:
        """The class had no room for ``amount``, in the unit of ``memory``, before it made some."""
        self._lacked[size_class] += amount
        while sum(self._lacked) > self._memory:
            self._lacked = [lacked / 2 for lacked in self._lacked]

    def giver(
        self, taker: int, owned: Sequence[int], may_give: Collection[int], *, at_any: bool = False
    ) -> int | None:
        """The class of ``may_give`` under the least pressure; None if a slab had better stay.

        ``owned``: slabs by class; those that may give have two or more. ``at_any`` pressure: the
        taker has no chunk of its own that could leave.
        """
        if not may_give:
            return None
        giver = min(may_give, key=lambda c: (self._lacked[c] / (owned[c] - 1), c))
        if at_any:
            return giver
        theirs = self._lacked[giver] / (owned[giver] - 1)
        return giver if theirs < _RATIO * self._lacked[taker] / (owned[taker] + 1) else None

    def clear(self) -> None:
        """Forget all needs."""
        self._lacked = [0.0] * len(self._lacked)

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant, if any."""
        if min(self._lacked) < 0 or sum(self._lacked) > self._memory:
            raise AssertionError(f"{self!r}: a need is negative, or old ones do not fade")

    def __repr__(self) -> str:
        return f"<Pressure {[round(lacked, 1) for lacked in self._lacked]}>"
