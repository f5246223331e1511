import pytest

from kvtiers.chunks import PAGE_BYTES, ChunkLayout, GroupLayout, Key, make_key
from kvtiers.errors import KVTiersError
from kvtiers.host.policies import LRUPolicy, load_policy
from kvtiers.host.pressure import Pressure
from kvtiers.host.sized import SizedIndex
from kvtiers.host.slabpool import SlabPool
from kvtiers.host.slabs import SizeClasses

SMALL, LARGE = 0, 1
LAYOUT = ChunkLayout((GroupLayout(SMALL, PAGE_BYTES, 16), GroupLayout(LARGE, 4 * PAGE_BYTES, 16)))
CLASSES = SizeClasses.of(LAYOUT, PAGE_BYTES)
SLAB = 4


def index_of(slabs: int, policy=LRUPolicy) -> SizedIndex:
    return SizedIndex(slabs, SLAB, CLASSES, lambda n: policy(capacity=n))


def keys(group: int, first: int, count: int) -> list[Key]:
    return [make_key(n.to_bytes(8, "big"), group) for n in range(first, first + count)]


def fill(index: SizedIndex, group: int, count: int, first: int = 0) -> tuple[Key, ...]:
    """Bring chunks in, one reservation each; what was evicted for them."""
    gone: list[Key] = []
    for key in keys(group, first, count):
        reserved = index.reserve([key])
        gone += reserved.evicted
        index.commit(reserved.keys)
        index.check()
    return tuple(gone)


def resident(index: SizedIndex) -> list[int]:
    """Ready chunks by group."""
    return [sum(key[-1] == group for key in index.ready) for group in (SMALL, LARGE)]


# -- taking and giving back -----------------------------------------------------------------------


def test_chunks_of_each_size_lie_close_together_in_slabs_of_their_own():
    index = index_of(4)
    reserved = index.reserve([*keys(SMALL, 0, 5), *keys(LARGE, 0, 1)])
    assert reserved.slots == (0, 1, 2, 3, 4, 8)
    assert index.free == 16 - 5 - 4
    assert repr(index) == (
        "<SizedIndex 16 slots: 7 free, 0 ready, 6 filling, 0 orphaned; 6 held; "
        "<SlabPool 1 spare, [2, 1] taken by class>>"
    )


def test_chunks_keep_their_order_across_sizes_and_of_each_the_first_fit():
    index = index_of(3)
    offered = [k for pair in zip(keys(SMALL, 0, 6), keys(LARGE, 0, 6), strict=True) for k in pair]
    reserved = index.reserve(offered)
    # The small ones find their slab and one more; what is left is the floor of the large ones.
    assert list(reserved.keys) == [k for k in offered if k[-1] == SMALL or k == offered[1]]
    assert list(index.filling) == list(reserved.keys)
    assert reserved.evicted == ()


def test_an_empty_slab_serves_the_next_size():
    index = index_of(3)
    fill(index, SMALL, 8)
    index.drop(keys(SMALL, 0, 4))
    assert fill(index, LARGE, 2) == ()
    assert resident(index) == [4, 2]


def test_after_a_reset_any_size_may_have_everything_but_a_floor():
    index = index_of(5)
    fill(index, SMALL, 16)
    index.clear()
    index.check()
    assert fill(index, LARGE, 4) == ()
    assert len(index.ready) == 4


# -- nobody starves -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy", [LRUPolicy, lambda capacity: load_policy("arc", capacity=capacity)]
)
@pytest.mark.parametrize(("flooding", "late"), [(SMALL, LARGE), (LARGE, SMALL)])
def test_a_flood_of_one_size_leaves_the_other_its_floor_and_gives_way_in_time(
    flooding, late, policy
):
    slabs, per_slab = 64, {SMALL: 4, LARGE: 1}
    index = index_of(slabs, policy)
    fill(index, flooding, 4 * slabs * per_slab[flooding])
    assert resident(index)[flooding] == (slabs - 2) * per_slab[flooding]
    floor = 2 * per_slab[late]
    assert fill(index, late, floor) == (), "its floor was kept for it"
    whole = slabs * per_slab[late]
    fill(index, late, whole, first=floor)
    assert resident(index)[late] >= whole * 5 // 8, "asked for all there is, and got most of it"
    fill(index, late, whole, first=floor + whole)
    assert resident(index)[late] >= whole * 7 // 8
    assert resident(index)[flooding] >= 2 * per_slab[flooding], "but its floor stays"


def test_sizes_that_are_asked_for_alike_come_to_share_memory_alike_and_rest():
    slabs = 64
    index = index_of(slabs)
    fill(index, SMALL, 4 * slabs)
    for turn in range(6 * slabs):
        fill(index, LARGE, 1, first=turn)
        fill(index, SMALL, 4, first=1000 + 4 * turn)
    shares = [resident(index)[SMALL] / 4, resident(index)[LARGE]]
    assert sum(shares) >= slabs - 1
    assert min(shares) / max(shares) >= 0.6, shares
    before = index._free.owned()
    for turn in range(6 * slabs, 8 * slabs):
        fill(index, LARGE, 1, first=turn)
        fill(index, SMALL, 4, first=1000 + 4 * turn)
    moved = max(abs(a - b) for a, b in zip(before, index._free.owned(), strict=True))
    assert moved <= 4, "slabs go to and fro"


def test_a_size_whose_chunks_are_all_held_gets_slabs_of_the_other():
    index = index_of(8)
    fill(index, SMALL, 28)
    fill(index, LARGE, 1)
    held = index.hold(keys(LARGE, 0, 1))
    gone = fill(index, LARGE, 1, first=1)
    assert len(gone) == 4
    assert {key[-1] for key in gone} == {SMALL}
    index.release(held)


