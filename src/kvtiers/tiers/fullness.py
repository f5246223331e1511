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
    """What a store says of its use. ``now`` is monotonic seconds.

    ``note`` is called on lanes, the rest by the owner. A store that says nothing costs nothing.
    """

    def __init__(self, store: ChunkStore, inbox: Inbox, deadline_s: float) -> None:
        self.usage: Usage | None = None
        """How full the store was a moment ago."""
        self._measure: Callable[[], Usage | None] | None = None
        if isinstance(store, KnowsUsage):
            self._measure = store.usage
        self._inbox = inbox
        self._deadline_s = deadline_s
        self._measured_at: float | None = None
        self._stale = False
        """Whether something went on that was not measured."""
        self._piece: Measurement | None = None
        """Queued or under way, for the owner's measurement at rest."""

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
        self._stale = False  # before it is asked: what ends meanwhile may not be in the answer
        with suppress(Exception):  # a figure for people is worth no fault
            usage = self._measure()
            self.usage = usage if isinstance(usage, Usage) else None

    def due(self, now: float) -> "Measurement | None":
        """At rest: what is to be queued for a lane, if it is time for that."""
        last = self._measured_at
        if not self.pending or self._piece is not None:
            return None
        if last is not None and now - last < AT_REST_S:
            return None
        self._piece = Measurement(self, now, now + self._deadline_s, self._inbox)
        return self._piece

    def took(self, piece: "Measurement") -> None:
        """It was made, perhaps late."""
        if self._piece is piece:
            self._piece = None

    def overdue(self, now: float) -> "Measurement | None":
        """The measurement that is not waited for any more: the store hangs."""
        piece = self._piece
        if piece is None or now < piece.deadline:
            return None
        self.give_up()
        return piece

    def give_up(self) -> None:
        """Do without a measurement until something changes."""
        self._piece, self._stale = None, False

    @property
    def pending(self) -> bool:
        """Whether a measurement at rest is to be made, or under way."""
        return self._measure is not None and (self._stale or self._piece is not None)

    def check(self) -> None:
        """Raise AssertionError if a store is measured that says nothing."""
        assert self._measure is not None or not self._piece, "a store is asked that says nothing"

    def __repr__(self) -> str:
        return f"<Fullness {self.usage}{', stale' if self.pending else ''}>"


class Measurement(Work):
    """One look at how full the store is, when no transfer is in flight."""

    priority = Priority.SCAN

    def __init__(self, fullness: Fullness, now: float, deadline: float, inbox: Inbox) -> None:
        super().__init__()
        self.deadline = deadline
        self._fullness = fullness
        self._now = now
        self._inbox = inbox

    def run(self) -> None:
        """Measure, tell the scheduler thread."""
        self._fullness.measure(self._now)
        self._inbox.post(self)
