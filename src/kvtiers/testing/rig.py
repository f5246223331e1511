"""A tier under test, driven as the core drives one."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol

from kvtiers.chunks import Key, Lookup, Namespace, RequestContext
from kvtiers.events import ChunksRemoved, ChunksStored, Event
from kvtiers.testing.laws import must
from kvtiers.testing.values import LAYOUT, ManualClock, Slots, chunk
from kvtiers.tiers.base import (
    EmitsEvents,
    FollowsSteps,
    Job,
    JobKind,
    JobOutcome,
    JobReleased,
    SecondaryTierManager,
    StoreContext,
)
from kvtiers.tiers.views import ChunkViews

REQUEST = RequestContext("laws")


class Held(Protocol):
    """What a tier stands on, made to hang."""

    def wait_until_held(self, patience_s: float) -> None:
        """Wait until an operation hangs. Raises LawBroken if none does in that time."""

    def release(self) -> None:
        """Nothing hangs any more."""


@dataclass(slots=True)
class TierEnvironment:
    """What a tier is given."""

    namespace: Namespace
    clock: ManualClock = field(default_factory=ManualClock)
    wall: ManualClock = field(default_factory=lambda: ManualClock(1_700_000_000.0))

    def context(self) -> StoreContext:
        """The context to build the tier with."""
        return StoreContext(
            "laws", "1:laws", self.namespace, LAYOUT, self.clock, self.wall, lambda keys, why: None
        )


@dataclass(slots=True)
class Given:
    """A job and the memory behind its views."""

    job: Job
    slots: Slots

    @property
    def keys(self) -> tuple[Key, ...]:
        """Its chunks."""
        return self.job.keys


class Rig:
    """One open tier, its jobs, and what it reported."""

    def __init__(
        self,
        tier: SecondaryTierManager,
        environment: TierEnvironment,
        pause: Callable[[SecondaryTierManager], None],
        patience_s: float,
    ) -> None:
        self.tier = tier
        self.clock = environment.clock
        self.events: list[Event] = []
        self._pause = pause
        self._patience_s = patience_s
        self._next_id = 0

    # -- jobs -----------------------------------------------------------------------------------

    def store_job(self, names: Sequence[Key]) -> Given:
        """A cascade of chunks with their right bytes."""
        return self._job(JobKind.STORE, Slots.filled(names))

    def load_job(self, names: Sequence[Key]) -> Given:
        """A promotion."""
        return self._job(JobKind.LOAD, Slots(names))

    def _job(self, kind: JobKind, slots: Slots) -> Given:
        self._next_id += 1
        views = ChunkViews.of(slots.views(writable=kind is JobKind.LOAD))
        places = tuple(range(len(views)))
        return Given(Job(self._next_id, kind, slots.keys, places, views, REQUEST), slots)

    def submit(self, given: Given) -> bool:
        """Offer a job."""
        job = given.job
        submit = self.tier.submit_store if job.kind is JobKind.STORE else self.tier.submit_load
        return submit(job)

    def take(self, *given: Given) -> None:
        """Offer jobs that an idle tier has to take."""
        for one in given:
            must(self.submit(one), f"an idle tier refused a {one.job.kind.value} job")

    def run(self, given: Given) -> JobOutcome:
        """Run one job to its outcome, which must be the only thing that is reported."""
        self.take(given)
        return self.outcomes([given])[0]

    def outcomes(self, jobs: Sequence[Given]) -> list[JobOutcome]:
        """The outcomes of ``jobs``, in their order, when nothing is in flight any more."""
        self.drain()
        ended = self.finished()
        must(all(isinstance(e, JobOutcome) for e in ended), "memory was in use, without need")
        ids = Counter(e.job_id for e in ended)
        expected = Counter(g.job.id for g in jobs)
        must(ids == expected, f"jobs {sorted(expected)} were taken, {sorted(ids.elements())} ended")
        by_id = {e.job_id: e for e in ended if isinstance(e, JobOutcome)}
        return [checked(by_id[g.job.id], g) for g in jobs]

    def finished(self) -> list[JobOutcome | JobReleased]:
        """What ended since the last call."""
        ended = self.tier.get_finished_jobs()
        must(isinstance(ended, list), "get_finished_jobs returned no list")
        return ended

    def drain(self) -> None:
        """Wait until nothing is in flight."""
        must(self.tier.drain_jobs(self._patience_s), "drain_jobs was not done in time")

    def await_finished(self, count: int) -> list[JobOutcome | JobReleased]:
        """The next ``count`` results, in order."""
        found = self.finished()
        patience = self._patience("jobs do not end")
        while len(found) < count:
            patience()
            found += self.finished()
        return found

    # -- whole hops -----------------------------------------------------------------------------

    def store(self, names: Sequence[Key]) -> Slots:
        """Cascade ``names``; all must be done."""
        given = self.store_job(names)
        outcome = self.run(given)
        must(not outcome.failed, f"a cascade failed: {dict(outcome.failed)}")
        return given.slots

    def load(self, names: Sequence[Key]) -> JobOutcome:
        """Promote ``names``; what is done has the right bytes, nothing else was written."""
        given = self.load_job(names)
        outcome = self.run(given)
        must_be_right(given, outcome)
        return outcome

    def must_hold(self, names: Sequence[Key]) -> None:
        """All of ``names`` are found and come back bit for bit."""
        verdicts = self.resolve(names)
        must(verdicts == [Lookup.HIT] * len(names), f"chunks that were stored: {verdicts}")
        outcome = self.load(names)
        must(not outcome.failed, f"chunks that were stored do not load: {dict(outcome.failed)}")

    def must_lack(self, names: Sequence[Key]) -> None:
        """None of ``names`` is found."""
        verdicts = self.resolve(names)
        must(verdicts == [Lookup.MISS] * len(names), f"absent chunks: {verdicts}")

    def resolve(self, names: Sequence[Key]) -> list[Lookup]:
        """Look up, with steps between, until the tier has made up its mind."""
        patience = self._patience("a lookup does not resolve")
        while Lookup.RETRY in (verdicts := self.lookup(names)):
            self.step()
            patience()
        return verdicts

    def lookup(self, names: Sequence[Key]) -> list[Lookup]:
        """Checked to be one verdict per key, and one that a tier may give."""
        verdicts = self.tier.lookup(names, REQUEST)
        must(len(verdicts) == len(names), f"{len(verdicts)} verdicts for {len(names)} keys")
        good = {Lookup.HIT, Lookup.MISS, Lookup.RETRY}
        must(set(verdicts) <= good, f"a tier says HIT, MISS or RETRY, not {verdicts}")
        return list(verdicts)

    def step(self) -> None:
        """End a scheduler step."""
        if isinstance(self.tier, FollowsSteps):
            self.tier.on_schedule_end()

    def _patience(self, otherwise: str) -> Callable[[], None]:
        until = time.monotonic() + self._patience_s

        def wait() -> None:
            self._pause(self.tier)
            must(time.monotonic() < until, otherwise)

        return wait

    # -- events ---------------------------------------------------------------------------------

    def take_events(self) -> list[Event]:
        """Events since the last call; they are kept in ``events`` too."""
        if not isinstance(self.tier, EmitsEvents):
            return []
        events = self.tier.take_events()
        self.events += events
        return events

    def contents(self) -> Counter[Key]:
        """What the events so far say is stored: each key once, if they are right."""
        self.take_events()
        held: Counter[Key] = Counter()
        for event in self.events:
            if isinstance(event, ChunksStored):
                held.update(event.keys)
            elif isinstance(event, ChunksRemoved):
                held.subtract(event.keys)
        return held


def checked(outcome: JobOutcome, given: Given) -> JobOutcome:
    """``outcome``, which must divide the keys of the job into done and failed."""
    done, failed = Counter(outcome.done), Counter(list(outcome.failed))
    must(not done & failed, "a chunk is done and failed at once")
    whole = done + failed == Counter(given.keys)
    must(whole, "done and failed together are not the keys of the job")
    return outcome


def must_be_right(given: Given, outcome: JobOutcome) -> None:
    """The chunks of a load that are done have their bytes, and nothing outside was written."""
    given.slots.must_be_guarded()
    for i, name in enumerate(given.keys):
        right = name not in outcome.done or given.slots.holds(i) == chunk(name)
        must(right, f"{name.hex()} was delivered with wrong bytes")


@contextmanager
def stopping(rig: Rig) -> Iterator[Rig]:
    """Shut the tier down at the end, quietly if the law is broken already."""
    try:
        yield rig
    except BaseException:
        with suppress(Exception):
            rig.tier.shutdown(0.1)
        raise
    rig.tier.shutdown(rig._patience_s)