def test_the_one_slab_that_is_not_in_use_is_found_at_once():
    index = index_of(64)
    fill(index, SMALL, 4 * 62)
    index.hold([k for k in index.ready if index.ready[k] // SLAB != 40])
    fill(index, LARGE, 2)
    index.hold(keys(LARGE, 0, 2))
    assert len(fill(index, LARGE, 1, first=2)) == 4, "all others are in use"


def test_a_slab_in_use_stays_and_the_one_not_used_for_longest_leaves():
    index = index_of(4)
    fill(index, SMALL, 12)
    fill(index, LARGE, 1)
    index.hold(keys(LARGE, 0, 1))
    index.hold(keys(SMALL, 0, 1))  # the first slab is held
    index.touch(keys(SMALL, 4, 1))  # the second one was used
    assert fill(index, LARGE, 1, first=1) == tuple(keys(SMALL, 8, 4))


def test_a_prefix_loses_the_slab_of_its_end_first():
    index = index_of(4)
    whole = keys(SMALL, 0, 12)
    index.commit(index.reserve(whole).keys)
    fill(index, LARGE, 1)
    index.hold(keys(LARGE, 0, 1))
    assert fill(index, LARGE, 1, first=1) == tuple(whole[8:])


def test_chunks_of_the_same_prefix_are_not_evicted_with_a_slab():
    index = index_of(4)
    fill(index, SMALL, 12)
    fill(index, LARGE, 1)
    index.hold(keys(LARGE, 0, 1))
    protected = frozenset(keys(SMALL, 0, 1) + keys(SMALL, 5, 1) + keys(SMALL, 11, 1))
    assert index.reserve(keys(LARGE, 1, 1), protected).keys == ()
    index.check()


def test_pressure_weighs_what_is_lacked_against_what_is_there():
    pressure = Pressure(3, memory=100)
    pressure.lacked(0, 40)
    pressure.lacked(1, 10)
    assert pressure.giver(0, [10, 10, 10], {1, 2}) == 2
    assert pressure.giver(0, [10, 10, 10], {1}) == 1
    assert pressure.giver(1, [10, 10, 10], {0}) is None, "it is under more pressure itself"
    assert pressure.giver(1, [10, 10, 10], {0}, at_any=True) == 0
    assert pressure.giver(0, [40, 10, 10], {1}) is None, "it has more already"
    assert pressure.giver(0, [10, 10, 10], set()) is None
    assert repr(pressure) == "<Pressure [40.0, 10.0, 0.0]>"


def test_old_needs_fade():
    pressure = Pressure(2, memory=100)
    pressure.lacked(0, 90)
    pressure.lacked(1, 20)
    assert repr(pressure) == "<Pressure [45.0, 10.0]>"
    pressure.check()
    pressure.clear()
    assert repr(pressure) == "<Pressure [0.0, 0.0]>"


@pytest.mark.parametrize("lacked", [[-1.0, 0.0], [90.0, 20.0]])
def test_broken_pressure_is_found(lacked):
    pressure = Pressure(2, memory=100)
    pressure.check()
    pressure._lacked = lacked
    with pytest.raises(AssertionError, match="a need is negative, or old ones do not fade"):
        pressure.check()


# -- what breaks ----------------------------------------------------------------------------------


class Spiteful(LRUPolicy):
    """Chooses what is not there, when told to."""

    evil = False

    def evict(self, count, staying):
        return [make_key(b"unknown", LARGE)] if self.evil else super().evict(count, staying)


def test_nothing_is_reserved_when_a_policy_of_one_size_fails():
    index = index_of(4, Spiteful)
    fill(index, LARGE, 3)
    index._policies.by_class[1].evil = True
    pressed = index.hold(keys(LARGE, 0, 2))
    with pytest.raises(KVTiersError, match="Spiteful chose a chunk"):
        index.reserve([*keys(SMALL, 0, 2), *keys(LARGE, 3, 1)])
    index.release(pressed)
    assert not index.filling
    index.check()


def test_a_chunk_reserved_twice_is_refused():
    index = index_of(4)
    fill(index, SMALL, 1)
    with pytest.raises(KVTiersError, match="reserved twice"):
        index.reserve([*keys(SMALL, 0, 1), *keys(LARGE, 0, 1)])


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (lambda pool: pool._spare.pop(), "a slab is lost"),
        (lambda pool: pool._spare.append(0), "there twice"),
        (lambda pool: pool._open[0].clear(), "cannot be found"),
        (lambda pool: pool._by_age[0].clear(), "other slabs than it should"),
        (lambda pool: pool._slabs[0].free.append(3), "do not add up"),
        (lambda pool: pool._slabs[0].free.__setitem__(0, 2), "a slot is free twice"),
        (lambda pool: pool._slabs[0].free.__setitem__(0, 9), "a slot is free twice"),
        (lambda pool: pool.__setattr__("floor", 3), "a floor is not kept"),
    ],
)
def test_a_broken_pool_is_found(what, why):
    pool = SlabPool(4, SLAB, (1, 4), 1)
    pool.take(0, keys(SMALL, 0, 1))
    pool.check()
    what(pool)
    with pytest.raises(AssertionError, match=why):
        pool.check()


def test_a_policy_that_misses_chunks_of_one_size_is_found():
    index = index_of(4)
    fill(index, SMALL, 2)
    fill(index, LARGE, 1)
    small, large = index._policies.by_class
    small.remove(keys(SMALL, 0, 1))
    large.insert(keys(LARGE, 9, 1))
    with pytest.raises(AssertionError, match="the policy of class 0 differs"):
        index.check()
