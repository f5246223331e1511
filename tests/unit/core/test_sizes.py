"""The manager over chunks of several sizes: what it promises of one size holds for each."""

from collections.abc import Sequence

import pytest

from kvtiers.chunks import PAGE_BYTES, ChunkLayout, GroupLayout, Key, Lookup, make_key
from kvtiers.core.ledger import Request
from kvtiers.core.manager import ManagerOptions, TieringManager
from kvtiers.events import ChunksDeclined, ChunksRemoved, ChunksStored, Hop, Reason
from kvtiers.host.policies import load_policy
from kvtiers.host.sized import SizedIndex
from kvtiers.host.slabs import SizeClasses
from kvtiers.testing import content
from tests.unit.core.core_harness import ScriptedTier, World

SIZES = (3, 4, 1, 2, 1)
"""Pages of a chunk, as of a model with several kinds of attention, states and an indexer."""
LAYOUT = ChunkLayout(
    tuple(
        GroupLayout(g, n * PAGE_BYTES, 4 << g, keeps_every_chunk=g != 1)
        for g, n in enumerate(SIZES)
    )
)
SLAB = 12


def key(name: int, group: int) -> Key:
    return make_key(name.to_bytes(16, "big"), group)


def prompt(*names: int) -> list[Key]:
    """Chunks of all groups, in the order of the prefixes that they end."""
    return [key(name, group) for name in names for group in range(len(SIZES))]


class SizedTier(ScriptedTier):
    """Moves chunks of their own sizes."""

    def __init__(self, holds: Sequence[Key] = ()) -> None:
        super().__init__()
        self.holds = {k: content(k, LAYOUT.chunk_bytes(k)) for k in holds}


class SizedWorld(World):
    """Host memory in one piece, with slabs."""

    def __init__(self, slabs: int, tiers: Sequence[ScriptedTier] = (), **options: object) -> None:
        super().__init__(slots=1)
        self.tiers = list(tiers)
        self.region = bytearray(slabs * SLAB * PAGE_BYTES)
        classes = SizeClasses.of(LAYOUT, PAGE_BYTES)
        self.sized = SizedIndex(slabs, SLAB, classes, lambda n: load_policy("lru", capacity=n))
        self.manager = TieringManager(
            index=self.sized,
            layout=LAYOUT,
            view=self._part,
            tiers=tiers,
            sink=self.events.append,
            options=ManagerOptions(**options),  # type: ignore[arg-type]
        )
        self.manager.poll(self.now)

    def _part(self, slot: int, nbytes: int, writable: bool) -> memoryview:
        view = memoryview(self.region)[slot * PAGE_BYTES :][:nbytes]
        return view if writable else view.toreadonly()

    def stored(self, names: Sequence[Key], request: Request | None = None) -> None:
        request = request or self.request(f"store-{len(self.events)}")
        plan = self.manager.store(list(names), request)
        for k, slot in zip(plan.keys, plan.slots, strict=True):
            size = LAYOUT.chunk_bytes(k)
            self._part(slot, size, True)[:] = content(k, size)
        self.manager.complete_store(plan.keys)
        self.manager.check()

    def holds_right_bytes(self) -> bool:
        return all(
            self._part(slot, LAYOUT.chunk_bytes(k), False) == content(k, LAYOUT.chunk_bytes(k))
            for k, slot in self.sized.ready.items()
        )


def test_chunks_of_all_sizes_go_down_and_come_back_after_a_restart() -> None:
    tier = SizedTier()
    world = SizedWorld(16, [tier])
    world.stored(prompt(1, 2, 3))
    world.step()
    tier.finish_all()
    world.step()
    assert tier.holds == {k: content(k, LAYOUT.chunk_bytes(k)) for k in prompt(1, 2, 3)}

    fresh = SizedWorld(16, [tier])
    request = fresh.request()
    assert fresh.lookup(prompt(1, 2, 3), request) == [Lookup.HIT_PENDING] * 15
    fresh.step()
    tier.finish_all()
    fresh.step()
    assert fresh.lookup(prompt(1, 2, 3), request) == [Lookup.HIT] * 15
    assert fresh.holds_right_bytes()
    assert len(set(fresh.manager.load(prompt(1, 2, 3), request))) == 15
    fresh.manager.check()


