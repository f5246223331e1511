"""What gauges say of tiers, as the core knows it."""

from kvtiers.core.attached import FAULTS_TO_FENCE, AttachedTier
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
    assert AttachedTier(ScriptedTier(), 1).standing() == Standing(Circuit.CLOSED, 0, 0)


def test_what_is_no_standing_is_none() -> None:
    tier = SayingTier()
    tier.says = "fine"
    assert AttachedTier(tier, 1).standing() == Standing(Circuit.CLOSED, 0, 0)  # type: ignore[arg-type]


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
