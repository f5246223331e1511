import pytest

from kvtiers.chunks import Lookup, make_key
from kvtiers.errors import Kind, KVTiersError
from kvtiers.host.index import HostIndex
from kvtiers.host.parts import Reservation
from kvtiers.host.policies import LRUPolicy, load_policy

KEYS = [make_key(bytes([i]) * 32, 0) for i in range(20)]
A, B, C, D, E, F = KEYS[:6]


@pytest.fixture
def index():
    return HostIndex(4, LRUPolicy(capacity=4))


def store(index, *keys):
    reserved = index.reserve(keys)
    assert reserved.keys == keys
    assert index.commit(reserved.keys) == list(keys)
    index.check()
    return reserved


def test_a_chunk_is_a_miss_then_pending_then_a_hit(index):
    assert index.lookup(A) is Lookup.MISS
    reserved = index.reserve([A])
    assert index.lookup(A) is Lookup.HIT_PENDING
    assert index.filling == {A: reserved.slots[0]}
    assert index.commit([A]) == [A]
    assert index.lookup(A) is Lookup.HIT
    assert index.ready == {A: reserved.slots[0]}


def test_a_batch_gets_adjacent_slots_also_after_eviction(index):
    assert store(index, A, B).slots == (0, 1)
    assert store(index, C, D).slots == (2, 3)
    reserved = index.reserve([E, F])
    assert reserved.slots == (0, 1)
    assert set(reserved.evicted) == {A, B}


def test_a_prefix_loses_its_end_first(index):
    store(index, A, B, C, D)
    assert index.reserve([E, F]).evicted == (D, C)


def test_a_touched_prefix_loses_its_end_first(index):
    store(index, A, B)
    store(index, C, D)
    index.touch([A, B, F])
    assert index.reserve(KEYS[6:10]).evicted == (D, C, B, A)


def test_as_many_as_fit_are_taken_from_the_front(index):
    reserved = index.reserve(KEYS[:6])
    assert reserved == Reservation(tuple(KEYS[:4]), (0, 1, 2, 3), ())
    assert index.reserve([E, F]) == Reservation((), (), ())
    index.check()


def test_neither_held_nor_protected_nor_filling_keys_are_evicted(index):
    store(index, A, B)
    reserved = index.reserve([C])
    store(index, D)
    index.hold([A])
    assert index.reserve(KEYS[6:10], protected={B}) == Reservation((KEYS[6],), (3,), (D,))
    assert index.commit(reserved.keys) == [C]
    assert {A, B, C} == set(index.ready)
    index.check()


@pytest.mark.parametrize("fetched", [False, True])
def test_a_failed_write_gives_its_slot_back(index, fetched):
    reserved = index.reserve([A, B, C], fetched=fetched)
    if fetched:
        assert index.settle(reserved.keys, reserved.slots, failed={B}) == [A, C]
    else:
        assert index.commit(reserved.keys, failed={B}) == [A, C]
    assert index.lookup(B) is Lookup.MISS
    assert index.free == 2
    assert (index.resident, index.filling_count, index.held, index.orphaned) == (2, 0, 0, 0)
    index.check()


def test_a_key_dropped_while_it_is_written_stays_absent(index):
    reserved = index.reserve([A, B], fetched=True)
    assert index.drop([A, A, F]) == [A]
    assert (index.orphaned, index.held, index.free) == (1, 2, 2)
    assert index.settle(reserved.keys, reserved.slots) == [B]
    assert index.lookup(A) is Lookup.MISS
    assert (index.orphaned, index.held, index.free) == (0, 0, 3)
    index.check()


def test_what_was_dropped_while_the_accelerator_wrote_it_is_not_committed(index):
    index.reserve([A, B])
    assert index.drop([A]) == [A]
    assert index.commit([A, B], failed={A}) == [B]
    assert (index.orphaned, index.free) == (1, 2)
    index.release([0])
    assert index.free == 3
    index.check()


def test_the_old_writer_does_not_make_the_new_ones_bytes_ready(index):
    old = index.reserve([A], fetched=True)
    index.drop([A])
    new = index.reserve([A], fetched=True)
    assert new.slots != old.slots
    assert index.settle([A], old.slots) == []
    assert index.lookup(A) is Lookup.HIT_PENDING
    assert index.settle([A], new.slots) == [A]
    assert index.ready == {A: new.slots[0]}
    assert index.free == 3
    index.check()


def test_a_held_key_that_is_dropped_frees_its_slot_with_the_last_release(index):
    store(index, A)
    assert index.hold([A]) == index.hold([A])
    assert index.drop([A]) == [A]
    assert index.lookup(A) is Lookup.MISS
    index.release([0])
    assert (index.orphaned, index.free) == (1, 3)
    index.release([0])
    assert (index.orphaned, index.free) == (0, 4)
    index.check()


def test_a_key_held_twice_in_one_call_is_released_twice(index):
    store(index, A)
    slots = index.hold([A, A])
    index.release([0])
    assert index.held == 1
    index.release([0])
    assert index.held == 0
    assert slots == [0, 0]


def test_holding_an_unknown_or_pending_key_pins_nothing(index):
    store(index, A)
    index.reserve([B])
    for keys in ([A, F], [A, B]):
        with pytest.raises(KeyError):
            index.hold(keys)
    index.check()


