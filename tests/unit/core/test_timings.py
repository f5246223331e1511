"""How long a chunk's ways took, as the caller's clock has it."""

from kvtiers.chunks import GroupLayout, Lookup, make_key
from kvtiers.events import ChunksCopied, Hop, TransferFinished
from tests.unit.core.core_harness import ScriptedTier, World, key, keys


def copied(world: World) -> list[tuple[Hop, int, float, float | None]]:
    def rounded(seconds: float | None) -> float | None:
        return None if seconds is None else round(seconds, 3)

    return [
        (e.hop, e.chunks, rounded(e.seconds) or 0.0, rounded(e.waited_s))
        for e in world.of(ChunksCopied)
    ]


def test_a_store_is_timed_from_its_reservation_by_the_job() -> None:
    world = World()
    request = world.request()
    first = world.manager.store(keys(1, 2), request)
    world.step(1.0)
    second = world.manager.store(keys(3), request)
    world.step(1.0)
    world.manager.complete_store(set(first.keys), now=world.now + 0.5)
    world.manager.complete_store(second.keys, now=world.now + 0.5)
    assert copied(world) == [(Hop.STORE, 2, 2.5, None), (Hop.STORE, 1, 1.5, None)]
    world.manager.check()


def test_a_copy_has_the_bytes_of_its_chunks_whatever_their_group() -> None:
    world = World(groups=(GroupLayout(0, 8192, 16), GroupLayout(1, 4096, 16)))
    names = [make_key(b"a" * 32, 0), make_key(b"b" * 32, 1)]
    request = world.request()
    plan = world.manager.store(names, request)
    world.manager.complete_store(plan.keys, now=world.now)
    world.lookup(names, request)
    world.manager.load(names, request)
    world.manager.complete_load(request, now=world.now)
    assert [(e.hop, e.chunks, e.bytes) for e in world.of(ChunksCopied)] == [
        (Hop.STORE, 2, 12288),
        (Hop.LOAD, 2, 12288),
    ]


def test_a_store_that_failed_is_not_timed_nor_one_that_a_reset_overtook() -> None:
    world = World()
    request = world.request()
    failed = world.manager.store(keys(1), request)
    world.manager.complete_store(failed.keys, failed.keys, now=9.0)
    world.manager.store(keys(2), request)
    slots = world.manager.reset()
    world.manager.release_device(slots)
    world.manager.check()
    again = world.manager.store(keys(2), world.request("again"))
    world.manager.complete_store(again.keys, now=world.now + 0.25)
    assert copied(world) == [(Hop.STORE, 1, 0.25, None)]


def test_a_load_of_what_host_memory_has_waited_for_nothing() -> None:
    world = World()
    world.stored(keys(1))
    request = world.request()
    world.lookup(keys(1), request)
    world.manager.load(keys(1), request)
    world.step(0.1)
    world.manager.complete_load(request, now=world.now + 0.1)
    assert copied(world) == [(Hop.LOAD, 1, 0.2, None)]


def test_the_way_from_a_tier_to_the_accelerator_is_timed_in_parts_and_as_a_whole() -> None:
    tier = ScriptedTier(holds=keys(1))
    tier.verdicts[key(1)] = Lookup.RETRY
    world = World(tiers=[tier])
    request = world.request()
    assert world.lookup(keys(1), request) == [Lookup.RETRY]
    world.step(1.0)
    del tier.verdicts[key(1)]
    assert world.lookup(keys(1), request) == [Lookup.HIT_PENDING]
    world.step(0.5)
    tier.finish(tier.jobs[0])
    world.step(2.0)
    assert world.lookup(keys(1), request) == [Lookup.HIT]
    world.manager.load(keys(1), request)
    world.step(0.25)
    world.manager.complete_load(request, now=world.now)
    (promoted,) = world.of(TransferFinished)
    assert isinstance(promoted, TransferFinished)
    assert (promoted.hop, promoted.took_s) == (Hop.PROMOTE, 2.0)
    assert copied(world) == [(Hop.LOAD, 1, 0.25, 3.75)]


def test_a_request_that_gave_up_waiting_and_loads_what_there_is_has_waited() -> None:
    tier = ScriptedTier(holds=keys(2))
    world = World(tiers=[tier])
    world.stored(keys(1))
    request = world.request()
    assert world.lookup(keys(1, 2), request) == [Lookup.HIT, Lookup.HIT_PENDING]
    world.step(31.0)
    assert world.lookup(keys(1, 2), request) == [Lookup.HIT, Lookup.MISS]
    world.manager.load(keys(1), request)
    world.manager.complete_load(request, now=world.now + 1.0)
    assert copied(world) == [(Hop.LOAD, 1, 1.0, 32.0)]


def test_what_one_lookup_waited_for_is_not_held_against_the_next() -> None:
    world = World()
    writer, request = world.request("writer"), world.request()
    plan = world.manager.store(keys(1), writer)
    assert world.lookup(keys(1), request) == [Lookup.HIT_PENDING]
    world.manager.on_request_scheduled(request)
    world.manager.complete_store(plan.keys)
    world.step(50.0)
    assert world.lookup(keys(1), request) == [Lookup.HIT]
    world.manager.load(keys(1), request)
    world.manager.complete_load(request, now=world.now + 1.0)
    assert copied(world) == [(Hop.LOAD, 1, 1.0, None)]


def test_chunks_that_a_peer_reads_are_not_loaded() -> None:
    world = World()
    world.stored(keys(1))
    request = world.request()
    world.manager.load(keys(1), request)
    world.manager.complete_load(request)
    assert copied(world) == []


def test_a_cascade_is_timed_from_being_handed_over() -> None:
    tier = ScriptedTier()
    world = World(tiers=[tier])
    world.stored(keys(1))
    world.step(3.0)
    tier.finish(tier.jobs[0])
    world.step(0.5)
    (ended,) = world.of(TransferFinished)
    assert isinstance(ended, TransferFinished)
    assert (ended.hop, ended.took_s) == (Hop.CASCADE, 0.5)
