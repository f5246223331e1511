"""From the threads on which things happen to the one that tells of them."""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvtiers.events import (
    ChunksFound,
    ChunksRemoved,
    ChunksStored,
    Event,
    TierReachable,
)

MAX_QUEUED = 1 << 20
"""Chunks in the queue, beyond which only the tiers are remembered of which something was missed."""


class Captured(NamedTuple):
    """Chunks that are about to be stored."""

    chunks: int
    values: Sequence[Any]
    """What says what they consist of, one after the other.

    No object for each chunk, which the garbage collector would count.
    """


class Flushed(NamedTuple):
    """Set ``done`` when all that came before was taken in and said."""

    done: threading.Event


class Forgotten(NamedTuple):
    """Readers were told to forget all that was ever said."""


class Missed(NamedTuple):
    """Chunks came to this tier or left it, and nobody remembers which: go by what it holds now."""

    tier: str


Note = Event | Captured | Flushed | Forgotten | None
"""None: only wakes the reader up."""


class Notes:
    """Many threads put, one takes. Neither waits for the other, and what waits is bounded.

    Beyond ``max_queued`` chunks the queue is closed until the reader has come so far. Of what comes
    meanwhile only the tiers are remembered of which something was missed, and of each whether it is
    in reach and whether its start-up scan is over. Descriptions are dropped then.
    """

    def __init__(self, max_queued: int = MAX_QUEUED, *, values: int = 1) -> None:
        """``values``: so many say what a chunk consists of."""
        self._max_queued = max_queued
        self._values = values
        self._captured: list[Any] = []
        self.capture: Callable[[Sequence[Any]], None] = self._captured.extend
        """Take note of what says what a chunk consists of; for one thread, not to be blocked."""
        self._queue: queue.SimpleQueue[Note] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._put = 0
        self._got = 0
        self._beyond = False
        self._missed: dict[str, None] = {}
        self._scans: dict[str, ChunksFound] = {}
        self._reach: dict[str, TierReachable] = {}
        self._n_missed = 0
        self._closed = False
        self.sent = 0
        """How many notes were put into the queue."""
        self.dropped = 0
        """Descriptions that were dropped."""

    def put(self, event: Event) -> None:
        """Pass on what was captured, and this. It holds a lock only for as long as this takes."""
        with self._lock:
            if self._captured:
                self._pass_captured()
            self._pass(event)

    def put_captured(self) -> None:
        """Pass on what was captured; what still comes meanwhile is passed on the next time."""
        if self._captured:
            with self._lock:
                self._pass_captured()

    def _pass_captured(self) -> None:
        captured = self._captured[:]
        del self._captured[: len(captured)]
        if not self._closed:
            self._pass(Captured(len(captured) // self._values, captured))

    def close(self) -> None:
        """What is captured from now on is dropped: it keeps requests, and nobody will ask."""
        self._closed = True

    def _pass(self, note: Event | Captured) -> None:
        weight = _weight(note)
        if not self._beyond and self._put + weight - self._got <= self._max_queued:
            self._put += weight
            self._send(note)
            return
        if not self._beyond:
            self._beyond = True
            self._send(None)  # there may be nothing else in the queue
        self._miss(note)

    def _miss(self, note: Event | Captured) -> None:
        if isinstance(note, Captured):
            self.dropped += note.chunks
        elif isinstance(note, TierReachable):
            self._reach[note.tier] = note
        elif isinstance(note, ChunksStored | ChunksFound | ChunksRemoved):
            if isinstance(note, ChunksFound):
                self._scans[note.tier] = note._replace(keys=())
            if note.keys:
                self._missed[note.tier] = None
                self._n_missed += len(note.keys)

    def put_aside(self, note: Flushed | Forgotten | None) -> None:
        """Wake the reader up; a ``Flushed`` comes after all that was put before."""
        with self._lock:
            self._send(note)

    def _send(self, note: Note) -> None:
        self.sent += 1
        self._queue.put(note)

    def get(self, timeout_s: float | None) -> Note:
        """The next note. Raises queue.Empty if there is none in time."""
        note = self._queue.get(timeout=timeout_s)
        if note is not None and not isinstance(note, Flushed | Forgotten):
            self._got += _weight(note)
        return note

    def overflow(self) -> list[Event | Missed]:
        """What came when the queue was full; the queue is open again. Only when it is empty."""
        if not self._beyond or not self._queue.empty():
            return []
        with self._lock:
            if not self._queue.empty():
                return []
            missed, self._missed, self._n_missed = self._missed, {}, 0
            scans, self._scans = self._scans, {}
            reach, self._reach = self._reach, {}
            self._beyond = False
        return [
            *(scan for scan in scans.values() if not scan.complete),
            *map(Missed, missed),
            *(scan for scan in scans.values() if scan.complete),
            *reach.values(),
        ]

    @property
    def queued(self) -> int:
        """About of how many chunks there is news that was not taken yet. On any thread."""
        return self._put - self._got + self._n_missed

    @property
    def waiting(self) -> bool:
        """Whether something was not taken yet."""
        return self._beyond or not self._queue.empty()

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        with self._lock:
            assert self._put - self._got <= self._max_queued, "the queue is over its bound"
            assert not len(self._captured) % self._values, "a part of a chunk was captured"
            assert self._beyond or not (self._missed or self._scans or self._reach), (
                "something was missed and the queue is open"
            )

    def __repr__(self) -> str:
        return f"<Notes {self._put - self._got} chunks queued, {self._n_missed} beyond the bound>"


def _weight(note: Event | Captured) -> int:
    if isinstance(note, Captured):
        return note.chunks
    return 1 + len(getattr(note, "keys", ()))
