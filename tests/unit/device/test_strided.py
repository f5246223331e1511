import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.device.strided import balanced_ranges, strided_ranges

place = st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 9))


@given(st.lists(place, max_size=30))
def test_ranges_are_the_same_places_in_the_same_order(places):
    listed = [
        (s.slot + i * s.slot_step, s.sub + i * s.sub_step, s.block + i * s.block_step)
        for s in strided_ranges(places)
        for i in range(s.blocks)
    ]
    assert listed == places


@pytest.mark.parametrize(
    ("places", "count"),
    [
        ([(slot, 0, 40 + slot) for slot in range(8)], 1),
        ([(slot, 0, 40 - slot) for slot in range(8)], 1),
        ([(slot, sub, 4 * slot + sub) for slot in range(3) for sub in range(4)], 3),
        ([(0, 0, 5), (7, 0, 1), (3, 0, 9), (1, 0, 2)], 2),
        ([(0, 1, 5), (1, 0, 6)], 2),
        ([(0, 0, 5), (1, 0, 5)], 2),
    ],
)
def test_regular_places_take_few_ranges(places, count):
    assert len(strided_ranges(places)) == count


@given(st.lists(st.integers(1, 9), max_size=9), st.integers(1, 4))
def test_ranges_cover_all_items_in_order_and_differ_by_one_item(weights, count):
    found = balanced_ranges(weights, count)
    assert len(found) == count
    assert [item for chosen in found for item in chosen] == list(range(len(weights)))
    part = sum(weights) / count
    for chosen in found:
        assert abs(sum(weights[i] for i in chosen) - part) <= max(weights, default=0)
