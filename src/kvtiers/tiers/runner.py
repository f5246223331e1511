"""``StoreTier`` turns any ``ChunkStore`` into a ``SecondaryTierManager``.

The scheduler thread decides and never waits; lanes do. State is owned by the scheduler thread
alone: lanes touch a piece of work, the store, and the inbox through which they report.
"""

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from kvtiers.chunks import Key, Lookup, RequestContext
from kvtiers.errors import ConfigError, Kind, KVTiersError
from kvtiers.events import (
    ChunksFound,
    ChunksRemoved,
    ChunksStored,
    Event,
    MissReason,
    Reason,
    TierReachable,
)
from kvtiers.tiers.asking import Asking
from kvtiers.tiers.base import (
    ChunkStore,
    Circuit,
    Job,
    JobKind,
    JobOutcome,
    JobReleased,
    Standing,
    Usage,
)
from kvtiers.tiers.breaker import Breaker, State
from kvtiers.tiers.fullness import Fullness, Measurement
from kvtiers.tiers.jobs import Taken, split
from kvtiers.tiers.lanes import Inbox, Lanes, Removed, StartThread, start_daemon
from kvtiers.tiers.misses import LostToDamage, miss_of
from kvtiers.tiers.options import RunnerOptions
from kvtiers.tiers.presence import InstantPresence, Presence
from kvtiers.tiers.rechecking import Recheck, Rechecks
from kvtiers.tiers.scanning import Scan, StartUpScan
from kvtiers.tiers.work import Mover, Question, Transfer, ask, fault

_log = logging.getLogger("kvtiers")

_MAX_EVENTS = 65536
_CIRCUIT = {
    State.CLOSED: Circuit.CLOSED,
    State.TRIAL: Circuit.TRIAL,
    State.OPEN: Circuit.OPEN,
}
_GONE = {Kind.VANISHED: Reason.VANISHED, Kind.CORRUPT: Reason.CORRUPT}


@dataclass(frozen=True, slots=True)
class TierIdentity:
    """How a tier is called."""

    name: str
    """Its type, e.g. ``fs``."""
    label: str
    """Its name in events, e.g. ``1:fs``."""
    medium: str | None = None
    """``CPU`` or ``STORAGE``; None: its events are not for the engine's event stream."""
    locality: str | None = None
    told: bool = False
    """Whether anybody is told what was in it at the start, other than lookups."""


