"""A tier over a store, with lanes that a test works by hand: at random, checked at every step.

What a lane does falls in two: it takes a piece of work up, and ends it. Anything may happen in
between - deadlines pass, the store loses chunks, others write - so that every piece can hang.
"""

from collections import Counter
from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtiers.chunks import Lookup, RequestContext, make_key
from kvtiers.errors import Kind, KVTiersError, Retry
from kvtiers.events import ChunksRemoved, Reason, TierReachable
from kvtiers.testing import ManualClock, content
from kvtiers.tiers import runner
from kvtiers.tiers.base import Capabilities, Circuit, Entry, Job, JobKind, JobOutcome
from kvtiers.tiers.lanes import Inbox
from kvtiers.tiers.options import RunnerOptions
from kvtiers.tiers.runner import StoreTier, TierIdentity
from kvtiers.tiers.views import ChunkViews
from kvtiers.tiers.work import Question, Transfer

BYTES = 16
KEYS = [make_key(bytes([n]) * 8, 0) for n in range(8)]
RIGHT = {key: content(key, BYTES) for key in KEYS}
REQUEST = RequestContext("model")
KINDS = (Kind.IO, Kind.FULL, Kind.CORRUPT, Kind.VANISHED, Kind.CLOSED)
OPTIONS = RunnerOptions(min_slice_bytes=1, max_queued_store_bytes=5 * BYTES)
DEADLINES = {JobKind.STORE: OPTIONS.store_deadline_s, JobKind.LOAD: OPTIONS.load_deadline_s}
some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=5, unique=True)


class HandLanes:
    """Work that waits for a lane, and work that one is at."""

    def __init__(self, n_read, n_write, max_replacements, name, start):
        self.queued, self.running = [], []

    def put(self, work):
        self.queued.append(work)

    def take_up(self, work):
        self.queued.remove(work)
        if work.claim():
            self.running.append(work)

    def end(self, work):
        self.running.remove(work)
        work.run()

    def abandon(self, work):
        return work in self.running

    def stop(self):
        self.queued.clear()

    def join(self, timeout_s):
        return not self.running

    def check(self):
        assert len(set(map(id, self.queued))) == len(self.queued), "work is queued twice"


class ModelStore:
    """A dictionary whose next call fails as told."""

    def __init__(self, inbox, shared, held):
        self.capabilities = Capabilities(persistent=True, shared=shared)
        self.held = {key: RIGHT[key] for key in held}
        self.failing, self.retry, self.raising = {}, Retry.NEVER, False
        self.wrote, self.crowded = set(), False
        """What was ever written; and whether it leaves at once for others."""
        self._gone = inbox.removed

    def contains(self, keys):
        self._maybe_raise()
        return [key in self.held for key in keys]

    def write(self, items):
        self._maybe_raise()
        return [self._error(item.key) or self._write(item) for item in items]

    def _write(self, item):
        assert bytes(item.view) == RIGHT[item.key], "the memory of a store was reused"
        self.held[item.key] = bytes(item.view)
        self.wrote.add(item.key)
        if self.crowded:
            self.lose(item.key, Reason.EVICTED)

    def read(self, items):
        self._maybe_raise()
        return [self._error(item.key) or self._read(item) for item in items]

    def _read(self, item):
        if item.key not in self.held:
            return self.lose(item.key, Reason.VANISHED)
        item.view[:] = self.held[item.key]
        return None

    def lose(self, key, reason):
        self.held.pop(key, None)
        self._gone([key], reason)
        kind = Kind.CORRUPT if reason is Reason.CORRUPT else Kind.VANISHED
        return KVTiersError("lost", kind=kind)

    def scan(self):
        self._maybe_raise()
        return [Entry(key, BYTES, 0.0) for key in self.held]

    def touch(self, keys):
        pass

    def close(self):
        self.closed = True

    def _maybe_raise(self):
        if self.raising:
            raise RuntimeError("told to raise")

    def _error(self, key):
        kind = self.failing.get(key)
        if kind is Kind.CORRUPT:
            return self.lose(key, Reason.CORRUPT)
        return kind and KVTiersError("told to fail", kind=kind, retry=self.retry)


