"""Key -> place, packed into one number."""

import itertools
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.chunks import PAGE_BYTES
from kvtiers.tiers.fs.log.format import MAX_SEGMENT_PAGES, pages_of, position
from kvtiers.tiers.fs.log.index import Location, LogIndex
from kvtiers.tiers.fs.log.pool import Pool
from tests.unit.tiers.tier_kit import key

LONGEST_SEGMENT = MAX_SEGMENT_PAGES * PAGE_BYTES
LARGEST = Pool(LONGEST_SEGMENT, LONGEST_SEGMENT).largest
"""Bytes: what a store takes at most."""


@given(
    st.integers(0, 1 << 20),
    st.integers(1, MAX_SEGMENT_PAGES - 1),
    st.integers(1, LARGEST),
    st.integers(0, (1 << 64) - 1),
    st.booleans(),
)
def test_a_place_comes_back_whatever_it_is(segment, page, nbytes, checksum, used):
    index = LogIndex()
    index.put(segment, 1, [(key(1), page, nbytes, checksum)])
    if used:
        index.use([key(1), key(2)])
    place = Location(segment, page, pages_of(nbytes), checksum)
    assert index.find(key(1)) == place
    assert index.used_in(segment, [key(1), key(2)]) == ([(place, key(1))] if used else [])
    assert index.used_in(segment + 1, [key(1)]) == []
    index.check()
    assert index.evict(segment + 1, [key(1)]) == []
    assert index.evict(segment, [key(1), key(2), key(1)]) == [key(1)]
    assert key(1) not in index


@pytest.mark.parametrize("segment_bytes", [1 << 30, (1 << 30) + (1 << 20), LONGEST_SEGMENT])
def test_what_a_pool_takes_the_index_can_say(segment_bytes):
    index = LogIndex()
    largest = Pool(segment_bytes, segment_bytes).largest
    assert largest < segment_bytes
    index.put(3, 1, [(key(1), 9, largest, 5)])
    assert index.find(key(1)) == Location(3, 9, pages_of(largest), 5)


def test_a_place_takes_no_more_than_it_should():
    index = LogIndex()
    index.put(4095, 1, [(key(1), MAX_SEGMENT_PAGES - 1, 1 << 29, (1 << 64) - 1)])
    assert sys.getsizeof(index._locations[key(1)]) <= 44


def test_the_last_row_counts_and_a_deletion_is_a_row():
    index = LogIndex()
    index.put(1, 1, [(key(1), 5, 4096, 1), (key(2), 6, 4096, 2)])
    index.put(2, 2, [(key(1), 9, 4096, 3), (key(2), 10, 0, position(1, 6))])
    assert index.find(key(1)).segment == 2
    assert key(2) not in index
    assert len(index) == 1


def test_a_chunk_that_moved_is_not_dropped_at_its_old_place():
    index = LogIndex()
    index.put(1, 1, [(key(1), 5, 4096, 1)])
    old = index.find(key(1))
    index.put(2, 2, [(key(1), 5, 4096, 1)])
    assert index.drop_at(key(1), old) == []
    assert index.drop_at(key(1), index.find(key(1))) == [(key(1), position(2, 5))]
    assert index.drop([key(1)]) == []


def test_writing_again_forgets_the_use():
    index = LogIndex()
    index.put(1, 1, [(key(1), 5, 4096, 1)])
    index.use([key(1)])
    index.put(2, 2, [(key(1), 5, 4096, 1)])
    assert index.used_in(2, [key(1)]) == []


def test_a_deletion_leaves_what_is_later_in_whatever_order_they_are_taken_in():
    early, late, gone = (key(1), 5, 4096, 1), (key(1), 9, 4096, 2), (key(1), 7, 0, position(3, 5))
    for rows in itertools.permutations([early, late, gone]):
        index = LogIndex()
        index.put(1, 3, rows)
        assert index.find(key(1)).page == 9
        index.put(2, 4, [(key(1), 1, 0, position(3, 9))])
        assert key(1) not in index


def test_of_two_locations_of_a_chunk_the_later_one_holds():
    index = LogIndex()
    index.put(2, 8, [(key(1), 5, 4096, 1)])
    index.put(1, 7, [(key(1), 9, 4096, 1)])
    assert index.find(key(1)).segment == 2
    index.put(1, 9, [(key(1), 1, 4096, 1)])
    assert index.find(key(1)).segment == 1
