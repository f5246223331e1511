"""What one event says of a request's lookups: where chunks were found, and why others were not."""

from collections.abc import Callable

import pytest

from kvtiers.chunks import Key, Lookup, RequestContext, TierFilter, TierMatch
from kvtiers.core.settled import MAX_RUNS
from kvtiers.errors import Kind
from kvtiers.events import PRIMARY, LookupsSettled, MissReason, Run
from tests.unit.core.core_harness import GROUPS, ScriptedTier, World, key, keys

ABSENT = (PRIMARY, MissReason.ABSENT)
STORAGE_ONLY = TierFilter((TierMatch("STORAGE"),))
NOTHING_BELOW = TierFilter(())


def ends(*names: object, group: int = 0) -> Callable[[Key], int | None]:
    """Where these chunks end, of 16 tokens each, in this order."""
    there = {key(name, group): 16 * (i + 1) for i, name in enumerate(names)}
    return there.get


def settled(world: World) -> LookupsSettled:
    """The last one."""
    events = [e for e in world.events if isinstance(e, LookupsSettled)]
    return events[-1]


def asked_and_settled(world: World, *names: object, steps: int = 3) -> LookupsSettled:
    """A request that asks for these until no answer changes any more, and then is computed."""
    request = world.request()
    for _ in range(steps):
        world.lookup(keys(*names), request)
        world.step()
        for tier in world.tiers:
            tier.finish_all()
    world.lookup(keys(*names), request)
    world.manager.on_request_scheduled(request)
    return settled(world)


def test_a_full_hit_is_one_event_with_what_is_loaded() -> None:
    world = World()
    world.stored(keys(1, 2, 3))
    request = world.request("mine")
    world.lookup(keys(1, 2, 3), request)
    world.manager.load(keys(1, 2, 3), request)
    assert settled(world) == LookupsSettled(
        "mine", 3, {PRIMARY: 3}, {}, {PRIMARY: 48}, 0.0, {}, (), untold=3
    )
    world.manager.complete_load(request)
    world.manager.on_request_scheduled(request)
    world.manager.on_request_finished(request)
    assert len(world.of(LookupsSettled)) == 1, "once per settling"


def test_a_request_that_asked_for_nothing_is_not_told_of() -> None:
    world = World()
    world.manager.on_request_finished(world.request())
    assert not world.of(LookupsSettled)


def test_what_comes_from_a_tier_counts_as_a_miss_above_it() -> None:
    first, second = ScriptedTier("first"), ScriptedTier("second", holds=keys(2))
    world = World(tiers=[first, second])
    world.stored(keys(1))
    request = world.request()
    world.lookup(keys(1, 2), request)
    world.step(0.5)
    second.finish_all()
    world.step(0.25)
    world.lookup(keys(1, 2), request)
    world.manager.load(keys(1, 2), request)
    event = settled(world)
    assert event.found == {PRIMARY: 1, "2:second": 1}
    assert event.missed == {ABSENT: 1, ("1:first", MissReason.ABSENT): 1}
    assert event.loaded == {PRIMARY: 16, "2:second": 16}
    assert event.waited_s == pytest.approx(0.75)
    assert event.took_s == {"2:second": pytest.approx(0.25)}  # from the end of the step on


def test_a_tier_says_itself_why_it_missed() -> None:
    tier = ScriptedTier("dull")
    tier.reason = MissReason.TIER_DOWN
    world = World(tiers=[tier])
    assert asked_and_settled(world, 1).missed == {ABSENT: 1, ("1:dull", MissReason.TIER_DOWN): 1}


def test_a_reason_that_is_none_counts_as_absent_and_costs_no_hit() -> None:
    tier = ScriptedTier("odd")
    tier.reason = "because"  # type: ignore[assignment]
    world = World(tiers=[tier])
    assert ("1:odd", MissReason.ABSENT) in asked_and_settled(world, 1).missed


def test_a_tier_that_breaks_its_contract_failed_and_then_is_down() -> None:
    tier = ScriptedTier("broken")
    tier.verdicts[key(1)] = "yes"  # type: ignore[assignment]
    world = World(tiers=[tier])
    assert ("1:broken", MissReason.FAILED) in asked_and_settled(world, 1, steps=0).missed
    for _ in range(3):
        asked_and_settled(world, 1, steps=0)
    assert ("1:broken", MissReason.TIER_DOWN) in asked_and_settled(world, 1, steps=0).missed


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Kind.CORRUPT, MissReason.CORRUPT),
        (Kind.IO, MissReason.FAILED),
        (Kind.TIMEOUT, MissReason.PENDING),
        (Kind.VANISHED, MissReason.ABSENT),
    ],
)
def test_a_promotion_that_fails_says_why(kind: Kind, why: MissReason) -> None:
    tier = ScriptedTier("disk", holds=keys(1))
    world = World(tiers=[tier])
    request = world.request()
    world.lookup(keys(1), request)
    world.step()
    tier.finish(tier.jobs[0], fail=keys(1), kind=kind)
    world.step()
    assert world.lookup(keys(1), request) == [Lookup.MISS]
    world.manager.on_request_scheduled(request)
    assert settled(world).missed == {ABSENT: 1, ("1:disk", why): 1}


