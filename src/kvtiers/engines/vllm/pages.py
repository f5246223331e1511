"""Page maps of our own, for layers to which vLLM gives no canonical mapping."""

from typing import Any, NamedTuple

from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SparseCacheRole,
)
from vllm.v1.kv_offload.config import OffloadingParallelConfig

from kvtiers.device.geometry import PageMap
from kvtiers.device.pages.attention import Axis, KVTensor, attention_page
from kvtiers.device.pages.latent import latent_page
from kvtiers.device.pages.shares import is_even, share_of
from kvtiers.device.pages.state import PER_BLOCK
from kvtiers.engines.vllm.facts import EngineFacts
from kvtiers.engines.vllm.states import own_states
from kvtiers.errors import KVTiersError

_VLLMS_AXES = (Axis.BLOCK, Axis.HEAD, Axis.TOKEN, Axis.ELEMENT)
_HEADS_OUTSIDE = ("LBHNC", "BLHNC")
_TOKENS_OUTSIDE = ("LBNHC", "BLNHC")
_PLAIN = (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR)
_CPU_PACKS_K = "the CPU backend packs K for a block as a whole"


class Layer(NamedTuple):
    """One layer of a group: vLLM's description of it, and its tensor if that was shown."""

    spec: KVCacheSpec
    cache: Any = None


def own_pages(
    tensor: int, layer: Layer, facts: EngineFacts, parallel: OffloadingParallelConfig
) -> tuple[PageMap, ...] | str:
    """The pages of ``layer``, which lies in device tensor ``tensor``.

    Or the reason, in words, why its bytes cannot be told from those of another topology.
    """
    context_parallel = parallel.dcp_size * parallel.pcp_size > 1
    if context_parallel or parallel.world_size != parallel.tp_size:
        return "ranks divide the work otherwise than by tensor parallelism"
    spec, ranks, rank = layer.spec, parallel.tp_size, parallel.rank
    try:
        if isinstance(spec, MambaSpec):
            return own_states(tensor, spec, facts, ranks, rank)
        if isinstance(spec, (MLAAttentionSpec, SlidingWindowMLASpec)):
            return _latent(tensor, spec, facts, ranks, rank)
        if isinstance(spec, AttentionSpec):
            return _attention(tensor, layer, spec, facts, ranks, rank)
    except KVTiersError as e:
        return str(e)
    return f"{type(spec).__name__} is not known"


def _latent(
    tensor: int, spec: AttentionSpec, facts: EngineFacts, ranks: int, rank: int
) -> tuple[PageMap, ...] | str:
    if type(spec) not in (MLAAttentionSpec, SlidingWindowMLASpec) or spec.max_tp_shards != 1:
        return "nobody says that all ranks hold the same latent"
    if spec.kv_quant_mode.is_per_token_head:
        return "every token has scales of its own"
    page = latent_page(
        tensor,
        spec.unpadded_page_size_bytes,
        ranks,
        rank,
        order="latent",
        why_per_block=why_per_block(spec, facts),
    )
    return (page,)


def _attention(
    tensor: int, layer: Layer, spec: AttentionSpec, facts: EngineFacts, ranks: int, rank: int
) -> tuple[PageMap, ...] | str:
    if (
        spec.kv_quant_mode not in _PLAIN
        or spec.state_content_bytes is not None
        or spec.num_head_slots is not None
        or spec.tokens_per_state != 1
    ):
        return "its K and V are packed in a way of their own"
    described = _described(layer.cache, facts.kv_cache_layout)
    if described is None:
        return "its tensor is none of blocks, heads, tokens and elements"
    total = facts.total_kv_heads
    if not total or not is_even(total, ranks):
        return f"{total} KV heads do not divide evenly between {ranks} ranks"
    packed = _CPU_PACKS_K if facts.device == "cpu" else ""
    page = attention_page(tensor, described, share_of(total, ranks, rank), why_per_block=packed)
    told = (spec.num_kv_heads, spec.block_size, spec.unpadded_page_size_bytes)
    if (described.size(Axis.HEAD), described.size(Axis.TOKEN), page.local_bytes) != told:
        return "its tensor is not what vLLM says a page has"
    return (page,)


def _described(cache: Any, layout: str) -> KVTensor | None:
    if layout in _HEADS_OUTSIDE:
        order = _VLLMS_AXES
    elif layout in _TOKENS_OUTSIDE:
        order = (Axis.BLOCK, Axis.TOKEN, Axis.HEAD, Axis.ELEMENT)
    else:
        return None
    if getattr(cache, "ndim", 0) != len(order):
        return None
    places, itemsize = [_VLLMS_AXES.index(axis) for axis in order], cache.element_size()
    return KVTensor(
        order,
        tuple(cache.shape[i] for i in places),
        tuple(cache.stride(i) * itemsize for i in places),
        itemsize,
    )


def unpadded_bytes(spec: KVCacheSpec) -> int:
    """Bytes of a page of one layer on one rank, without what pads it."""
    if isinstance(spec, MambaSpec):
        return spec.real_page_size_bytes
    if isinstance(spec, AttentionSpec):
        return spec.unpadded_page_size_bytes
    return spec.page_size_bytes


def kind_of(spec: KVCacheSpec) -> str:
    """What a layer keeps, in a word."""
    if isinstance(spec, MambaSpec):
        return "state"
    latent = isinstance(spec, (MLAAttentionSpec, SlidingWindowMLASpec))
    return "latent" if latent else "attention"


def why_per_block(spec: KVCacheSpec, facts: EngineFacts) -> str:
    """Why a chunk of such layers depends on the block size, in words; empty: it does not."""
    if isinstance(spec, MambaSpec):
        return PER_BLOCK
    if facts.device == "cpu":
        return _CPU_PACKS_K
    if isinstance(spec, (MLAAttentionSpec, SlidingWindowMLASpec)):
        if getattr(spec, "cache_role", None) is SparseCacheRole.INDEXER:
            return "an indexer keeps the scales of a block behind its values"
        plain = spec.tokens_per_state == 1 and spec.state_content_bytes is None
        return "" if plain else "a latent may be packed for a block as a whole"
    if facts.kv_cache_layout in _TOKENS_OUTSIDE and facts.packing == "packed":
        return ""
    return "heads of a block lie apart, or K and V do, each with all of the block's tokens"
