"""How full a store is, as of a moment ago: measured on lanes, and rarely.

While transfers go on a measurement follows some of them. So that what stands at rest is the truth,
the owner has one more made when the last of them is over.
"""

from collections.abc import Callable
from contextlib import suppress

from kvtiers.tiers.base import ChunkStore, KnowsUsage, Usage
from kvtiers.tiers.lanes import Inbox, Priority, Work

EVERY_S = 1.0
"""Between two measurements while transfers go on."""
AT_REST_S = 0.1
"""Between the last of them and the one at rest: the engine steps for it alone."""


class Fullness:
    """What a store says of its use. Monotonic seconds. A store that says nothing costs nothing.

    The measurement at rest is the owner's alone. ``note`` and ``measure`` are called on any lane,
    ``usage``, ``pending`` and ``changed`` at the same time by the owner, and there is no lock: each
    attribute is set in one piece. Two lanes may so measure where one would do. Whatever ends while
    the store is asked leaves "stale" behind, and so does who was overtaken by another lane.
    """

    def __init__(
        self, store: ChunkStore, inbox: Inbox, clock: Callable[[], float], deadline_s: float
    ) -> None:
        self.usage: Usage | None = None
        """How full the store was a moment ago."""
        self._measure: Callable[[], Usage | None] | None = None
        if isinstance(store, KnowsUsage):
            self._measure = store.usage
        self._inbox = inbox
        self._clock = clock
        self._deadline_s = deadline_s
        self._measured_at: float | None = None
        self._asked_last: object = None
        """Who asked the store last."""
        self._stale = False
        """Whether something went on that was not measured."""
        self._piece: Measurement | None = None
        """Queued or under way, for the owner's measurement at rest."""
        self._late = False
        """Whether no lane came to it in time: it stays in the queue, and nobody waits for it."""

    def note(self, now: float) -> None:
        """A transfer is over: measure, unless that was done less than ``EVERY_S`` ago."""
        last = self._measured_at
        if last is not None and now - last < EVERY_S:
            self._stale = True
        else:
            self.measure(now)

    def changed(self) -> None:
        """Something else came or went."""
        self._stale = True

    def measure(self, now: float) -> None:
        """Ask the store. May block."""
        if self._measure is None:
            return
        self._measured_at = now
        self._asked_last = asking = object()
        self._stale = False  # before it is asked: what ends meanwhile may not be in the answer
        with suppress(Exception):  # a figure for people is worth no fault
            usage = self._measure()
            self.usage = usage if isinstance(usage, Usage) else None
        if self._asked_last is not asking:
            self._stale = True  # the answer of who came later may have been replaced

    def due(self, now: float) -> "Measurement | None":
        """At rest: what is to be queued for a lane, if it is time for that."""
        last = self._measured_at
        if not self.pending or self._piece is not None:
            return None
        if last is not None and now - last < AT_REST_S:
            return None
        self._piece = Measurement(self, now + self._deadline_s)
        return self._piece

    def run(self, piece: "Measurement") -> None:
        """Measure, tell the scheduler thread. Runs on a lane."""
        piece.began = began = self._clock()
        self.measure(began)
        self._inbox.post(piece)

    def took(self, piece: "Measurement") -> None:
        """It was made, perhaps late."""
        if self._piece is piece:
            self._piece, self._late = None, False

    def hung(self, now: float) -> "Measurement | None":
        """The measurement that a lane has been at for longer than the deadline.

        It is waited for no more, as one that no lane came to in time, which is no fault of the
        store's: it is made when one does.
        """
        piece = self._piece
        if piece is None:
            return None
        began = piece.began
        self._late = began is None and now >= piece.deadline
        if began is None or now - began < self._deadline_s:
            return None
        self.give_up()
        return piece

    def give_up(self) -> None:
        """Do without a measurement until something changes."""
        if self._piece is not None:
            self._piece.claim()
        self._piece, self._stale, self._late = None, False, False

    @property
    def pending(self) -> bool:
        """Whether a measurement at rest is to be made, or waited for."""
        if self._measure is None:
            return False
        return self._stale if self._piece is None else not self._late

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        assert self._measure is not None or not self._piece, "a store is asked that says nothing"
        assert self._piece is not None or not self._late, "what is late is not queued"

    def __repr__(self) -> str:
        return f"<Fullness {self.usage}{', stale' if self.pending else ''}>"


class Measurement(Work):
    """One look at how full the store is, when no transfer is in flight."""

    priority = Priority.SCAN

    def __init__(self, fullness: Fullness, deadline: float) -> None:
        """A lane should come to it by ``deadline``."""
        super().__init__()
        self.deadline = deadline
        self.began: float | None = None
        self._fullness = fullness

    def run(self) -> None:
        """Measure, tell the scheduler thread."""
        self._fullness.run(self)
