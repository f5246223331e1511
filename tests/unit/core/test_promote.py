import pytest

from kvtiers.chunks import Lookup, TierFilter, TierMatch
from kvtiers.errors import Kind
from kvtiers.events import ChunksDeclined, LookedUp, LookupTimed, Reason
from tests.unit.core.core_harness import ScriptedTier, World, key, keys

HIT, MISS, PENDING, RETRY = Lookup.HIT, Lookup.MISS, Lookup.HIT_PENDING, Lookup.RETRY


def test_what_a_request_asks_for_in_a_step_is_one_job_sent_when_it_ends() -> None:
    tier = ScriptedTier(holds=keys(1, 2, 3))
    world = World(tiers=[tier])
    request = world.request()
    assert world.lookup(keys(1, 2, 3), request) == [PENDING] * 3
    assert not tier.jobs
    world.step()
    assert [j.keys for j in tier.jobs] == [tuple(keys(1, 2, 3))]
    assert not any(view.readonly for view in tier.jobs[0].views)
    tier.finish_all()
    world.step()
    assert world.lookup(keys(1, 2, 3), request) == [HIT] * 3
    slots = world.manager.load(keys(1, 2, 3), request)
    assert [world.memory[s][0] for s in slots] == [1, 1, 1]


def test_two_requests_wait_for_one_promotion() -> None:
    tier = ScriptedTier(holds=keys(1))
    world = World(tiers=[tier])
    a, b = world.request("a"), world.request("b")
    assert world.lookup(keys(1), a) == world.lookup(keys(1), b) == [PENDING]
    world.step()
    assert len(tier.jobs) == 1
    tier.finish_all()
    world.step()
    assert world.lookup(keys(1), a) == world.lookup(keys(1), b) == [HIT]


def test_tiers_are_asked_in_order_and_the_first_hit_wins() -> None:
    first, second = ScriptedTier("first"), ScriptedTier("second", holds=keys(1))
    third = ScriptedTier("third", holds=keys(1))
    world = World(tiers=[first, second, third])
    world.lookup(keys(1), world.request())
    world.step()
    assert first.asked == keys(1)
    assert len(second.jobs) == 1
    assert not third.asked


def test_a_retry_holds_the_turn_until_its_deadline_then_the_next_tier_decides() -> None:
    slow, quick = ScriptedTier("slow"), ScriptedTier("quick", holds=keys(1))
    slow.verdicts[key(1)] = RETRY
    world = World(tiers=[slow, quick])
    request = world.request()
    assert world.lookup(keys(1), request) == [RETRY]
    world.step(seconds=4.9)
    assert world.lookup(keys(1), request) == [RETRY]
    assert not quick.asked
    world.step(seconds=0.2)
    assert world.lookup(keys(1), request) == [PENDING]
    world.step()
    assert len(quick.jobs) == 1


def test_a_retry_that_resolves_in_time_is_taken() -> None:
    slow, quick = ScriptedTier("slow", holds=keys(1)), ScriptedTier("quick", holds=keys(1))
    slow.verdicts[key(1)] = RETRY
    world = World(tiers=[slow, quick])
    request = world.request()
    assert world.lookup(keys(1), request) == [RETRY]
    world.step()
    del slow.verdicts[key(1)]
    assert world.lookup(keys(1), request) == [PENDING]
    world.step()
    assert len(slow.jobs) == 1
    assert not quick.asked


def test_a_filtered_tier_is_not_asked() -> None:
    tier = ScriptedTier(holds=keys(1))
    world = World(tiers=[tier])
    assert world.lookup(keys(1), world.request("none", TierFilter(()))) == [MISS]
    remote = TierFilter((TierMatch("STORAGE", "REMOTE"),))
    assert world.lookup(keys(1), world.request("remote", remote)) == [MISS]
    assert not tier.asked
    local = TierFilter((TierMatch("STORAGE", "LOCAL"),))
    assert world.lookup(keys(1), world.request("local", local)) == [PENDING]


def test_a_failed_promotion_is_a_miss_for_the_request_and_cannot_loop() -> None:
    tier = ScriptedTier(holds=keys(1, 2))
    world = World(tiers=[tier])
    request = world.request()
    world.lookup(keys(1, 2), request)
    world.step()
    tier.finish(tier.jobs[0], fail=[key(2)], kind=Kind.CORRUPT)
    world.step()
    assert world.lookup(keys(1, 2), request) == [HIT, MISS]
    world.step()
    assert not tier.jobs


