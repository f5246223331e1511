"""What holds for every copier: the bytes, and nothing but the bytes."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers.device.copier import Direction
from kvtiers.device.cpu import CpuCopier
from kvtiers.device.cuda_copier import CudaCopier
from kvtiers.device.streams import HostDevice
from tests.unit.device.device_kv import copy_now, paddings_of, pages_of, tensors_of
from tests.unit.device.device_plans import (
    BLOCKS,
    OLD,
    SLOTS,
    few_heads,
    fresh_region,
    models,
    plans,
    used,
)


def on_two_threads(tensors, buffer, geometry):
    return CpuCopier(tensors, buffer, geometry, threads=2)


def on_three_threads(tensors, buffer, geometry):
    return CpuCopier(tensors, buffer, geometry, threads=3)


def by_tables(tensors, buffer, geometry):
    return CudaCopier(tensors, buffer, geometry, HostDevice())


def by_tables_in_portions(tensors, buffer, geometry):
    return CudaCopier(tensors, buffer, geometry, HostDevice(), portion_bytes=500)


MAKERS = [CpuCopier, on_two_threads, on_three_threads, by_tables, by_tables_in_portions]


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(models, few_heads),
    st.sampled_from([1, 2, 4, 8]),
    st.booleans(),
    st.sampled_from(MAKERS),
    st.data(),
)
def test_all_ranks_together_store_the_bytes_of_tp_1_and_zeros_and_load_them_back(
    model, tp, shared, make, data
):
    plan = data.draw(plans(model))
    logical = model.logical(BLOCKS)
    region = fresh_region(model.geometry(tp, 0))
    slot_bytes = model.geometry(tp, 0).slot_bytes
    for rank in data.draw(st.permutations(range(tp))):
        tensors = tensors_of(model.pages(logical, tp, rank), shared=shared)
        assert copy_now(tensors, region, model.geometry(tp, rank), Direction.STORE, plan, make).ok
    expected = used(model, plan, logical, tp)
    for slot in range(SLOTS):
        stored = bytes(region[slot * slot_bytes : (slot + 1) * slot_bytes])
        assert stored == expected.get(slot, bytes([OLD]) * slot_bytes)

    given_blocks = sorted({block for chunk in plan.chunks for _, block in chunk.blocks})
    for rank in range(tp):
        pages = model.pages(logical, tp, rank)
        tensors = tensors_of(np.full_like(pages, 7), shared=shared)
        assert copy_now(tensors, region, model.geometry(tp, rank), Direction.LOAD, plan, make).ok
        wanted = np.full_like(pages, 7)
        wanted[:, given_blocks] = pages[:, given_blocks]
        assert (pages_of(tensors) == wanted).all()
        assert (paddings_of(tensors) == 0x55).all()
