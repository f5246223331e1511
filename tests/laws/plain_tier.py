"""An honest tier that the runner had no part in: one thread over a store, to be sabotaged."""

import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace
from queue import SimpleQueue

from kvtiers.chunks import Lookup
from kvtiers.errors import Kind, KVTiersError
from kvtiers.events import ChunksRemoved, ChunksStored
from kvtiers.testing import GatedStore, TierLaws
from kvtiers.tiers.base import Item, Job, JobKind, JobOutcome, JobReleased
from tests.laws.honest import HonestLaws

DEADLINE_S = 30.0


@dataclass(eq=False)
class Task:
    """A job, or without one a question about ``keys``."""

    keys: tuple
    deadline: float
    job: Job | None = None
    begun: bool = False
    over: bool = False
    answers: list = field(default_factory=list)


class PlainTier:
    name, label, medium, locality = "plain", "1:plain", None, None

    def __init__(self, open_store, clock):
        self.store = GatedStore(open_store(self.removed))
        self.clock = clock
        self.known = {}  # key -> whether it is there
        self.asked = {}  # key -> when it becomes a MISS
        self.tasks = {}  # of jobs, by id, while their memory is in use
        self.told, self.announced = [], set()
        self.ended, self.came = [], deque()
        self.closed = False
        self.lock, self.news = threading.Lock(), threading.Event()
        self.todo = SimpleQueue()
        self.thread = threading.Thread(target=self.serve, name="plain", daemon=True)
        self.thread.start()

    # -- the thread --------------------------------------------------------------------------------

    def serve(self):
        while (task := self.todo.get()) is not None:
            with self.lock:
                task.begun = not task.over
            if task.begun:
                try:
                    task.answers = self.act(task)
                except KVTiersError as e:
                    task.answers = [e] * len(task.keys)
                self.post(task)

    def act(self, task):
        if task.job is None:
            return self.store.contains(task.keys)
        items = [Item(k, v) for k, v in zip(task.keys, task.job.views, strict=True)]
        act = self.store.write if task.job.kind is JobKind.STORE else self.store.read
        return act(items)

    def removed(self, keys, reason):
        self.post(ChunksRemoved(self.label, tuple(keys), reason))

    def post(self, note):
        self.came.append(note)
        self.news.set()

    # -- the scheduler -----------------------------------------------------------------------------

    def lookup(self, keys, request):
        self.take_in()
        return [self.verdict(key) for key in keys]

    def verdict(self, key):
        if self.closed:
            return Lookup.MISS
        if key in self.known:
            return Lookup.HIT if self.known[key] else Lookup.MISS
        if key not in self.asked:
            self.asked[key] = self.clock() + DEADLINE_S
            self.todo.put(Task((key,), self.asked[key]))
        return Lookup.RETRY if self.clock() < self.asked[key] else Lookup.MISS

    def submit_store(self, job):
        return self.submit(job)

    def submit_load(self, job):
        return self.submit(job)

    def submit(self, job):
        if not self.closed:
            self.tasks[job.id] = Task(job.keys, self.clock() + DEADLINE_S, job)
            self.todo.put(self.tasks[job.id])
        return not self.closed

    def get_finished_jobs(self):
        self.take_in()
        self._expire(self.clock())
        ended, self.ended = self.ended, []
        return ended

    def take_in(self):
        for _ in range(len(self.came)):
            note = self.came.popleft()
            if isinstance(note, ChunksRemoved):
                self.forget(note)
            elif note.job is None:
                self.asked.pop(note.keys[0], None)
                self.known.setdefault(note.keys[0], note.answers == [True])
            elif not self.closed:
                self.settle(note, note.job)

    def forget(self, note):
        for key in note.keys:
            self.known.pop(key, None)
        gone = tuple(key for key in note.keys if key in self.announced)
        self.announced.difference_update(gone)
        if gone:
            self.told.append(note._replace(keys=gone))

    def settle(self, task, job):
        del self.tasks[job.id]
        done = tuple(k for k, e in zip(task.keys, task.answers, strict=True) if e is None)
        failed = {k: e for k, e in zip(task.keys, task.answers, strict=True) if e is not None}
        if job.kind is JobKind.STORE:
            self.known.update(dict.fromkeys(done, True))
            new = tuple(k for k in done if k not in self.announced)
            self.announced.update(new)
            self.told += [ChunksStored(self.label, new)] if new else []
        else:
            for key in failed:
                self.known.pop(key, None)
        self.ended.append(JobReleased(job.id) if task.over else JobOutcome(job.id, done, failed))

    def _expire(self, now):
        late = [t for t in self.tasks.values() if not t.over and now >= t.deadline]
        for task in late:
            with self.lock:
                task.over, in_use = True, task.begun
            if not in_use:
                del self.tasks[task.job.id]
            failed = dict.fromkeys(task.keys, KVTiersError("late", kind=Kind.TIMEOUT))
            self.ended.append(JobOutcome(task.job.id, (), failed, memory_in_use=in_use))

    def touch(self, keys):
        if not self.closed:
            self.store.touch(keys)

    def take_events(self):
        self.take_in()
        told, self.told = self.told, []
        return told

    def drain_jobs(self, deadline_s):
        until = time.monotonic() + deadline_s
        while True:
            self.news.clear()
            self.take_in()
            if not self.tasks:
                return True
            if not self.news.wait(max(0.0, until - time.monotonic())):
                return False

    def shutdown(self, deadline_s):
        if self.closed:
            return
        self.closed = True
        for task in self.tasks.values():
            with self.lock:
                task.over = True
        self.todo.put(None)
        self.thread.join(deadline_s)
        self.tasks.clear()
        self.store.close()


class PlainLaws(TierLaws):
    """The laws on the plain tier, or on what ``tier_type`` and ``store_laws`` name."""

    store_laws = HonestLaws
    tier_type = PlainTier
    deadline_s = DEADLINE_S

    def make(self, place, context):
        def open_store(removed):
            store = self.store_laws().make(place, replace(context, on_removed=removed))
            self.persistent = store.capabilities.persistent
            return store

        return self.tier_type(open_store, context.clock)

    def hold(self, tier):
        tier.store.hold()
        return tier.store

    def peek(self, tier, name):
        return self.store_laws().peek(tier.store.inner, name)

    def seed(self, tier, name, record):
        self.store_laws().seed(tier.store.inner, name, record)