def test_a_job_that_is_refused_means_a_tier_that_is_down() -> None:
    tier = ScriptedTier("disk", holds=keys(1))
    tier.accepts = False
    world = World(tiers=[tier])
    assert ("1:disk", MissReason.TIER_DOWN) in asked_and_settled(world, 1).missed


def test_a_tier_that_the_request_may_not_load_from_is_filtered() -> None:
    tier = ScriptedTier("disk", holds=keys(1))
    world = World(tiers=[tier])
    request = world.request(tier_filter=NOTHING_BELOW)
    world.lookup(keys(1), request)
    world.manager.on_request_scheduled(request)
    assert settled(world).missed == {ABSENT: 1, ("1:disk", MissReason.FILTERED): 1}


def test_a_tier_that_does_not_answer_in_time_is_pending() -> None:
    slow = ScriptedTier("slow")
    slow.verdicts[key(1)] = Lookup.RETRY
    world = World(tiers=[slow])
    request = world.request()
    world.lookup(keys(1), request)
    world.step(5.5)
    assert world.lookup(keys(1), request) == [Lookup.MISS]
    world.manager.on_request_scheduled(request)
    event = settled(world)
    assert event.missed == {ABSENT: 1, ("1:slow", MissReason.PENDING): 1}
    assert event.waited_s == event.took_s["1:slow"] == pytest.approx(5.5)


def test_a_promotion_that_takes_longer_than_the_request_waits_is_pending() -> None:
    tier = ScriptedTier("slow", holds=keys(1))
    world = World(tiers=[tier])
    request = world.request()
    world.lookup(keys(1, 2), request)
    world.step()
    world.step(31.0)
    assert world.lookup(keys(1, 2), request) == [Lookup.MISS] * 2
    world.manager.on_request_scheduled(request)
    event = settled(world)
    # Host memory is being filled, and has nothing to give; the second chunk is in no tier.
    assert event.missed == {
        (PRIMARY, MissReason.PENDING): 1,
        ("1:slow", MissReason.PENDING): 1,
        ABSENT: 1,
        ("1:slow", MissReason.ABSENT): 1,
    }
    assert event.found == {}


def test_a_request_that_ends_while_it_waits_has_pending_chunks() -> None:
    tier = ScriptedTier("slow", holds=keys(1))
    world = World(tiers=[tier])
    request = world.request()
    world.lookup(keys(1), request)
    world.step()
    world.manager.on_request_finished(request)
    assert settled(world).missed == {ABSENT: 1, ("1:slow", MissReason.PENDING): 1}


def test_what_is_there_and_finds_no_room_says_so() -> None:
    tier = ScriptedTier("disk", holds=keys(1, 2, 3))
    world = World(slots=2, tiers=[tier])
    assert ("1:disk", MissReason.NO_ROOM) in asked_and_settled(world, 1, 2, 3).missed


def test_what_is_looked_at_and_not_brought_up_is_beyond_a_window() -> None:
    tier = ScriptedTier("disk", holds=keys(1))
    world = World(tiers=[tier])
    request = world.request()
    assert world.manager.look(key(1), request) is Lookup.HIT_PENDING
    world.manager.on_request_scheduled(request)
    assert settled(world).missed == {ABSENT: 1, ("1:disk", MissReason.WINDOW): 1}


def test_what_was_asked_ahead_of_time_and_not_waited_for_is_no_miss() -> None:
    tier = ScriptedTier("slow", holds=keys(3))
    tier.verdicts = {key(1): Lookup.RETRY, key(2): Lookup.RETRY}
    world = World(tiers=[tier], groups=GROUPS[:1], trace_lookups=True)
    request = world.request(end_of=ends(*range(1, 5)))
    world.stored(keys(4))
    world.lookup(keys(1, 2, 3, 4), request)
    world.step()
    tier.verdicts[key(1)] = Lookup.MISS
    assert world.lookup(keys(1), request) == [Lookup.MISS]
    world.manager.on_request_scheduled(request)
    event = settled(world)
    assert event.asked == 3, "nothing is known of the second, and nothing depends on it"
    assert event.missed == {
        ABSENT: 2,
        ("1:slow", MissReason.ABSENT): 1,
        ("1:slow", MissReason.WINDOW): 1,
    }
    assert [(run.first, run.source) for run in event.runs] == [(0, None), (2, None), (3, PRIMARY)]


