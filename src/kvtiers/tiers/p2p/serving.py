"""Serving: what peers want, from what the engine has, on a thread beside the scheduler's.

``Server`` decides and asks; it runs wherever ``step`` is called and reads no clock.
``ServingThread`` calls it: whenever something was posted, when chunks came into host memory, when
something expires, and every ``_POLL_S`` while a chunk that was asked for is on its way up or a tier
is still being asked - never otherwise.
"""

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from kvtiers.chunks import Key
from kvtiers.tiers.lanes import StartThread
from kvtiers.tiers.p2p.notes import (
    Demand,
    Finished,
    Gone,
    Local,
    Query,
    Sent,
    Stopped,
    ToServing,
)
from kvtiers.tiers.p2p.options import P2POptions
from kvtiers.tiers.p2p.parent import Parent
from kvtiers.tiers.p2p.protocol import Code, Role, Verdict
from kvtiers.tiers.p2p.wants import Outputs, Stage, Wants

_log = logging.getLogger("kvtiers")

_POLL_S = 0.002
_MAX_LOCALS = 4096
"""``remote_decoder`` requests that are remembered, the oldest first to go."""
_MAX_REQUESTS = 4096
"""Of one consumer, for which chunks are wanted or kept at once; for those beyond there are none."""
_SHARE = 0.75
"""Of a consumer's deadline: so that it gets an answer, if it has ours, and not silence."""
_NEVER = float("inf")


class Speaker(Protocol):
    """Takes what is to be said to peers to the I/O thread; see ``Guests``."""

    def answer(self, session: int, question: int, verdicts: dict[int, Verdict], last: bool) -> None:
        """Verdicts by place."""

    def push(self, session: int, transfer: int, chunks: Sequence[tuple[int, memoryview]]) -> None:
        """Chunks by place; a ``Sent`` comes back for each, or a ``Gone``."""

    def done(self, session: int, transfer: int, failed: dict[int, Code]) -> None:
        """Nothing more of it is pushed."""


@dataclass(slots=True, eq=False)
class _Open:
    """What one session wants, by request."""

    wants: dict[str, Wants] = field(default_factory=dict)
    transfers: dict[int, Wants] = field(default_factory=dict)
    """Whose each transfer is that is not done."""


