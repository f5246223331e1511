import numpy as np
import pytest

from kvtiers.device.sides import Strided, gather_layers, num_slots
from kvtiers.device.views import window
from tests.unit.device.device_kv import Model, tensors_of


def layers_of(shared: bool, order: list[int]):
    model = Model("hnd", heads=2, layers=4, blocks_per_chunk=1)
    tensors = tensors_of(model.pages(model.logical(3), 1, 0), shared=shared)
    return gather_layers(tensors, [model.page_map(t, 1, 0) for t in order])


def test_layers_are_gathered_only_when_equally_spaced_and_ascending_in_one_storage():
    assert [g.count for g in layers_of(True, [0, 1, 2, 3])] == [4]
    assert [g.count for g in layers_of(True, [3, 2, 1, 0])] == [1, 1, 1, 1]
    assert [g.count for g in layers_of(True, [0, 2, 1, 3])] == [2, 2]
    assert [g.count for g in layers_of(True, [0, 1, 3])] == [2, 1]
    assert [g.first for g in layers_of(True, [0, 1, 3])] == [0, 2]
    assert [g.count for g in layers_of(False, [0, 1, 2, 3])] == [1, 1, 1, 1]


def test_a_window_cannot_leave_its_buffer():
    buffer = np.zeros(16, np.uint8)
    assert window(buffer, Strided((2, 4), (4, 1), 8)).shape == (2, 4)
    for offset, strides in ((9, (4, 1)), (8, (5, 1)), (0, (-1, 1))):
        with pytest.raises(ValueError, match="strides"):
            window(buffer, Strided((2, 4), strides, offset))


def test_a_slot_counts_only_if_a_whole_chunk_fits():
    """Zeros at its end included: they are written, too."""
    geometry = Model("hnd", heads=2, layers=3, blocks_per_chunk=1).geometry(1, 0)
    assert geometry.payload_bytes(0) < geometry.slot_bytes
    for missing, slots in ((0, 3), (1, 2), (3 * geometry.slot_bytes, 0)):
        assert num_slots(3 * geometry.slot_bytes - missing, geometry, 0) == slots
