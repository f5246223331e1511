"""A circuit breaker: a tier that keeps failing is left alone for a while, then tried once.

Pure: ``now`` (monotonic seconds) is an argument.
"""

from enum import Enum


class State(Enum):
    """Where the circuit is."""

    CLOSED = "closed"
    """The tier is in use."""
    OPEN = "open"
    """The tier is out; once the cooldown has passed one operation may try it."""
    TRIAL = "trial"
    """That one operation is on its way."""


class Breaker:
    """Opens after ``failures`` failures in a row, for a cooldown that doubles while trials fail."""

    def __init__(self, failures: int, cooldown_s: float, max_cooldown_s: float) -> None:
        self._limit = failures
        self._first_cooldown_s = cooldown_s
        self._max_cooldown_s = max_cooldown_s
        self._cooldown_s = cooldown_s
        self._failures = 0
        self._retry_at = 0.0
        self.state = State.CLOSED

    @property
    def failing(self) -> bool:
        """Whether failures were told of since anything last worked."""
        return self._failures > 0

    def is_out(self, now: float) -> bool:
        """Whether nothing may be asked of the tier, not even what is known from memory."""
        if self.state is State.CLOSED:
            return False
        return self.state is State.TRIAL or now < self._retry_at

    def admit(self, now: float) -> bool:
        """Whether an operation may be sent. After the cooldown exactly one is: the trial."""
        if self.state is State.CLOSED:
            return True
        if self.is_out(now):
            return False
        self.state = State.TRIAL
        return True

    def succeeded(self) -> bool:
        """An operation worked. True if this closed the circuit."""
        if self.state is State.OPEN:
            return False  # sent before the circuit opened: says nothing about now
        closed = self.state is State.TRIAL
        self.state = State.CLOSED
        self._failures = 0
        self._cooldown_s = self._first_cooldown_s
        return closed

    def failed(self, now: float) -> bool:
        """An operation failed. True if this opened a closed circuit."""
        if self.state is State.OPEN:
            return False
        if self.state is State.TRIAL:
            self._cooldown_s = min(2 * self._cooldown_s, self._max_cooldown_s)
            self._open(now)
            return False
        self._failures += 1
        if self._failures < self._limit:
            return False
        self._open(now)
        return True

    def _open(self, now: float) -> None:
        self.state = State.OPEN
        self._retry_at = now + self._cooldown_s

    def check(self) -> None:
        """Raise AssertionError if the counters contradict the state."""
        assert self._cooldown_s <= max(self._max_cooldown_s, self._first_cooldown_s), "cooldown"
        if self.state is State.CLOSED:
            assert self._failures < self._limit, "closed in spite of too many failures"

    def __repr__(self) -> str:
        return f"<Breaker {self.state.value}: {self._failures}/{self._limit} failures>"
