import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.device.strided import gather_layers, segments, shares, window
from tests.unit.device.device_kv import Model, tensors_of

place = st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 9))


@given(st.lists(place, max_size=30))
def test_segments_are_the_same_places_in_the_same_order(places):
    listed = [
        (s.slot + i * s.slot_step, s.sub + i * s.sub_step, s.block + i * s.block_step)
        for s in segments(places)
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
def test_regular_places_take_few_segments(places, count):
    assert len(segments(places)) == count


@given(st.lists(st.integers(1, 9), max_size=9), st.integers(1, 4))
def test_shares_cover_all_items_in_order_and_differ_by_one_item(weights, count):
    found = shares(weights, count)
    assert len(found) == count
    assert [item for share in found for item in share] == list(range(len(weights)))
    part = sum(weights) / count
    for share in found:
        assert abs(sum(weights[i] for i in share) - part) <= max(weights, default=0)


def layers_of(shared: bool, order: list[int]):
    model = Model("hnd", heads=2, layers=4, blocks_per_chunk=1)
    tensors = tensors_of(model.pages(model.logical(3), 1, 0), shared=shared)
    return gather_layers(tensors, [model.page_map(t, 1, 0) for t in order])


def test_layers_are_gathered_only_when_equally_spaced_in_one_storage():
    assert [g.count for g in layers_of(True, [0, 1, 2, 3])] == [4]
    assert [g.count for g in layers_of(True, [3, 2, 1, 0])] == [4]
    assert [g.count for g in layers_of(True, [0, 1, 3])] == [2, 1]
    assert [g.first for g in layers_of(True, [0, 1, 3])] == [0, 2]
    assert [g.count for g in layers_of(False, [0, 1, 2, 3])] == [1, 1, 1, 1]


def test_a_window_cannot_leave_its_buffer():
    buffer = np.zeros(16, np.uint8)
    assert window(buffer, (2, 4), 8, (4, 1)).shape == (2, 4)
    for offset, strides in ((9, (4, 1)), (8, (5, 1)), (0, (-1, 1))):
        with pytest.raises(ValueError, match="strides"):
            window(buffer, (2, 4), offset, strides)
