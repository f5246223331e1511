"""What one engine was granted of the quota of a root, spends, and gives back."""

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvtiers.tiers.fs import stamps
from kvtiers.tiers.fs.quota import Quota
from kvtiers.tiers.fs.scratch import is_alive, sweep
from kvtiers.tiers.fs.shared import QuotaFile, read_quota
from kvtiers.tiers.fs.tree import Measure, measure
from kvtiers.tiers.options import bad_option

_log = logging.getLogger("kvtiers")

_LOOK_FOR_DEAD_S = 5.0
COUNT_EVERY_S = 600.0
_FASTEST = 4 << 30
"""Bytes per second that no root is filled faster than: tells when evictions are far away."""


@dataclass(slots=True)
class Turn:
    """One turn at the quota file."""

    quota: Quota
    name: str
    granted: int = 0

    def grant(self, size: int) -> bool:
        """Whether at least ``size`` bytes were granted."""
        given = self.quota.grant(self.name, size)
        self.granted += given
        return given > 0


class Account:
    """A member of the quota of ``root``. Any thread. Methods raise OSError.

    ``capacity_bytes`` None: a member that only says that eviction is not ours.
    """

    def __init__(
        self,
        root: str,
        capacity_bytes: int | None,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._root = root
        self._capacity = capacity_bytes
        self._clock = clock
        self._wall_clock = wall_clock
        self._file = QuotaFile(root)
        self._name: str | None = None
        self._lock = threading.Lock()
        """Guards the three sums; never held during I/O."""
        self._free = 0
        """Granted and not spent."""
        self._promised = 0
        """Spent on writes that are under way."""
        self._freed = 0
        """Left the disk, and the quota file does not know yet."""
        self._looked_for_dead: float | None = None
        self._said_smaller = self._said_unlisted = False
        self.suspect = False
        """The books may be wrong: a turn failed, or a write that cannot be undone."""

    # -- membership -----------------------------------------------------------------------------

    def join(self, scratch_folder: str) -> None:
        """Become a member, named by the scratch folder that says that we live; or be renamed.

        Raises ConfigError if living members leave eviction to others and we do not, or the
        other way round.
        """
        name = os.path.relpath(scratch_folder, self._root)
        with self._file.locked() as quota:
            self._bury_dead(quota)
            if self._name is not None:
                quota.rename(self._name, name)
            _refuse_other_ways(self._root, quota, self.bounded)
            quota.meet(name, self._capacity, self._free + self._promised, 0)
            ruling = quota.capacity
        self._name = name
        if self._capacity is not None and ruling is not None and ruling < self._capacity:
            self._say_smaller(ruling)

    def _say_smaller(self, ruling: int) -> None:
        if not self._said_smaller:
            self._said_smaller = True
            _log.warning(
                "%s is kept within %d bytes, as another engine states, not within the %d of this "
                "one: let all of them state the same",
                self._root,
                ruling,
                self._capacity,
            )

    def _say_unlisted(self, error: OSError) -> None:
        if not self._said_unlisted:
            self._said_unlisted = True
            _log.warning(
                "%s cannot be listed, so what it held goes on counting, said once: %s",
                error.filename,
                error.strerror,
            )

    def leave(self) -> None:
        """Give back what was not spent. Idempotent; after an error others find us dead."""
        name, self._name = self._name, None
        try:
            if name is not None:
                with self._file.locked() as quota:
                    self._meet(quota, name)
                    quota.leave(name)
        finally:
            self._file.close()

    def look_for_dead(self, quota: Quota) -> None:
        """Bury the members that died, unless that was done a moment ago."""
        last = self._looked_for_dead
        if last is None or self._clock() - last >= _LOOK_FOR_DEAD_S:
            self._bury_dead(quota)

    def _bury_dead(self, quota: Quota) -> None:
        self._looked_for_dead = self._clock()
        bury_dead(self._root, quota, self._name)

    # -- sums -----------------------------------------------------------------------------------

    def take(self, size: int) -> bool:
        """Spend ``size`` bytes on a write that begins, if so much is granted."""
        with self._lock:
            if self._free < size:
                return False
            self._free -= size
            self._promised += size
            return True

    def fill(self, size: int) -> None:
        """That write is on the disk."""
        with self._lock:
            self._promised -= size

    def release(self, size: int) -> None:
        """That write left nothing on the disk."""
        with self._lock:
            self._promised -= size
            self._freed += size

    def lose_track(self, size: int) -> None:
        """That write may have left something on the disk."""
        self.fill(size)
        self.suspect = True

    def freed(self, size: int) -> None:
        """So much left the disk, outside of a turn."""
        with self._lock:
            self._freed += size

    # -- the quota file -------------------------------------------------------------------------

    @contextlib.contextmanager
    def turn(self) -> Iterator[Turn]:
        """Alone at the quota file; what the body was granted may be spent afterwards."""
        if self._name is None:
            raise OSError(errno.ESHUTDOWN, "the store was closed meanwhile", self._file.path)
        try:
            with self._file.locked() as quota:
                turn = Turn(quota, self._name)
                freed = self._meet(quota, turn.name)
                yield turn
        except OSError:
            self.suspect = True
            raise
        with self._lock:
            self._freed -= freed
            self._free += turn.granted

    def _meet(self, quota: Quota, name: str) -> int:
        with self._lock:
            held, freed = self._free + self._promised, self._freed
        quota.meet(name, self._capacity, held, freed)
        return freed

    def count(self) -> None:
        """Measure what lies under the root, while others go on, and put the books right.

        What could not be listed goes on being claimed. Where nobody ever counted it, that raises.
        """
        with self.turn() as turn:
            self._bury_dead(turn.quota)
            before = turn.quota.begin_count()
        found, unlisted = count(self._root)
        with self.turn() as turn:
            if unlisted is not None and turn.quota.claimed is None:
                raise unlisted
            whole = unlisted is None
            turn.quota.counted(found, before, self._wall_clock(), whole=whole)
        self.suspect = False
        if unlisted is not None:
            self._say_unlisted(unlisted)

    def count_is_old(self, seconds: float = COUNT_EVERY_S) -> bool:
        """Whether nobody has counted for so long: strangers may have deleted much since."""
        age = self._wall_clock() - self._file.peek().counted_at
        return abs(age) >= seconds  # the clock of who counted may be ahead

    def evictions_are_near(self, wall_now: float) -> bool:
        """Whether chunks may leave so soon that a hit has to be made known to others."""
        if not self.bounded:
            return True
        quota = self._file.peek()
        return quota.available() < _FASTEST * stamps.GRACE_S or quota.cleaning_until > wall_now

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Alone at the quota file, so that its reserved pages are ours to try the disk with."""
        if self.bounded:
            with self._file.locked():
                yield
        else:
            yield

    @property
    def bounded(self) -> bool:
        """Whether eviction is ours."""
        return self._capacity is not None

    @property
    def counted(self) -> bool:
        """Whether anybody knows what lies under the root."""
        return self._file.peek().claimed is not None

    @property
    def used_bytes(self) -> int:
        """Bytes on the disk, and promised to writes; of other engines what they may still add."""
        quota = self._file.peek()
        return max(0, (quota.claimed or 0) - self._free - self._freed)

    @property
    def capacity(self) -> int:
        """What rules now."""
        return self._file.peek().capacity or self._capacity or 0

    def check(self) -> None:
        """Raise AssertionError if a sum is below zero or the quota file contradicts itself."""
        sums = (self._free, self._promised, self._freed)
        assert all(n >= 0 for n in sums), f"granted, promised, freed: {sums}"
        self._file.check()

    def __repr__(self) -> str:
        return f"<Account {self.used_bytes}/{self.capacity} bytes>"


def refuse_other_ways(root: str, bounded: bool) -> None:
    """Raise ConfigError where :meth:`Account.join` would. Nothing is changed."""
    quota = read_quota(root)
    bury_dead(root, quota)
    _refuse_other_ways(root, quota, bounded)


def _refuse_other_ways(root: str, quota: Quota, bounded: bool) -> None:
    if any((member.capacity is not None) != bounded for member in quota.members.values()):
        ours, theirs = ("own", "external") if bounded else ("external", "own")
        raise bad_option(
            "eviction",
            f'is "{ours}", but another engine that works in {root} says "{theirs}": '
            "let all of them say the same",
        )


def bury_dead(root: str, quota: Quota, ours: str | None = None) -> None:
    """Take out the members of ``quota`` that no longer live."""
    others = [name for name in quota.members if name != ours]
    quota.bury([name for name in others if not is_alive(os.path.join(root, name))])


def count(root: str) -> Measure:
    """Remove what dead engines left half-written, then measure."""
    with contextlib.suppress(OSError):
        sweep(root)
    return measure(root)