def test_after_a_failed_load_host_memory_failed() -> None:
    world = World(tiers=[ScriptedTier("disk", holds=keys(1))])
    world.stored(keys(1))
    request = world.request()
    world.lookup(keys(1), request)
    world.manager.load(keys(1), request)
    world.manager.complete_load(request, ok=False)
    assert world.lookup(keys(1), request) == [Lookup.MISS]
    world.manager.on_request_scheduled(request)
    assert settled(world).missed == {(PRIMARY, MissReason.FAILED): 1}


def test_a_chunk_that_another_request_brought_is_host_memorys() -> None:
    tier = ScriptedTier("slow", holds=keys(1))
    tier.verdicts[key(1)] = Lookup.RETRY
    world = World(tiers=[tier])
    request = world.request()
    world.lookup(keys(1), request)
    world.stored(keys(1))
    assert world.lookup(keys(1), request) == [Lookup.HIT]
    world.manager.on_request_scheduled(request)
    assert (settled(world).found, settled(world).missed) == ({PRIMARY: 1}, {})


def test_our_own_questions_are_not_told_of() -> None:
    world = World(tiers=[ScriptedTier(holds=keys(1))])
    request = world.manager.on_new_request(RequestContext("p2p-ask-1", internal=True))
    world.lookup(keys(1, 2), request)
    world.manager.on_request_finished(request)
    assert not world.of(LookupsSettled)


# -- runs ----------------------------------------------------------------------------------------


def test_a_trace_says_which_chunks_met_which_fate() -> None:
    tier = ScriptedTier("disk", holds=keys(2, 3))
    world = World(tiers=[tier], groups=GROUPS[:1], trace_lookups=True)
    world.stored(keys(0, 1, 4))
    request = world.request(end_of=ends(*range(7)))
    for _ in range(2):
        world.lookup(keys(*range(6)), request)
        world.step()
        tier.finish_all()
    world.step()
    world.lookup(keys(*range(6)), request)
    world.manager.load(keys(*range(5)), request)
    assert settled(world).runs == (
        Run(0, 0, 2, PRIMARY, (), key(0)),
        Run(0, 2, 2, "1:disk", (ABSENT,), key(2)),
        Run(0, 4, 1, PRIMARY, ()),
        Run(0, 5, 1, None, (ABSENT, ("1:disk", MissReason.ABSENT)), key(5)),
    )
    assert settled(world).untold == 0


def test_a_trace_of_a_full_hit_begins_after_what_the_accelerator_had() -> None:
    world = World(groups=GROUPS[:1], trace_lookups=True)
    world.stored(keys(2, 3))
    request = world.request(end_of=ends(*range(4)))
    world.lookup(keys(2, 3), request)
    world.manager.load(keys(2, 3), request)
    assert settled(world).runs == (Run(0, 2, 2, PRIMARY, (), key(2)),)


def test_a_trace_of_several_groups_has_runs_of_each() -> None:
    world = World(trace_lookups=True)
    world.stored([key(0), key(1), key(1, 1)])
    both = {key(i, g): 16 * (i + 1) for i in range(2) for g in range(2)}
    request = world.request(end_of=both.get)
    world.lookup([key(0), key(1), key(1, 1), key(0, 1)], request)
    world.manager.load([key(0), key(1), key(1, 1)], request)
    assert settled(world).runs == (
        Run(0, 0, 2, PRIMARY, (), key(0)),
        Run(1, 0, 1, None, (ABSENT,), key(0, 1)),
        Run(1, 1, 1, PRIMARY, (), key(1, 1)),
    )
    assert settled(world).loaded == {PRIMARY: 32}, "tokens of full attention alone"


def test_a_trace_is_bounded_and_says_what_it_leaves_out() -> None:
    names = range(4 * MAX_RUNS)
    odd = [n for n in names if n % 2]
    world = World(slots=len(odd), groups=GROUPS[:1], trace_lookups=True)
    world.stored(keys(*odd))
    request = world.request(end_of=ends(*names))
    world.lookup(keys(*names), request)
    world.manager.on_request_scheduled(request)
    event = settled(world)
    assert len(event.runs) == MAX_RUNS
    assert event.untold == len(names) - MAX_RUNS
    assert event.asked == len(names)


def test_where_nobody_knows_where_chunks_lie_they_are_counted_only() -> None:
    world = World(trace_lookups=True)
    world.lookup(keys(1), world.request("a"))
    request = world.request("b", end_of={}.get)
    world.lookup(keys(1), request)
    world.manager.on_request_scheduled(request)
    assert (settled(world).runs, settled(world).untold) == ((), 1)
