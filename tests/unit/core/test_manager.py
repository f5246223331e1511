import itertools
import math

import pytest

from kvtiers.chunks import Lookup
from kvtiers.core.load import NO_SLOT
from kvtiers.errors import Kind, KVTiersError
from kvtiers.events import (
    ChunksDeclined,
    ChunksExchanged,
    ChunksRemoved,
    ChunksStored,
    Direction,
    Hop,
    Reason,
)
from kvtiers.tiers.base import JobOutcome, JobReleased
from tests.unit.core.core_harness import ScriptedTier, World, key, keys

HIT, MISS, PENDING = Lookup.HIT, Lookup.MISS, Lookup.HIT_PENDING


def test_many_lookups_end_with_the_first_miss() -> None:
    world = World()
    world.stored(keys(1, 2, 4))
    request = world.request()
    assert world.manager.lookup_many(keys(1, 2), request) == [HIT, HIT]
    assert world.manager.lookup_many(keys(1, 2, 3, 4), request) == [HIT, HIT, MISS]


def test_a_chunk_being_loaded_is_not_evicted_until_the_load_ends() -> None:
    world = World(slots=1)
    world.stored(keys(1))
    request = world.request()
    world.lookup(keys(1), request)
    world.manager.load(keys(1), request)
    assert world.manager.store(keys(2), world.request("b")).declined == keys(2)
    world.manager.complete_load(request)
    assert world.manager.store(keys(2), world.request("c")).keys == keys(2)


def test_a_failed_load_makes_its_chunks_misses_and_its_request_computes() -> None:
    world = World()
    world.stored(keys(1, 2))
    request, other = world.request(), world.request("other")
    world.lookup(keys(1, 2), request)
    world.manager.load(keys(1, 2), request)
    world.manager.complete_load(request, ok=False)
    assert world.lookup(keys(1, 2), request) == [MISS, MISS]
    assert world.lookup(keys(1, 2), other) == [MISS, MISS]
    assert ChunksRemoved("0:primary", tuple(keys(1, 2)), Reason.FAILED) in world.events
    world.stored(keys(1, 2))
    assert world.lookup(keys(1), request) == [MISS]
    assert world.lookup(keys(1), other) == [HIT]


def test_a_chunk_that_left_before_its_load_gets_no_slot() -> None:
    world = World()
    world.stored(keys(1))
    slots = world.manager.load(keys(1, 2), world.request())
    assert slots[0] != NO_SLOT
    assert slots[1] == NO_SLOT


def test_two_loads_of_one_chunk_each_hold_it() -> None:
    world = World(slots=1)
    world.stored(keys(1))
    a, b = world.request("a"), world.request("b")
    assert world.manager.load(keys(1), a) == world.manager.load(keys(1), b)
    world.manager.complete_load(a)
    assert world.manager.store(keys(2), world.request("c")).declined == keys(2)
    world.manager.complete_load(b)
    assert world.manager.store(keys(2), world.request("d")).keys == keys(2)


def test_reset_forgets_host_memory_and_keeps_slots_that_are_in_flight() -> None:
    tier = ScriptedTier(holds=keys("disk"))
    world = World(slots=4, tiers=[tier], cascade_max_pinned_fraction=0.0)
    world.stored(keys("loading", "idle"))
    loading, waiting, storing = world.request("l"), world.request("w"), world.request("s")
    world.manager.load(keys("loading"), loading)
    world.lookup(keys("disk"), waiting)
    world.step()
    promotion = next(j for j in tier.jobs if key("disk") in j.keys)
    world.manager.store(keys("storing"), storing)
    device = world.manager.reset()
    world.manager.check()
    assert len(device) == 2
    assert world.lookup(keys("loading", "idle"), waiting) == [MISS, MISS]
    assert world.index.free == 1
    world.manager.complete_store(keys("storing"))
    world.manager.complete_load(loading)
    assert world.index.free == 1
    for job in list(tier.jobs):
        if job is not promotion:
            tier.finish(job)
    tier.finish(promotion)
    world.step()
    world.manager.release_device(device)
    world.step()
    assert world.index.free == 4


def test_reset_drops_promotions_that_were_gathered_but_not_sent() -> None:
    tier = ScriptedTier(holds=keys(1))
    world = World(tiers=[tier])
    request = world.request()
    assert world.lookup(keys(1), request) == [PENDING]
    world.manager.reset()
    world.step()
    assert not tier.jobs
    assert world.index.free == 8
    assert world.lookup(keys(1), request) == [PENDING]


def test_finishing_a_request_twice_or_before_its_load_ends_is_fine() -> None:
    tier = ScriptedTier()
    world = World(tiers=[tier])
    world.stored(keys(1))
    request = world.request()
    world.manager.load(keys(1), request)
    world.manager.on_request_finished(request)
    world.manager.on_request_finished(request)
    world.step()
    world.manager.complete_load(request)
    assert world.manager.request("r") is None
    assert tier.finished_requests == ["r"]
    for job in list(tier.jobs):
        tier.finish(job)
    world.step()
    assert world.manager.use.pinned == 0


