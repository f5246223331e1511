"""vLLM's own CUDA copy worker over our region, with memmove in place of the copy engine."""

import ctypes
import itertools

import numpy as np
import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import (
    _layer_mapping,
    _RankContext,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CanonicalPageMapping,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker

from kvtiers.device.copier import Direction
from kvtiers.device.cpu import CpuCopier
from kvtiers.device.cuda import RegionForVllm
from kvtiers.device.geometry import Geometry, GroupGeometry, PageMap, Run, coalesce
from kvtiers.device.plans import CopyPlan, plan_copies

LAYERS, BLOCKS, SLOTS = 3, 12, 6
TOKENS, HEAD_SIZE = 16, 32
OLD = 0xEE


class OnDevice(torch.Tensor):
    """Host memory that says it is on a CUDA device."""

    is_cuda = True


class Event:
    """The CPU has no events: everything has happened when it is recorded."""

    def record(self, stream) -> None:
        pass

    def synchronize(self) -> None:
        pass


def memmove(src, dst, sizes, **_) -> None:
    """What ``swap_blocks_batch`` does with its batch of addresses, on the host."""
    for s, d, n in zip(src.tolist(), dst.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(d, s, n)


def mapping_of(kind: str, heads: int, tp: int, rank: int) -> CanonicalPageMapping:
    """The mapping that vLLM derives for one layer on one rank."""
    local = 1 if kind == "mla" else max(1, heads // tp)
    make = MLAAttentionSpec if kind == "mla" else FullAttentionSpec
    spec = make(block_size=TOKENS, num_kv_heads=local, head_size=HEAD_SIZE, dtype=torch.bfloat16)
    shape = (BLOCKS, local, TOKENS, 2 * HEAD_SIZE)
    cache = torch.empty(shape, dtype=torch.bfloat16)
    if kind == "nhd":
        cache = torch.empty(BLOCKS, TOKENS, local, 2 * HEAD_SIZE, dtype=torch.bfloat16)
        cache = cache.permute(0, 2, 1, 3)
    context = _RankContext(tp, 1, 1, 1, heads, rank)
    mapping = _layer_mapping(spec, cache, BLOCKS, context)
    assert mapping is not None
    return mapping


def page_of(tensor: int, mapping: CanonicalPageMapping) -> PageMap:
    runs = (
        Run(
            r.local_offset,
            r.canonical_offset,
            r.fragment_size,
            r.num_fragments,
            r.local_stride,
            r.canonical_stride,
        )
        for r in mapping.runs
    )
    return PageMap(
        tensor,
        mapping.local_page_size_bytes,
        mapping.canonical_page_size_bytes,
        coalesce(runs),
        mapping.num_writers,
        mapping.writer_index,
        mapping.parallelism_agnostic,
    )


class Rank:
    """One rank's KV cache, region and geometry, seen by both copiers."""

    def __init__(self, mapping: CanonicalPageMapping, groups: int, per_chunk: int, rank: int):
        pages = tuple(page_of(layer, mapping) for layer in range(LAYERS))
        self.geometry = Geometry(
            tuple(GroupGeometry(g, TOKENS * per_chunk, pages) for g in range(groups)),
            per_chunk,
            rank,
        )
        self.geometry.check()
        page = mapping.local_page_size_bytes
        shard = mapping.runs[0].canonical_offset  # ranks of equal shards hold equal bytes
        random = np.random.default_rng(shard)
        data = random.integers(1, 127, (LAYERS, BLOCKS, page), dtype=np.int8)
        self.tensors = [torch.from_numpy(layer.copy()) for layer in data]
        refs = [CanonicalKVCacheRef(layer, page, mapping) for layer in range(LAYERS)]
        self.caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(t.as_subclass(OnDevice), page) for t in self.tensors],
            [refs for _ in range(groups)],
        )

    def run_vllm(self, region: bytearray, direction: Direction, transfer, plan: CopyPlan) -> None:
        adapter = RegionForVllm(memoryview(region), self.geometry, lambda _: None)
        worker = CPUOffloadingWorker(
            self.caches, self.geometry.blocks_per_chunk, adapter.num_chunks, adapter, True
        )
        for handler in (worker._store_handler, worker._load_handler):
            handler._swap_blocks_batch = memmove
            handler._event_pool.extend([Event(), Event()])
        sizes, indices, blocks, slots = transfer
        device, host = GPULoadStoreSpec(blocks, sizes, indices), CPULoadStoreSpec(slots)
        if direction is Direction.STORE:
            adapter.zero_unwritten(plan)
            worker._store_handler.transfer_async(1, device, host)
        else:
            worker._load_handler.transfer_async(1, host, device)
        worker.shutdown()

    def run_ours(self, region: bytearray, direction: Direction, plan: CopyPlan) -> None:
        copier = CpuCopier(self.tensors, memoryview(region), self.geometry)
        copier.submit(1, direction, plan)
        copier.wait([1])
        (outcome,) = copier.poll()
        copier.close()
        assert outcome.ok, outcome.error


CASES = [
    ("hnd", 4, 1),
    ("hnd", 4, 2),
    ("hnd", 2, 4),
    ("nhd", 4, 2),
    ("mla", 1, 2),
]
TRANSFERS = {
    1: ([3, 2], [5, 0], [7, 2, 3, 11, 0], [4, 1, 2, 0, 5]),
    2: ([3, 2], [5, 0], [7, 2, 3, 11, 0], [4, 1, 2]),
    4: ([5, 2], [2, 8], [7, 2, 3, 11, 0, 5, 6], [4, 1, 2]),
}


@pytest.mark.parametrize(("per_chunk", "case"), list(itertools.product(TRANSFERS, CASES)))
def test_vllms_worker_and_ours_move_the_same_bytes_to_the_same_places(per_chunk, case):
    kind, heads, tp = case
    transfer = TRANSFERS[per_chunk]
    ranks = [Rank(mapping_of(kind, heads, tp, r), 2, per_chunk, r) for r in range(tp)]
    size = SLOTS * ranks[0].geometry.slot_bytes
    theirs, ours = (bytearray([OLD]) * size for _ in range(2))
    for rank in ranks:
        plan = plan_copies(*transfer, rank.geometry)
        rank.run_vllm(theirs, Direction.STORE, transfer, plan)
        rank.run_ours(ours, Direction.STORE, plan)
    assert theirs == ours
    assert set(ours) != {OLD}
    for rank in ranks:
        plan = plan_copies(*transfer, rank.geometry)
        stored = [tensor.clone() for tensor in rank.tensors]
        loaded = []
        for run in (
            lambda r=rank, p=plan: r.run_vllm(theirs, Direction.LOAD, transfer, p),
            lambda r=rank, p=plan: r.run_ours(ours, Direction.LOAD, p),
        ):
            for tensor in rank.tensors:
                tensor.fill_(99)
            run()
            loaded.append([tensor.clone() for tensor in rank.tensors])
        for by_vllm, by_us, original in zip(*loaded, stored, strict=True):
            assert torch.equal(by_vllm, by_us)
            assert torch.equal(by_us[transfer[2]], original[transfer[2]])
