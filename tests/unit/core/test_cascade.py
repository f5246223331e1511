from itertools import pairwise

import pytest

from kvtiers.errors import Kind
from kvtiers.events import ChunksDeclined, Hop, Reason, TransferFinished
from kvtiers.tiers.base import JobKind, JobOutcome, JobReleased
from tests.unit.core.core_harness import ScriptedTier, World, key, keys


def test_confirmed_chunks_go_to_every_tier_as_one_job_each() -> None:
    tiers = [ScriptedTier("a"), ScriptedTier("b")]
    world = World(slots=16, tiers=tiers)
    world.stored(keys(1, 2, 3))
    world.step()
    for tier in tiers:
        assert [j.keys for j in tier.jobs] == [tuple(keys(1, 2, 3))]
        assert tier.jobs[0].kind is JobKind.STORE
        assert all(view.readonly for view in tier.jobs[0].views)


def test_the_bytes_a_tier_sees_are_those_of_the_chunk() -> None:
    tier = ScriptedTier()
    world = World(tiers=[tier])
    world.stored(keys(1))
    world.step()
    tier.finish_all()
    assert tier.holds[key(1)].startswith(key(1))


def test_a_chunk_in_flight_is_not_evicted() -> None:
    tier = ScriptedTier()
    world = World(slots=1, tiers=[tier], cascade_max_pinned_fraction=1.0)
    world.stored(keys(1))
    world.step()
    assert world.manager.store(keys(2), world.request()).declined == keys(2)
    tier.finish_all()
    world.step()
    assert world.manager.store(keys(2), world.request("later")).keys == keys(2)


def test_cascades_pin_no_more_than_their_share() -> None:
    tier = ScriptedTier()
    world = World(slots=8, tiers=[tier], cascade_max_pinned_fraction=0.5)
    world.stored(keys(*range(8)))
    world.step()
    assert sum(len(j.keys) for j in tier.jobs) == 4
    assert world.manager.use.pinned == 4
    tier.finish_all()
    world.step()
    assert sum(len(j.keys) for j in tier.jobs) == 4


def test_what_a_tier_refuses_is_counted_and_offered_again() -> None:
    tier = ScriptedTier()
    tier.accepts = False
    world = World(tiers=[tier])
    world.stored(keys(1, 2))
    world.step()
    assert ChunksDeclined(Hop.CASCADE, "1:scripted", 2, Reason.PRESSURE) in world.events
    tier.accepts = True
    world.step(seconds=1.0)
    assert [j.keys for j in tier.jobs] == [tuple(keys(1, 2))]


def test_what_a_tier_refused_is_offered_at_once_when_one_of_its_jobs_ends() -> None:
    tier = ScriptedTier()
    world = World(tiers=[tier])
    world.stored(keys(1))
    world.step()
    tier.accepts = False
    world.stored(keys(2))
    for _ in range(8):
        world.step(seconds=10)
    tier.accepts = True
    tier.finish(tier.jobs[0])
    world.step()
    assert [j.keys for j in tier.jobs] == [tuple(keys(2))]


def test_a_chunk_evicted_before_its_cascade_is_counted_as_lost() -> None:
    tier = ScriptedTier()
    tier.accepts = False
    world = World(slots=2, tiers=[tier], cascade_max_pinned_fraction=1.0)
    world.stored(keys(1, 2))
    world.step()
    world.stored(keys(3))
    assert ChunksDeclined(Hop.CASCADE, "1:scripted", 1, Reason.EVICTED) in world.events
    tier.accepts = True
    world.step(seconds=1.0)
    assert {k for j in tier.jobs for k in j.keys} == set(keys(1, 3))


def test_a_chunk_that_fails_is_offered_again_ever_more_rarely_while_it_is_resident() -> None:
    tier = ScriptedTier()
    world = World(tiers=[tier])
    world.stored(keys(1))
    offered_at = []
    for _ in range(200):
        world.step(seconds=1.0)
        for job in list(tier.jobs):
            offered_at.append(world.now)
            tier.finish(job, fail=job.keys, kind=Kind.FULL)
    gaps = [b - a for a, b in pairwise(offered_at)]
    assert len(offered_at) >= 5
    assert gaps[0] < gaps[1] < gaps[2]
    assert gaps[-1] >= 60.0
    failures = [e for e in world.of(TransferFinished) if e.failed]  # type: ignore[attr-defined]
    assert {e.reason for e in failures} == {Reason.NO_ROOM}  # type: ignore[attr-defined]


