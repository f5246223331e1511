"""Stores that do what a test tells them, and a tier over them that a test can step."""

import mmap
import threading
from collections.abc import Callable, Sequence
from typing import Any

from kvtiers.chunks import (
    ChunkLayout,
    GroupLayout,
    Key,
    Lookup,
    Namespace,
    RequestContext,
    make_key,
)
from kvtiers.errors import Kind, KVTiersError, Retry
from kvtiers.events import ChunksFound, Event, Reason
from kvtiers.tiers.base import (
    Capabilities,
    Entry,
    Item,
    Job,
    JobKind,
    JobOutcome,
    JobReleased,
    StoreContext,
)
from kvtiers.tiers.lanes import Inbox
from kvtiers.tiers.options import RunnerOptions
from kvtiers.tiers.runner import StoreTier, TierIdentity
from kvtiers.tiers.views import ChunkViews

CHUNK = 8192
NAMESPACE = Namespace({"model": "m", "format": 1})
LAYOUT = ChunkLayout((GroupLayout(0, CHUNK, 16),))
REQUEST = RequestContext("r")
EXCLUSIVE = Capabilities(persistent=True, shared=False)
SHARED = Capabilities(persistent=True, shared=True)


class ManualClock:
    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def key(n: int, group: int = 0) -> Key:
    return make_key(n.to_bytes(32, "big"), group)


def page_aligned(size: int = CHUNK) -> memoryview:
    return memoryview(mmap.mmap(-1, size))


