"""The contract of an eviction policy: it orders keys, and does nothing else."""

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from kvtiers.chunks import Key

Staying = Callable[[Sequence[Key]], Collection[Key]]
"""Of these resident keys, those that cannot be evicted now because they are in use."""


class EvictionPolicy(Protocol):
    """Decides which resident chunk leaves host memory first.

    A policy holds no bytes, slots or pins and does no I/O. All calls come from one thread. It is
    built as ``Policy(capacity=<number of slots>)``, for each size of chunk one: then ``capacity``
    is the most that this size may come to have.
    """

    def insert(self, keys: Sequence[Key]) -> None:
        """These keys became resident. Caller guarantees: none of them is in the policy."""

    def touch(self, keys: Sequence[Key]) -> None:
        """These keys were used, in this order. Unknown keys are ignored."""

    def evict(self, count: int, staying: Staying) -> list[Key]:
        """Choose, remove and return ``count`` keys, none of which is ``staying``.

        Ask ``staying`` about candidates, several at a time. Caller guarantees: at least ``count``
        keys in the policy may leave. If a policy finds fewer it must return what it found; the
        keys it did not return stay in it.
        """

    def remove(self, keys: Sequence[Key]) -> None:
        """These keys left by other means, and were not chosen. Unknown keys are ignored."""

    def clear(self) -> None:
        """Forget everything, history included."""

    def __len__(self) -> int:
        """Number of resident keys in the policy."""

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant, if any."""
