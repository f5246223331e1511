"""What is stored under context parallelism, and where parallelism is refused."""

from types import SimpleNamespace

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import (
    derive_canonical_mappings,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
)
from vllm.v1.kv_offload.config import OffloadingGroupConfig

from kvtiers.engines.vllm.connector import refuse_other_hosts
from kvtiers.engines.vllm.layout import geometry_of, record_of
from kvtiers.errors import ConfigError


def parallel(**changes):
    known = {"nnodes": 1, "nnodes_within_dp": 1, "world_size": 2}
    return SimpleNamespace(**known | {"distributed_executor_backend": "mp"} | changes)


def test_workers_that_may_run_on_other_hosts_are_refused() -> None:
    refuse_other_hosts(parallel())
    refuse_other_hosts(parallel(nnodes=2))  # whole replicas on other hosts
    refuse_other_hosts(parallel(world_size=1, distributed_executor_backend="ray"))
    with pytest.raises(ConfigError, match=r"nnodes is 2, .* use one host for each engine"):
        refuse_other_hosts(parallel(nnodes=2, nnodes_within_dp=2))
    with pytest.raises(ConfigError, match=r"backend is ray, .*; use mp"):
        refuse_other_hosts(parallel(distributed_executor_backend="ray"))


HEADS, BLOCK, SIZE, BLOCKS = 2, 16, 8, 4


def of_rank(rank, tp, dcp, mla, offloading_config):
    """Geometry and record of a rank, by vLLM's mappings; one layer, CPU tensors."""
    size = {"block_size": BLOCK, "head_size": SIZE, "dtype": torch.float32}
    if mla:
        spec = MLAAttentionSpec(**size, num_kv_heads=1)
        shape = (BLOCKS, 1, BLOCK, SIZE)
    else:
        spec = FullAttentionSpec(**size, num_kv_heads=max(1, HEADS // tp))
        shape = (BLOCKS, max(1, HEADS // tp), BLOCK, 2 * SIZE)
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tp,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=dcp,
            cp_kv_cache_interleave_size=1,
            world_size=tp,
            rank=rank,
        ),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: HEADS),
    )
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["layer"])
    kv_cache_config = SimpleNamespace(kv_cache_groups=[group], num_blocks=BLOCKS)
    tensor = torch.zeros(shape)
    mapping = derive_canonical_mappings(config, kv_cache_config, {"layer": tensor})["layer"]
    page = mapping.local_page_size_bytes
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor.view(torch.int8).flatten(1), page)],
        [[CanonicalKVCacheRef(0, page, mapping)]],
    )
    groups = (OffloadingGroupConfig(BLOCK * dcp, ("layer",), 0),)
    known = offloading_config(groups=groups, world_size=tp, tp_size=tp, dcp_size=dcp, rank=rank)
    geometry = geometry_of(caches, known, None)
    geometry.check()
    return geometry, record_of(geometry, known, ["format"])


@pytest.mark.parametrize(("tp", "mla"), [(4, False), (2, True), (4, True)])
def test_context_parallel_ranks_tile_a_chunk_whose_namespace_is_theirs(
    offloading_config, tp, mla
) -> None:
    """Each rank has every other token; a chunk spans the blocks of both."""
    ranks = [of_rank(r, tp, 2, mla, offloading_config) for r in range(tp)]
    records = [record for _, record in ranks]
    assert records == [records[0]] * tp
    assert records[0].portable is False, "so the topology is part of the namespace"
    (group,) = records[0].layout.groups
    assert group.tokens_per_chunk == 2 * BLOCK
    for slot in range(tp):
        written = sorted(
            span
            for geometry, _ in ranks
            for page in geometry.groups[0].pages
            if page.writes(geometry.place(0, slot, 0))
            for run in page.runs
            for span in run.page_spans()
        )
        ends = [stop for _, stop in written]
        assert [start for start, _ in written] == [0, *ends[:-1]], "every byte is written once"
        assert ends[-1] == ranks[0][0].groups[0].pages[0].canonical_bytes


def test_without_context_parallelism_the_same_layers_are_portable(offloading_config) -> None:
    _, alone = of_rank(0, 1, 1, False, offloading_config)
    _, one_of_two = of_rank(1, 2, 1, False, offloading_config)
    assert alone.portable
    assert alone.named_bytes() == one_of_two.named_bytes()