def test_after_a_failed_promotion_the_next_tier_is_asked() -> None:
    bad, good = ScriptedTier("bad", holds=keys(1)), ScriptedTier("good", holds=keys(1))
    world = World(tiers=[bad, good])
    request = world.request()
    world.lookup(keys(1), request)
    world.step()
    bad.finish(bad.jobs[0], fail=keys(1))
    world.step()
    assert world.lookup(keys(1), request) == [PENDING]
    world.step()
    good.finish_all()
    world.step()
    assert world.lookup(keys(1), request) == [HIT]


def test_a_refused_promotion_is_a_miss_and_gives_its_slot_back() -> None:
    tier = ScriptedTier(holds=keys(1))
    tier.accepts = False
    world = World(tiers=[tier])
    request = world.request()
    world.lookup(keys(1), request)
    world.step()
    assert world.lookup(keys(1), request) == [MISS]
    assert world.index.free == 8


def test_chunks_of_a_waiting_request_are_kept_until_it_loads_them() -> None:
    tier = ScriptedTier(holds=keys(3))
    world = World(slots=3, tiers=[tier], cascade_max_pinned_fraction=0.0)
    world.stored(keys(1, 2))
    tier.verdicts.update({k: MISS for k in keys(1, 2)})
    request = world.request()
    assert world.lookup(keys(1, 2, 3), request) == [HIT, HIT, PENDING]
    world.step()
    cascades = [j for j in tier.jobs if key(3) not in j.keys]
    for job in cascades:
        tier.finish(job)
    assert world.manager.store(keys("x"), world.request("other")).declined == keys("x")
    tier.finish_all()
    world.step()
    assert world.lookup(keys(1, 2, 3), request) == [HIT] * 3
    world.manager.load(keys(1, 2, 3), request)
    world.manager.complete_load(request)
    world.manager.on_request_finished(request)
    for job in list(tier.jobs):
        tier.finish(job)
    world.step()
    assert world.manager.store(keys("x"), world.request("later")).keys == keys("x")


def test_a_prefix_longer_than_host_memory_is_served_as_far_as_it_fits() -> None:
    names = keys(*range(6))
    tier = ScriptedTier(holds=names)
    world = World(slots=4, tiers=[tier])
    request = world.request()
    assert world.lookup(names, request) == [PENDING] * 4 + [MISS] * 2
    world.step()
    tier.finish_all()
    world.step()
    assert world.lookup(names, request) == [HIT] * 4 + [MISS] * 2
    assert any(isinstance(e, ChunksDeclined) and e.reason is Reason.NO_ROOM for e in world.events)


def test_a_promotion_waits_a_little_for_room_that_others_will_free() -> None:
    tier = ScriptedTier(holds=keys(1))
    world = World(slots=1, tiers=[tier])
    other = world.manager.store(keys("x"), world.request("other"))
    request = world.request()
    assert world.lookup(keys(1), request) == [RETRY]
    world.step(seconds=0.1)
    world.manager.complete_store(other.keys)
    assert world.lookup(keys(1), request) == [PENDING]


def test_a_promotion_does_not_wait_for_room_for_ever() -> None:
    tier = ScriptedTier(holds=keys(1))
    world = World(slots=1, tiers=[tier])
    world.manager.store(keys("x"), world.request("other"))
    request = world.request()
    assert world.lookup(keys(1), request) == [RETRY]
    world.step(seconds=0.3)
    assert world.lookup(keys(1), request) == [MISS]


def test_a_request_does_not_wait_for_a_tier_that_never_answers_its_job() -> None:
    tier = ScriptedTier(holds=keys(1))
    world = World(tiers=[tier])
    request = world.request()
    world.lookup(keys(1), request)
    world.step()
    world.step(seconds=31.0)
    assert world.lookup(keys(1), request) == [MISS]
    assert any(isinstance(e, ChunksDeclined) and e.reason is Reason.TIMEOUT for e in world.events)