class StoreTier:
    """A secondary tier over a blocking store.

    ``inbox.removed`` must be the store's ``on_removed``. Raises ConfigError if threads lack.
    """

    def __init__(
        self,
        store: ChunkStore,
        identity: TierIdentity,
        options: RunnerOptions,
        inbox: Inbox,
        clock: Callable[[], float],
        start_thread: StartThread = start_daemon,
        total_bytes: Callable[[Sequence[Key]], int] | None = None,
    ) -> None:
        """``total_bytes``: of chunks together; None: nobody knows."""
        self.name, self.label = identity.name, identity.label
        self.medium, self.locality = identity.medium, identity.locality
        self.store = store
        self._options = options
        self._inbox = inbox
        self._clock = clock
        self._start_thread = start_thread
        self._exclusive = not store.capabilities.shared
        self._fullness = Fullness(store, inbox, clock, options.lookup_deadline_s)
        self._fullness.measure(clock())
        self._mover = Mover(store, inbox, clock, options.transfer_retries, self._fullness)
        self._total_bytes = total_bytes
        self._presence = self._make_presence()
        self._damaged = LostToDamage()
        self._breaker = Breaker(
            options.breaker_failures, options.breaker_cooldown_s, options.breaker_max_cooldown_s
        )
        self._jobs: dict[int, Taken] = {}
        self._by_deadline: dict[JobKind, OrderedDict[int, Taken]] = {
            kind: OrderedDict() for kind in JobKind
        }
        self._held = dict.fromkeys(JobKind, 0)
        """Bytes of host memory by the kind of the jobs that hold them."""
        self._asking = Asking(options.lookup_deadline_s)
        self._finished: list[JobOutcome | JobReleased] = []
        self._events: deque[Event] = deque(maxlen=_MAX_EVENTS)
        self._finding = False
        """Whether it was said that the start-up scan will find more."""
        self._touch_failed = False
        self._closed = False
        n_lanes = (options.n_read_threads, options.n_write_threads)
        name, n_spare = f"kvtiers-{self.label}", options.max_replacement_threads
        try:
            self._lanes = Lanes(*n_lanes, n_spare, name, start_thread)
        except ConfigError:
            self._close_store()
            raise
        self._rechecks = self._make_rechecks() if identity.told else None
        self._scan = StartUpScan(self.label, options.scan_deadline_s)
        # A store that answers at once is scanned for those only who are told of it.
        if store.capabilities.scan and (identity.told or not store.capabilities.instant):
            self._lanes.put(self._scan.begin(store, inbox, clock))

    def _make_presence(self) -> Presence | InstantPresence:
        ttl_s = self._options.negative_ttl_s
        if self.store.capabilities.instant:
            return InstantPresence(partial(ask, self.store), self._could_not_ask, ttl_s)
        total_bytes = self._total_bytes or (lambda keys: 0)
        return Presence(self._options.max_tracked_chunks, ttl_s, total_bytes)

    def _make_rechecks(self) -> Rechecks | None:
        presence, options = self._presence, self._options
        shared = isinstance(presence, Presence) and self.store.capabilities.shared
        if not shared or not options.recheck_s:
            return None
        return Rechecks(
            self.store,
            self.residents,
            self._inbox,
            self._clock,
            options.recheck_s,
            options.scan_deadline_s,
        )

    def _could_not_ask(self, error: KVTiersError) -> None:
        self._failed(self._clock(), str(error))

    def lookup(self, keys: Sequence[Key], request: RequestContext) -> list[Lookup]:
        """HIT or MISS from memory; RETRY while the store is asked."""
        if not self._inbox.empty():
            self._take_notes()
        now = self._clock()
        if self._closed or self._breaker.is_out(now):
            return [Lookup.MISS] * len(keys)
        find = self._presence.find
        verdicts = []
        for key in keys:
            known = find(key, now)
            if known is None:
                verdicts.append(self._asking.lookup(key, now))
            else:
                verdicts.append(Lookup.HIT if known else Lookup.MISS)
        return verdicts

    def why_missed(self, key: Key) -> MissReason:
        """Why a lookup of this chunk ends with MISS now."""
        now = self._clock()
        if self._closed or self._breaker.is_out(now):
            return MissReason.TIER_DOWN
        denied = self._presence.why_denied(key, now)
        if denied not in (None, MissReason.ABSENT):
            return denied
        if key in self._damaged:
            return MissReason.CORRUPT
        return MissReason.PENDING if key in self._asking else MissReason.ABSENT

    def peek(self, keys: Sequence[Key]) -> list[Lookup | MissReason]:
        """What a lookup would say now, without a trace of having asked. Any thread."""
        now = self._clock()
        if self._closed or self._breaker.is_out(now):
            return [MissReason.TIER_DOWN] * len(keys)
        if self.store.capabilities.instant:
            return [Lookup.RETRY] * len(keys)
        return [self._glimpse(key, now) for key in keys]

    def _glimpse(self, key: Key, now: float) -> Lookup | MissReason:
        known = self._presence.find(key, now)
        if known is None:
            return Lookup.RETRY
        return Lookup.HIT if known else self.why_missed(key)

    def ask_store(self, keys: Sequence[Key]) -> list[bool] | KVTiersError:
        """Ask the store itself, on the caller's thread. May block."""
        return ask(self.store, keys)

    def residents(self) -> list[Key]:
        """All that is known to be in the store. Any thread; a store that knows by itself may block.

        Raises KVTiersError.
        """
        if isinstance(self._presence, Presence):
            return self._presence.held
        return [entry.key for entry in self.store.scan()]

    def on_schedule_end(self) -> None:
        """Send what lookups gathered in this step, batched."""
        self._take_notes()
        if self._rechecks is not None and not self._closed:
            self._go_on_rechecking(self._rechecks, self._clock())
        batches = self._asking.gather()
        if not batches or self._closed:
            return
        now = self._clock()
        admitted = self._breaker.admit(now)
        for keys, deadline in batches:
            if admitted:
                question = Question(keys, deadline, self._presence.moment, self.store, self._inbox)
                self._asking.sent(question)
                self._lanes.put(question)
            else:
                self._asking.forget(keys)
                self._deny_unknown(keys, now, MissReason.TIER_DOWN)

    def _go_on_rechecking(self, rechecks: Rechecks, now: float) -> None:
        hung = rechecks.hung(now)
        if hung is not None:
            self._lanes.abandon(hung)
            self._failed(now, "chunks that are there were not asked for in time")
        if self._breaker.state is State.CLOSED:
            piece = rechecks.next(now, self._presence.moment)
            if piece is not None:
                self._lanes.put(piece)

    def _rechecked(self, rechecks: Rechecks, piece: Recheck) -> None:
        in_time = rechecks.took(piece)
        if isinstance(piece.gone, KVTiersError):
            if in_time:  # else that it hung was counted
                self._failed(self._clock(), str(piece.gone))
            return
        if in_time and not piece.first:  # the first asks nobody
            self._succeeded()
        if isinstance(self._presence, Presence):
            self._lost(self._presence.still_held(piece.gone, piece.since), Reason.VANISHED)

    def _answered(self, question: Question) -> None:
        in_time = self._asking.answered(question)
        answer, now = question.answer, self._clock()
        if isinstance(answer, KVTiersError):
            if in_time:
                self._deny_unknown(question.keys, now, MissReason.FAILED)
                self._failed(now, str(answer))
            return
        pairs = list(zip(question.keys, answer, strict=True))
        self._say_found(self._presence.add((key for key, there in pairs if there), question.since))
        if in_time:
            self._deny_unknown([key for key, there in pairs if not there], now)
            self._succeeded()

    def _deny_unknown(
        self, keys: Sequence[Key], now: float, why: MissReason = MissReason.ABSENT
    ) -> None:
        """What a write or the scan brought to light meanwhile is newer than a "no"."""
        self._presence.deny([key for key in keys if not self._presence.holds(key)], now, why)

    def submit_store(self, job: Job) -> bool:
        """Take a cascade unless unfinished ones hold too much memory or the tier is out."""
        held = self._held[JobKind.STORE]
        if held and held + job.views.nbytes > self._options.max_queued_store_bytes:
            return False
        todo = self._presence.lacks(job.keys)
        return self._submit(job, todo, self._options.store_deadline_s)

    def submit_load(self, job: Job) -> bool:
        """Take a promotion unless the tier is out."""
        return self._submit(job, range(len(job.keys)), self._options.load_deadline_s)

    def _submit(self, job: Job, todo: Sequence[int], deadline_s: float) -> bool:
        now = self._clock()
        if self._closed or (todo and not self._breaker.admit(now)):
            return False
        taken = Taken(job, now, now + deadline_s, job.views.nbytes)
        self._held[job.kind] += taken.held_bytes
        moving = set(todo)
        rest = [i for i in range(len(job.keys)) if i not in moving]
        taken.done.extend(job.keys[i] for i in rest)
        job.views.release(rest)
        pieces = self._pieces(taken, todo)
        taken.pieces.update(pieces)
        self._jobs[job.id] = taken
        self._by_deadline[job.kind][job.id] = taken
        for piece in pieces:
            self._lanes.put(piece)
        if not pieces:
            self._report(taken)
        return True

    def _pieces(self, taken: Taken, todo: Sequence[int]) -> list[Transfer]:
        options, job = self._options, taken.job
        lanes = options.n_write_threads
        if job.kind is JobKind.LOAD:
            lanes += options.n_read_threads
        share = max(1, lanes // (1 + len(self._by_deadline[job.kind])))  # others use them too
        parts = split(job.views.sizes, todo, share, options.min_slice_bytes)
        since = self._presence.moment
        return [Transfer(job, part, taken.deadline, since, self._mover) for part in parts]

    def _settle(self, piece: Transfer) -> None:
        self._learn(piece)
        taken = self._jobs.get(piece.job_id)
        if taken is None or piece not in taken.pieces:
            return
        taken.pieces.discard(piece)
        if not taken.reported:
            taken.merge(piece)
        if taken.pieces:
            return
        if taken.reported:
            self._forget(taken)
            self._finished.append(JobReleased(taken.job.id))
        else:
            self._report(taken)

    def _learn(self, piece: Transfer) -> None:
        """What the results say about where chunks are; true also when they come late."""
        failed = []
        good: Sequence[Key] = piece.keys
        if any(piece.results):
            pairs = list(zip(piece.keys, piece.results, strict=True))
            good = [key for key, error in pairs if error is None]
            failed = [(key, error) for key, error in pairs if error is not None]
        self._damaged.forget(good)
        if piece.kind is JobKind.LOAD:
            self._say_found(self._presence.add(good, piece.since))
        elif new := self._presence.announce(good, piece.since):
            self._events.append(ChunksStored(self.label, tuple(new)))
        if failed and piece.kind is JobKind.LOAD:
            for kind, reason in _GONE.items():
                self._lost([key for key, error in failed if error.kind is kind], reason)
            now = self._clock()
            for key, error in failed:
                self._presence.deny((key,), now, miss_of(error.kind))

    def _report(self, taken: Taken) -> None:
        """Give a job its one outcome; its memory is free unless a lane still runs a piece."""
        against = taken.fault()
        if against is not None:
            self._failed(self._clock(), str(against))
        elif taken.io_began is not None:
            self._succeeded()
        taken.reported = True
        del self._by_deadline[taken.job.kind][taken.job.id]
        self._finished.append(taken.outcome())
        if not taken.pieces:
            self._forget(taken)

    def _forget(self, taken: Taken) -> None:
        del self._jobs[taken.job.id]
        self._held[taken.job.kind] -= taken.held_bytes

    def get_finished_jobs(self) -> list[JobOutcome | JobReleased]:
        """What ended since the last call; jobs and lookups past their deadline end here."""
        self._take_notes()
        now = self._clock()
        self._expire(now)
        self._measure_at_rest(now)
        finished, self._finished = self._finished, []
        return finished

    def _expire(self, now: float) -> None:
        for jobs in self._by_deadline.values():
            while jobs:
                taken = next(iter(jobs.values()))
                if now < taken.deadline:
                    break
                self._time_out(taken)
        overdue = self._asking.overdue(now)
        for question in overdue:
            if not question.claim():
                self._lanes.abandon(question)
            self._deny_unknown(question.keys, now, MissReason.PENDING)
        if overdue:
            self._failed(now, "lookups were not answered in time")
        self._presence.expire(now)
        hung = self._scan.hung(now)
        if hung is not None and self._lanes.abandon(hung):
            self._scan.give_up()
            if self._finding:
                self._finding = False
                self._events.append(ChunksFound(self.label, ()))

    def _measure_at_rest(self, now: float) -> None:
        hung = self._fullness.hung(now)
        if hung is not None:
            self._lanes.abandon(hung)
        elif not self._fullness.pending:
            return
        elif self._closed or self._breaker.is_out(now):
            self._fullness.give_up()
        elif not any(self._by_deadline.values()) and (due := self._fullness.due(now)):
            self._lanes.put(due)

    def _time_out(self, taken: Taken) -> None:
        verb = taken.job.kind.value
        error = KVTiersError(
            f"{verb} job {taken.job.id} of {self.label} did not end within "
            f"{taken.deadline - taken.began:g} s",
            kind=Kind.TIMEOUT,
            operation=verb,
        )
        for piece in list(taken.pieces):
            taken.failed.update(dict.fromkeys(piece.keys, error))
            if taken.job.kind is JobKind.LOAD:
                self._presence.deny(piece.keys, self._clock(), MissReason.PENDING)
            if piece.claim():
                piece.release()
                taken.pieces.discard(piece)
            else:
                self._lanes.abandon(piece)
        self._report(taken)

    def _take_notes(self) -> None:
        for note in self._inbox.take():
            if isinstance(note, Transfer):
                self._settle(note)
            elif isinstance(note, Question):
                self._answered(note)
            elif isinstance(note, Removed):
                self._lost(note.keys, note.reason)
            elif isinstance(note, Scan):
                self._scanned(note)
            elif isinstance(note, Recheck) and self._rechecks is not None:
                self._rechecked(self._rechecks, note)
            elif isinstance(note, Measurement):
                self._fullness.took(note)

    def _scanned(self, piece: Scan) -> None:
        found = self._presence.scanned(piece.keys)
        following = self._scan.took(piece)
        if found or self._finding:
            self._finding = following is not None
            self._events.append(ChunksFound(self.label, tuple(found), not self._finding))
        if not self.store.capabilities.instant:
            self._presence.complete = self._scan.complete and self._exclusive
        if following is None:
            self._fullness.changed()
        elif not self._closed:
            self._lanes.put(following)

    def _say_found(self, keys: Sequence[Key]) -> None:
        if keys:
            self._events.append(ChunksFound(self.label, tuple(keys)))

    def _lost(self, keys: Iterable[Key], reason: Reason) -> None:
        gone = self._presence.discard(keys)
        self._fullness.changed()
        if reason is Reason.CORRUPT:
            self._damaged.add(gone)
        if gone:
            self._events.append(ChunksRemoved(self.label, tuple(gone), reason))

    def _failed(self, now: float, why: str) -> None:
        if self._breaker.failed(now):
            self._events.append(TierReachable(self.label, False))
            _log.error(
                "%s keeps failing and is left alone for %g s at first: %s",
                self.label,
                self._options.breaker_cooldown_s,
                why,
            )

    def _succeeded(self) -> None:
        if self._breaker.succeeded():
            self._events.append(TierReachable(self.label, True))
            self._fullness.changed()  # nobody measured meanwhile
            _log.info("%s works again", self.label)

    def touch(self, keys: Sequence[Key]) -> None:
        """Keep these longer, here and in the store."""
        self._presence.touch(keys)
        try:
            if not self._closed:
                self.store.touch(keys)
        except Exception as e:
            if not self._touch_failed:
                self._touch_failed = True
                _log.warning("%s: touch failed, said once: %s", self.label, fault("touch", e))

    def take_events(self) -> list[Event]:
        """Stored and removed since the last call, under the tier's label."""
        events = list(self._events)
        self._events.clear()
        return events

    def usage(self) -> Usage | None:
        """How full the store was a moment ago, if it says so; and what is known to be in it."""
        said = self._fullness.usage or Usage(None, None)
        if said.resident_bytes is None:
            said = said._replace(resident_bytes=self._resident_bytes())
        return None if said == Usage(None, None) else said

    def _resident_bytes(self) -> int | None:
        """Of the chunks that are known to be there, once those are that were before the start."""
        found = self._scan.complete or not self.store.capabilities.persistent
        return self._presence.resident_bytes if found and self._total_bytes else None

    def standing(self) -> Standing:
        """The breaker, jobs and the bytes that they hold."""
        jobs = sum(map(len, self._by_deadline.values()))
        return Standing(_CIRCUIT[self._breaker.state], jobs, sum(self._held.values()))

    def has_pending_work(self) -> bool:
        """Whether a job or a lookup is outstanding, an outcome not fetched, or use not measured.

        Memory that a hung lane still holds is not work: it may take for ever.
        """
        return bool(
            self._finished
            or self._asking
            or any(self._by_deadline.values())
            or self._fullness.pending
        )

    def drain_jobs(self, deadline_s: float) -> bool:
        """Wait until no job runs and no memory is in use; False if ``deadline_s`` passed first."""
        until = self._clock() + deadline_s
        while True:
            self._take_notes()
            self._expire(self._clock())
            if not self._jobs:
                return True
            left = until - self._clock()
            if left <= 0 or not self._inbox.wait(left):
                return False

    def shutdown(self, deadline_s: float) -> None:
        """Stop lanes and close the store, within ``deadline_s`` seconds. Idempotent."""
        if self._closed:
            return
        self._take_notes()
        self._closed = self._mover.stopping = True
        for taken in self._jobs.values():
            for piece in taken.pieces:
                if piece.claim():
                    piece.release()
        self._lanes.stop()
        began = self._clock()
        if not self._lanes.join(deadline_s):
            _log.warning("%s: a lane still hangs in the store at shutdown", self.label)
        left = max(0.0, deadline_s - (self._clock() - began))
        self._start_thread(self._close_store, f"kvtiers-{self.label}-close").join(left)
        self._jobs.clear()
        for jobs in self._by_deadline.values():
            jobs.clear()
        self._held = dict.fromkeys(JobKind, 0)
        self._asking.clear()

    def _close_store(self) -> None:
        try:
            self.store.close()
        except BaseException as e:
            _log.warning("%s: closing failed: %s", self.label, fault("close", e))

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant, if any."""
        self._presence.check()
        self._damaged.check()
        self._breaker.check()
        self._lanes.check()
        self._scan.check()
        if self._rechecks is not None:
            self._rechecks.check()
        self._fullness.check()
        for kind, held in self._held.items():
            jobs = [taken for taken in self._jobs.values() if taken.job.kind is kind]
            assert held == sum(t.held_bytes for t in jobs), "held bytes do not add up"
        unreported = {i for i, taken in self._jobs.items() if not taken.reported}
        timed = {i for jobs in self._by_deadline.values() for i in jobs}
        assert unreported == timed, "a job has no deadline, or a deadline no job"
        assert all(t.pieces for t in self._jobs.values()), "a finished job was not forgotten"
        self._asking.check()
        for taken in self._jobs.values():
            taken.check()

    def __repr__(self) -> str:
        hung = sum(taken.reported for taken in self._jobs.values())
        return (
            f"<StoreTier {self.label}: {len(self._presence)} chunks known, "
            f"{len(self._jobs) - hung} jobs, {hung} hung, {len(self._asking)} lookups, "
            f"{sum(self._held.values())} bytes held, {self._breaker.state.value}>"
        )