def test_what_does_not_fit_of_one_size_is_declined_and_the_others_are_stored() -> None:
    world = SizedWorld(4)
    request = world.request()
    plan = world.manager.store([key(n, g) for n in range(5) for g in (1, 2)], request)
    assert plan.keys == [key(n, g) for n in range(5) for g in (1, 2) if g == 2 or n < 3]
    assert plan.declined == [key(3, 1), key(4, 1)]
    assert world.of(ChunksDeclined) == [ChunksDeclined(Hop.STORE, "0:primary", 2, Reason.NO_ROOM)]
    world.manager.complete_store(plan.keys)
    world.manager.on_request_finished(request)
    world.step()
    # Another request may evict them.
    assert world.manager.store([key(3, 1)], world.request("other")).keys == [key(3, 1)]


def test_events_tell_what_leaves_with_a_slab() -> None:
    world = SizedWorld(8)
    for n in range(80):
        world.stored([key(n, 2)])
    for n in range(40):
        world.stored([key(n, 1)])
    told: set[Key] = set()
    for event in world.events:
        if isinstance(event, ChunksStored):
            told.update(event.keys)
        elif isinstance(event, ChunksRemoved):
            assert event.reason is Reason.EVICTED
            told.difference_update(event.keys)
    assert told == set(world.sized.ready)
    assert world.holds_right_bytes()


@pytest.mark.parametrize("fraction", [0.1, 0.5])
def test_a_slow_tier_pins_no_more_than_its_share_of_bytes(fraction: float) -> None:
    tier = SizedTier()
    world = SizedWorld(16, [tier], cascade_max_pinned_fraction=fraction)
    for n in range(12):
        world.stored(prompt(n))
        world.step()
    pinned = sum(LAYOUT.chunk_bytes(k) for job in tier.jobs for k in job.keys)
    share = fraction * len(world.region)
    assert share - LAYOUT.slot_bytes < pinned <= share
    assert world.manager.use.pinned * PAGE_BYTES == pinned
    resident = sum(LAYOUT.chunk_bytes(k) for k in world.sized.ready)
    assert world.manager.use.resident * PAGE_BYTES == resident


def test_a_tier_that_hangs_over_one_size_does_not_stop_it() -> None:
    tier = SizedTier()
    world = SizedWorld(8, [tier], cascade_max_pinned_fraction=0.5)
    for n in range(60):
        world.stored([key(n, 2)])
    while world.manager.has_pending_work(world.now):
        world.step()
        tier.finish_all()
    world.events.clear()
    for n in range(40):
        world.stored([key(n, 1)])
        world.step()
    assert any(key(0, 1) in job.keys for job in tier.jobs), "it holds chunks of this size"
    declined = [e for e in world.events if isinstance(e, ChunksDeclined)]
    assert all(e.hop is Hop.CASCADE for e in declined), "none for want of room"
    assert key(39, 1) in world.sized.ready


def test_promotions_for_a_size_that_is_full_make_room() -> None:
    tier = SizedTier(holds=[key(n, 1) for n in range(100, 106)])
    world = SizedWorld(8, [tier])
    for n in range(100):
        world.stored([key(n, 2)])
    request = world.request()
    wanted = [key(n, 1) for n in range(100, 106)]
    assert world.lookup(wanted, request) == [Lookup.HIT_PENDING] * 6
    world.step()
    tier.finish_all()
    world.step()
    assert world.lookup(wanted, request) == [Lookup.HIT] * 6


def test_warming_up_fills_half_of_all_bytes_at_most() -> None:
    hot = prompt(*range(30))
    tier = SizedTier(holds=hot)
    world = SizedWorld(20, [tier])
    world.manager.warm(hot)
    for _ in range(30):
        world.step()
        tier.finish_all()
    use = world.manager.use
    assert use.slots // 2 - 32 * max(SIZES) <= use.resident <= use.slots // 2
    assert not world.of(ChunksRemoved)


def test_a_reset_gives_all_slabs_back() -> None:
    world = SizedWorld(8)
    world.stored(prompt(*range(6)))
    world.manager.reset()
    assert world.sized.free == world.sized.num_slots
    world.manager.check()