def test_drain_sends_the_backlog_and_awaits_it() -> None:
    tier = ScriptedTier()
    world = World(slots=8, tiers=[tier], cascade_max_pinned_fraction=0.25)
    world.stored(keys(*range(8)))
    assert world.manager.drain(10.0, lambda: world.now)
    assert set(keys(*range(8))) <= set(tier.holds)


def test_drain_gives_up_at_its_deadline() -> None:
    tier = ScriptedTier()
    times = iter(range(100))

    def never(deadline_s: float) -> bool:
        return False

    tier.drain_jobs = never  # type: ignore[method-assign]
    world = World(tiers=[tier])
    world.stored(keys(1))
    assert not world.manager.drain(5.0, lambda: float(next(times)))


def test_a_tier_that_raises_on_every_call_is_left_alone_and_its_neighbour_serves() -> None:
    bad, good = ScriptedTier("bad"), ScriptedTier("good", holds=keys(*range(5)))

    def explode(*args: object) -> list[Lookup]:
        raise RuntimeError("plug-in bug")

    bad.lookup = explode  # type: ignore[method-assign,assignment]
    world = World(tiers=[bad, good])
    for attempt in range(5):
        assert world.lookup(keys(attempt), world.request(f"r{attempt}")) == [PENDING]
    assert "fenced" in repr(world.manager.tiers[0])


def test_work_is_pending_while_something_is_in_flight() -> None:
    tier = ScriptedTier()
    world = World(tiers=[tier])
    assert not world.manager.has_pending_work(world.now)
    world.stored(keys(1))
    assert world.manager.has_pending_work(world.now)
    world.step()
    assert world.manager.has_pending_work(world.now)
    tier.finish_all()
    world.step()
    assert not world.manager.has_pending_work(world.now)


def test_its_repr_tells_an_operator_how_things_stand() -> None:
    tier = ScriptedTier()
    world = World(slots=4, tiers=[tier])
    world.stored(keys(1, 2))
    text = repr(world.manager)
    assert "1:scripted 2" in text
    assert "4 slots" in text


def test_a_job_that_a_tier_never_reports_is_failed_by_the_core() -> None:
    tier = ScriptedTier(holds=keys(1))
    world = World(slots=1, tiers=[tier], job_deadline_s=50.0)
    request = world.request()
    world.lookup(keys(1), request)
    world.step()
    job = tier.jobs[0]
    world.step(seconds=51.0)
    assert not world.manager.has_pending_work(world.now)
    assert world.index.free == 0, "its slot may still be written to"
    tier.finish(job)
    world.step()
    assert world.index.free == 1


@pytest.mark.parametrize(
    ("method", "answer"),
    [
        ("lookup", None),
        ("lookup", [None]),
        ("lookup", [Lookup.HIT] * 7),
        ("get_finished_jobs", None),
        ("get_finished_jobs", ["done"]),
        ("get_finished_jobs", [JobOutcome(0, (), {key(1): "broken"})]),  # type: ignore[dict-item]
        ("get_finished_jobs", [JobOutcome(0, None)]),  # type: ignore[arg-type]
        ("get_finished_jobs", [JobOutcome(0, (), {}, None)]),  # type: ignore[arg-type]
        ("get_finished_jobs", [JobReleased([])]),  # type: ignore[arg-type]
        ("get_finished_jobs", [JobOutcome(0, ([],))]),  # type: ignore[arg-type]
        ("get_finished_jobs", [JobOutcome(0, (), {}, -5)]),
        ("get_finished_jobs", [JobOutcome(0, (), {}, 0, -1.0)]),
        ("get_finished_jobs", [JobOutcome(0, (), {}, 0, math.nan)]),
        ("get_finished_jobs", [JobOutcome(0, (), {}, math.inf)]),  # type: ignore[arg-type]
        ("take_events", [ChunksStored([], (key(1),))]),  # type: ignore[arg-type]
        ("take_events", [ChunksStored("1:bad", ([],))]),  # type: ignore[arg-type]
        ("take_events", [ChunksDeclined(Hop.CASCADE, "1:bad", -3, Reason.EVICTED)]),
        ("take_events", [ChunksDeclined([], "1:bad", 3, Reason.EVICTED)]),  # type: ignore[arg-type]
        ("take_events", [ChunksRemoved("1:bad", (), "vanished")]),  # type: ignore[arg-type]
        ("take_events", [ChunksExchanged("1:bad", Direction.IN, -1, 0)]),
        ("take_events", [ChunksExchanged("1:bad", "up", 1, 4)]),  # type: ignore[arg-type]
        ("take_events", None),
        ("take_events", ["stored"]),
    ],
)
def test_nonsense_from_a_tier_is_a_fault_of_that_tier_only(method: str, answer: object) -> None:
    bad, good = ScriptedTier("bad"), ScriptedTier("good", holds=keys(1))
    setattr(bad, method, lambda *args: answer)
    world = World(tiers=[bad, good])
    assert world.lookup(keys(1), world.request()) == [PENDING]
    world.step()
    good.finish_all()
    world.step()
    assert world.lookup(keys(1), world.request("next")) == [HIT]


