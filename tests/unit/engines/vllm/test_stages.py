"""Pipeline stages together fill the chunk that one rank would fill."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.kv_offload.config import OffloadingGroupConfig

from kvtiers.device.copier import Direction
from kvtiers.device.geometry import Geometry, GroupGeometry, PageMap, Run
from kvtiers.device.plans import ChunkCopy, CopyPlan
from kvtiers.engines.vllm.layout import record_of
from kvtiers.engines.vllm.stages import joined, layers_of, of_stage, shares_of
from kvtiers.errors import ConfigError
from tests.unit.device.device_kv import copy_now
from tests.unit.device.device_plans import touched
from tests.unit.device.test_copiers import MAKERS

WHOLE = {0: (64, 64, 64, 96), 1: (200, 200)}
"""The page of each layer of each group."""
STAGES = ({0: (64, 64), 1: (200,)}, {0: (64, 96), 1: (200,)})
NAMED_ORDERS = {96: "channels outermost"}
BLOCKS_PER_CHUNK = 2


def geometry(sizes, tp=1, rank=0, portable=True):
    """A stage of ``tp`` ranks, its pages cut into equal parts; ``rank`` counts over all stages."""
    groups = []
    for group, pages in sizes.items():
        maps = []
        for tensor, size in enumerate(pages):
            part = size // tp
            run = Run(0, rank % tp * part, part)
            order = NAMED_ORDERS.get(size, "")
            maps.append(PageMap(tensor, part, size, (run,), portable=portable, order=order))
        groups.append(GroupGeometry(group, 16, tuple(maps)))
    return Geometry(tuple(groups), BLOCKS_PER_CHUNK, rank)


def config_of(offloading_config, sizes, first, **parallel):
    groups = tuple(
        OffloadingGroupConfig(16, tuple(f"{g}.{first[g] + i}" for i in range(len(pages))), g)
        for g, pages in sizes.items()
    )
    return offloading_config(groups=groups, **parallel)


def stages_of(offloading_config, tp=1, stages=STAGES, portable=True):
    """Geometry and record of every rank, after they told each other."""
    everyone, first = [], dict.fromkeys(WHOLE, 0)
    for sizes in stages:
        config = config_of(offloading_config, sizes, first)
        everyone.append(shares_of(geometry(sizes, tp, portable=portable), config))
        first = {g: n + len(sizes[g]) for g, n in first.items()}
    world = tp * len(stages)
    found = []
    for rank in range(world):
        stage, first = rank // tp, dict.fromkeys(WHOLE, 0)
        config = config_of(offloading_config, stages[stage], first, world_size=world, rank=rank)
        own = joined(geometry(stages[stage], tp, rank, portable), everyone, stage)
        own.check()
        found.append((own, record_of(own, config, ["format"], layers_of(everyone))))
    return found


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_ranks_of_all_stages_write_every_byte_of_a_chunk_once(offloading_config, tp) -> None:
    """Those of the zeros at its end too, and of a block that is missing."""
    ranks = stages_of(offloading_config, tp)
    for group in WHOLE:
        chunk = ChunkCopy(group, 3, blocks=((1, 7),), missing=(0,))
        spans = [span for own, _ in ranks for span in touched(own, chunk)]
        ends = [0, *(stop for _, stop in sorted(spans))]
        assert [start for start, _ in sorted(spans)] == ends[:-1]
        assert ends[-1] == ranks[0][0].chunk_bytes(group)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("tp", [1, 2])
def test_every_copier_of_ours_fills_and_reads_a_chunk_stage_by_stage(
    offloading_config, tp, make
) -> None:
    """And with stages the chunk has the bytes of one rank that has all layers."""
    whole = geometry(WHOLE)
    dice, blocks = np.random.default_rng(1), 8
    sizes = [size for pages in WHOLE.values() for size in pages]
    content = [dice.integers(0, 256, (blocks, size), np.uint8) for size in sizes]
    plan = CopyPlan((ChunkCopy(0, 1, ((0, 3), (1, 5))), ChunkCopy(1, 2, ((0, 6), (1, 0)))))
    expected = bytearray(4 * whole.granule_bytes)
    tensors = [torch.from_numpy(c).view(torch.int8) for c in content]
    assert copy_now(tensors, expected, whole_of(whole), Direction.STORE, plan, make).ok
    region = bytearray(len(expected))
    ranks = [own for own, _ in stages_of(offloading_config, tp)]
    kept = [[content[i] for i in of_stage_] for of_stage_ in ((0, 1, 4), (2, 3, 5))]
    shares = [
        [np.array(np.split(c, tp, axis=1)[rank % tp]) for c in kept[rank // tp]]
        for rank in range(2 * tp)
    ]
    for own, share in zip(ranks, shares, strict=True):
        tensors = [torch.from_numpy(s).view(torch.int8) for s in share]
        assert copy_now(tensors, region, whole_of(own), Direction.STORE, plan, make).ok
    assert region == expected
    for own, share in zip(ranks, shares, strict=True):
        back = [torch.zeros(s.shape, dtype=torch.int8) for s in share]
        assert copy_now(back, region, whole_of(own), Direction.LOAD, plan, make).ok
        for i, (got, sent) in enumerate(zip(back, share, strict=True)):
            there = [3, 5] if i < len(share) - 1 else [6, 0]
            assert (got.numpy().view(np.uint8)[there] == sent[there]).all()


def whole_of(own: Geometry) -> Geometry:
    """With a tensor for each layer, of both groups."""
    first = len(own.groups[0].pages)
    pages = tuple(replace(p, tensor=first + i) for i, p in enumerate(own.groups[1].pages))
    return replace(own, groups=(own.groups[0], replace(own.groups[1], pages=pages)))


@pytest.mark.parametrize("tp", [1, 2])
def test_what_they_vouch_for_is_what_one_rank_does(offloading_config, tp) -> None:
    alone = geometry(WHOLE)
    ranks = stages_of(offloading_config, tp)
    for own, record in ranks:
        assert own.certificate() == alone.certificate()
        assert own.layout() == alone.layout()
        assert own.slot_bytes == alone.slot_bytes
        assert record.to_json() == ranks[0][1].to_json()
        assert record.layers == (("0.0", "0.1", "0.2", "0.3"), ("1.0", "1.1"))
        assert record.portable


def test_a_layer_that_is_bound_binds_the_stages_without_it(offloading_config) -> None:
    for _, record in stages_of(offloading_config, portable=False):
        assert not record.portable
    own = geometry(STAGES[0])
    config = config_of(offloading_config, STAGES[0], dict.fromkeys(WHOLE, 0))
    bound = shares_of(geometry(STAGES[1], portable=False), config)
    assert not joined(own, [shares_of(own, config), bound], 0).portable(0)


def test_a_stage_without_a_layer_of_some_group_is_refused(offloading_config) -> None:
    with pytest.raises(ConfigError, match=r"is 3, .* no layer of KV-cache group 1; use another"):
        stages_of(offloading_config, stages=(*STAGES, {0: (96,), 1: ()}))


def test_vllm_certifies_a_stage_as_if_it_were_alone() -> None:
    parallel = SimpleNamespace(rank=5, world_size=8, pipeline_parallel_size=2)
    config = SimpleNamespace(parallel_config=parallel, model_config="same")
    alone = of_stage(config)
    assert (alone.parallel_config.rank, alone.parallel_config.world_size) == (1, 4)
    assert alone.model_config == "same"
    assert (parallel.rank, parallel.world_size) == (5, 8), "the engine's own is as it was"
