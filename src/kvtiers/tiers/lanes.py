"""Lanes: the threads on which blocking stores are called.

The scheduler thread puts work in and never waits: queues are deques, and a ticket in a
``SimpleQueue`` wakes a lane. Every piece of work has a ticket for the write lanes, which take
anything, and work that read lanes may take has one for them too; whoever comes first does it, and
the other ticket finds nothing. So no lock is shared that a lane could hold while descheduled.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from queue import SimpleQueue
from typing import Generic, TypeVar

from kvtiers.chunks import Key
from kvtiers.events import Reason
from kvtiers.tiers.options import bad_option

_log = logging.getLogger("kvtiers")

N = TypeVar("N")


class Priority(IntEnum):
    """The order in which a lane prefers work."""

    LOOKUP = 0
    LOAD = 1
    STORE = 2
    SCAN = 3


_READ_LANE = (Priority.LOOKUP, Priority.LOAD, Priority.SCAN)
_WRITE_LANE = tuple(Priority)


class Work:
    """Something to do on a lane, at most once, unless it is cancelled first."""

    priority: Priority

    def __init__(self) -> None:
        self._unclaimed = [True]

    def run(self) -> None:
        """Do it. Called on a lane; may block; must not raise."""
        raise NotImplementedError

    def claim(self) -> bool:
        """Take the right to run (a lane) or to cancel (the owner). Only one caller gets True."""
        try:
            return self._unclaimed.pop()  # atomic: one of two racing threads finds it empty
        except IndexError:
            return False


@dataclass(frozen=True, slots=True)
class Removed:
    """Note from a store: chunks it held are gone."""

    keys: tuple[Key, ...]
    reason: Reason


class Mailbox(Generic[N]):
    """Notes to one thread from others: left anywhere, taken by one."""

    def __init__(self) -> None:
        self._notes: deque[N] = deque()
        self._arrived = threading.Event()

    def post(self, note: N) -> None:
        """Leave a note. Any thread."""
        self._notes.append(note)
        self._arrived.set()

    def take(self) -> Iterator[N]:
        """The notes that are there now, in order; more may arrive meanwhile."""
        for _ in range(len(self._notes)):
            yield self._notes.popleft()

    def empty(self) -> bool:
        """Whether no note is there now. Cheap: asked at every lookup."""
        return not self._notes

    def wait(self, timeout_s: float) -> bool:
        """Wait for a note that was not waited for yet; False if none came."""
        if not self._arrived.wait(timeout_s):
            return False
        self._arrived.clear()
        return True

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {len(self._notes)} notes>"


class Inbox(Mailbox[Work | Removed]):
    """Notes from lanes and stores to the scheduler thread."""

    def removed(self, keys: Sequence[Key], reason: Reason) -> None:
        """The ``RemovalReport`` to give to a store. Any thread."""
        self.post(Removed(tuple(keys), reason))


StartThread = Callable[[Callable[[], None], str], threading.Thread]
"""Starts a thread that runs the callable, under the given name."""


def start_daemon(target: Callable[[], None], name: str) -> threading.Thread:
    """A daemon thread: one that hangs in a dead mount does not keep the process alive."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread


@dataclass(slots=True, eq=False)
class _Lane:
    name: str
    takes: tuple[Priority, ...]
    tickets: "SimpleQueue[None]"
    work: Work | None = None
    retired: bool = False
    thread: threading.Thread | None = field(default=None, repr=False)


