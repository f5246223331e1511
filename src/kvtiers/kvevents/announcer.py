"""The thread that tells of tiers, so that those on which things happen need not.

It takes notes of what happened, asks the engine's side what chunks consist of, and hands what is
to be said to an outlet.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from kvtiers.chunks import Key
from kvtiers.events import ChunksFound, ChunksRemoved, ChunksStored, Event, TierReachable
from kvtiers.kvevents.descriptions import Description
from kvtiers.kvevents.messages import KVEvent
from kvtiers.kvevents.narrator import Narrator
from kvtiers.kvevents.notes import (
    MAX_QUEUED,
    Captured,
    Flushed,
    Forgotten,
    Missed,
    Note,
    Notes,
)

_log = logging.getLogger("kvtiers")

CHUNKS_AT_ONCE = 64
"""After so many chunks others get the interpreter, if they want it."""

Materialize = Callable[[Any], tuple[Key, Description | None, bool]]
"""Of something captured: the key, what the chunk consists of (None: unknown by now), and whether
it is about to be stored. May raise."""


Residents = Callable[[str], Iterable[Key] | None]
"""Of a tier's label: all chunks that it holds, at any moment of the call; None: it cannot say so
now. Must not raise."""


class Outlet(Protocol):
    """Where events go. All calls come from the announcer's thread."""

    def room(self) -> int:
        """About how many chunks can be told of now; 0: none."""

    def say(self, events: Sequence[KVEvent]) -> None:
        """Pass these on, in this order. Must not block; raises OSError if it fails for good."""

    def serve(self, narrator: Narrator) -> float | None:
        """Do what is due apart from that; seconds until it is due again, None: never."""

    def close(self) -> None:
        """Nothing more will be said."""


_RESIDENCY = {ChunksStored, ChunksFound, ChunksRemoved, TierReachable}


