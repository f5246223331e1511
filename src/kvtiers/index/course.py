"""What a sequence number of a stream of events means. Pure.

A publisher counts its batches from 0 and sends each once, in order. Whoever listens misses some
when it comes late, is slow, or loses the connection; the publisher may keep the latest for replay.
"""

from dataclasses import dataclass
from enum import Enum

import xxhash


@dataclass(frozen=True, slots=True)
class At:
    """A point in a stream."""

    seq: int
    """Of the last batch that was applied."""
    digest: int
    """Of its payload: another process counts the same, and says something else."""

    @classmethod
    def of(cls, seq: int, payload: bytes) -> "At":
        """After this batch."""
        return cls(seq, xxhash.xxh3_64_intdigest(payload))


class Turn(Enum):
    """What to do about a batch."""

    APPLY = "apply"
    """It is the next one."""
    SKIP = "skip"
    """A replay has brought it already."""
    CATCH_UP = "catch up"
    """Some before it are missing: have them replayed first."""
    START_OVER = "start over"
    """The publisher is a new one, or nothing is known of it: forget all, then replay all."""


class Course:
    """How far along one stream is."""

    def __init__(self) -> None:
        self.next: int | None = None
        """The number of the batch that is to be applied next; None: nothing is known."""
        self._live = -1
        """The last that came on its own, and not by replay."""

    def live(self, seq: int) -> Turn:
        """A batch came on its own."""
        restarted, self._live = seq <= self._live, seq
        if restarted or self.next is None:
            return Turn.START_OVER
        if seq > self.next:
            return Turn.CATCH_UP
        return Turn.APPLY if seq == self.next else Turn.SKIP

    def applied(self, seq: int) -> None:
        """All up to this one are known."""
        self.next = seq + 1

    def forget(self) -> None:
        """Nothing is known."""
        self.next = None

    def reconnected(self) -> None:
        """Whoever publishes may be a new one: a number that falls means nothing, once."""
        self._live = -1

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        assert self.next is None or self.next >= 0, "the first batch is 0"
        assert self._live >= -1, "a number below 0"

    def __repr__(self) -> str:
        return f"<Course next {self.next}, live {self._live}>"