class Given:
    """A job that was taken, and the memory behind it."""

    def __init__(self, number, kind, keys, now):
        store = kind is JobKind.STORE
        self.memory = {k: bytearray(RIGHT[k] if store else BYTES) for k in keys}
        buffers = list(self.memory.values())

        def cut(i):
            view = memoryview(buffers[i])
            return view.toreadonly() if store else view

        views = ChunkViews(cut, [BYTES] * len(keys))
        self.job = Job(number, kind, tuple(keys), tuple(range(len(keys))), views, REQUEST)
        self.deadline = now + DEADLINES[kind]
        self.outcome = None

    def scribble(self):
        """The memory is somebody else's now."""
        for buffer in self.memory.values():
            buffer[:] = b"\x3c" * BYTES
            buffer.append(0)  # BufferError if somebody still has a view


class Machine(RuleBasedStateMachine):
    tier = None

    @initialize(
        shared=st.booleans(),
        held=st.sets(st.sampled_from(KEYS), max_size=3),
        tracked=st.sampled_from((3, len(KEYS))),
    )
    def begin(self, shared, held, tracked):
        self.clock, inbox = ManualClock(), Inbox()
        self.store = ModelStore(inbox, shared, held)
        self.ever_held = set(held)
        self.unsure = set(held) if tracked == len(KEYS) else set(KEYS)
        """Chunks of which the events do not tell all: others', or more than are tracked."""
        self.said_stored, self.taken_away = set(), set()
        """What the events say is there; and what others took away, of which nobody told."""
        self.open, self.lingering, self.free = {}, {}, []
        self.asked, self.replayed, self.jobs = {}, Counter(), 0
        identity = TierIdentity("model", "1:model", "STORAGE", "LOCAL")
        lanes, runner.Lanes = runner.Lanes, HandLanes
        try:
            options = replace(OPTIONS, max_tracked_chunks=tracked)
            self.tier = StoreTier(self.store, identity, options, inbox, self.clock, run_at_once)
        finally:
            runner.Lanes = lanes
        self.lanes = self.tier._lanes

    # -- the core --------------------------------------------------------------------------------

    @rule(keys=some_keys)
    def look_up(self, keys):
        for key, verdict in zip(keys, self.tier.lookup(keys, REQUEST), strict=True):
            if verdict is Lookup.RETRY:
                since = self.asked.setdefault(key, self.clock())
                waited = self.clock() - since
                assert waited < OPTIONS.lookup_deadline_s, "a lookup waits beyond its deadline"
            else:
                self.asked.pop(key, None)
                assert verdict is Lookup.MISS or key in self.ever_held, "found, but never there"

    @rule()
    def end_step(self):
        self.tier.on_schedule_end()
        if self.tier.standing().circuit is Circuit.OPEN:
            self.asked.clear()  # nothing is asked of it: what was gathered is a miss

    @rule(keys=some_keys)
    def cascade(self, keys):
        self.submit(JobKind.STORE, keys)

    @rule(keys=some_keys)
    def promote(self, keys):
        self.submit(JobKind.LOAD, keys)

    def submit(self, kind, keys):
        self.jobs += 1
        given = Given(self.jobs, kind, keys, self.clock())
        tier = self.tier
        taken = (tier.submit_store if kind is JobKind.STORE else tier.submit_load)(given.job)
        if taken:
            self.open[self.jobs] = given
        return given if taken else None

    @rule()
    def take_finished(self):
        running = {w.job_id for w in self.lanes.running if isinstance(w, Transfer)}
        for ended in self.tier.get_finished_jobs():
            if isinstance(ended, JobOutcome):
                self.end_job(self.open.pop(ended.job_id), ended, ended.job_id in running)
            else:
                assert ended.job_id not in running, "released while a lane is at it"
                self.lingering.pop(ended.job_id).scribble()
        late = [i for i, g in self.open.items() if g.deadline <= self.clock()]
        assert not late, "jobs did not end by their deadline"
        assert self.lingering.keys() <= running, "memory is in nobody's use, yet not released"
        before = self.clock() - OPTIONS.lookup_deadline_s
        self.asked = {k: since for k, since in self.asked.items() if since > before}

    @rule()
    def drain(self):
        drained = self.tier.drain_jobs(0.0)
        self.take_finished()
        if drained:
            assert not self.open, "drained, but a job has not ended"
            assert not self.lingering, "drained, but memory is in use"

    def end_job(self, given, outcome, in_use):
        job = given.job
        assert outcome.memory_in_use == in_use, "in use, says the tier or the lane"
        ended = Counter(outcome.done) + Counter(list(outcome.failed))
        assert ended == Counter(job.keys), "done and failed do not divide the job"
        for key in outcome.done:
            assert given.memory[key] == RIGHT[key], f"{job.kind.value}: wrong bytes are done"
            assert key in self.ever_held, "done, but never there"
        if in_use:
            self.lingering[job.id] = given
        else:
            given.scribble()

    @rule(keys=some_keys)
    def touch(self, keys):
        self.tier.touch(keys)

    @rule()
    def take_events(self):
        for event in self.tier.take_events():
            if isinstance(event, TierReachable):
                continue
            change = -1 if isinstance(event, ChunksRemoved) else 1
            for key in event.keys:
                self.replayed[key] += change
                (self.said_stored.add if change == 1 else self.said_stored.discard)(key)
                good = self.replayed[key] in (0, 1) or key in self.unsure
                assert good, "stored twice, or removed and never stored"

    # -- the lanes and the store -----------------------------------------------------------------

    @rule(data=st.data())
    def take_up(self, data):
        if self.lanes.queued:
            self.lanes.take_up(data.draw(st.sampled_from(self.lanes.queued)))

    @rule(data=st.data(), failing=st.dictionaries(st.sampled_from(KEYS), st.sampled_from(KINDS)))
    def end_work(self, data, failing):
        if self.lanes.running:
            self.store.failing = failing
            self.store.retry = data.draw(st.sampled_from(Retry))
            self.store.raising = data.draw(st.integers(0, 9)) == 0
            self.store.crowded = data.draw(st.integers(0, 4)) == 0
            self.end(data.draw(st.sampled_from(self.lanes.running)))

    @rule()
    def work_well(self):
        """All lanes come to an end, and nothing fails."""
        self.store.failing, self.store.raising, self.store.crowded = {}, False, False
        while self.lanes.queued:
            self.lanes.take_up(self.lanes.queued[0])
        while self.lanes.running:
            self.end(self.lanes.running[0])

    def end(self, work):
        if isinstance(work, Question):
            for key in work.keys:
                self.asked.pop(key, None)  # an answer came, though maybe too late
        self.lanes.end(work)
        self.ever_held |= self.store.wrote

    @rule(seconds=st.sampled_from((0.01, 0.6, 2.0, 6.0, 31.0, 61.0)))
    def pass_time(self, seconds):
        self.clock.advance(seconds)

    @rule(key=st.sampled_from(KEYS))
    def make_room(self, key):
        if key in self.store.held:
            self.store.lose(key, Reason.EVICTED)

    @rule(key=st.sampled_from(KEYS), comes=st.booleans())
    def somebody_else(self, key, comes):
        """Adds or removes a chunk of a shared store, and tells nobody."""
        if self.store.capabilities.shared and comes:
            self.store.held[key] = RIGHT[key]
            self.ever_held.add(key)
            self.unsure.add(key)
        elif self.store.capabilities.shared:
            self.store.held.pop(key, None)
            self.taken_away.add(key)

    # -- what must hold --------------------------------------------------------------------------

    @invariant()
    def is_sound(self):
        if self.tier is not None:
            self.tier.check()
            if self.open or self.asked:
                assert self.tier.has_pending_work(), "the engine may rest, but something waits"

    def teardown(self):
        """All answer again: everything ends, and every chunk can be stored, found and loaded."""
        if self.tier is None:
            return
        self.come_to_rest()
        assert not self.open
        assert not self.lingering
        self.take_events()
        gone = self.said_stored - self.store.held.keys() - self.taken_away
        assert not gone, "said to be stored, and gone"
        for kind in (JobKind.STORE, JobKind.LOAD):
            for key in KEYS:
                assert self.submit(kind, [key]), "an idle tier refuses"
                self.come_to_rest(expected=key)
        self.take_events()
        self.tier.shutdown(1.0)
        assert self.store.closed
        assert not self.tier.has_pending_work()

    def come_to_rest(self, expected=None):
        given = list(self.open.values())[-1:] if expected else []
        for _ in range(20):
            self.work_well()
            self.take_finished()
            self.end_step()
            self.is_sound()
            if not expected:
                self.clock.advance(120)  # beyond every denial and cooldown
            if not self.tier.has_pending_work() and not self.lanes.queued:
                break
        else:
            raise AssertionError(f"{self.tier!r} does not come to rest")
        for one in given:
            assert one.memory[expected][:BYTES] == b"\x3c" * BYTES, "no outcome"


def run_at_once(target, name):
    class Ended:
        def join(self, timeout_s):
            pass

    target()
    return Ended()


TestRunner = Machine.TestCase
TestRunner.settings = settings(
    max_examples=60,
    stateful_step_count=60,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
