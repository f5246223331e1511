"""The laws of secondary tiers (``kvtiers.tiers.base.SecondaryTierManager``)."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import ClassVar

from kvtiers.chunks import Key, Lookup, Namespace, OffloadPolicy, RequestContext
from kvtiers.errors import ConfigError, Kind
from kvtiers.events import ChunksRemoved, ChunksStored, Reason
from kvtiers.testing.laws import Holdings, Laws, hook, law, must
from kvtiers.testing.rig import Given, Held, Rig, TierEnvironment, checked, must_be_right, stopping
from kvtiers.testing.values import LAYOUT, NAMESPACE, OTHER_NAMESPACE, key, keys, near_misses
from kvtiers.tiers.base import (
    EmitsEvents,
    FollowsRequests,
    JobOutcome,
    JobReleased,
    SecondaryTierManager,
    StoreContext,
)

_SIZES = [group.group for group in LAYOUT.groups]
_NAMES = [key(n, group) for group in _SIZES for n in range(3)]


class TierLaws(Laws):
    """Subclass it, define the hooks, and name the class ``Test...`` for pytest.

    For a tier made of a chunk store take ``StoreTierLaws``, which has them all.
    """

    persistent: bool
    """Capability: chunks survive ``shutdown``."""
    deadline_s: ClassVar[float]
    """Every job and every lookup of the tier under test ends in this time, by its clock."""

    @hook
    def make(self, place: Path, context: StoreContext) -> SecondaryTierManager:
        """Hook: open a tier at ``place``. ``context.on_removed`` is not used."""
        raise NotImplementedError

    @hook
    def hold(self, tier: SecondaryTierManager) -> Held:
        """Hook: let every operation on what the tier stands on hang until it is released."""
        raise NotImplementedError

    @hook
    def peek(self, tier: SecondaryTierManager, name: Key) -> bytes | None:
        """Hook: the record of a chunk as it lies in storage, behind the API; None if absent."""
        raise NotImplementedError

    @hook
    def seed(self, tier: SecondaryTierManager, name: Key, record: bytes) -> None:
        """Hook: put ``record`` where that of ``name`` lies, behind the API."""
        raise NotImplementedError

    @hook
    def pause(self, tier: SecondaryTierManager) -> None:
        """Hook: wait until something may have changed. Polls, unless there is a better way."""
        threading.Event().wait(0.001)

    # -- bytes ----------------------------------------------------------------------------------

    @law("T1")
    def test_t1_what_was_cascaded_is_promoted(self, tmp_path: Path) -> None:
        """A chunk that was a MISS is a HIT once its cascade is done, and loads bit for bit."""
        with self._open(tmp_path) as rig:
            rig.must_lack(_NAMES[:2])
            rig.store(_NAMES)
            rig.must_hold(_NAMES[::-1])
            for name in _NAMES[::3]:
                rig.must_hold([name])

    @law("T2")
    def test_t2_keys_that_look_alike_never_meet(self, tmp_path: Path) -> None:
        """A key that differs in one bit, in its group or by a prefix is another chunk."""
        with self._open(tmp_path) as rig:
            name = key("x")
            rig.store([name])
            others = near_misses(name)
            rig.must_lack(others)
            rig.store(others)
            rig.must_hold([name, *others])

    @law("T3")
    def test_t3_every_taken_job_has_one_outcome(self, tmp_path: Path) -> None:
        """Done and failed divide its keys; nothing is reported twice, and nothing made up."""
        with self._open(tmp_path) as rig:
            must(rig.finished() == [], "something ended that was not begun")
            old = keys("old", "older", group=1)
            rig.store(old)
            jobs = [rig.store_job([name]) for name in _NAMES]
            jobs += [rig.store_job(_NAMES[:2]), rig.load_job([*old, key("absent")])]
            taken = [job for job in jobs if rig.submit(job)]
            must(taken, "an idle tier took nothing")
            outcomes = rig.outcomes(taken)
            must(rig.finished() == [], "an outcome was reported twice")
            for job, outcome in zip(taken, outcomes, strict=True):
                must_be_right(job, outcome)
            rig.must_hold(list({name: None for outcome in outcomes for name in outcome.done}))

    @law("T4")
    def test_t4_no_call_waits_for_the_medium(self, tmp_path: Path) -> None:
        """While it hangs, the scheduler's calls return; a lookup is decided by its deadline."""
        with self._open(tmp_path) as rig:
            rig.store(_NAMES[:2])
            names = [*_NAMES[:1], *keys("unknown")]
            with self._hanging(rig, "submit_store"):
                rig.submit(rig.store_job(keys("new")))
            with self._hanging(rig, "submit_load"):
                rig.submit(rig.load_job(_NAMES[:1]))
            with self._hanging(rig, "lookup"):
                rig.lookup(names)
                rig.step()
            with self._hanging(rig, "touch"):
                rig.tier.touch(names)
            with self._hanging(rig, "get_finished_jobs or take_events"):
                rig.submit(rig.load_job(_NAMES[:2]))
                rig.lookup(keys("another"))
                rig.step()
                rig.finished()
                rig.take_events()
                rig.clock.advance(self.deadline_s)
                rig.finished()
                verdict = rig.lookup(keys("another"))
                must(verdict == [Lookup.MISS], f"after its deadline a lookup is {verdict}")

    @law("T5")
    def test_t5_after_its_outcome_a_jobs_memory_is_the_cores(self, tmp_path: Path) -> None:
        """The tier neither reads nor writes it again, and keeps no export of it."""
        with self._open(tmp_path) as rig:
            stored = rig.store(_NAMES[:3])
            given = rig.load_job([*_NAMES[:3], key("absent")])
            rig.run(given)
            images = [stored.scribble(), given.slots.scribble()]
            for slots in (stored, given.slots):
                slots.must_be_free()
            rig.store(_NAMES[3:])
            rig.must_hold(_NAMES)
        for slots, image in zip((stored, given.slots), images, strict=True):
            must(slots.image() == image, "memory was touched after the outcome")

    @law("T6")
    def test_t6_a_job_touches_its_own_slots_only(self, tmp_path: Path) -> None:
        """A load writes into its views, a store into nothing; a failed chunk spoils no other."""
        with self._open(tmp_path) as rig:
            given = rig.store_job(_NAMES)
            before = given.slots.image()
            rig.run(given)
            must(given.slots.image() == before, "a cascade changed host memory")
            absent = keys("absent", "another", group=1)
            outcome = rig.load([absent[0], *_NAMES[:4], absent[1], *_NAMES[4:]])
            must(set(outcome.failed) == set(absent), "a failed chunk failed its neighbours")

    @law("T7")
    def test_t7_damage_is_never_done(self, tmp_path: Path) -> None:
        """A damaged, short or foreign record fails, its neighbours do not, and it is a MISS."""
        with self._open(tmp_path) as rig:
            names = keys(*range(6), group=1)
            rig.store(names)
            records = [self._record(rig, name) for name in names]
            bad = names[1::2]
            self.seed(rig.tier, bad[0], records[1][:-1] + bytes([records[1][-1] ^ 1]))
            self.seed(rig.tier, bad[1], records[3][: len(records[3]) // 2])
            self.seed(rig.tier, bad[2], records[0])
            outcome = rig.load(names)
            must(set(outcome.failed) == set(bad), f"these failed: {dict(outcome.failed)}")
            rig.must_lack(bad)
            rig.must_hold(names[::2])

    @law("T8")
    def test_t8_a_chunk_cascaded_twice_is_one_chunk(self, tmp_path: Path) -> None:
        """Jobs with the same key, at once or one after the other, leave one valid chunk."""
        with self._open(tmp_path) as rig:
            names = keys("a", "b", group=7)
            jobs = [rig.store_job(names) for _ in range(4)]
            rig.take(*jobs)
            for outcome in rig.outcomes(jobs):
                must(not outcome.failed, f"a second cascade failed: {dict(outcome.failed)}")
            rig.store(names)
            rig.must_hold(names)

    # -- time -----------------------------------------------------------------------------------

    @law("T9")
    def test_t9_drained_means_that_nothing_is_in_flight(self, tmp_path: Path) -> None:
        """``drain_jobs`` is True when no job runs, False at its deadline while one does."""
        with self._open(tmp_path) as rig:
            must(rig.tier.drain_jobs(0.01), "an idle tier is drained")
            with self._hanging(rig, "drain_jobs beyond its deadline"):
                job = rig.store_job(_NAMES[:2])
                rig.take(job)
                must(not rig.tier.drain_jobs(0.01), "drain_jobs is done while a job hangs")
                must(rig.finished() == [], "a job ended while it hangs")
            (outcome,) = rig.outcomes([job])
            must(not outcome.failed, "a job failed that only took its time")

    @law("T10")
    def test_t10_a_job_ends_by_its_deadline(self, tmp_path: Path) -> None:
        """It fails with ``TIMEOUT``; while its memory is in use it says so, and says when not."""
        with self._open(tmp_path) as rig:
            rig.store(_NAMES[:2])
            with self._hanging(rig, "get_finished_jobs") as held:
                jobs = [rig.load_job(_NAMES[:1]), rig.load_job(_NAMES[1:2])]
                jobs += [rig.store_job([name]) for name in _NAMES[2:8]]
                rig.take(*jobs)
                held.wait_until_held(self.patience_s)
                rig.clock.advance(self.deadline_s)
                in_use = self._must_have_timed_out(jobs, rig.finished())
                must(in_use, "memory is in use, and no outcome says so")
                idle = [job for job in jobs if job.job.id not in in_use]
                images = [job.slots.scribble() for job in idle]
                must(rig.finished() == [], "memory was released while it is in use")
            released = rig.await_finished(len(in_use))
            must(all(isinstance(r, JobReleased) for r in released), "a job ended twice")
            must(sorted(r.job_id for r in released) == sorted(in_use), "released other jobs")
            images += [job.slots.scribble() for job in jobs if job.job.id in in_use]
            idle += [job for job in jobs if job.job.id in in_use]
            rig.drain()
            must(rig.finished() == [], "a job was released twice")
        for job, image in zip(idle, images, strict=True):
            must(job.slots.image() == image, "memory was touched after it was free")

    # -- life -----------------------------------------------------------------------------------

    @law("T11")
    def test_t11_chunks_survive_shutdown_if_and_only_if_it_says_so(self, tmp_path: Path) -> None:
        """``persistent``: the next tier at this place has every chunk. Else it has none."""
        with self._open(tmp_path) as rig:
            rig.store(_NAMES)
        with self._open(tmp_path) as rig:
            if self.persistent:
                rig.must_hold(_NAMES)
            else:
                rig.must_lack(_NAMES)
            rig.store(keys("new"))
            rig.must_hold(keys("new"))

    @law("T12")
    def test_t12_namespaces_never_meet(self, tmp_path: Path) -> None:
        """A tier for another model or format at the same place finds and loads nothing of ours.

        It may be refused until ours has left the place.
        """
        names = _NAMES[:3]
        with self._open(tmp_path) as ours:
            ours.store(names)
            try:
                self._must_not_find(tmp_path, names)
            except ConfigError:
                pass
            else:
                ours.must_hold(names)
                return
        self._must_not_find(tmp_path, names)
        if self.persistent:
            with self._open(tmp_path) as ours:
                ours.must_hold(names)

    def _must_not_find(self, place: Path, names: Sequence[Key]) -> None:
        with self._open(place, OTHER_NAMESPACE) as theirs:
            theirs.must_lack(names)
            outcome = theirs.load(names)
            must(not outcome.done, "a chunk of another namespace was loaded")

    @law("T13")
    def test_t13_it_says_what_it_is_and_what_it_follows(self, tmp_path: Path) -> None:
        """Name, medium and locality are words the core knows; an optional ability is whole."""
        with self._open(tmp_path) as rig:
            tier = rig.tier
            must(isinstance(tier.name, str) and tier.name, "a tier has a name")
            must(tier.medium in ("CPU", "STORAGE", None), f"unknown medium {tier.medium!r}")
            must(tier.locality in ("LOCAL", "REMOTE", None), f"unknown locality {tier.locality!r}")
            pair = ("on_new_request", "on_request_finished")
            there = [hasattr(tier, name) for name in pair]
            must(there[0] == there[1], f"{' and '.join(pair)} come together or not at all")
            if isinstance(tier, FollowsRequests):
                request = RequestContext("another")
                policy = tier.on_new_request(request)
                must(isinstance(policy, OffloadPolicy), f"{policy!r} is no OffloadPolicy")
                tier.on_request_finished(request)
            tier.touch(keys("never seen"))
            must(rig.lookup([]) == [], "looking up nothing gives something")

    @law("T14")
    def test_t14_events_tell_what_is_stored(self, tmp_path: Path) -> None:
        """Replayed, they give the contents: stored once, removed once, with the reason."""
        with self._open(tmp_path) as rig:
            if not isinstance(rig.tier, EmitsEvents):
                return
            names = keys("a", "b", "c", group=1)
            rig.store(names)
            rig.store(names[:2])
            must(rig.contents() == dict.fromkeys(names, 1), "each stored chunk is said once")
            record = self._record(rig, names[0])
            self.seed(rig.tier, names[0], record[: len(record) // 2])
            rig.load(names)
            rig.step()
            left = +rig.contents()
            must(left == dict.fromkeys(names[1:], 1), "a chunk that was lost is said so, once")
            removed = [e for e in rig.events if isinstance(e, ChunksRemoved)]
            must([e.reason for e in removed] == [Reason.CORRUPT], f"removed: {removed}")
            kinds = (ChunksStored, ChunksRemoved)
            labels = {e.tier for e in rig.events if isinstance(e, kinds)}
            must(len(labels) == 1, f"events of one tier under {len(labels)} labels")

    @law("T15")
    def test_t15_after_shutdown_nothing_goes_on(self, tmp_path: Path) -> None:
        """Stopping twice is fine; then nothing is taken, found or reported, nor held."""
        holdings = Holdings()
        with self._open(tmp_path) as rig:
            rig.store(_NAMES[:2])
            rig.tier.shutdown(self.patience_s)
            rig.tier.shutdown(self.patience_s)
            must(not rig.submit(rig.store_job(keys("new"))), "a cascade was taken after shutdown")
            must(not rig.submit(rig.load_job(_NAMES[:1])), "a promotion was taken after shutdown")
            must(rig.lookup(_NAMES[:2]) == [Lookup.MISS] * 2, "a chunk is found after shutdown")
            rig.step()
            rig.tier.touch(_NAMES[:2])
            must(rig.finished() == [], "something ended after shutdown")
        holdings.must_be_back(self.patience_s)

    @law("T16")
    def test_t16_shutdown_does_not_wait_for_what_hangs(self, tmp_path: Path) -> None:
        """It returns by its deadline; jobs that did not end are not reported afterwards."""
        with self._open(tmp_path) as rig:
            rig.store(_NAMES[:2])
            with self._hanging(rig, "shutdown beyond its deadline") as held:
                rig.take(rig.load_job(_NAMES[:1]))
                held.wait_until_held(self.patience_s)
                rig.tier.shutdown(0.01)
            must(rig.finished() == [], "a job ended after shutdown")

    # -- inside ----------------------------------------------------------------------------------

    def _open(self, place: Path, namespace: Namespace = NAMESPACE) -> AbstractContextManager[Rig]:
        environment = TierEnvironment(namespace)
        tier = self.make(place, environment.context())
        return stopping(Rig(tier, environment, self.pause, self.patience_s))

    @contextmanager
    def _hanging(self, rig: Rig, what: str) -> Iterator[Held]:
        """Within, the medium hangs, and ``what`` must not wait for it."""
        held = self.hold(rig.tier)
        try:
            with self.watched(what, held.release):
                yield held
        finally:
            held.release()

    def _record(self, rig: Rig, name: Key) -> bytes:
        record = self.peek(rig.tier, name)
        must(record is not None, "peek finds nothing where a chunk was stored")
        return record or b""

    @staticmethod
    def _must_have_timed_out(
        jobs: Sequence[Given], ended: Sequence[JobOutcome | JobReleased]
    ) -> set[int]:
        """Ids of the jobs whose memory is said to be in use."""
        must(all(isinstance(e, JobOutcome) for e in ended), "released before it timed out")
        by_id = {e.job_id: e for e in ended if isinstance(e, JobOutcome)}
        must(len(by_id) == len(ended) == len(jobs), f"{len(jobs)} jobs, {len(ended)} outcomes")
        for job in jobs:
            outcome = checked(by_id[job.job.id], job)
            must(not outcome.done, "a job that hangs is done")
            kinds = {error.kind for error in outcome.failed.values()}
            must(kinds == {Kind.TIMEOUT}, f"a job that hangs fails with {kinds}, not TIMEOUT")
        return {i for i, outcome in by_id.items() if outcome.memory_in_use}
