"""Pipeline stages: each holds some layers of every group, and together they fill one chunk.

A stage writes and reads the pages of its own layers. Where they lie depends on how large the pages
of the others are, which no stage knows: they tell each other when they register their KV caches.
vLLM counts a copy job as done when the ranks of all stages have ended it.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm.v1.kv_offload.config import OffloadingConfig

from kvtiers.device.geometry import Elsewhere, Geometry
from kvtiers.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Share:
    """What one stage has of a group."""

    layers: tuple[str, ...]
    page_bytes: tuple[int, ...]
    """Of the canonical page of each layer."""
    portable: bool
    any_block_size: bool
    orders: tuple[str, ...]
    """Named orders of its pages."""


def of_stage(vllm_config: Any) -> Any:
    """The configuration as if this worker's stage were alone: so vLLM certifies its layers."""
    parallel = copy.copy(vllm_config.parallel_config)
    ranks = parallel.world_size // parallel.pipeline_parallel_size
    parallel.rank, parallel.world_size = parallel.rank % ranks, ranks
    alone = copy.copy(vllm_config)
    alone.parallel_config = parallel
    return alone


def across(
    geometry: Geometry, config: OffloadingConfig
) -> tuple[Geometry, tuple[tuple[str, ...], ...]]:
    """With the other stages: the geometry, and every group's layers; alone, nothing is added.

    Every rank of every stage must call this.
    """
    if config.parallel.pp_size == 1:
        return geometry, ()
    everyone, stage = gather(shares_of(geometry, config))
    return joined(geometry, everyone, stage), layers_of(everyone)


def shares_of(geometry: Geometry, config: OffloadingConfig) -> list[Share]:
    """What this stage has, by group."""
    return [
        Share(
            theirs.layer_names,
            tuple(page.canonical_bytes for page in ours.pages),
            geometry.portable(ours.group),
            geometry.any_block_size(ours.group),
            tuple(page.order for page in ours.pages if page.order),
        )
        for ours, theirs in zip(geometry.groups, config.groups, strict=True)
    ]


def gather(own: list[Share]) -> tuple[list[list[Share]], int]:
    """What all stages have, in their order, and this one's number."""
    import torch
    from vllm.distributed import get_pp_group

    group = get_pp_group()
    everyone: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(everyone, own, group=group.cpu_group)
    return everyone, group.rank_in_group


def joined(geometry: Geometry, everyone: Sequence[Sequence[Share]], stage: int) -> Geometry:
    """``geometry`` with room for the layers of the other stages.

    Raises ConfigError where a stage has no layer of a group.
    """
    groups = []
    for group, shares in zip(geometry.groups, zip(*everyone, strict=True), strict=True):
        if not all(share.layers for share in shares):
            raise ConfigError(
                f"pipeline_parallel_size is {len(shares)}, but one of the stages has no layer of "
                f"KV-cache group {group.group}; use another number of stages",
                key="pipeline_parallel_size",
            )
        before = [n for share in shares[:stage] for n in share.page_bytes]
        after = [n for share in shares[stage + 1 :] for n in share.page_bytes]
        elsewhere = Elsewhere(
            tuple(before),
            tuple(after),
            portable=all(share.portable for share in shares),
            any_block_size=all(share.any_block_size for share in shares),
            orders=tuple(order for share in shares for order in share.orders),
        )
        groups.append(replace(group, elsewhere=elsewhere))
    return replace(geometry, groups=tuple(groups))


def layers_of(everyone: Sequence[Sequence[Share]]) -> tuple[tuple[str, ...], ...]:
    """The layers of every group, on whatever stage."""
    return tuple(
        tuple(name for share in shares for name in share.layers)
        for shares in zip(*everyone, strict=True)
    )
