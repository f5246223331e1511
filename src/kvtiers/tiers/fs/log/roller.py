"""How segments come and go: one more, or the oldest again, without what was used of it."""

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Sequence

from kvtiers.chunks import PAGE_BYTES, Key
from kvtiers.errors import KVTiersError
from kvtiers.events import Reason
from kvtiers.tiers.fs.log import format as fmt
from kvtiers.tiers.fs.log import survivors
from kvtiers.tiers.fs.log.core import LogCore, mapped
from kvtiers.tiers.fs.log.format import Header
from kvtiers.tiers.fs.log.pool import Run, Segment, State
from kvtiers.tiers.fs.log.segment import is_lost

_log = logging.getLogger("kvtiers")

_MAX_TOUCHED = 100_000
_TOUCH_PORTION = 8192
_NO_GROWTH_S = 30.0
"""After the disk was full, its own segments are used again for so long before it is asked."""


class Roller:
    """Finds room for every write, by making it where there is none. Any thread.

    What leaves, leaves by the segment, the oldest first; of what was used see ``survivors``.
    """

    def __init__(self, core: LogCore) -> None:
        self._core = core
        self._rolling = threading.Lock()
        """Held by the lane that makes another segment the active one."""
        self._preparing = threading.Lock()
        """Held by the lane that sees to a free segment, to whether the log may grow, and to what
        was said of that. Taken within ``_rolling``, as ``core.lock`` is within both, never around.
        """
        self._touched: deque[Key] = deque(maxlen=_MAX_TOUCHED)
        self._no_growth_until = 0.0
        self._cannot_grow: KVTiersError | None = None
        """Why it could not the last time; said once, until it did."""
        self._said_cannot_remove = False
        self._evicted: deque[Key] = deque()
        """Chunks that left and were not reported yet."""

    def touch(self, keys: Sequence[Key]) -> None:
        """These were used. Never waits."""
        self._touched.extend(keys)

    def note_uses(self) -> None:
        """Take in a portion of what was touched."""
        used = []
        with contextlib.suppress(IndexError):
            for _ in range(_TOUCH_PORTION):
                used.append(self._touched.popleft())
        if used:
            with self._core.lock:
                self._core.index.use(used)

    def make_room(self, wanted: Sequence[tuple[Key, int]]) -> tuple[Segment, Run]:
        """Room for at least the first of ``wanted`` - key, bytes -, in one segment.

        Raises KVTiersError if there is none to be had.
        """
        while True:
            seen = self._core.pool.active
            use = 0 if seen is None else seen.sequence
            found = self._core.find_room(wanted)
            if found is not None:
                return found
            self._roll(seen, use)

    def _roll(self, seen: Segment | None, use: int) -> None:
        """Begin another segment, or this one anew, unless that was done since its ``use``."""
        core, last = self._core, False
        try:
            with self._rolling:
                if core.pool.active is not seen or (seen is not None and seen.sequence != use):
                    return
                following = self._begin_another()
                with core.lock:
                    if seen is not None and core.pool.active is seen:
                        last = seen.fill()
                    core.pool.active = following
            if seen is not None and last:  # before anything may leave that was begun later
                core.seal(seen)
            with self._preparing:  # others may write to it meanwhile
                self.prepare()
        finally:
            self.report()

    def _begin_another(self) -> Segment:
        core = self._core
        following = self._spare()
        with core.lock:
            sequence = core.pool.next_sequence()
        created_at = core.context.wall_clock()
        self._write_header(following, self._header(following, sequence, created_at))
        with core.lock:
            following.begin(sequence, created_at)
        return following

    def _header(self, segment: Segment, sequence: int, created_at: float) -> bytes:
        namespace = self._core.context.namespace.id
        return fmt.pack_header(Header(sequence, segment.nbytes, created_at, namespace))

    def _write_header(self, segment: Segment, header: bytes) -> None:
        core = self._core
        try:
            core.files.write_pages(segment.number, 0, header)
        except OSError as e:
            with core.lock:
                if is_lost(e):
                    core.pool.forget(segment)
                else:
                    segment.give_back()
            raise core.failed("write", segment.number, e) from None

    def _spare(self) -> Segment:
        """Take a segment. If none was prepared the oldest one leaves without more ado."""
        spare = self._take_free()
        if spare is not None:
            return spare
        with self._preparing:
            return self._spare_at_once()

    def _spare_at_once(self) -> Segment:
        while (spare := self._take_free() or self._grow()) is None:
            victim = self._victim() or self._retire()
            if victim is None:
                raise self._in_use()
            try:
                self.empty(victim)
            except OSError as e:
                self._no_growth_until = 0.0  # it may take nothing at all: then ask again
                raise self._core.failed("write", victim.number, e) from None
            self._try_to_remove_misfits()
        return spare

    def _in_use(self) -> KVTiersError:
        """No segment may leave: of a disk that is broken it is not said that it is full."""
        if self._cannot_grow is None:
            return self._core.full("every segment is in use")
        return self._cannot_grow.with_traceback(None)

    def _retire(self) -> Segment | None:
        """The active segment if there is no other, and nobody writes to it: it follows itself."""
        core = self._core
        with core.lock:
            active = core.pool.active
            if active is None or len(core.pool.segments) > 1:
                return None
            core.pool.active = None
            last = active.fill()
        if last:
            core.seal(active)
        return self._victim()

    def _take_free(self) -> Segment | None:
        with self._core.lock:
            free = self._core.pool.free()
            if free is not None:
                free.take()
            return free

    def _has_free(self) -> bool:
        with self._core.lock:
            return self._core.pool.free() is not None

    def _victim(self) -> Segment | None:
        with self._core.lock:
            return self._core.pool.victim()

    def _grow(self) -> Segment | None:
        """Take one more segment; None if the capacity or the disk has no room."""
        core = self._core
        if core.context.clock() < self._no_growth_until:
            return None
        with core.lock:
            segment = core.pool.new()
        if segment is None:
            return None
        try:
            core.files.make(segment.number, segment.nbytes)
        except OSError as e:
            with core.lock:
                core.pool.forget(segment)
            if not core.pool.segments:
                raise core.failed("write", segment.number, e) from None
            self._no_growth_until = core.context.clock() + _NO_GROWTH_S
            self._say_cannot_grow(e, core.files.path(segment.number))
            return None
        self._say_grows()
        return segment

    def _say_cannot_grow(self, error: OSError, path: str) -> None:
        if self._cannot_grow is None:
            folder = self._core.files.folder
            _log.warning("%s cannot grow, so what it has is used again: %s", folder, error.strerror)
        self._cannot_grow = mapped("write", path, error)

    def _say_grows(self) -> None:
        if self._cannot_grow is not None:
            self._cannot_grow = None
            _log.info("%s grows again", self._core.files.folder)

    def prepare(self) -> None:
        """Have a free segment for the next time: the oldest leaves, what was used of it stays."""
        while not self._has_free():
            grown = self._grow()
            if grown is not None:
                with self._core.lock:
                    grown.give_back()
                return
            victim = self._victim()
            if victim is None:
                return
            try:
                self.empty(victim, survive=True)
            except OSError:
                return  # whoever needs a segment is told
            self._try_to_remove_misfits()
            if victim.state is State.DRAINING:  # somebody reads from it yet
                return

    def empty(self, victim: Segment, *, survive: bool = False) -> None:
        """Evict the chunks of ``victim``; ``survive``: but for some of those that were used.

        Raises OSError, and evicts nothing, if the disk does not take it that they leave.
        """
        core = self._core
        if survive:
            self.note_uses()
            survivors.write_again(core, victim)
        self._erase(victim)
        with core.lock:
            victim.leave()
            evicted = core.index.evict(victim.number, victim.keys)
            victim.emptied()
        self._evicted.extend(evicted)

    def report(self) -> None:
        """Say what was evicted since the last time; the listener is not waited for by others."""
        evicted = []
        with contextlib.suppress(IndexError):
            while True:
                evicted.append(self._evicted.popleft())
        if evicted:
            self._core.context.on_removed(evicted, Reason.EVICTED)

    def remove_misfits(self) -> None:
        """Delete what holds nothing and is of no use, so that the log may grow instead.

        Raises OSError; what could not be deleted is counted on.
        """
        core = self._core
        with core.lock:
            misfits = deque(core.pool.misfits())
            for segment in misfits:
                segment.take()
        try:
            while misfits:
                core.files.remove(misfits[0].number)
                with core.lock:
                    core.pool.forget(misfits.popleft())
                self._no_growth_until = 0.0
        finally:
            with core.lock:
                for segment in misfits:
                    segment.give_back()

    def _try_to_remove_misfits(self) -> None:
        try:
            self.remove_misfits()
        except OSError as e:
            if not self._said_cannot_remove:
                self._said_cannot_remove = True
                _log.warning("%s cannot be made smaller: %s", self._core.files.folder, e)

    def _erase(self, victim: Segment) -> None:
        """No later owner finds anything in it: what it holds may have been deleted elsewhere.

        The last use of all is followed by one that holds nothing: a number that no header tells
        would be given out again, and what was written under it would count again.
        """
        core = self._core
        with core.lock:
            following = core.pool.next_sequence() if core.pool.is_last(victim) else None
        page = bytes(PAGE_BYTES)
        if following is not None:
            page = self._header(victim, following, core.context.wall_clock())
        try:
            core.files.write_pages(victim.number, 0, page)
        except OSError as e:
            if not is_lost(e):
                raise
