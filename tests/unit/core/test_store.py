from kvtiers.chunks import Lookup, OffloadPolicy
from kvtiers.core.store import UseCounter
from kvtiers.events import ChunksDeclined, ChunksRemoved, ChunksStored, Hop, Reason
from tests.unit.core.core_harness import ScriptedTier, World, key, keys


def test_a_stored_chunk_is_pending_until_the_copy_is_confirmed() -> None:
    world = World()
    request = world.request()
    plan = world.manager.store(keys(1, 2), request)
    assert plan.keys == keys(1, 2)
    assert len(set(plan.slots)) == 2
    assert world.lookup(keys(1, 2), request) == [Lookup.HIT_PENDING] * 2
    world.manager.complete_store(plan.keys)
    assert world.lookup(keys(1, 2), request) == [Lookup.HIT] * 2
    assert world.of(ChunksStored) == [ChunksStored("0:primary", tuple(keys(1, 2)))]
    world.step()


def test_a_failed_copy_is_a_miss_and_frees_its_slot() -> None:
    world = World(slots=2)
    request = world.request()
    plan = world.manager.store(keys(1, 2), request)
    world.manager.complete_store(plan.keys, failed=[key(2)])
    assert world.lookup(keys(1, 2), request) == [Lookup.HIT, Lookup.MISS]
    assert world.index.free == 1
    world.step()


def test_what_is_resident_or_being_stored_is_not_stored_twice() -> None:
    world = World()
    request = world.request()
    world.stored(keys(1))
    plan = world.manager.store(keys(1, 2), request)
    assert plan.keys == [key(2)]
    assert plan.resident == [key(1)]
    assert world.manager.store(keys(1, 2), request).keys == []


def test_without_room_the_first_chunks_are_taken_and_the_rest_is_declined() -> None:
    world = World(slots=3)
    request = world.request()
    plan = world.manager.store(keys(1, 2, 3, 4, 5), request)
    assert plan.keys == keys(1, 2, 3)
    assert plan.declined == keys(4, 5)
    assert ChunksDeclined(Hop.STORE, "0:primary", 2, Reason.NO_ROOM) in world.events


def test_a_declined_chunk_is_taken_when_it_is_offered_again_after_room_was_made() -> None:
    world = World(slots=2)
    request, other = world.request(), world.request("other")
    held = world.manager.store(keys("x", "y"), other)
    epoch = world.manager.room_epoch
    assert world.manager.store(keys(1), request).declined == [key(1)]
    world.manager.complete_store(held.keys)
    assert world.manager.room_epoch > epoch
    assert world.manager.store(keys(1), request).keys == [key(1)]


def test_resident_chunks_of_the_same_offer_are_never_evicted_for_it() -> None:
    world = World(slots=1)
    request = world.request()
    world.stored(keys(1))
    plan = world.manager.store(keys(1, 2, 3), request)
    assert plan.keys == []
    assert plan.declined == keys(2, 3)
    assert world.lookup(keys(1), request) == [Lookup.HIT]


def test_the_least_recently_used_chunk_makes_room_and_its_departure_is_told() -> None:
    world = World(slots=2)
    world.stored(keys(1, 2))
    world.manager.touch(keys(1))
    plan = world.manager.store(keys(3), world.request())
    assert plan.evicted == [key(2)]
    assert ChunksRemoved("0:primary", (key(2),), Reason.EVICTED) in world.events


def test_a_chunk_is_stored_only_after_it_was_offered_often_enough() -> None:
    world = World(store_threshold=2)
    request = world.request()
    assert world.manager.store(keys(1), request).keys == []
    assert world.manager.store(keys(1), request).keys == keys(1)
    assert ChunksDeclined(Hop.STORE, "0:primary", 1, Reason.THRESHOLD) in world.events


def test_what_a_tier_wants_whole_is_stored_at_once() -> None:
    """A peer waits for it, however rarely it was offered."""
    whole = ScriptedTier("whole")
    whole.policy = OffloadPolicy.REQUEST
    world = World(tiers=[whole], store_threshold=2)
    assert world.manager.store(keys(1), world.request()).keys == keys(1)


def test_the_use_counter_forgets_the_oldest_beyond_its_capacity() -> None:
    counter = UseCounter(threshold=2, capacity=2)
    assert counter.admit(keys(1, 2, 3)) == []
    assert counter.admit(keys(1)) == []
    assert counter.admit(keys(3)) == keys(3)


def test_request_level_tiers_are_offered_what_was_resident_before() -> None:
    whole, part = ScriptedTier("whole"), ScriptedTier("part")
    whole.policy = OffloadPolicy.REQUEST
    world = World(tiers=[whole, part])
    world.stored(keys(1))
    world.step()
    for tier in (whole, part):
        tier.finish_all()
    world.step()
    assert not whole.jobs
    request = world.request("all")
    world.manager.store(keys(1), request)
    world.step()
    assert [j.keys for j in whole.jobs] == [(key(1),)]
    assert not part.jobs
