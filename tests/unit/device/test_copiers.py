"""What holds for every copier: the bytes, and nothing but the bytes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers.chunks import PAGE_BYTES
from kvtiers.device.copier import Direction
from kvtiers.device.cpu import CpuCopier
from kvtiers.device.cuda_copier import CudaCopier
from kvtiers.device.geometry import ChunkCopy, CopyPlan, Geometry, GroupGeometry
from kvtiers.testing.host_device import HostDevice
from tests.unit.device.device_kv import Model, copier, copy_now, paddings_of, pages_of, tensors_of
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


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("one_size", [True, False])
def test_chunks_of_unequal_size_lie_side_by_side_and_leave_each_other_alone(make, one_size):
    model = Model("hnd", heads=8, layers=3, blocks_per_chunk=2)
    page = model.page_map(0, 1, 0)
    per_chunk = -(-2 * PAGE_BYTES // page.canonical_bytes)
    groups = (
        GroupGeometry(0, 16, tuple(replace(page, tensor=t) for t in range(3))),
        GroupGeometry(1, 16, (replace(page, tensor=1),)),
    )
    geometry = Geometry(groups, per_chunk, one_size=one_size)
    wide, narrow = geometry.span(0), geometry.span(1)
    assert (wide > narrow) is not one_size
    slots = [wide, 2 * wide, 3 * wide, 3 * wide + narrow, 3 * wide + 3 * narrow]
    plan = CopyPlan(
        tuple(
            ChunkCopy(min(n // 2, 1), slot, tuple((s, n * per_chunk + s) for s in range(per_chunk)))
            for n, slot in enumerate(slots)
        )
    )
    pages = model.pages(model.logical(len(slots) * per_chunk), 1, 0)
    region = bytearray([OLD]) * (8 * wide * geometry.granule_bytes)
    assert copy_now(tensors_of(pages), region, geometry, Direction.STORE, plan, make).ok

    expected = bytearray([OLD]) * len(region)
    for chunk in plan.chunks:
        layers = [m.tensor for m in groups[chunk.group].pages]
        blocks = [block for _, block in chunk.blocks]
        whole = b"".join(pages[layer, blocks].tobytes() for layer in layers)
        size, start = geometry.chunk_bytes(chunk.group), geometry.slot_start(chunk.slot)
        expected[start : start + size] = whole.ljust(size, b"\0")
    assert region == expected

    fresh = tensors_of(np.full_like(pages, 7))
    assert copy_now(fresh, region, geometry, Direction.LOAD, plan, make).ok
    assert (pages_of(fresh)[1] == pages[1]).all(), "both groups keep blocks in this tensor"
    assert (pages_of(fresh)[0, : 2 * per_chunk] == pages[0, : 2 * per_chunk]).all()
    assert (pages_of(fresh)[0, 2 * per_chunk :] == 7).all()


@pytest.mark.parametrize("make", MAKERS)
def test_wait_takes_an_id_twice_and_ids_it_does_not_know(make):
    model = Model("hnd", heads=2, layers=3, blocks_per_chunk=1)
    geometry = model.geometry(1, 0)
    tensors = tensors_of(model.pages(model.logical(BLOCKS), 1, 0))
    with copier(tensors, fresh_region(geometry), geometry, make) as made:
        made.wait([7])
        made.submit(1, Direction.STORE, CopyPlan((ChunkCopy(0, 0, ((0, 1),)),)))
        made.wait([1, 7, 1])
        assert [(o.job_id, o.ok) for o in made.poll()] == [(1, True)]