class Server:
    """What all peers want."""

    def __init__(self, parent: Parent, speaker: Speaker, options: P2POptions) -> None:
        self._parent = parent
        self._speaker = speaker
        self._options = options
        self._sessions: dict[int, _Open] = {}
        self._locals: OrderedDict[str, bool] = OrderedDict()
        """``remote_decoder`` requests of this engine -> whether more of it may be stored."""

    def take(self, note: ToServing, now: float) -> None:
        """Take in what happened."""
        if isinstance(note, Local):
            self._local(note)
        elif isinstance(note, Query):
            self._query(note, now)
        elif isinstance(note, Demand):
            self._demand(note, now)
        elif isinstance(note, Gone):
            for name, wants in self._take_session(note.session).items():
                self._parent.end(_asker(note.session, name))
                wants.end()
        else:
            self._about_one(note, now)

    def _query(self, note: Query, now: float) -> None:
        wants = self._wants(note.session, note.request, note.role, now)
        if wants is None:
            absent = dict.fromkeys(range(len(note.keys)), Verdict.ABSENT)
            self._speaker.answer(note.session, note.question, absent, True)
            return
        wants.ask(note.question, note.keys, now + _SHARE * self._options.lookup_deadline_s)

    def _demand(self, note: Demand, now: float) -> None:
        wants = self._wants(note.session, note.request, note.role, now)
        if wants is None:
            busy = dict.fromkeys(range(len(note.keys)), Code.BUSY)
            self._speaker.done(note.session, note.transfer, busy)
            return
        options = self._options
        parks = note.role is Role.PREFILL
        wait_s = options.park_deadline_s if parks else _SHARE * options.load_deadline_s
        self._sessions[note.session].transfers[note.transfer] = wants
        wants.fetch(note.transfer, note.keys, now + wait_s)

    def _about_one(self, note: Sent | Stopped | Finished, now: float) -> None:
        session = self._sessions.get(note.session)
        if session is None:
            return
        if isinstance(note, Finished):
            wants = session.wants.get(note.request)
            if wants is not None:
                wants.keep(until=now)
            return
        wants = session.transfers.get(note.transfer)
        if wants is None:
            return
        if isinstance(note, Sent):
            wants.sent(note.transfer, note.places)
        else:
            wants.stop(note.transfer)

    def _local(self, note: Local) -> None:
        self._locals[note.request] = note.begins
        self._locals.move_to_end(note.request)
        while len(self._locals) > _MAX_LOCALS:
            self._locals.popitem(last=False)
        if note.begins:
            return
        for session in self._sessions.values():
            wants = session.wants.get(note.request)
            if wants is not None:  # nothing more will be computed: ask for the rest, once
                for key in _at(wants, Stage.PARKED):
                    wants.stages[key] = Stage.UNKNOWN

    def step(self, now: float) -> float:
        """Go on with everything; when to be called again, if nothing happens before."""
        again = _NEVER
        asked = False
        for number, session in self._sessions.items():
            for name, wants in list(session.wants.items()):
                if not wants.stages and now < wants.due:
                    again = min(again, wants.due)
                    continue
                wants.expire(now)
                asked |= self._go_on(number, name, wants)
                if wants.over:
                    self._parent.end(_asker(number, name))
                    del session.wants[name]
                else:
                    wants.due = wants.next()
                    again = min(again, wants.due)
        if asked:
            self._parent.advance()
            again = min(again, now + _POLL_S)
        return again

    def _go_on(self, session: int, name: str, wants: Wants) -> bool:
        """Ask for what is unknown, pin what came; whether to look again soon."""
        asker = _asker(session, name)
        self._pin(wants, list(wants.stages))
        keys = _at(wants, Stage.UNKNOWN, Stage.COMING)
        if not keys:
            self._parent.end(asker)
            return False
        room = max(0, self._parent.room)
        if keys[room:]:
            wants.no_room(keys[room:])
            keys = keys[:room]
        may_come = wants.role is Role.PREFILL and self._locals.get(name, True)
        verdicts = dict(zip(keys, self._parent.ask(keys, asker), strict=True))
        self._pin(wants, wants.told(verdicts, may_come=may_come))
        return bool(_at(wants, Stage.UNKNOWN, Stage.COMING))

    def _pin(self, wants: Wants, keys: Sequence[Key]) -> None:
        most = self._parent.max_keys
        for start in range(0, len(keys), most):
            pin = self._parent.pin(keys[start : start + most])
            if pin is not None:
                wants.pinned(pin)

    def _wants(self, session: int, name: str, role: Role, now: float) -> Wants | None:
        """What a consumer wants for a request; None: it wants too much at once."""
        known = self._sessions.setdefault(session, _Open()).wants
        wants = known.get(name)
        if wants is None:
            if len(known) >= _MAX_REQUESTS:
                return None
            wants = known[name] = Wants(role, self._outputs(session))
        wants.role = role
        wants.keep(until=now + self._options.hold_deadline_s)
        return wants

    def _outputs(self, session: int) -> Outputs:
        speaker = self._speaker
        return Outputs(
            partial(speaker.answer, session),
            partial(speaker.push, session),
            partial(self._done, session),
            self._parent.release,
        )

    def _done(self, session: int, transfer: int, failed: dict[int, Code]) -> None:
        self._sessions[session].transfers.pop(transfer, None)
        self._speaker.done(session, transfer, failed)

    def _take_session(self, session: int) -> dict[str, Wants]:
        found = self._sessions.pop(session, None)
        return {} if found is None else found.wants

    @property
    def waiting(self) -> bool:
        """Whether a chunk that comes into host memory may be wanted."""
        return any(
            wants.stages for session in self._sessions.values() for wants in session.wants.values()
        )

    def close(self) -> None:
        """Let go of everything."""
        for number in list(self._sessions):
            self.take(Gone(number), 0.0)

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        assert len(self._locals) <= _MAX_LOCALS, "more requests are remembered than may be"
        for session in self._sessions.values():
            assert len(session.wants) <= _MAX_REQUESTS, "more is wanted at once than may be"
            transfers = sum(wants.transfers for wants in session.wants.values())
            assert len(session.transfers) == transfers, "transfers do not add up"
            for wants in session.wants.values():
                wants.check()

    def __repr__(self) -> str:
        count = sum(len(session.wants) for session in self._sessions.values())
        return f"<Server {len(self._sessions)} sessions want chunks for {count} requests>"


def _asker(session: int, name: str) -> str:
    return f"{session}-{name}"


def _at(wants: Wants, *stages: Stage) -> list[Key]:
    return [key for key, stage in wants.stages.items() if stage in stages]


class ServingThread:
    """Runs a ``Server`` when there is something to do."""

    def __init__(
        self,
        server: Server,
        listen: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
        start_thread: StartThread,
    ) -> None:
        self._server = server
        self._clock = clock
        self._notes: deque[ToServing] = deque()
        self._woken = threading.Event()
        self._stopped = False
        self._awaiting = False
        """Whether a chunk that comes into host memory may be wanted."""
        listen(self._changed)
        self._thread = start_thread(self._run, "kvtiers-p2p-serve")

    def post(self, note: ToServing) -> None:
        """Leave a note. Any thread; never waits."""
        self._notes.append(note)
        self._woken.set()

    def stop(self, timeout_s: float) -> bool:
        """Let go of everything; whether that was done in time. Caller guarantees: nobody reads."""
        self._stopped = True
        self._woken.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _changed(self) -> None:
        if self._awaiting:
            self._woken.set()

    def _run(self) -> None:
        again = _NEVER
        while not self._stopped:
            left = again - self._clock()
            self._woken.wait(None if left == _NEVER else max(0.0, left))
            self._woken.clear()
            self._awaiting = True  # what comes from now on is not seen by this step for certain
            try:
                self._take_all()
                again = self._server.step(self._clock())
                self._awaiting = self._server.waiting
            except Exception:
                _log.exception("p2p: a bug in kvtiers: please report the traceback")
                again = self._clock() + 1.0
        try:
            self._take_all()
            self._server.close()
        except Exception:
            _log.exception("p2p: a bug in kvtiers: please report the traceback")

    def _take_all(self) -> None:
        for _ in range(len(self._notes)):
            try:
                self._server.take(self._notes.popleft(), self._clock())
            except Exception:  # the next one may let go of memory
                _log.exception("p2p: a bug in kvtiers: please report the traceback")

    def __repr__(self) -> str:
        return f"<ServingThread {len(self._notes)} notes, {self._server!r}>"
