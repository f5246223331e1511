"""vLLM's description of the device tensors as our geometry, and the record all ranks agree on."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
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
    """Where the bytes of this rank's blocks lie in a chunk.

    Without facts, windows cannot be told from full attention, and count as such.
    """
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
        ranks = config.parallel.world_size // config.parallel.pp_size
        rank = config.parallel.rank % ranks
        return opaque_page(ref.tensor_idx, ref.page_size_bytes, ranks, rank)
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

    def named_bytes(self) -> dict[str, Any]:
        """What a namespace says of the bytes, as JSON values."""
        return {**self.certificate, "byte_formats": list(self.byte_formats)}

    def to_json(self) -> dict[str, Any]:
        """As JSON values, equal on every rank."""
        return {
            "groups": [list(astuple(g)) for g in self.layout.groups],
            "portable": self.portable,
            "certificate": dict(self.certificate),
            "byte_formats": list(self.byte_formats),
            "world_size": self.world_size,
            "layers": [list(names) for names in self.layers],
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


def check_world(record: RegionRecord, world_size: int) -> None:
    """Refuse workers that the scheduler does not know of."""
    if record.world_size != world_size:
        raise ConfigError(
            f"the workers share host memory between {record.world_size} ranks, but the "
            f"scheduler counts {world_size}; all workers of an engine must run on one host"
        )


def tokens_of(layout: ChunkLayout, num_slots: int) -> int:
    """How many tokens fit: every group that keeps all of its chunks needs one slot per chunk."""
    whole = [g for g in layout.groups if g.keeps_every_chunk] or list(layout.groups)
    return min(num_slots // len(whole) * g.tokens_per_chunk for g in whole)