@pytest.mark.parametrize("slots", [[0, 1], [0, 0], [0, 2], [0, 3]])
def test_releasing_what_is_not_held_raises_and_releases_nothing(index, slots):
    store(index, A, B)
    index.reserve([C])  # slot 2 is its writer's, who must settle
    index.hold([A])
    with pytest.raises(KVTiersError, match="released more often than held") as caught:
        index.release(slots)
    assert caught.value.kind is Kind.BROKEN
    assert index.held == 2
    index.check()


@pytest.mark.parametrize("keys", [[A], [B], [C, C], [D, A]])
def test_reserving_a_known_key_or_one_twice_is_refused(index, keys):
    store(index, A)
    index.reserve([B])
    with pytest.raises(KVTiersError) as caught:
        index.reserve(keys)
    assert caught.value.kind is Kind.BROKEN
    assert index.free == 2
    index.check()


def test_clear_drops_everything_and_lets_holders_finish(index):
    store(index, A, B)
    index.hold([B])
    reserved = index.reserve([C], fetched=True)
    assert sorted(index.clear()) == [A, B, C]
    assert (index.resident, index.filling_count, index.orphaned, index.free) == (0, 0, 2, 2)
    assert index.settle(reserved.keys, reserved.slots) == []
    index.release([1])
    assert index.free == 4
    index.check()


def test_clear_forgets_the_policys_history():
    index = HostIndex(2, load_policy("arc", capacity=2))
    store(index, A, B)
    index.touch([A, B])
    store(index, C)
    assert "B1 0, B2 1" in repr(index.policy)
    index.clear()
    assert "B1 0, B2 0" in repr(index.policy)


def test_the_repr_has_counts(index):
    store(index, A)
    index.hold([A])
    index.reserve([B])
    assert repr(index) == "<HostIndex 4 slots: 2 free, 1 ready, 1 filling, 0 orphaned; 2 held>"


class Spiteful(LRUPolicy):
    """Answers with ``answer`` whatever it is asked for."""

    answer = ()

    def evict(self, count, staying):
        return list(self.answer)


@pytest.mark.parametrize("answer", [[A], [F], [B, B], [C]])
def test_a_policy_that_breaks_its_word_is_named_and_nothing_is_lost(answer):
    index = HostIndex(3, Spiteful(capacity=3))
    store(index, A, B, C)
    index.hold([A])
    index.policy.answer = answer
    with pytest.raises(KVTiersError, match="eviction policy Spiteful") as caught:
        index.reserve([D, E], protected={C})
    assert caught.value.kind is Kind.BROKEN
    assert set(index.ready) == {A, B, C}
    index.check()


def test_a_policy_that_finds_too_few_makes_the_reservation_shorter():
    index = HostIndex(2, Spiteful(capacity=2))
    store(index, A, B)
    assert index.reserve([C, D]) == Reservation((), (), ())
    index.check()


def break_owner(index):
    index.ready[B] = index.ready[A]


def break_free_list(index):
    index._free[0] = index._free[1]


def break_hold(index):
    index._held.add(index._free[0])


def break_second_hold(index):
    index._held_again[index.ready[A]] += 1


def break_orphans(index):
    index._orphans[index._free.pop()] = 0


def break_policy(index):
    index.policy.remove([A])


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (break_owner, "owner"),
        (break_free_list, "owner"),
        (break_hold, "read that is not ready"),
        (break_second_hold, "held again that is not held"),
        (break_orphans, "counted that nobody holds"),
        (break_policy, "policy and the index"),
    ],
)
def test_check_names_the_broken_invariant(index, damage, what):
    store(index, A)
    damage(index)
    with pytest.raises(AssertionError, match=what):
        index.check()


class CountingDict(dict):
    """Counts how often it is walked."""

    walks = 0

    def __iter__(self):
        CountingDict.walks += 1
        return super().__iter__()


def test_no_operation_walks_the_index():
    index = HostIndex(4, LRUPolicy(capacity=4))
    index.ready, index.filling, index.fetching = (CountingDict() for _ in range(3))
    store_once = index.reserve([A, B])
    index.commit(store_once.keys)
    index.release(index.hold([A]))
    index.reserve(KEYS[2:6], protected={A})
    index.drop([A])
    assert CountingDict.walks == 0


@pytest.mark.parametrize("failed", [(), (A,)])
def test_a_commit_of_what_is_named_twice_or_was_never_reserved_loses_no_slot(index, failed):
    index.reserve([A, B])
    assert index.commit([A, A, F, B], failed) == [k for k in (A, B) if k not in failed]
    assert index.free == 2 + len(failed)
    index.check()


class Lazy(LRUPolicy):
    def evict(self, count, staying):
        return iter(super().evict(count, staying))


class Failing(LRUPolicy):
    def evict(self, count, staying):
        raise ZeroDivisionError("oops")


def test_a_policy_may_answer_with_any_iterable():
    index = HostIndex(2, Lazy(capacity=2))
    store(index, A, B)
    assert index.reserve([C]).evicted == (B,)
    index.check()


@pytest.mark.parametrize("policy", [Failing, type("Odd", (Spiteful,), {"answer": ([],)})])
def test_a_policy_that_fails_is_named_and_nothing_is_lost(policy):
    index = HostIndex(2, policy(capacity=2))
    store(index, A, B)
    with pytest.raises(KVTiersError, match=f"eviction policy {policy.__name__} failed") as caught:
        index.reserve([C])
    assert caught.value.kind is Kind.BROKEN
    index.check()
