"""vLLM's description of the device tensors as our geometry, and the record all ranks agree on."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CanonicalPageMapping,
    CopyRun,
)
from vllm.v1.kv_offload.config import OffloadingConfig, OffloadingParallelConfig

from kvtiers.chunks import ChunkLayout, GroupLayout, Namespace
from kvtiers.device.geometry import Geometry, GroupGeometry, PageMap, Run, coalesce, opaque_page
from kvtiers.engines.vllm.facts import EngineFacts
from kvtiers.engines.vllm.namespace import GroupSpan, Identity, build_namespace
from kvtiers.engines.vllm.pages import Layer, kind_of, own_pages, unpadded_bytes, why_per_block
from kvtiers.errors import ConfigError
from kvtiers.host.region import Region
from kvtiers.host.slabs import num_tokens


def by_layer(kv_caches: CanonicalKVCaches, facts: EngineFacts | None) -> CanonicalKVCaches:
    """A tensor for each layer, where vLLM shows the blocks of all layers as one.

    It does so where a block is wider than a layer's page, and then gives each group the whole of
    it. Elsewhere, and without facts, ``kv_caches`` as they are.
    """
    if facts is None or not _blocks_are_one(kv_caches, facts):
        return kv_caches
    num_blocks = kv_caches.tensors[0].tensor.shape[0]
    tensors: list[CanonicalKVCacheTensor] = []
    groups: list[list[CanonicalKVCacheRef]] = []
    for group in facts.groups:
        groups.append([])
        for name, spec in zip(group.span.layers, group.layer_specs, strict=True):
            cache = facts.tensors[name]
            page = unpadded_bytes(spec)
            groups[-1].append(CanonicalKVCacheRef(len(tensors), page))
            tensors.append(CanonicalKVCacheTensor(_table(cache, num_blocks, page), page))
    return CanonicalKVCaches(tensors, groups)


def _blocks_are_one(kv_caches: CanonicalKVCaches, facts: EngineFacts) -> bool:
    refs = [ref for group in kv_caches.group_data_refs for ref in group]
    layers = sum(len(group.layer_specs) for group in facts.groups)
    one = len(kv_caches.tensors) == 1 and all(ref.mapping is None for ref in refs)
    return one and len(facts.tensors) >= layers and len(refs) == len(facts.groups)


def _table(cache: Any, num_blocks: int, page: int) -> Any:
    """(blocks, bytes of a page) of a layer, whose first axis counts blocks or parts of blocks."""
    nbytes = cache.element_size()
    parts = cache.shape[0] // num_blocks
    table = torch.empty(0, dtype=torch.int8, device=cache.device)
    return table.set_(
        cache.untyped_storage(),
        cache.storage_offset() * nbytes,
        (num_blocks, page),
        (cache.stride(0) * nbytes * parts, 1),
    )


def geometry_of(
    kv_caches: CanonicalKVCaches,
    config: OffloadingConfig,
    facts: EngineFacts | None,
    *,
    vllms_bytes: bool = False,
) -> Geometry:
    """Where the bytes of this rank's blocks lie in a chunk.

    Without facts, windows cannot be told from full attention, and count as such. With
    ``vllms_bytes`` vLLM's own worker copies, so that its mapping holds, also where ours says more.
    """
    groups = tuple(
        GroupGeometry(
            group=position,
            tokens_per_chunk=group.tokens_per_block * config.cache.blocks_per_chunk,
            pages=tuple(
                page
                for ref, layer in zip(refs, _layers(facts, position, len(refs)), strict=True)
                for page in _pages(ref, layer, config, facts, vllms_bytes=vllms_bytes)
            ),
            keeps_every_chunk=facts.groups[position].keeps_every_chunk if facts else True,
        )
        for position, (group, refs) in enumerate(
            zip(config.groups, kv_caches.group_data_refs, strict=True)
        )
    )
    return Geometry(groups, config.cache.blocks_per_chunk, config.parallel.rank)


def _layers(facts: EngineFacts | None, group: int, refs: int) -> Sequence[Layer | None]:
    """The layers of a group, one for each reference; None where that is not how it is."""
    if facts is None or len(facts.groups[group].layer_specs) != refs:
        return [None] * refs
    found = facts.groups[group]
    names = zip(found.span.layers, found.layer_specs, strict=True)
    return [Layer(spec, facts.tensors.get(name)) for name, spec in names]


def _pages(
    ref: CanonicalKVCacheRef,
    layer: Layer | None,
    config: OffloadingConfig,
    facts: EngineFacts | None,
    *,
    vllms_bytes: bool,
) -> tuple[PageMap, ...]:
    mapping = ref.mapping
    why = "vLLM certifies no canonical bytes for it"
    certified = mapping is not None and mapping.parallelism_agnostic
    if layer is not None and facts is not None and not (certified or vllms_bytes):
        own = own_pages(ref.tensor_idx, layer, facts, _of_stage(config.parallel))
        if not isinstance(own, str):
            return own
        why = own
    page = _vllms_page(ref, config, why)
    if layer is None or facts is None:
        return (page,)
    per_block = why_per_block(layer.spec, facts)
    return (replace(page, kind=kind_of(layer.spec), why_per_block=per_block),)


def _vllms_page(ref: CanonicalKVCacheRef, config: OffloadingConfig, why: str) -> PageMap:
    """``why`` its bytes are bound to the topology, if they are."""
    parallel, mapping = _of_stage(config.parallel), ref.mapping
    if mapping is None:
        nbytes = ref.page_size_bytes
        return opaque_page(ref.tensor_idx, nbytes, parallel.world_size, parallel.rank, why)
    page = _mapped(ref.tensor_idx, mapping)
    return page if page.portable else replace(page, why_bound=why)


def _of_stage(parallel: OffloadingParallelConfig) -> OffloadingParallelConfig:
    """The ranks of this pipeline stage alone: the others hold other layers."""
    ranks = parallel.world_size // parallel.pp_size
    return replace(parallel, rank=parallel.rank % ranks, world_size=ranks, pp_size=1)


def _mapped(tensor: int, mapping: CanonicalPageMapping) -> PageMap:
    return PageMap(
        tensor=tensor,
        local_bytes=mapping.local_page_size_bytes,
        canonical_bytes=mapping.canonical_page_size_bytes,
        runs=coalesce(_run(run) for run in mapping.runs),
        num_writers=mapping.num_writers,
        writer_index=mapping.writer_index,
        portable=mapping.parallelism_agnostic,
    )


def _run(run: CopyRun) -> Run:
    return Run(
        device_offset=run.local_offset,
        page_offset=run.canonical_offset,
        nbytes=run.fragment_size,
        count=run.num_fragments,
        device_stride=run.local_stride,
        page_stride=run.canonical_stride,
    )


@dataclass(frozen=True, slots=True)
class RegionRecord:
    """What the workers agree on and the scheduler reads: it travels in the region's header."""

    layout: ChunkLayout
    portable: bool
    """Whether the bytes are the same under every topology."""
    certificate: Mapping[str, Any]
    """What geometry vouches for, as JSON values; see :meth:`Geometry.certificate`."""
    byte_formats: tuple[str, ...]
    """How the engine lays out a page of each group."""
    world_size: int
    layers: tuple[tuple[str, ...], ...] = ()
    """Of each group on all pipeline stages: the scheduler is told those of the first one."""
    any_block_size: bool = False
    """Whether the bytes of a chunk are the same whatever blocks divide it."""

    def named_bytes(self) -> dict[str, Any]:
        """What a namespace says of the bytes, as JSON values."""
        return {**self.certificate, "byte_formats": list(self.byte_formats)}

    def as_one_block(self) -> "RegionRecord":
        """What an engine would say whose block is the chunk, where blocks of any size will do."""
        blocks = self.certificate["blocks_per_chunk"]
        groups = [
            {**g, "page_bytes": [[size * blocks, count] for size, count in g["page_bytes"]]}
            for g in self.certificate["groups"]
        ]
        certificate = {**self.certificate, "blocks_per_chunk": 1, "groups": groups}
        return replace(self, certificate=certificate)

    def to_json(self) -> dict[str, Any]:
        """As JSON values, equal on every rank."""
        return {
            "groups": [list(astuple(g)) for g in self.layout.groups],
            "portable": self.portable,
            "certificate": dict(self.certificate),
            "byte_formats": list(self.byte_formats),
            "world_size": self.world_size,
            "layers": [list(names) for names in self.layers],
            "any_block_size": self.any_block_size,
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "RegionRecord":
        """What ``to_json`` gave, after its way through a header."""
        return cls(
            layout=ChunkLayout(tuple(GroupLayout(*group) for group in record["groups"])),
            portable=record["portable"],
            certificate=record["certificate"],
            byte_formats=tuple(record["byte_formats"]),
            world_size=record["world_size"],
            layers=tuple(tuple(names) for names in record["layers"]),
            any_block_size=record["any_block_size"],
        )


def record_of(
    geometry: Geometry,
    config: OffloadingConfig,
    byte_formats: Sequence[str],
    layers: tuple[tuple[str, ...], ...] = (),
) -> RegionRecord:
    """What this rank has to say; groups by vLLM's ids, as keys name them."""
    groups = zip(geometry.layout().groups, config.groups, strict=True)
    return RegionRecord(
        layout=ChunkLayout(tuple(replace(g, group=theirs.group_id) for g, theirs in groups)),
        portable=all(geometry.portable(g.group) for g in geometry.groups),
        certificate=_shortened(geometry.certificate()),
        byte_formats=tuple(byte_formats),
        world_size=config.parallel.world_size,
        layers=layers,
        any_block_size=all(geometry.any_block_size(g.group) for g in geometry.groups),
    )


def _shortened(certificate: dict[str, Any]) -> dict[str, Any]:
    """Runs of equal page sizes as (size, count): the record must fit a header."""
    groups = []
    for group in certificate["groups"]:
        sizes: list[list[int]] = []
        for size in group["page_bytes"]:
            if sizes and sizes[-1][0] == size:
                sizes[-1][1] += 1
            else:
                sizes.append([size, 1])
        groups.append({**group, "page_bytes": sizes})
    return {**certificate, "groups": groups}


def namespace_of(
    record: RegionRecord, identity: Identity, spans: Sequence[GroupSpan], *, own_keys: bool
) -> Namespace:
    """The namespace of an engine's chunks; where nothing else depends on the size of its blocks,
    and keys of our own do not either, that of all engines whose blocks divide the chunk.
    """
    if own_keys and record.any_block_size:
        spans, record = [span.as_one_block() for span in spans], record.as_one_block()
    return build_namespace(identity, spans, record.named_bytes(), portable=record.portable)


def check_world(record: RegionRecord, world_size: int) -> None:
    """Refuse workers that the scheduler does not know of."""
    if record.world_size != world_size:
        raise ConfigError(
            f"the workers share host memory between {record.world_size} ranks, but the "
            f"scheduler counts {world_size}; all workers of an engine must run on one host"
        )


def tokens_of(layout: ChunkLayout, region: Region) -> int:
    """How many tokens fit: each takes its part of a chunk of every group that keeps all of them."""
    num_slabs = region.num_slots // region.slab_slots
    return num_tokens(layout, num_slabs, region.slab_slots, region.slot_bytes)


def described(layout: ChunkLayout, region: Region) -> str:
    """How many chunks ``region`` has room for, and of which sizes."""
    if region.slab_slots == 1:
        return f"{region.num_slots} chunks of at most {region.slot_bytes} bytes"
    sizes = sorted({g.chunk_bytes for g in layout.groups})
    num_slabs, size = region.num_slots // region.slab_slots, region.slab_slots * region.slot_bytes
    named = f"{', '.join(map(str, sizes[:-1]))} and {sizes[-1]}"
    return f"chunks of {named} bytes in {num_slabs} slabs of {size} bytes"