def test_one_poisoned_chunk_does_not_hold_up_or_spin_the_others() -> None:
    tier = ScriptedTier()
    world = World(tiers=[tier], cascade_max_pinned_fraction=1.0)
    world.stored(keys("poison", 1))
    offers = 0
    for round_ in range(50):
        world.stored(keys(f"good{round_}"))
        world.step(seconds=1.0)
        for job in list(tier.jobs):
            offers += key("poison") in job.keys
            tier.finish(job, fail=[k for k in job.keys if k == key("poison")])
        world.manager.touch(keys("poison"))
    assert key("good0") in tier.holds
    assert offers <= 4


def test_several_failed_jobs_of_one_outage_count_as_one_pause() -> None:
    tier = ScriptedTier()
    world = World(slots=16, tiers=[tier], cascade_max_pinned_fraction=1.0)
    for name in range(6):
        world.stored(keys(name))
        world.step(seconds=0.0)
    assert len(tier.jobs) == 6
    for job in list(tier.jobs):
        tier.finish(job, fail=job.keys)
    world.step(seconds=0.0)
    world.step(seconds=1.1)
    assert tier.jobs


def test_a_tier_that_failed_is_left_alone_for_a_while() -> None:
    tier = ScriptedTier()
    world = World(tiers=[tier])
    world.stored(keys(1))
    world.step()
    tier.finish(tier.jobs[0], fail=keys(1))
    world.step()
    assert not tier.jobs
    world.step(seconds=1.0)
    assert len(tier.jobs) == 1


def test_the_slots_of_a_hung_store_stay_pinned_until_the_tier_lets_go() -> None:
    tier = ScriptedTier()
    world = World(slots=1, tiers=[tier], cascade_max_pinned_fraction=1.0)
    world.stored(keys(1))
    world.step()
    job = tier.jobs[0]
    tier.time_out(job)
    world.step()
    assert world.manager.store(keys(2), world.request()).declined == keys(2)
    tier.release(job)
    world.step()
    assert world.manager.store(keys(2), world.request("later")).keys == keys(2)


@pytest.mark.parametrize("fault", ["raises", "another tier's job", "twice"])
def test_a_tier_that_breaks_its_contract_harms_nobody(fault: str) -> None:
    bad, good = ScriptedTier("bad"), ScriptedTier("good")
    world = World(tiers=[bad, good])
    world.stored(keys(1))
    world.step()
    job = bad.jobs[0]
    if fault == "raises":
        bad.get_finished_jobs = lambda: 1 / 0  # type: ignore[assignment,method-assign,return-value]
    elif fault == "another tier's job":
        bad.time_out(good.jobs[0])
    else:
        bad.finish(job)
        bad.jobs.append(job)
        bad.finish(job)
    world.step()
    good.finish_all()
    world.step()
    assert key(1) in good.holds


def test_a_hung_tier_pins_no_more_than_its_share() -> None:
    tier = ScriptedTier()
    world = World(slots=8, tiers=[tier], cascade_max_pinned_fraction=0.25)
    for name in range(8):
        world.stored(keys(name))
        world.step(seconds=100.0)
        for job in list(tier.jobs):
            tier.time_out(job)
            tier.jobs.remove(job)
    assert world.index.held == 2


def test_a_tier_cannot_release_the_slots_of_another_ones_hung_job() -> None:
    hung, liar = ScriptedTier("hung"), ScriptedTier("liar")
    world = World(slots=2, tiers=[hung, liar], cascade_max_pinned_fraction=1.0)
    world.stored(keys(1))
    world.step()
    job = hung.jobs[0]
    hung.time_out(job)
    liar.finish_all()
    world.step()
    liar.report(JobReleased(job.id))
    liar.report(JobOutcome(job.id, job.keys))
    world.step()
    assert world.index.held == 1
    hung.release(job)
    world.step()
    assert world.index.held == 0


def test_a_tier_that_stores_nothing_is_offered_nothing():
    reading, taking = ScriptedTier(), ScriptedTier()
    reading.takes_cascades = False
    world = World(tiers=[reading, taking])
    world.stored(keys("a", "b"))
    world.step()
    assert not reading.jobs
    assert [job.keys for job in taking.jobs] == [tuple(keys("a", "b"))]
    taking.finish_all()
    world.step()
    assert not world.manager.has_pending_work(world.now)
    assert not world.of(ChunksDeclined)
