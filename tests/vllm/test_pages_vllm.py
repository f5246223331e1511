"""Where vLLM certifies a layer, our own pages say the same: byte by byte, on every rank."""

from itertools import product

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import (
    _layer_mapping,
    _RankContext,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.kv_offload.base import CanonicalPageMapping

from kvtiers.device.geometry import PageMap, check_tiles
from kvtiers.device.pages.attention import Axis, KVTensor, attention_page
from kvtiers.device.pages.latent import latent_page
from kvtiers.device.pages.shares import share_of

BLOCKS, TOKENS, SIZE, ITEM = 5, 16, 8, 2
B, KV, H, N, E = Axis.BLOCK, Axis.KV, Axis.HEAD, Axis.TOKEN, Axis.ELEMENT
LAYOUTS = {
    # order in memory -> vLLM's order of a layer's axes
    "hnd-packed": ((B, H, N, E), (B, H, N, E)),
    "nhd-packed": ((B, N, H, E), (B, H, N, E)),
    "nhd-split": ((B, KV, N, H, E), (B, KV, N, H, E)),
    "hnd-split": ((B, KV, H, N, E), (B, KV, N, H, E)),
}


def cache_of(layout: str, heads: int) -> tuple[torch.Tensor, KVTensor]:
    """A rank's tensor as vLLM sees it, and as we describe it."""
    order, theirs = LAYOUTS[layout]
    elements = SIZE if KV in order else 2 * SIZE
    sizes = {B: BLOCKS, KV: 2, H: heads, N: TOKENS, E: elements}
    shape = tuple(sizes[axis] for axis in order)
    memory = torch.empty(shape, dtype=torch.bfloat16)
    strides = tuple(stride * ITEM for stride in memory.stride())
    ours = KVTensor(order, shape, strides, ITEM)
    return memory.permute([order.index(axis) for axis in theirs]), ours


def pieces_of_mapping(mapping: CanonicalPageMapping) -> list[tuple[int, int]]:
    return sorted(
        (r.local_offset + i * r.local_stride + b, r.canonical_offset + i * r.canonical_stride + b)
        for r in mapping.runs
        for i in range(r.num_fragments)
        for b in range(r.fragment_size)
    )


def pieces_of_page(page: PageMap) -> list[tuple[int, int]]:
    return sorted(
        (a + b, p + b)
        for run in page.runs
        for (a, z), (p, _) in zip(run.device_spans(), run.page_spans(), strict=True)
        for b in range(z - a)
    )


def agree(page: PageMap, mapping: CanonicalPageMapping) -> None:
    check_tiles([page])
    assert pieces_of_page(page) == pieces_of_mapping(mapping)
    assert page.local_bytes == mapping.local_page_size_bytes
    assert page.canonical_bytes == mapping.canonical_page_size_bytes
    assert (page.num_writers, page.writer_index) == (mapping.num_writers, mapping.writer_index)
    assert page.portable == mapping.parallelism_agnostic
    assert sum(r.count for r in page.runs) == sum(r.num_fragments for r in mapping.runs)


@pytest.mark.parametrize(("layout", "heads"), list(product(LAYOUTS, [8, 2, 1])))
def test_pages_of_attention_are_vllms(layout, heads):
    for tp in (1, 2, 4, 8):
        for rank in range(tp):
            share = share_of(heads, tp, rank)
            cache, described = cache_of(layout, share.count)
            spec = FullAttentionSpec(
                block_size=TOKENS, num_kv_heads=share.count, head_size=SIZE, dtype=torch.bfloat16
            )
            mapping = _layer_mapping(spec, cache, BLOCKS, _RankContext(tp, 1, 1, 1, heads, rank))
            assert mapping is not None
            agree(attention_page(0, described, share), mapping)


@pytest.mark.parametrize(("heads", "tp"), [(6, 4), (3, 8), (3, 2)])
def test_heads_that_do_not_divide_evenly_are_refused_by_vllm_alone(heads, tp):
    """VLLM's own layers refuse them too: what we would make of them is for other engines."""
    share = share_of(heads, tp, 0)
    spec = FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=share.count, head_size=SIZE, dtype=torch.bfloat16
    )
    cache, described = cache_of("hnd-packed", share.count)
    assert _layer_mapping(spec, cache, BLOCKS, _RankContext(tp, 1, 1, 1, heads, 0)) is None
    assert attention_page(0, described, share).portable


def test_the_page_of_a_latent_is_vllms():
    spec = MLAAttentionSpec(
        block_size=TOKENS, num_kv_heads=1, head_size=SIZE, dtype=torch.bfloat16, max_tp_shards=1
    )
    for tp in (1, 2, 4, 8):
        for rank in range(tp):
            mapping = _layer_mapping(spec, None, BLOCKS, _RankContext(tp, 1, 1, 1, 1, rank))
            agree(latent_page(0, spec.unpadded_page_size_bytes, tp, rank), mapping)
