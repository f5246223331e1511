import mmap
import re
from dataclasses import replace

import pytest
import torch

from kvtiers.device.cuda import RegionForVllm, vllm_compatible
from kvtiers.device.geometry import Geometry, GroupGeometry, opaque_page
from kvtiers.device.plans import ChunkCopy, CopyPlan
from kvtiers.errors import Kind, KVTiersError
from tests.unit.device.device_kv import Model

MODEL = Model("hnd", heads=2, layers=3, blocks_per_chunk=2)
GEOMETRY = MODEL.geometry(2, 0)
SLOTS = 4


def groups(*pages: list[tuple[int, int]], blocks_per_chunk: int = 2) -> Geometry:
    """One group per list of (tensor, page bytes)."""
    made = (
        GroupGeometry(i, 16, tuple(opaque_page(t, size, 1, 0) for t, size in group))
        for i, group in enumerate(pages)
    )
    return Geometry(tuple(made), blocks_per_chunk)


@pytest.fixture
def buffer():
    return memoryview(bytearray(SLOTS * GEOMETRY.slot_bytes))


@pytest.mark.parametrize(
    "geometry",
    [
        GEOMETRY,
        groups([(0, 64), (1, 64)], [(0, 64), (1, 64)], [(0, 64)]),
        groups([(0, 64), (1, 32)], [(0, 64)]),
        groups([(0, 64), (1, 32)], [(0, 48)], blocks_per_chunk=1),
        replace(groups([(0, 4096), (1, 4096)], [(0, 4096)]), one_size=True),
    ],
)
def test_groups_that_cover_the_tensors_in_order_suit_vllm(geometry):
    assert vllm_compatible(geometry) is None


@pytest.mark.parametrize(
    ("geometry", "reason"),
    [
        (groups([(0, 64), (1, 64)], [(1, 64)]), "layer 0 of KV-cache group 1 .* tensor 1"),
        (groups([(1, 64), (0, 64)]), "layer 0 of KV-cache group 0 .* tensor 1"),
        (groups([(0, 64), (1, 64)], [(0, 48), (1, 64)]), "layer 0 of KV-cache group 1"),
        (groups([(0, 64)], [(0, 48)]), "layer 0 of KV-cache group 1"),
        (groups([(0, 64), (2, 64)]), "tensor 1 holds no layer"),
        (groups([(0, 4096), (1, 4096)], [(0, 4096)]), "chunks are of several sizes"),
    ],
)
def test_other_packings_do_not_and_the_reason_is_in_plain_words(geometry, reason):
    assert re.search(reason, vllm_compatible(geometry))


def test_views_lie_side_by_side_in_every_slot(buffer):
    region = RegionForVllm(buffer, GEOMETRY, print)
    size = MODEL.page_map(0, 2, 0).canonical_bytes * 2
    views = [region.create_next_canonical_view(size) for _ in range(3)]
    for number, view in enumerate(views):
        assert (view.shape, view.stride(), view.dtype) == (
            (SLOTS, size),
            (GEOMETRY.slot_bytes, 1),
            torch.int8,
        )
        view[3] = number + 1
        start = 3 * GEOMETRY.slot_bytes + GEOMETRY.page_start(0, number, 0)
        assert set(buffer[start : start + size]) == {number + 1}
    region.check()
    assert region.total_size_bytes == len(buffer)
    assert list(region.iter_worker_slot_ranges())[-1] == (
        3 * GEOMETRY.slot_bytes,
        GEOMETRY.slot_bytes,
    )
    assert repr(region) == (
        f"<RegionForVllm rank 0: 4 slots of {GEOMETRY.slot_bytes} bytes, pageable, 3 views>"
    )


def test_a_view_beyond_the_slot_and_a_private_view_are_refused(buffer):
    region = RegionForVllm(buffer, GEOMETRY, print)
    region.create_next_canonical_view(GEOMETRY.slot_bytes)
    with pytest.raises(KVTiersError, match="copy worker asks for") as caught:
        region.create_next_canonical_view(1)
    assert caught.value.kind is Kind.BROKEN
    with pytest.raises(KVTiersError, match="canonical_layout=True") as caught:
        region.create_next_worker_view(1)
    assert caught.value.kind is Kind.UNSUPPORTED


def test_what_a_store_leaves_out_is_zeroed_before_it(buffer):
    buffer[:] = b"\xee" * len(buffer)
    region = RegionForVllm(buffer, GEOMETRY, print)
    region.zero_unwritten(CopyPlan((ChunkCopy(0, 1, ((0, 5),), (1,)),)))
    chunk = bytes(buffer[GEOMETRY.slot_bytes : 2 * GEOMETRY.slot_bytes])
    page = MODEL.page_map(0, 2, 0)
    for layer in range(3):
        kept = GEOMETRY.page_start(0, layer, 0)
        gone = GEOMETRY.page_start(0, layer, 1)
        assert set(chunk[kept : kept + page.canonical_bytes]) == {0xEE}
        assert set(chunk[gone : gone + page.local_bytes]) == {0}
        other_rank = chunk[gone + page.local_bytes : gone + page.canonical_bytes]
        assert set(other_rank) == {0xEE}
    assert set(chunk[GEOMETRY.payload_bytes(0) :]) == {0}
    assert set(buffer[: GEOMETRY.slot_bytes]) == {0xEE}


@pytest.mark.parametrize("slot", [-1, SLOTS])
def test_a_slot_that_is_not_there_is_refused_and_nothing_zeroed(buffer, slot):
    buffer[:] = b"\xee" * len(buffer)
    region = RegionForVllm(buffer, GEOMETRY, print)
    with pytest.raises(IndexError, match=f"slot {slot} of {SLOTS}"):
        region.zero_unwritten(CopyPlan((ChunkCopy(0, slot, ((0, 5),), (1,)),)))
    assert set(buffer) == {0xEE}


def test_cleanup_unpins_and_lets_the_memory_be_unmapped():
    memory = mmap.mmap(-1, SLOTS * GEOMETRY.slot_bytes)
    view = memoryview(memory)
    unpinned: list[int] = []
    region = RegionForVllm(view, GEOMETRY, unpinned.append)
    region.create_next_canonical_view(64)
    region.pinned_addresses.extend([100, 200])
    region.is_pinned = True
    assert "pinned" in repr(region)
    region.cleanup()
    region.cleanup()
    region.check()
    assert (unpinned, region.is_pinned) == ([200, 100], False)
    view.release()
    memory.close()