def payload(n: int, size: int = CHUNK) -> bytes:
    return (n.to_bytes(4, "little") * (size // 4 + 1))[:size]


def filled(n: int, size: int = CHUNK) -> memoryview:
    view = page_aligned(size)
    view[:] = payload(n, size)
    return view.toreadonly()


def dead(view: memoryview) -> bool:
    try:
        len(view)
    except ValueError:
        return True
    return False


def context(
    removed: Callable[[Sequence[Key], Reason], None] = lambda keys, reason: None,
    *,
    namespace: Namespace = NAMESPACE,
    clock: Callable[[], float] | None = None,
    wall_clock: Callable[[], float] | None = None,
) -> StoreContext:
    return StoreContext(
        "test",
        "1:test",
        namespace,
        LAYOUT,
        clock or ManualClock(),
        wall_clock or ManualClock(1_700_000_000.0),
        removed,
    )


def error(kind: Kind = Kind.IO, retry: Retry = Retry.NEVER) -> KVTiersError:
    return KVTiersError("told to fail", kind=kind, retry=retry)


class ScriptedStore:
    """A dictionary that can be held (``hold``) and told to answer anything (``answers``)."""

    def __init__(self, capabilities: Capabilities = EXCLUSIVE, stored: Sequence[int] = ()) -> None:
        self.capabilities = capabilities
        self.chunks: dict[Key, bytes] = {key(n): payload(n) for n in stored}
        self.calls: list[tuple[str, tuple[Key, ...]]] = []
        self.answers: dict[str, Callable[[Sequence[Any]], Any]] = {}
        self.gates: dict[Any, threading.Event] = {}
        self.entered = threading.Semaphore(0)
        self.closed = 0

    def hold(self, what: Any) -> threading.Event:
        """Calls of an operation, or on a key, wait until the returned event is set."""
        self.gates[what] = threading.Event()
        return self.gates[what]

    def _enter(self, operation: str, keys: Sequence[Key]) -> Any:
        self.calls.append((operation, tuple(keys)))
        gates = [self.gates[w] for w in (operation, *keys) if w in self.gates]
        if gates:
            self.entered.release()
        for gate in gates:
            assert gate.wait(30)
        return self.answers.get(operation)

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        answer = self._enter("contains", keys)
        return answer(keys) if answer else [k in self.chunks for k in keys]

    def write(self, items: Sequence[Item]) -> list[KVTiersError | None]:
        answer = self._enter("write", [i.key for i in items])
        if answer:
            return answer(items)
        for item in items:
            self.chunks[item.key] = bytes(item.view)
        return [None] * len(items)

    def read(self, items: Sequence[Item]) -> list[KVTiersError | None]:
        answer = self._enter("read", [i.key for i in items])
        if answer:
            return answer(items)
        results: list[KVTiersError | None] = []
        for item in items:
            if item.key in self.chunks:
                item.view[:] = self.chunks[item.key]
            results.append(None if item.key in self.chunks else error(Kind.VANISHED))
        return results

    def delete(self, keys: Sequence[Key]) -> None:
        for k in keys:
            self.chunks.pop(k, None)

    def scan(self) -> list[Entry]:
        answer = self._enter("scan", [])
        return answer([]) if answer else [Entry(k, len(v), 0.0) for k, v in self.chunks.items()]

    def touch(self, keys: Sequence[Key]) -> None:
        answer = self._enter("touch", keys)
        if answer:
            answer(keys)

    def close(self) -> None:
        self.closed += 1

    def called(self, operation: str) -> list[tuple[Key, ...]]:
        return [keys for name, keys in self.calls if name == operation]


class Bench:
    """A tier, its store, and a clock; use as a context manager."""

    def __init__(
        self, store: Any, inbox: Inbox | None = None, *, told: bool = False, **options: Any
    ) -> None:
        self.store = store
        self.inbox = inbox or Inbox()
        self.clock = ManualClock()
        chosen = RunnerOptions(**{"n_read_threads": 1, "n_write_threads": 1, **options})
        identity = TierIdentity("fake", "1:fake", "STORAGE", "LOCAL", told)
        self.tier = StoreTier(store, identity, chosen, self.inbox, self.clock)
        self._ids = 0

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *_: object) -> None:
        for gate in getattr(self.store, "gates", {}).values():
            gate.set()
        self.tier.check()
        self.tier.shutdown(10)

    def scanned(self) -> "Bench":
        """Wait for the end of the start-up scan, which evicts and counts on its own."""
        if not self.store.capabilities.instant:
            self.until(lambda: self.tier._scan.complete)
        return self

    def job(self, kind: JobKind, ns: Sequence[int], size: int = CHUNK) -> Job:
        self._ids += 1
        make = filled if kind is JobKind.STORE else lambda n, size: page_aligned(size)
        views = tuple(make(n, size) for n in ns)
        keys, slots = tuple(key(n) for n in ns), tuple(range(len(ns)))
        return Job(self._ids, kind, keys, slots, ChunkViews.of(views))

    def store_job(self, *ns: int, size: int = CHUNK) -> Job:
        return self.job(JobKind.STORE, ns, size)

    def load_job(self, *ns: int, size: int = CHUNK) -> Job:
        return self.job(JobKind.LOAD, ns, size)

    def run(self, job: Job) -> JobOutcome:
        submit = self.tier.submit_store if job.kind is JobKind.STORE else self.tier.submit_load
        assert submit(job)
        assert self.tier.drain_jobs(20)
        (outcome,) = self.tier.get_finished_jobs()
        assert isinstance(outcome, JobOutcome)
        assert outcome.job_id == job.id
        return outcome

    def changes(self) -> list[Event]:
        """Events since the last call, without those that tell of what was there before."""
        return [e for e in self.tier.take_events() if not isinstance(e, ChunksFound)]

    def lookup(self, *ns: int) -> list[Lookup]:
        return self.tier.lookup([key(n) for n in ns], REQUEST)

    def resolve(self, *ns: int) -> list[Lookup]:
        """Step until nothing is RETRY."""
        while Lookup.RETRY in (verdicts := self.lookup(*ns)):
            self.tier.on_schedule_end()
            assert self.inbox.wait(20)
        return verdicts

    def until(self, reached: Callable[[], bool]) -> None:
        """Step the tier until ``reached``, woken by its lanes."""
        while not reached():
            assert self.inbox.wait(20)
            self.tier.on_schedule_end()

    def finished(self, count: int) -> list[JobOutcome | JobReleased]:
        """The next ``count`` results, once they are there."""
        found: list[JobOutcome | JobReleased] = []
        while len(found := found + self.tier.get_finished_jobs()) < count:
            assert self.inbox.wait(20)
        return found
