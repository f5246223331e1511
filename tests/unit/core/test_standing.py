"""What gauges say of tiers, as the core knows it."""

from collections.abc import Sequence

import pytest

from kvtiers.core.attached import FAULTS_TO_FENCE, FENCE_S, AttachedTier
from kvtiers.errors import Kind, KVTiersError
from kvtiers.events import PRIMARY, ChunksStored, Event, TierReachable
from kvtiers.tiers.base import Circuit, Peers, Standing
from tests.unit.core.core_harness import ScriptedTier, World, key, keys


class SayingTier(ScriptedTier):
    says: object = Standing(Circuit.TRIAL, 2, 4096)
    knows: object = Peers(1, 2, 3, 4, 5)

    def standing(self) -> object:
        return self.says

    def peers(self) -> object:
        return self.knows


def test_a_tier_says_it_and_one_that_does_not_is_in_use() -> None:
    assert AttachedTier(SayingTier(), 1).standing() == SayingTier.says  # type: ignore[arg-type]
    assert AttachedTier(ScriptedTier(), 1).standing() == Standing(Circuit.CLOSED, None, None)


def test_what_is_no_standing_is_none() -> None:
    tier = SayingTier()
    tier.says = "fine"
    nothing = Standing(Circuit.CLOSED, None, None)
    assert AttachedTier(tier, 1).standing() == nothing  # type: ignore[arg-type]


def test_a_tier_says_whom_it_knows_and_one_that_does_not_knows_nobody() -> None:
    tier = SayingTier()
    assert AttachedTier(tier, 1).peers() == Peers(1, 2, 3, 4, 5)  # type: ignore[arg-type]
    tier.knows = {"connected": 1}
    assert AttachedTier(tier, 1).peers() is None  # type: ignore[arg-type]
    assert AttachedTier(ScriptedTier(), 1).peers() is None


def test_a_fenced_tier_is_left_alone_whatever_it_says() -> None:
    tier = SayingTier()
    tier.get_finished_jobs = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    world = World(tiers=[tier])
    for _ in range(FAULTS_TO_FENCE):
        world.step()
    assert world.manager.tiers[0].standing().circuit is Circuit.OPEN


def reach(world: World) -> list[bool]:
    return [e.reachable for e in world.of(TierReachable) if isinstance(e, TierReachable)]


def test_what_a_fenced_tier_holds_is_said_to_be_out_of_reach_until_the_fence_ends() -> None:
    tier = ScriptedTier()
    lookup = tier.lookup
    world = World(tiers=[tier])
    tier.lookup = lambda keys, request: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    for n in range(FAULTS_TO_FENCE):
        assert reach(world) == []
        world.lookup(keys(n), world.request(f"r{n}"))
        world.step()
    assert reach(world) == [False]
    tier.lookup = lookup  # type: ignore[method-assign]
    world.step(FENCE_S - 1)
    assert reach(world) == [False]
    world.step(2)
    assert reach(world) == [False, True]


class KnowingTier(ScriptedTier):
    answer: object = ()

    def residents(self) -> object:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_what_is_held_is_what_host_memory_and_tiers_say(caplog: pytest.LogCaptureFixture) -> None:
    tier = KnowingTier()
    world = World(tiers=[tier, ScriptedTier("mute")])
    world.stored(keys(1, 2))
    tier.answer = {key(3): None}.keys()
    residents = world.manager.residents
    assert sorted(residents(PRIMARY)) == sorted(keys(1, 2))
    assert residents("1:knowing") == [] == residents("2:mute"), "there is no such label"
    assert residents("1:scripted") == keys(3)
    for wrong in (KVTiersError("down", kind=Kind.IO), [3], None):
        tier.answer = wrong
        assert residents("1:scripted") is None, "which is not that it holds nothing"
    assert caplog.text.count("did not say what it holds") == 3
    assert "what was told of it stands" in caplog.text


def fence(world: World, tier: ScriptedTier) -> None:
    """It breaks its contract often enough, and never again."""
    finished = tier.get_finished_jobs
    tier.get_finished_jobs = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    for _ in range(FAULTS_TO_FENCE):
        world.step()
    tier.get_finished_jobs = finished  # type: ignore[method-assign]


class TellingTier(ScriptedTier):
    tells: Sequence[Event] = ()

    def take_events(self) -> list[Event]:
        told, self.tells = self.tells, ()
        return list(told)


def test_a_tier_whose_own_circuit_is_open_is_not_in_reach_when_its_fence_ends() -> None:
    tier = TellingTier()
    world = World(tiers=[tier])
    fence(world, tier)
    tier.tells = [TierReachable("1:scripted", False), ChunksStored("1:scripted", tuple(keys(1)))]
    world.step()
    assert world.of(ChunksStored) == [ChunksStored("1:scripted", tuple(keys(1)))]
    world.step(FENCE_S)
    assert reach(world) == [False]
    tier.tells = [TierReachable("1:scripted", True)]
    world.step()
    assert reach(world) == [False, True]


def test_what_is_said_of_a_fenced_tier_does_not_come_back_as_its_own_word() -> None:
    tier = TellingTier()
    one_and_the_same: list[Event] = []
    tier.take_events = lambda: one_and_the_same  # type: ignore[method-assign]
    world = World(tiers=[tier])
    fence(world, tier)
    world.step(FENCE_S)
    assert reach(world) == [False, True]
    assert one_and_the_same == []


def test_a_backlog_is_what_waits_parked_or_not() -> None:
    tier = ScriptedTier()
    tier.accepts = False
    world = World(tiers=[tier])
    world.stored(keys(1, 2))
    world.step()
    assert world.manager.backlogs == {"1:scripted": 2}
    tier.accepts = True
    for _ in range(3):
        world.step(600.0)
        tier.finish(tier.jobs[0], fail=[key(1)])
        world.step()
    assert world.manager.backlogs == {"1:scripted": 1}
    assert "waiting: 1:scripted 0" in repr(world.manager._cascades), "it is parked"


def test_it_is_quiet_when_no_request_is_live_and_nothing_in_flight() -> None:
    tier = ScriptedTier()
    world = World(tiers=[tier])
    assert world.manager.quiet
    request = world.request()
    assert not world.manager.quiet
    world.stored(keys(1), request)
    world.step()
    world.manager.on_request_finished(request)
    assert not world.manager.quiet, "a cascade is in flight"
    tier.finish_all()
    world.step()
    assert world.manager.quiet
