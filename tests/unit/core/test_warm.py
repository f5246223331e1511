"""Warm-up: hot chunks come up by themselves, in the room to spare, and behind every request."""

import logging

import pytest

from kvtiers.chunks import Lookup
from kvtiers.core.warm import WarmUp
from kvtiers.errors import Kind
from kvtiers.events import ChunksRemoved, WarmedUp
from kvtiers.metrics import Metrics
from tests.unit.core.core_harness import ScriptedTier, World, keys

HIT, MISS, PENDING, RETRY = Lookup.HIT, Lookup.MISS, Lookup.HIT_PENDING, Lookup.RETRY
HOT = keys(*range(6))


def run(world: World, steps: int = 10) -> None:
    for _ in range(steps):
        world.step()
        for tier in world.tiers:
            tier.finish_all()
    world.step()


def test_hot_chunks_are_there_before_anybody_asks(caplog: pytest.LogCaptureFixture) -> None:
    tier = ScriptedTier(holds=HOT)
    world = World(slots=32, tiers=[tier])
    world.manager.warm(HOT)
    assert world.manager.has_pending_work(world.now)  # so that the engine steps at rest
    with caplog.at_level(logging.INFO, "kvtiers"):
        run(world)
    assert list(world.index.ready) == HOT
    assert world.manager.use.pinned == 0
    assert world.manager.has_pending_work(world.now) is False
    assert "6 of 6 hot chunks came to host memory" in caplog.text
    request = world.request()
    assert world.lookup(HOT, request) == [HIT] * 6
    assert [world.memory[s][0] for s in world.manager.load(HOT, request)] == [1] * 6


def test_at_most_half_of_host_memory_is_filled_and_nothing_evicted() -> None:
    world = World(slots=8, tiers=[ScriptedTier(holds=HOT)])
    world.stored(keys("a"))
    world.manager.warm(HOT)
    run(world)
    assert list(world.index.ready) == [*keys("a"), *HOT[:3]]
    assert world.of(ChunksRemoved) == []


@pytest.mark.parametrize("stored", [4, 8])
def test_where_half_is_full_already_nothing_is_asked_for(stored: int) -> None:
    tier = ScriptedTier(holds=HOT)
    world = World(slots=8, tiers=[tier])
    world.stored(keys(*(f"s{i}" for i in range(stored))))
    world.manager.warm(HOT)
    run(world)
    assert tier.asked == []


def test_a_request_that_waits_comes_first() -> None:
    wanted = keys("w")
    tier = ScriptedTier(holds=[*HOT, *wanted])
    world = World(slots=32, tiers=[tier])
    request = world.request()
    assert world.lookup(wanted, request) == [PENDING]
    world.manager.warm(HOT)
    world.step()
    world.step()
    assert [job.keys for job in tier.jobs] == [tuple(wanted)]
    tier.finish_all()
    world.step()
    assert world.lookup(wanted, request) == [HIT]
    world.manager.on_request_scheduled(request)
    run(world)
    assert set(HOT) <= set(world.index.ready)


def test_what_is_gone_or_fails_is_passed_over() -> None:
    tier = ScriptedTier(holds=HOT[2:])
    world = World(slots=32, tiers=[tier])
    world.manager.warm(HOT)
    world.step()
    (job,) = tier.jobs
    tier.finish(job, fail=[HOT[3]], kind=Kind.CORRUPT)
    del tier.holds[HOT[3]]
    run(world)
    assert list(world.index.ready) == [HOT[2], *HOT[4:]]
    assert world.manager.use.filling == 0


def test_a_tier_that_never_answers_does_not_hold_it_for_ever() -> None:
    tier = ScriptedTier()
    tier.verdicts = dict.fromkeys(HOT, RETRY)
    world = World(slots=32, tiers=[tier])
    world.manager.warm(HOT)
    world.step()
    assert world.manager.has_pending_work(world.now)
    world.step(seconds=5.1)  # the lookup deadline
    world.step()
    assert not world.manager.has_pending_work(world.now)


def test_it_ends_after_a_while_however_busy_the_engine_is() -> None:
    tier = ScriptedTier(holds=HOT)
    world = World(slots=32, tiers=[tier])
    world.manager.warm(HOT)
    blocked = keys("never")
    tier.verdicts = dict.fromkeys(blocked, RETRY)
    for i in range(25):
        world.lookup(blocked, world.request(f"r{i}"))
        world.step(seconds=29)
    assert not any(key in tier.asked for key in HOT)
    assert world.manager._warm_up is None


def test_a_reset_in_the_middle_is_survived() -> None:
    tier = ScriptedTier(holds=HOT)
    world = World(slots=32, tiers=[tier])
    world.manager.warm(HOT)
    world.step()
    world.manager.reset()
    run(world)
    assert list(world.index.ready) == HOT


def test_a_shutdown_asks_for_nothing_more() -> None:
    many = keys(*range(100))
    tier = ScriptedTier(holds=many)
    world = World(slots=400, tiers=[tier])
    world.manager.warm(many)
    world.step()
    world.manager.shutdown(10.0, lambda: world.now)
    world.manager.check()
    assert len(tier.asked) == 32


def test_chunks_go_up_a_few_at_a_time_and_each_once() -> None:
    many = keys(*range(100))
    tier = ScriptedTier(holds=many)
    world = World(slots=400, tiers=[tier])
    world.manager.warm([*many, *many])
    world.step()
    assert [len(job.keys) for job in tier.jobs] == [32]
    run(world)
    assert list(world.index.ready) == many


def warmed(world: World) -> dict[str, int]:
    """What the events say of the hot chunks, added up."""
    events = world.of(WarmedUp)
    return {name: sum(getattr(e, name) for e in events) for name in WarmedUp._fields}


def test_its_events_say_what_became_of_each_chunk() -> None:
    tier = ScriptedTier(holds=HOT[1:])
    world = World(slots=6, tiers=[tier])
    world.manager.warm(HOT)
    world.step()
    (job,) = tier.jobs
    tier.finish(job, fail=[HOT[1]], kind=Kind.CORRUPT)
    del tier.holds[HOT[1]]
    run(world)
    assert list(world.index.ready) == HOT[2:5]
    assert warmed(world) == {"promoted": 3, "missing": 2, "not_asked": 1}
    metrics = Metrics()
    for event in world.of(WarmedUp):
        metrics(event)
    counted = {labels: n for (name, labels), n in metrics.take().counters.items()}
    assert counted == {("promoted",): 3, ("missing",): 2, ("not_asked",): 1}


def test_its_check_can_fail() -> None:
    warm_up = WarmUp(HOT, *[lambda *_: None] * 4)  # type: ignore[arg-type]
    warm_up.check()
    assert repr(warm_up) == "<WarmUp 0 of 6 here, 0 asked for>"
    warm_up._hits = 1
    with pytest.raises(AssertionError, match="7 of 6"):
        warm_up.check()
    warm_up._hits, warm_up.ended = 0, True
    with pytest.raises(AssertionError, match="goes on"):
        warm_up.check()
    warm_up._asked = [HOT[0]]
    with pytest.raises(AssertionError, match="for nobody"):
        warm_up.check()
