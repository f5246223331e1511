from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

GROUPS = (OffloadingGroupConfig(32, ("layers.0", "layers.1"), 0),)


@pytest.fixture
def offloading_config() -> Callable[..., OffloadingConfig]:
    """What vLLM's own connector tells a spec of one rank; changes go to where they belong."""

    def build(**changes: Any) -> OffloadingConfig:
        model = {"name": "/models/tiny", "dtype": "bfloat16"}
        cache = {"tokens_per_hash": 32, "blocks_per_chunk": 1}
        parallel = {
            "rank": 0,
            "world_size": 1,
            "tp_size": 1,
            "pp_size": 1,
            "pcp_size": 1,
            "dcp_size": 1,
            "data_parallel_index": 0,
            "data_parallel_size": 1,
            "data_parallel_rank_local": None,
            "is_parallelism_agnostic": True,
        }
        rest = {
            "groups": GROUPS,
            "worker_kv_bytes_per_block": 0,
            "enable_kv_cache_events": False,
            "extra_config": {"cpu_bytes_to_use": 1_000_000},
            "engine_id": "engine",
            "kv_cache_layout": "LBHNC",
        }
        for part in (model, cache, parallel, rest):
            part.update({k: changes.pop(k) for k in list(changes) if k in part})
        assert not changes
        return OffloadingConfig(
            model=OffloadingModelConfig(**model),
            cache=OffloadingCacheConfig(**cache),
            parallel=OffloadingParallelConfig(**parallel),
            **rest,
        )

    return build