class Announcer:
    """A sink of events. After a fault of its own it is silent, and says so in the log."""

    def __init__(
        self,
        narrator: Narrator,
        outlet: Outlet,
        materialize: Materialize,
        *,
        values: int = 1,
        max_queued: int = MAX_QUEUED,
    ) -> None:
        """``capture`` takes ``values`` at once: ``materialize`` gets a tuple of them.

        Beyond ``max_queued`` chunks that wait here, what is said is made up from ``residents``.
        """
        self.notes = Notes(max_queued, values=values)
        self.residents: Residents = lambda tier: None
        """To be set by who has the tiers, ``TieringManager.residents``; called on this thread. A
        chunk that it does not name is taken back, and told of when it is heard of again. If it says
        None, what was told stands, and it is asked again the next time that the queue was full."""
        self.wanted = narrator.wanted
        """Chunks that are there without a description."""
        self._narrator = narrator
        self._outlet = outlet
        self._materialize = materialize
        self._values = values
        self.capture = self.notes.capture
        self._busy = False
        self._seen = 0
        """How many notes were dealt with."""
        self._stop = False
        self._dead = False
        self._complained = False
        self._uncounted: set[str] = set()
        """Tiers of which something was missed, and that could not say what they hold."""
        self._waiters: list[threading.Event] = []
        self._thread = threading.Thread(target=self._run, name="kvtiers-events", daemon=True)
        self._thread.start()

    # -- on the threads where things happen ------------------------------------------------------

    def __call__(self, event: Event) -> None:
        """Take note of an event about residency; ignore others."""
        if self._dead or type(event) not in _RESIDENCY:
            return
        self.notes.put(event)

    def send_captured(self) -> None:
        """Pass on what was captured; what still comes meanwhile is passed on the next time."""
        self.notes.put_captured()

    @property
    def pending(self) -> bool:
        """Whether something is under way that was not handed to the outlet yet."""
        if self._dead:
            return False
        return self._busy or self._seen != self.notes.sent or self.notes.waiting

    def forgotten(self) -> None:
        """Readers were told to forget all: say it again."""
        self.notes.put_aside(Forgotten())

    def wake(self) -> None:
        """The outlet has room again."""
        self.notes.put_aside(None)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was noted before was said, as far as the outlet had room for it."""
        self.send_captured()
        done = threading.Event()
        self.notes.put_aside(Flushed(done))
        return done.wait(timeout_s) if not self._dead else False

    def close(self, timeout_s: float) -> None:
        """Say what there is to say, then stop. Twice is fine."""
        self.send_captured()
        self._stop = True
        self.notes.put_aside(None)
        self._thread.join(timeout_s)

    # -- on the thread of its own ----------------------------------------------------------------

    def _run(self) -> None:
        try:
            whole = self._recall()
            while whole and not (self._stop and not self.notes.waiting):
                self._turn()
        except Exception:  # the fence: events are an extra, the engine must not end for them
            self._dead = True
            _log.exception(
                "kvtiers failed to tell of its tiers and does so no more; "
                "the engine goes on. Please report the traceback."
            )
        finally:
            self._dead = True
            self.notes.close()
            for waiter in self._waiters:
                waiter.set()
            self._end()

    def _recall(self) -> bool:
        """Whether it was not stopped. What is noted meanwhile waits, as when readers are slow."""
        try:
            for count, _ in enumerate(self._narrator.recall(), start=1):
                if count % CHUNKS_AT_ONCE == 0:
                    if self._stop:
                        return False
                    time.sleep(0)
        except OSError as e:
            _log.warning("what described KV cache before cannot all be read, hashes must do: %s", e)
        return True

    def _end(self) -> None:
        for close in (self._outlet.close, self._narrator.close):
            try:
                close()
            except OSError as e:
                _log.warning("what describes KV cache was not all written: %s", e)

    def _turn(self) -> None:
        due_s = self._outlet.serve(self._narrator)
        speaking = self._narrator.pending and self._outlet.room() > 0
        took = self._take_next(0.0 if speaking else due_s)
        if missed := self.notes.overflow():
            self._make_up(missed)
        if self._narrator.pending and (room := self._outlet.room()) > 0:
            self._outlet.say(self._narrator.speak(min(room, CHUNKS_AT_ONCE)))
        self._busy = self._narrator.pending and self._outlet.room() > 0
        self._seen += took
        if not self._busy and not self.notes.waiting:
            self._keep()
            self._all_said()
        time.sleep(0)  # lets go of the interpreter

    def _keep(self) -> None:
        try:
            self._narrator.flush()
        except OSError as e:  # they are kept in memory, and told of; further ones have no room
            self._complain(e)

    def _take_next(self, timeout_s: float | None) -> int:
        """Deal with the next note, if there is one in time; how many there were."""
        try:
            note = self.notes.get(timeout_s)
        except queue.Empty:
            return 0
        self._take(note)
        return 1

    def _take(self, note: Note | Missed) -> None:
        if isinstance(note, Captured):
            self._describe(note.values)
        elif isinstance(note, Flushed):
            self._waiters.append(note.done)
        elif isinstance(note, Forgotten):
            self._narrator.renew()
        elif isinstance(note, Missed):
            self._recount(note.tier)
        elif note is not None:
            self._narrator.take(note)

    def _make_up(self, notes: Iterable[Event | Missed]) -> None:
        again, self._uncounted = self._uncounted, set()
        for note in notes:
            if isinstance(note, Missed):
                again.discard(note.tier)
            self._take(note)
        for tier in sorted(again):
            self._recount(tier)

    def _recount(self, tier: str) -> None:
        """What was noted since the queue is open again comes after it, known already or not."""
        residents = self.residents(tier)
        if residents is None:
            self._uncounted.add(tier)
            return
        steps = self._narrator.recount(tier, residents)
        for count, _ in enumerate(steps, start=1):
            if count % CHUNKS_AT_ONCE == 0:
                time.sleep(0)

    def _all_said(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.set()

    def _describe(self, values: Iterable[Any]) -> None:
        sources = zip(*[iter(values)] * self._values, strict=True)
        for count, source in enumerate(sources, start=1):
            try:
                key, description, expected = self._materialize(source)
                if description is not None:
                    self._narrator.describe(key, description, expected=expected)
            except (ValueError, OSError, LookupError, TypeError, AssertionError) as e:
                self._complain(e)
            if count % CHUNKS_AT_ONCE == 0:
                time.sleep(0)

    def _complain(self, error: Exception) -> None:
        if not self._complained:
            self._complained = True
            _log.warning("a chunk cannot be described, said once: %s", error)

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant. Only between ``flush`` and news."""
        self.notes.check()
        if not self._dead:
            self._narrator.check()

    def __repr__(self) -> str:
        state = " silent" if self._dead else ""
        return f"<Announcer{state} {self._narrator!r} {self.notes!r}>"
