"""Keeps the root within its capacity.

A write spends from what was granted to this engine, without a lock of others. When that is used
up, the next portion is taken from the quota file; where nothing is left there, files that were
used least recently leave, a portion at a time.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Sequence

from kvtiers.errors import Kind, KVTiersError, Retry
from kvtiers.tiers.fs import stamps
from kvtiers.tiers.fs.account import Account
from kvtiers.tiers.fs.leaving import take_away
from kvtiers.tiers.fs.need import Need, Step
from kvtiers.tiers.fs.quota import RESERVED_BYTES, STATE_BYTES, Quota
from kvtiers.tiers.fs.tree import candidates, measure
from kvtiers.tiers.fs.victims import Victims

_log = logging.getLogger("kvtiers")

_MAX_FAILURES = 16
"""Files that one write tries to evict in vain before it fails."""
_MAX_DELETES = 512
"""Files that leave in one turn at the quota file, while others wait for theirs."""
_ROUNDS = 2
"""How often the end of the tree is reached in vain; the first walk may have begun long ago."""
_TRUSTED_S = 60.0
"""Before there is no room one looks whether a count that is older still holds."""
_HOPELESS_S = 1.0
"""After a walk that found nothing to evict there is none for so long."""


class Room:
    """Room for files under ``root``. Any thread.

    ``on_evicted`` is told the names, relative to the root, that left.
    """

    def __init__(
        self,
        root: str,
        account: Account,
        victims: Victims,
        on_evicted: Callable[[Sequence[str]], None],
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._root = root
        self._account = account
        self._victims = victims
        self._on_evicted = on_evicted
        self._clock = clock
        self._wall_clock = wall_clock
        self._hopeless_until: float | None = None
        self._said_stuck = False
        self._counting = threading.Lock()
        self._evicting = threading.Lock()
        """Held while files leave, so that two lanes do not evict for the same need."""

    def reserve(self, size: int) -> None:
        """Make room for ``size`` bytes, until ``fill`` or ``release``.

        Raises KVTiersError if that is impossible: ``Kind.FULL``, or ``Kind.IO`` because files
        that should leave cannot be deleted. Raises FileNotFoundError if the root is gone.
        """
        if self._account.take(size):
            return
        while not self._account.take(size):
            with self._evicting:
                if self._account.take(size):
                    break
                if size > self._account.capacity - RESERVED_BYTES - STATE_BYTES:
                    raise self._full(size)
                self._make_room(Need(size))
        self._count_now_and_then()

    def _count_now_and_then(self) -> None:
        """What strangers delete is claimed until somebody counts; other lanes write meanwhile."""
        if self._account.count_is_old() and self._counting.acquire(blocking=False):
            try:
                with contextlib.suppress(OSError):
                    self._account.count()
            finally:
                self._counting.release()

    def fill(self, size: int) -> None:
        """What was reserved is on the disk."""
        self._account.fill(size)

    def release(self, size: int) -> None:
        """What was reserved is not on the disk, or not any more."""
        self._account.release(size)

    def lose_track(self, size: int) -> None:
        """What was reserved is on the disk or is not: a count will tell."""
        self._account.lose_track(size)

    def freed(self, size: int) -> None:
        """So much left the disk by other means than eviction."""
        self._account.freed(size)

    def make_way(self, size: int) -> bool:
        """The disk is full below the capacity: evict ``size`` bytes; whether any left."""
        need = Need(size, regardless=True)
        with self._evicting, contextlib.suppress(KVTiersError, OSError):
            self._make_room(need)
        return need.gone > 0

    def trim(self) -> None:
        """Count what is there, and evict what is above the capacity. Raises OSError."""
        self._account.count()
        with self._evicting, contextlib.suppress(KVTiersError):  # all that may leave has left
            self._make_room(Need(0))

    # -- making room ----------------------------------------------------------------------------

    def _make_room(self, need: Need) -> None:
        try:
            while (step := self._step(need)) is not Step.MET:
                if need.failures >= _MAX_FAILURES:
                    raise self._stuck(need.size)
                if step is Step.COUNT:
                    self._count(need)
                elif step is Step.LACK:
                    self._look_further(need)
        finally:
            if need.evicted:
                self._on_evicted(need.evicted)

    def _step(self, need: Need) -> Step:
        """One turn at the quota file: take what is there, else evict and take."""
        gone = need.gone
        with self._account.turn() as turn:
            if not need.regardless:
                if turn.quota.claimed is None:
                    return Step.COUNT
                if need.met_by(turn):
                    return Step.MET
                self._account.look_for_dead(turn.quota)
                if not need.counted and (turn.quota.suspect or self._account.suspect):
                    return Step.COUNT
            self._evict(turn.quota, need)
            if need.met_by(turn):
                return Step.MET
        return Step.MORE if need.gone > gone else Step.LACK

    def _evict(self, quota: Quota, need: Need) -> None:
        """Delete a portion's worth of what is known to leave next."""
        lacking = need.size - need.gone
        if not need.regardless:
            lacking = (quota.portion(need.size) if need.size else 0) - quota.available()
        deletes, now = 0, self._wall_clock()
        while lacking > 0 and deletes < _MAX_DELETES and need.failures < _MAX_FAILURES:
            victim = self._victims.next()
            if victim is None:
                return
            deletes += 1
            try:
                left = take_away(os.path.join(self._root, victim.name), victim.stamp, now)
            except FileNotFoundError:
                continue
            except OSError as e:
                need.failures += 1
                self._put_off(victim.name, e)
                continue
            if left:
                need.evicted.append(victim.name)
                need.gone += victim.size
                lacking -= victim.size
                quota.free(victim.size)

    def _put_off(self, name: str, error: OSError) -> None:
        if not self._said_stuck:
            self._said_stuck = True
            _log.warning("cannot evict %s/%s, said once: %s", self._root, name, error.strerror)
        self._victims.put_off(name)

    def _count(self, need: Need) -> None:
        self._account.count()
        need.counted = True

    def _look_further(self, need: Need) -> None:
        """See more of the tree. Raises if all is known, and counted, and nothing may leave."""
        now = self._clock()
        if self._hopeless_until is not None and now < self._hopeless_until:
            raise self._error(need)
        need.rounds += self._victims.look_further()
        if need.rounds <= _ROUNDS:
            return
        if not need.counted and not need.regardless and self._account.count_is_old(_TRUSTED_S):
            self._count(need)  # what strangers took away may still be claimed
            return
        self._hopeless_until = now + _HOPELESS_S
        raise self._error(need)

    # -- errors ---------------------------------------------------------------------------------

    def _error(self, need: Need) -> KVTiersError:
        return self._stuck(need.size) if self._victims.stuck else self._full(need.size)

    def _full(self, size: int) -> KVTiersError:
        return KVTiersError(
            f"{self._root} has no room for {size} bytes within its capacity of "
            f"{self._account.capacity}: what is there is in use",
            kind=Kind.FULL,
            retry=Retry.MAY,
            operation="write",
        )

    def _stuck(self, size: int) -> KVTiersError:
        return KVTiersError(
            f"{self._root} has no room for {size} bytes, because {len(self._victims.stuck)} files "
            "in it that should leave cannot be deleted",
            kind=Kind.IO,
            retry=Retry.MAY,
            operation="write",
        )

    @property
    def used_bytes(self) -> int:
        """Bytes on the disk and promised; of other engines what they may still add."""
        return self._account.used_bytes

    def check(self) -> None:
        """Raise AssertionError if more lies there than may, promised or stuck files apart."""
        self._account.check()
        self._victims.check()
        if self._account.counted and not self._victims.stuck:
            above = measure(self._root).bytes - self._account.capacity
            assert above <= 0 or above <= self._in_use(), f"{above} bytes above the capacity"

    def _in_use(self) -> int:
        now = self._wall_clock()
        found = (c for folder in candidates(self._root) for c in folder)
        return sum(c.size for c in found if stamps.in_use(c.stamp, now))

    def __repr__(self) -> str:
        return f"<Room {self._account}, {self._victims}>"


class Unbounded:
    """Stands in for :class:`Room` where others see to the bound: there always is room."""

    used_bytes = 0

    def reserve(self, size: int) -> None:
        """Nothing to do."""

    def fill(self, size: int) -> None:
        """Nothing to do."""

    def release(self, size: int) -> None:
        """Nothing to do."""

    def lose_track(self, size: int) -> None:
        """Nothing to do."""

    def freed(self, size: int) -> None:
        """Nothing to do."""

    def make_way(self, size: int) -> bool:
        """Nothing leaves."""
        return False

    def trim(self) -> None:
        """Nothing to do."""

    def check(self) -> None:
        """Nothing can be wrong."""

    def __repr__(self) -> str:
        return "<Unbounded>"
