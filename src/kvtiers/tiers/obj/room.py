"""How much may be written below a prefix that has a bound. Pure.

What others write is known when all is listed. An engine adds up what it writes in between, and at
the bound it writes nothing more until what was written first has left and all was counted anew.
"""

import threading

_FREED = 10
"""A pass frees one part of so many, so that there is room until the next one."""
_BEFORE_A_COUNT = 16
"""One part of so many may be written before anything was counted."""
_IN_VAIN_S = 30.0
"""After a pass that did not help no other is begun for so long."""


class Room:
    """What one engine may write. Any thread; ``now`` is monotonic seconds."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity = capacity_bytes
        self.counted = False
        self._lock = threading.Lock()
        self._used = capacity_bytes - capacity_bytes // _BEFORE_A_COUNT
        self._written = 0
        """Since the count under way began, or else the last one."""
        self._counting = False
        self._not_before = 0.0

    @property
    def used(self) -> int:
        """Bytes below the prefix, as far as is known."""
        return self._used

    @property
    def aim(self) -> int:
        """Bytes that may be left by a pass."""
        return self.capacity - self.capacity // _FREED

    def take(self, size: int) -> bool:
        """Whether so much may be written; then it counts, until the next count.

        Also if the write fails: it may have been done all the same.
        """
        with self._lock:
            if self._used + size > self.capacity:
                return False
            self._used += size
            self._written += size
            return True

    def begin_count(self, now: float) -> bool:
        """Whether to count now: nobody does, and it may help."""
        with self._lock:
            if self._counting or now < self._not_before:
                return False
            self._counting, self._written = True, 0
            return True

    def end_count(self, left: int | None, now: float) -> None:
        """So much lay there, less what left; None: it could not be counted."""
        with self._lock:
            self._counting = False
            if left is not None:
                self.counted = True
                self._used = left + self._written
            if left is None or left > self.aim:
                self._not_before = now + _IN_VAIN_S

    def check(self) -> None:
        """Raise AssertionError if less than nothing is used."""
        assert self._used >= 0, f"{self._used} bytes are used"

    def __repr__(self) -> str:
        return f"<Room {self._used}/{self.capacity} bytes>"