def test_the_slot_of_a_hung_promotion_is_not_reused_until_the_tier_lets_go() -> None:
    tier = ScriptedTier(holds=keys(1))
    world = World(slots=1, tiers=[tier])
    request = world.request()
    world.lookup(keys(1), request)
    world.step()
    job = tier.jobs[0]
    tier.time_out(job)
    world.step()
    assert world.lookup(keys(1), request) == [MISS]
    assert world.manager.store(keys(2), world.request("b")).declined == keys(2)
    tier.release(job)
    world.step()
    assert world.manager.store(keys(2), world.request("c")).keys == keys(2)


def test_a_promoted_chunk_is_offered_to_the_tiers_that_lack_it_but_not_to_its_source() -> None:
    source, other = ScriptedTier("source", holds=keys(1)), ScriptedTier("other")
    world = World(tiers=[source, other])
    world.lookup(keys(1), world.request())
    world.step()
    source.finish_all()
    world.step()
    assert not source.jobs
    assert [j.keys for j in other.jobs] == [(key(1),)]


def test_an_aborted_request_leaves_its_promotion_for_others() -> None:
    tier = ScriptedTier(holds=keys(1))
    world = World(tiers=[tier])
    request = world.request()
    world.lookup(keys(1), request)
    world.step()
    world.manager.on_request_finished(request)
    tier.finish_all()
    world.step()
    assert world.lookup(keys(1), world.request("next")) == [HIT]
    assert world.manager.use.pinned == 0


def test_host_hits_are_passed_to_the_tiers_as_touches_in_one_batch() -> None:
    tier = ScriptedTier()
    world = World(tiers=[tier])
    world.stored(keys(1, 2))
    world.step()
    tier.finish_all()
    world.step()
    tier.touched.clear()
    request = world.request()
    world.lookup(keys(1, 2), request)
    world.manager.load(keys(1, 2), request)
    world.step()
    assert sorted(tier.touched) == sorted(keys(1, 2))


def test_each_chunk_is_counted_once_per_request_and_tier() -> None:
    tier = ScriptedTier(holds=keys(2))
    world = World(tiers=[tier])
    world.stored(keys(1))
    request = world.request()
    for _ in range(3):
        world.lookup(keys(1, 2, 3), request)
        world.step()
        tier.finish_all()
    world.manager.load(keys(1, 2), request)
    world.step()
    looked = [e for e in world.events if isinstance(e, LookedUp)]
    by_tier = {
        t: (
            sum(e.queries for e in looked if e.tier == t),
            sum(e.hits for e in looked if e.tier == t),
        )
        for t in ("0:primary", "1:scripted")
    }
    assert by_tier == {"0:primary": (3, 1), "1:scripted": (2, 1)}


def test_the_source_of_a_promoted_chunk_is_remembered_for_its_request() -> None:
    tier = ScriptedTier(holds=keys(2))
    world = World(tiers=[tier])
    world.stored(keys(1))
    request = world.request()
    world.lookup(keys(1, 2), request)
    world.step()
    tier.finish_all()
    world.step()
    world.lookup(keys(1, 2), request)
    world.manager.load(keys(1, 2), request)
    assert world.manager.source(key(1), request) is None
    source = world.manager.source(key(2), request)
    assert source is not None
    assert source.label == "1:scripted"


def test_after_a_failed_promotion_the_next_tier_has_its_whole_turn() -> None:
    bad, slow = ScriptedTier("bad", holds=keys(1)), ScriptedTier("slow", holds=keys(1))
    world = World(tiers=[bad, slow])
    request = world.request()
    world.lookup(keys(1), request)
    world.step()
    bad.finish(bad.jobs[0], fail=keys(1))
    world.step()
    slow.verdicts[key(1)] = RETRY
    assert world.lookup(keys(1), request) == [RETRY]
    world.step(seconds=4.0)
    del slow.verdicts[key(1)]
    assert world.lookup(keys(1), request) == [PENDING]
    waited = [e.waited_s for e in world.events if isinstance(e, LookupTimed)]
    assert waited == [pytest.approx(4.0)]


def test_want_of_room_is_counted_once_a_request_however_often_it_asks() -> None:
    tier = ScriptedTier(holds=keys(1, 2, 3))
    world = World(slots=1, tiers=[tier])
    request = world.request()
    for _ in range(5):
        world.lookup(keys(1, 2, 3), request)
        world.step()
    declined = [e for e in world.events if isinstance(e, ChunksDeclined)]
    assert sum(e.chunks for e in declined if e.reason is Reason.NO_ROOM) == 1