def test_a_tier_that_always_raises_is_said_once_and_when_it_is_fenced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad = ScriptedTier("bad")
    bad.get_finished_jobs = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    world = World(tiers=[bad])
    for _ in range(500):
        world.step()
    assert len(caplog.records) <= 3


def test_drain_says_so_when_something_could_not_be_sent() -> None:
    tier = ScriptedTier()
    world = World(tiers=[tier])
    world.stored(keys(1))
    world.step()
    tier.finish(tier.jobs[0], fail=keys(1))
    world.step()
    times = itertools.count(world.now)
    tier.accepts = False
    assert not world.manager.drain(10.0, lambda: float(next(times)))
    tier.accepts = True
    assert world.manager.drain(10.0, lambda: float(next(times)))
    assert key(1) in tier.holds


def test_an_idle_engine_steps_on_for_a_backlog_that_is_paused_briefly() -> None:
    tier = ScriptedTier()
    world = World(tiers=[tier])
    world.stored(keys(1))
    world.step()
    for pause in (1, 2):
        assert world.manager.has_pending_work(world.now)
        tier.finish(tier.jobs[0], fail=keys(1))
        world.step()
        assert world.manager.has_pending_work(world.now)
        world.step(seconds=pause)
    tier.finish(tier.jobs[0], fail=keys(1))
    world.step()
    assert not world.manager.has_pending_work(world.now), "parked for a minute: it need not spin"


def test_an_idle_engine_comes_to_rest_though_a_tier_refuses_everything() -> None:
    tier = ScriptedTier()
    tier.accepts = False
    world = World(tiers=[tier])
    world.stored(keys(1))
    started = world.now
    world.step()
    while world.manager.has_pending_work(world.now):
        assert world.now < started + 20
        world.step(seconds=0.05)
    tier.accepts = True
    world.step(seconds=10)
    assert [j.keys for j in tier.jobs] == [tuple(keys(1))]


def test_a_shutdown_without_time_sends_nothing() -> None:
    tier = ScriptedTier()
    world = World(tiers=[tier])
    world.stored(keys(1))
    world.manager.shutdown(0.0, lambda: world.now)
    assert not tier.jobs
    assert not tier.holds
    assert not tier.accepts


def test_a_long_prompt_keeps_its_beginning_not_its_end() -> None:
    world = World(slots=4)
    request = world.request()
    for name in range(8):
        plan = world.manager.store(keys(name), request)
        world.manager.complete_store(plan.keys)
    assert world.lookup(keys(*range(8)), world.request("next"))[:4] == [HIT] * 4


def test_the_views_of_a_job_are_dead_when_it_is_over_whatever_the_tier_does() -> None:
    tier = ScriptedTier(holds=keys(2))
    world = World(tiers=[tier])
    world.stored(keys(1))
    world.lookup(keys(2), world.request())
    world.step()
    views = [view for job in tier.jobs for view in job.views]
    assert len(views) == 2
    tier.finish_all()
    world.step()
    for view in views:
        with pytest.raises(ValueError, match="released"):
            view[0]


def test_the_views_of_a_hung_job_live_until_the_tier_lets_go() -> None:
    tier = ScriptedTier()
    world = World(tiers=[tier])
    world.stored(keys(1))
    world.step()
    job = tier.jobs[0]
    tier.time_out(job)
    world.step()
    assert job.views[0][0] == key(1)[0]
    tier.release(job)
    world.step()
    with pytest.raises(ValueError, match="released"):
        job.views[0][0]


def test_touches_go_in_one_batch_to_each_tier() -> None:
    tiers = [ScriptedTier("a"), ScriptedTier("b")]
    calls: dict[str, list[int]] = {"a": [], "b": []}
    for tier in tiers:
        tier.touch = lambda names, tier=tier: calls[tier.name].append(len(names))  # type: ignore[method-assign,misc]
    world = World(tiers=tiers)
    world.stored(keys(1, 2))
    request = world.request()
    world.lookup(keys(1, 2), request)
    world.manager.load(keys(1, 2), request)
    world.step()
    assert calls == {"a": [2], "b": [2]}


def test_what_is_sound_of_a_tiers_answer_counts() -> None:
    tier = ScriptedTier()
    world = World(slots=256, tiers=[tier])
    world.stored(keys(*range(128)))
    world.step()
    good, bad = tier.jobs
    tier.report(JobOutcome(good.id, good.keys))
    tier.report(JobOutcome(bad.id, bad.keys, None))  # type: ignore[arg-type]
    world.step()
    assert world.manager.use.pinned == 64


def test_a_chunk_that_a_tier_calls_both_done_and_failed_did_not_come() -> None:
    tier = ScriptedTier(holds=keys(1))
    world = World(tiers=[tier])
    request = world.request()
    world.lookup(keys(1), request)
    world.step()
    (job,) = tier.jobs
    error = KVTiersError("half of it", kind=Kind.CORRUPT)
    tier.report(JobOutcome(job.id, job.keys, {key(1): error}))
    world.step()
    assert key(1) not in world.index.ready
