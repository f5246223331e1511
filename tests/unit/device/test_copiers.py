"""What holds for every copier: the bytes, and nothing but the bytes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers.chunks import PAGE_BYTES
from kvtiers.device.copier import Direction
from kvtiers.device.cpu import CpuCopier
from kvtiers.device.cuda_copier import CudaCopier
from kvtiers.device.geometry import Geometry, GroupGeometry
from kvtiers.device.host_device import HostDevice
from kvtiers.device.plans import ChunkCopy, CopyPlan, plan_copies
from kvtiers.errors import Kind, KVTiersError
from tests.unit.device.device_kv import Model, copier, copy_now, paddings_of, pages_of, tensors_of
from tests.unit.device.device_plans import (
    BLOCKS,
    OLD,
    SLOTS,
    few_heads,
    fresh_region,
    models,
    plan_of,
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


@settings(max_examples=150)
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
def test_layers_may_lie_in_their_storage_in_any_order(make):
    model = Model("hnd", heads=2, layers=3, blocks_per_chunk=1)
    pages = model.pages(model.logical(BLOCKS), 1, 0)
    backwards = tuple(model.page_map(tensor, 1, 0) for tensor in (2, 1, 0))
    geometry = Geometry((GroupGeometry(0, 16, backwards),), 1)
    region = fresh_region(geometry)
    plan = CopyPlan((ChunkCopy(0, 1, ((0, 5),)),))
    assert copy_now(tensors_of(pages), region, geometry, Direction.STORE, plan, make).ok
    start, size = geometry.slot_bytes, geometry.payload_bytes(0)
    assert region[start : start + size] == pages[::-1, 5].tobytes()
    loaded = tensors_of(np.full_like(pages, 7))
    assert copy_now(loaded, region, geometry, Direction.LOAD, plan, make).ok
    assert (pages_of(loaded)[:, 5] == pages[:, 5]).all()


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


# -- a model of three layers, chunks of one block -------------------------------------------------

MODEL = Model("hnd", heads=2, layers=3, blocks_per_chunk=1)
PAGE = MODEL.page_map(0, 1, 0).local_bytes
GEOMETRY = MODEL.geometry(1, 0)


@pytest.fixture
def tensors():
    return tensors_of(MODEL.pages(MODEL.logical(BLOCKS), 1, 0))


@pytest.fixture
def region():
    return fresh_region(GEOMETRY)


@pytest.mark.parametrize("make", MAKERS)
def test_wait_takes_an_id_twice_and_ids_it_does_not_know(tensors, region, make):
    with copier(tensors, region, GEOMETRY, make) as made:
        made.wait([7])
        made.submit(1, Direction.STORE, plan_of((0, 1)))
        made.wait([1, 7, 1])
        assert [(o.job_id, o.ok) for o in made.poll()] == [(1, True)]
        assert made.poll() == []


@pytest.mark.parametrize("make", MAKERS)
def test_a_load_sees_the_store_submitted_before_it(tensors, region, make):
    with copier(tensors, region, GEOMETRY, make) as made:
        made.submit(1, Direction.STORE, plan_of((4, 1)))
        made.submit(2, Direction.LOAD, plan_of((4, 9)))
        made.wait([1, 2])
    assert all(torch.equal(t[9], t[1]) for t in tensors)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    ("plan", "error"),
    [
        (plan_of((0, BLOCKS)), f"device block {BLOCKS} of {BLOCKS}"),
        (plan_of((0, -1)), "device block -1"),
        (plan_of((SLOTS, 0)), f"slot {SLOTS} of {SLOTS}"),
        (plan_of((-1, 0)), "slot -1"),
        (CopyPlan((ChunkCopy(1, 0, ((0, 0),)),)), "group 1 of 1"),
        (CopyPlan((ChunkCopy(-1, 0, ((0, 0),)),)), "group -1 of 1"),
        (CopyPlan((ChunkCopy(0, 0, ((1, 0),)),)), "sub-block 1 of 1"),
        (CopyPlan((ChunkCopy(0, 0, ((-1, 0),)),)), "sub-block -1 of 1"),
        (CopyPlan((ChunkCopy(0, 0, (), (1,)),)), "sub-block 1 of 1"),
        (CopyPlan((ChunkCopy(0, 0, ((0, 0),), (-1,)),)), "sub-block -1 of 1"),
    ],
)
@pytest.mark.parametrize("direction", list(Direction))
def test_an_impossible_copy_fails_moves_nothing_and_the_next_one_works(
    tensors, region, make, plan, error, direction
):
    before = pages_of(tensors).copy()
    with copier(tensors, region, GEOMETRY, make) as made:
        made.submit(1, direction, plan)
        made.submit(2, Direction.STORE, plan_of((1, 3)))
        made.wait([1, 2])
        failed, after = made.poll()
        made.check()
    assert (failed.ok, failed.bytes) == (False, 0)
    assert error in failed.error
    assert (after.ok, after.error, after.bytes) == (True, None, 3 * PAGE)
    slot_bytes = GEOMETRY.slot_bytes
    assert set(region[:slot_bytes] + region[2 * slot_bytes :]) == {OLD}
    assert (pages_of(tensors) == before).all()


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    "bad",
    [
        lambda t: t[:2],
        lambda t: [*t[:2], t[2].view(torch.int16)],
        lambda t: [*t[:2], t[2][:, : PAGE - 1]],
        lambda t: [*t[:2], t[2].flatten()],
        lambda t: [*t[:2], t[2].t()],
        lambda t: [*t[:2], torch.empty_like(t[2], device="meta")],
    ],
    ids=["too few", "two-byte elements", "too narrow", "flat", "transposed", "not in memory"],
)
def test_tensors_that_do_not_fit_are_refused(tensors, region, make, bad):
    with pytest.raises(KVTiersError, match="KV tensor") as caught:
        make(bad(tensors), memoryview(region), GEOMETRY)
    assert caught.value.kind is Kind.BROKEN


@pytest.mark.parametrize("make", MAKERS)
def test_a_closed_copier_takes_no_job_and_has_let_go_of_the_memory(tensors, region, make):
    made = make(tensors, memoryview(region), GEOMETRY)
    made.submit(1, Direction.STORE, plan_of((0, 1)))
    made.wait([1])
    made.close()
    made.close()
    made.check()
    assert [(o.job_id, o.ok) for o in made.poll()] == [(1, True)]
    with pytest.raises(KVTiersError, match="after the copier was closed") as caught:
        made.submit(2, Direction.STORE, plan_of((0, 1)))
    assert caught.value.kind is Kind.CLOSED
    region.clear()  # raises BufferError while anybody has a view of it


@pytest.mark.parametrize("make", MAKERS)
def test_layers_of_unequal_pages_and_groups_that_share_tensors(tensors, region, make):
    """Group 1 keeps smaller pages, of an odd size, in the tensors of group 0, in another order."""
    wide = GEOMETRY.groups[0]
    (run,) = wide.pages[2].runs
    odd = replace(
        wide.pages[2], local_bytes=99, canonical_bytes=99, runs=(replace(run, nbytes=99),)
    )
    geometry = Geometry((wide, replace(wide, group=1, pages=(odd, wide.pages[0]))), 1)
    geometry.check()
    plan = plan_copies([1, 2], [0, 0], [1, 5, 6], [0, 1, 2], geometry)
    stored = copy_now(tensors, region, geometry, Direction.STORE, plan, make)
    assert (stored.ok, stored.bytes) == (True, 3 * PAGE + 2 * (99 + PAGE))
    before = pages_of(tensors).copy()
    for slot, block in ((1, 5), (2, 6)):
        expected = before[2, block, :99].tobytes() + before[0, block].tobytes()
        start, size = geometry.slot_start(slot), geometry.chunk_bytes(1)
        assert region[start : start + size] == expected.ljust(size, b"\0")
    for tensor in tensors:
        tensor[[1, 5, 6]] = 0
    assert copy_now(tensors, region, geometry, Direction.LOAD, plan, make).ok
    loaded = pages_of(tensors)
    assert (loaded[:, 1] == before[:, 1]).all()
    assert (loaded[0, 5:7] == before[0, 5:7]).all()
    assert (loaded[2, 5:7, :99] == before[2, 5:7, :99]).all()
    assert not loaded[2, 5:7, 99:].any()
