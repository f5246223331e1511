"""Chunks that are said to be in storage which others clear are asked for now and then.

Twice in a period, in rounds: the chunks that are held then are asked for evenly over half of it, a
slice at a time, on the lanes. So none goes unasked for longer than the period, whenever it came.
"""

from collections.abc import Callable, Sequence

from kvtiers.chunks import Key
from kvtiers.errors import KVTiersError
from kvtiers.tiers.base import ChecksAgain, ChunkStore
from kvtiers.tiers.lanes import Inbox, Priority, Work
from kvtiers.tiers.work import ask

LEAST_KEYS = 256
"""A slice has so many chunks, or the rest."""
MOST_KEYS = 4096


class Recheck(Work):
    """Asks for one slice; the first of a round finds out what there is to ask for."""

    priority = Priority.SCAN

    def __init__(self, rechecks: "Rechecks", keys: Sequence[Key] | None, since: int) -> None:
        """``since`` is the moment, in the tier's ``Presence``, at which it was made."""
        super().__init__()
        self.keys = keys
        self.since = since
        self.first = keys is None
        self.gone: list[Key] | KVTiersError = []
        self.began: float | None = None
        self._rechecks = rechecks

    def run(self) -> None:
        """Ask, tell the scheduler thread."""
        self._rechecks.ask(self)


class Rechecks:
    """How far the round of one tier is. But for ``ask`` for one thread; monotonic seconds."""

    def __init__(
        self,
        store: ChunkStore,
        held: Callable[[], list[Key]],
        inbox: Inbox,
        clock: Callable[[], float],
        period_s: float,
        deadline_s: float,
    ) -> None:
        """``held`` gives, on any thread, the chunks that are said to be there."""
        self._store = store
        self._held = held
        self._inbox = inbox
        self._clock = clock
        self._round_s = period_s / 2
        self._deadline_s = deadline_s
        self._began = clock()
        self._keys: Sequence[Key] = ()
        self._asked = 0
        self._piece: Recheck | None = None

    def next(self, now: float, moment: int) -> Recheck | None:
        """The slice that is due, to be queued. One is under way at a time."""
        if self._piece is not None:
            return None
        left = len(self._keys) - self._asked
        if left:
            passed = min(1.0, (now - self._began) / self._round_s)
            due = min(int(len(self._keys) * passed) - self._asked, MOST_KEYS)
            if due < min(left, LEAST_KEYS):
                return None
            self._piece = Recheck(self, self._keys[self._asked : self._asked + due], moment)
            self._asked += due
        elif now - self._began >= self._round_s:
            self._began = now
            self._piece = Recheck(self, None, moment)
        return self._piece

    def ask(self, piece: Recheck) -> None:
        """Runs on a lane."""
        piece.began = self._clock()
        if piece.first:
            piece.keys = self._held()
        else:
            piece.gone = self._gone(piece.keys or ())
        self._inbox.post(piece)

    def _gone(self, keys: Sequence[Key]) -> list[Key] | KVTiersError:
        store = self._store
        answers = ask(store, keys, store.still_there if isinstance(store, ChecksAgain) else None)
        if isinstance(answers, KVTiersError):
            return answers
        return [key for key, there in zip(keys, answers, strict=True) if not there]

    def took(self, piece: Recheck) -> bool:
        """``piece`` was taken in; whether it was still waited for."""
        if piece is not self._piece:
            return False
        self._piece = None
        if piece.first:
            self._keys, self._asked = piece.keys or (), 0
        return True

    def hung(self, now: float) -> Recheck | None:
        """The slice that a lane has been at for longer than the deadline: it is waited for no more.

        Its chunks are asked for in the next round.
        """
        piece = self._piece
        if piece is None or piece.began is None or now - piece.began < self._deadline_s:
            return None
        self._piece = None
        return piece

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        assert self._asked <= len(self._keys), "more was asked for than there is"

    def __repr__(self) -> str:
        return f"<Rechecks {self._asked} of {len(self._keys)} asked for>"
