"""The start-up scan: what a store holds, read on the lanes piece by piece.

Lookups never wait for it. Until all is taken in, a chunk that was not seen yet is asked for.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from kvtiers.chunks import Key
from kvtiers.errors import KVTiersError
from kvtiers.tiers.base import ChunkStore, Entry
from kvtiers.tiers.lanes import Inbox, Priority, Work
from kvtiers.tiers.work import fault

_log = logging.getLogger("kvtiers")

SCAN_PIECE = 4096
"""Entries per piece of work; the scheduler thread takes in one piece at a time."""


class Scan(Work):
    """A piece of the start-up scan; ``follow_up`` is the next, to be queued when this is in."""

    priority = Priority.SCAN

    def __init__(
        self,
        store: ChunkStore,
        inbox: Inbox,
        clock: Callable[[], float],
        entries: Iterator[Entry] | None = None,
    ) -> None:
        super().__init__()
        self.keys: list[Key] = []
        self.error: KVTiersError | None = None
        self.follow_up: Scan | None = None
        self.began: float | None = None
        """Set by the lane that runs it: waiting for a lane is no sign of a hung store."""
        self._store = store
        self._inbox = inbox
        self._clock = clock
        self._entries = entries

    def run(self) -> None:
        """Take the next entries, tell the scheduler thread."""
        self.began = self._clock()
        try:
            entries = self._entries if self._entries is not None else _scan(self._store)
            self.keys = [entry.key for entry in islice(entries, SCAN_PIECE)]
            if len(self.keys) == SCAN_PIECE:
                self.follow_up = Scan(self._store, self._inbox, self._clock, entries)
        except BaseException as e:
            self.keys = []
            self.error = fault("scan", e)
        self._inbox.post(self)


def _scan(store: ChunkStore) -> Iterator[Entry]:
    entries: Iterable[Entry] = store.scan()
    return iter(entries)


class StartUpScan:
    """How far the scan of one tier is. Owned by one thread; ``now`` is monotonic seconds."""

    def __init__(self, label: str, deadline_s: float) -> None:
        self._label = label
        self._deadline_s = deadline_s
        self._piece: Scan | None = None
        self.complete = False
        """Whether everything that was stored before was handed out."""

    def begin(self, store: ChunkStore, inbox: Inbox, clock: Callable[[], float]) -> Scan:
        """The first piece, to be queued."""
        self._piece = Scan(store, inbox, clock)
        return self._piece

    def took(self, piece: Scan) -> Scan | None:
        """``piece`` was taken in, perhaps late; returns the next one, to be queued."""
        self._piece = piece.follow_up
        if piece.error is not None:
            _log.warning(
                "%s: the start-up scan failed, chunks are asked for: %s", self._label, piece.error
            )
        self.complete = piece.error is None and piece.follow_up is None
        return piece.follow_up

    def hung(self, now: float) -> Scan | None:
        """The piece that a lane has been at for longer than the deadline."""
        piece = self._piece
        if piece is None or piece.began is None or now - piece.began < self._deadline_s:
            return None
        return piece

    def give_up(self) -> None:
        """Expect the hung piece no more. Should it end after all, the scan goes on."""
        self._piece = None
        _log.warning(
            "%s: the start-up scan hangs, chunks are asked for: is the storage alive?", self._label
        )

    def check(self) -> None:
        """Raise AssertionError if it is complete with a piece outstanding."""
        assert not (self.complete and self._piece), "complete, and a piece is under way"

    def __repr__(self) -> str:
        state = "complete" if self.complete else "under way" if self._piece else "not under way"
        return f"<StartUpScan {self._label}: {state}>"