class Lanes:
    """``n_read`` and ``n_write`` threads, and replacements for those that hang.

    Raises ConfigError, and leaves no thread behind, if the system refuses so many.
    """

    def __init__(
        self,
        n_read: int,
        n_write: int,
        max_replacements: int,
        name: str,
        start: StartThread = start_daemon,
    ) -> None:
        self._name = name
        self._start = start
        self._max_replacements = max_replacements
        self._n_lanes = n_read + n_write
        self._queues: dict[Priority, deque[Work]] = {p: deque() for p in Priority}
        self._read_tickets: SimpleQueue[None] = SimpleQueue()
        self._write_tickets: SimpleQueue[None] = SimpleQueue()
        self._stopped = False
        self._started = 0
        self._retired: list[_Lane] = []
        self._lanes: list[_Lane] = []
        try:
            for _ in range(n_read):
                self._lanes.append(self._open(_READ_LANE, self._read_tickets))
            for _ in range(n_write):
                self._lanes.append(self._open(_WRITE_LANE, self._write_tickets))
        except RuntimeError as e:
            self.stop()
            raise bad_option(
                "n_read_threads",
                f"and n_write_threads ask for {n_read + n_write} threads, of which the system "
                f"starts {len(self._lanes)} ({e}): give less",
            ) from e

    def put(self, work: Work) -> None:
        """Queue ``work`` behind its equals. Never waits."""
        self._queues[work.priority].append(work)
        self._write_tickets.put(None)
        if work.priority in _READ_LANE:
            self._read_tickets.put(None)

    def abandon(self, work: Work) -> bool:
        """Replace the lane that hangs in ``work``; False if none does or too many hang already.

        The hanging lane ends when its call returns, so that the number of working lanes stays.
        """
        lane = next((lane for lane in self._lanes if lane.work is work), None)
        self._retired = [r for r in self._retired if r.thread and r.thread.is_alive()]
        if lane is None or self._stopped or len(self._retired) >= self._max_replacements:
            return False
        try:
            replacement = self._open(lane.takes, lane.tickets)
        except RuntimeError as e:
            _log.warning("%s hangs and cannot be replaced: %s", lane.name, e)
            return False
        lane.retired = True
        self._lanes.remove(lane)
        self._retired.append(lane)
        self._lanes.append(replacement)
        return True

    def stop(self) -> None:
        """No lane starts anything more; those that hang end when their call returns."""
        self._stopped = True
        for lane in self._lanes:
            lane.tickets.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the lanes to end, at most ``timeout_s`` together; whether all did."""
        until = time.monotonic() + timeout_s
        threads = [lane.thread for lane in self._lanes + self._retired if lane.thread]
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _open(self, takes: tuple[Priority, ...], tickets: "SimpleQueue[None]") -> _Lane:
        role = "read" if takes == _READ_LANE else "write"
        lane = _Lane(f"{self._name}-{role}-{self._started}", takes, tickets)
        self._started += 1
        lane.thread = self._start(lambda: self._serve(lane), lane.name)
        return lane

    def _serve(self, lane: _Lane) -> None:
        while True:
            lane.tickets.get()
            if self._stopped or lane.retired:
                lane.tickets.put(None)  # it was meant for a lane that works
                return
            work = self._next(lane.takes)
            if work is None:
                continue
            lane.work = work  # before the claim: whoever loses the claim can find the lane
            try:
                if work.claim():
                    work.run()
            except BaseException:
                _log.exception("%s: a bug in kvtiers: work raised on a lane", lane.name)
            lane.work = None
            if lane.retired:
                return

    def _next(self, takes: tuple[Priority, ...]) -> Work | None:
        for priority in takes:
            try:
                return self._queues[priority].popleft()
            except IndexError:
                continue
        return None

    def check(self) -> None:
        """Raise AssertionError if there are more threads than allowed, or fewer lanes."""
        assert len(self._lanes) == self._n_lanes, "a lane is missing"
        alive = [r for r in self._retired if r.thread and r.thread.is_alive()]
        assert len(alive) <= self._max_replacements, "more replaced lanes than the bound"
        assert not any(lane.retired for lane in self._lanes), "a retired lane is in service"

    def __repr__(self) -> str:
        queued = sum(len(q) for q in self._queues.values())
        busy = sum(lane.work is not None for lane in self._lanes)
        return (
            f"<Lanes {self._name}: {busy}/{len(self._lanes)} busy, {queued} queued, "
            f"{len(self._retired)} replaced>"
        )
