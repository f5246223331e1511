"""vLLM's description of the device tensors as our geometry, and the record all ranks agree on."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CopyRun
from vllm.v1.kv_offload.config import OffloadingConfig

from kvtiers.chunks import ChunkLayout, GroupLayout
from kvtiers.device.geometry import Geometry, GroupGeometry, PageMap, Run, coalesce, opaque_page
from kvtiers.engines.vllm.facts import EngineFacts
from kvtiers.errors import ConfigError


def geometry_of(
    kv_caches: CanonicalKVCaches, config: OffloadingConfig, facts: EngineFacts | None
) -> Geometry:
    """Where the bytes of this rank's blocks lie in a chunk."""
    keeps = [g.keeps_every_chunk for g in facts.groups] if facts else [True] * len(config.groups)
    groups = tuple(
        GroupGeometry(
            group=position,
            tokens_per_chunk=group.tokens_per_block * config.cache.blocks_per_chunk,
            pages=tuple(_page(ref, config) for ref in refs),
            keeps_every_chunk=keeps[position],
        )
        for position, (group, refs) in enumerate(
            zip(config.groups, kv_caches.group_data_refs, strict=True)
        )
    )
    return Geometry(groups, config.cache.blocks_per_chunk, config.parallel.rank)


def _page(ref: CanonicalKVCacheRef, config: OffloadingConfig) -> PageMap:
    mapping = ref.mapping
    if mapping is None:
        parallel = config.parallel
        return opaque_page(ref.tensor_idx, ref.page_size_bytes, parallel.world_size, parallel.rank)
    return PageMap(
        tensor=ref.tensor_idx,
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


def record_of(
    geometry: Geometry, config: OffloadingConfig, facts: EngineFacts | None
) -> dict[str, Any]:
    """What the workers agree on and the scheduler reads: JSON values, equal on every rank."""
    layout = geometry.layout()
    return {
        "groups": [
            [config.groups[i].group_id, g.chunk_bytes, g.tokens_per_chunk, g.keeps_every_chunk]
            for i, g in enumerate(layout.groups)
        ],
        "portable": all(geometry.portable(g.group) for g in geometry.groups),
        "certificate": _shortened(geometry.certificate()),
        "byte_formats": facts.byte_formats() if facts else [str(config.kv_cache_layout)],
        "world_size": config.parallel.world_size,
    }


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


def layout_of(record: Mapping[str, Any]) -> ChunkLayout:
    """The sizes in a record."""
    groups: Sequence[Sequence[Any]] = record["groups"]
    return ChunkLayout(tuple(GroupLayout(*group) for group in groups))


def check_world(record: Mapping[str, Any], world_size: int) -> None:
    """Refuse workers that the scheduler does not know of."""
    if record["world_size"] != world_size:
        raise ConfigError(
            f"the workers share host memory between {record['world_size']} ranks, but the "
            f"scheduler counts {world_size}; all workers of an engine must run on one host"
        )


def tokens_of(layout: ChunkLayout, num_slots: int) -> int:
    """How many tokens fit: every group that keeps all of its chunks needs one slot per chunk."""
    whole = [g for g in layout.groups if g.keeps_every_chunk] or list(layout.groups)
    return min(num_slots // len(whole) * g.tokens_per_chunk for g in whole)
