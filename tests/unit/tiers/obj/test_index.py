from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.tiers.obj import packs
from kvtiers.tiers.obj.index import PackIndex, Place
from kvtiers.tiers.obj.names import PackName
from kvtiers.tiers.obj.packs import Packed
from tests.unit.tiers.tier_kit import key

A, B, C = key(1), key(2), key(3)


def broken(why):
    return pytest.raises(AssertionError, match=why) if __debug__ else nullcontext()


def pack(time_ms):
    return PackName(time_ms, 0, 1)


def test_the_latest_pack_has_the_word_in_whatever_order_they_are_found():
    for order in ((1, 2), (2, 1)):
        index = PackIndex(100)
        for time_ms in order:
            index.adopt(pack(time_ms), [Packed(A, 4096 * time_ms, 8192)])
        assert index.find(A) == Place(pack(2), 8192, 8192)
        assert index.held_by(pack(1)) == []
        index.check()


def test_what_is_gone_is_not_found_unless_it_was_written_later():
    index = PackIndex(100)
    index.adopt(pack(1), [Packed(A, 4096, 8192), Packed(B, 12288, 8192)])
    index.adopt(pack(2), packs.gone([A]))
    assert index.find(A) is None
    assert index.find(B)
    index.adopt(pack(3), [Packed(A, 4096, 8192)])
    assert index.find(A) == Place(pack(3), 4096, 8192)
    index.check()


def test_chunks_leave_with_their_pack():
    index = PackIndex(100)
    index.adopt(pack(1), [Packed(A, 4096, 8192), Packed(B, 12288, 8192)])
    index.adopt(pack(2), [Packed(B, 4096, 8192), Packed(C, 12288, 8192)])
    assert index.forget([pack(1), pack(9)]) == [A]
    assert index.find(B)
    assert index.forget([pack(2)]) == [B, C]
    assert len(index) == 0
    index.check()


def test_above_the_bound_the_oldest_packs_are_seen_but_empty():
    index = PackIndex(2)
    for n in (1, 2, 3):
        index.adopt(pack(n), [Packed(key(n), 4096, 8192)])
    assert [index.find(key(n)) is not None for n in (1, 2, 3)] == [False, True, True]
    assert index.has_seen(pack(1))
    index.check()
    assert repr(index) == "<PackIndex 2 chunks in 3 packs>"


adoptions = st.lists(
    st.tuples(st.integers(0, 8), st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=6))
)


@given(adoptions, st.sets(st.integers(0, 8)))
def test_it_agrees_with_reading_all_packs_in_order(found, left):
    index, model = PackIndex(1000), {}
    for time_ms, chunks in found:
        entries = {key(n): Packed(key(n), 4096, 8192 if there else 0) for n, there in chunks}
        index.adopt(pack(time_ms), list(entries.values()))
        model.setdefault(time_ms, entries)
        index.check()
    last = {k: e for time_ms in sorted(model) for k, e in model[time_ms].items()}
    assert {k for k in last if index.find(k)} == {k for k, e in last.items() if e.length}
    index.forget(pack(n) for n in left)
    index.check()
    assert not any(index.find(k) and index.find(k).pack.time_ms in left for k in last)


def test_its_check_can_fail():
    index = PackIndex(100)
    index.adopt(pack(1), [Packed(A, 4096, 8192)])
    index._places[B] = Place(pack(1), 0, 4096)
    with broken("do not name them"):
        index.check()


def test_one_pack_may_have_more_than_the_bound():
    index = PackIndex(1)
    index.adopt(pack(1), [Packed(A, 4096, 8192), Packed(B, 12288, 8192)])
    index.check()
    assert index.find(A) is None
