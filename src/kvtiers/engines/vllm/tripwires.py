"""Everything of vLLM that we override or reach into, in one table, checked at start.

vLLM's offloading interface changes with every release. Where a name or a signature is not what was
built and tested against, starting is refused in plain words rather than left to fail under load.
"""

import dis
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.config import CacheConfig
from vllm.distributed.kv_events import (
    BlockRemoved,
    BlockStored,
    EventPublisherFactory,
    ZmqEventPublisher,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import (
    OffloadingEventsTracker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadPromMetrics
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    GroupOffloadConfig,
    OffloadingConnectorScheduler,
    RequestGroupState,
    RequestOffloadState,
    SchedulerOffloadConfig,
    TransferJobStatus,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import AttentionSpec, MambaSpec
from vllm.v1.kv_offload.base import OffloadingManager, OffloadingSpec, OffloadingWorker
from vllm.v1.outputs import KVConnectorOutput

from kvtiers.errors import Kind, KVTiersError
from kvtiers.kvevents import messages

SUPPORTED = ">= 0.32, < 0.34"


@dataclass(frozen=True, slots=True)
class Signature:
    """What we override or call, and the parameters it must have, besides ``self``/``cls``."""

    owner: Any
    name: str
    parameters: tuple[str, ...]


SIGNATURES = (
    Signature(OffloadingConnector, "__init__", ("vllm_config", "role", "kv_cache_config")),
    Signature(OffloadingConnector, "register_kv_caches", ("kv_caches",)),
    Signature(OffloadingConnector, "get_transfer_results", ("finished_req_ids",)),
    Signature(
        OffloadingConnector,
        "build_prom_metrics",
        ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
    ),
    Signature(OffloadingConnector, "get_required_kvcache_layout", ("vllm_config",)),
    Signature(OffloadingConnector, "requires_piecewise_for_cudagraph", ("extra_config",)),
    Signature(OffloadingConnectorScheduler, "__init__", ("spec", "vllm_config", "kv_cache_config")),
    Signature(OffloadingConnectorScheduler, "update_connector_output", ("connector_output",)),
    Signature(
        OffloadingConnectorScheduler,
        "update_state_after_alloc",
        ("request", "blocks", "num_external_tokens"),
    ),
    Signature(KVConnectorFactory, "register_connector", ("name", "module_path", "class_name")),
    Signature(OffloadingConnectorScheduler, "_build_store_jobs", ("scheduler_output",)),
    Signature(OffloadingConnectorScheduler, "_update_req_states", ("scheduler_output",)),
    Signature(OffloadingConnectorScheduler, "build_connector_meta", ("scheduler_output",)),
    Signature(OffloadingManager, "lookup", ("key", "req_context")),
    Signature(OffloadingManager, "prepare_load", ("keys", "req_context")),
    Signature(OffloadingManager, "complete_load", ("keys", "req_context")),
    Signature(OffloadingManager, "prepare_store", ("keys", "req_context")),
    Signature(OffloadingManager, "complete_store", ("keys", "req_context", "success")),
    Signature(OffloadingManager, "on_new_request", ("req_context",)),
    Signature(OffloadingManager, "on_request_finished", ("req_context",)),
    Signature(OffloadingManager, "on_schedule_end", ("context",)),
    Signature(OffloadingSpec, "__init__", ("config",)),
    Signature(OffloadingSpec, "get_worker", ("kv_caches",)),
    Signature(OffloadingSpec, "build_metric_definitions", ("extra_config",)),
    Signature(OffloadingWorker, "submit_store", ("job_id", "src_spec", "dst_spec")),
    Signature(OffloadingWorker, "wait", ("job_ids",)),
    Signature(
        OffloadingConnectorScheduler,
        "_calc_num_offloadable_tokens",
        ("req_status", "num_computed_tokens"),
    ),
    Signature(
        OffloadingConnectorScheduler,
        "_lookup_complete_chunks",
        ("req_status", "max_num_new_tokens"),
    ),
    Signature(GroupOffloadConfig, "load_window_size_in_chunks", ("num_tokens",)),
    Signature(
        OffloadingEventsTracker,
        "record_lookup",
        ("req", "group_config", "chunk_idx", "offload_key"),
    ),
    Signature(
        OffloadingEventsTracker,
        "record_store",
        ("req", "group_config", "chunk_idx", "offload_key"),
    ),
    Signature(
        OffloadingEventsTracker,
        "record_partial_store",
        ("req", "group_config", "boundary_tokens", "offload_key"),
    ),
    Signature(
        OffloadingEventsTracker,
        "record_partial_lookup",
        ("req", "group_config", "boundary_tokens", "offload_key"),
    ),
    Signature(OffloadingEventsTracker, "take_events", ("events",)),
    Signature(OffloadingEventsTracker, "reset", ()),
    Signature(kv_cache_utils, "to_event_extra_keys", ("extra_keys",)),
    Signature(OffloadingConnectorScheduler, "shutdown", ()),
    Signature(EventPublisherFactory, "create", ("config", "data_parallel_rank")),
    Signature(ZmqEventPublisher, "_socket_setup", ()),
    Signature(ZmqEventPublisher, "_service_replay", ()),
    Signature(OffloadingConnectorScheduler, "on_new_request", ("request",)),
    Signature(OffloadingConnectorScheduler, "request_finished", ("request",)),
    Signature(
        OffloadingConnectorScheduler,
        "_make_boundary_key",
        ("request", "group_idx", "boundary_tokens", "req_context"),
    ),
    Signature(RequestOffloadState, "update_offload_keys", ()),
    Signature(
        kv_cache_utils,
        "generate_block_hash_extra_keys",
        ("request", "start_token_idx", "end_token_idx", "start_mm_idx"),
    ),
    Signature(OffloadingConnectorScheduler, "reset_cache", ()),
    Signature(OffloadingConnectorWorker, "__init__", ("spec", "vllm_config", "kv_cache_config")),
    Signature(OffloadingConnectorWorker, "register_kv_caches", ("kv_caches",)),
    Signature(OffloadingConnectorWorker, "get_finished", ("finished_req_ids",)),
    Signature(OffloadingConnectorWorker, "build_connector_worker_meta", ()),
    Signature(mamba_utils, "is_conv_state_dim_first", ()),
)

ATTRIBUTES = {
    OffloadingConnectorScheduler.__init__: (
        "_jobs",
        "_req_status",
        "_current_batch_load_jobs",
        "_current_batch_allocated_block_ids",
        "_events_tracker",
        "config",
        "manager",
    ),
    OffloadingConnectorWorker.__init__: ("_load_jobs", "worker", "spec"),
    ZmqEventPublisher.__init__: ("_buffer", "_replay", "_topic_bytes", "_dp_rank"),
    OffloadPromMetrics.__init__: ("_observe_deprecated_metrics",),
}
"""Instance attributes we use, which the constructor must set."""

REPLACED = {
    OffloadingConnector.__init__: {"_canonical_layout", "connector_scheduler", "connector_worker"},
}
"""Constructors we do not call, and everything they may set: we set it ourselves."""

FIELDS = {
    CacheConfig: ("block_size",),
    RequestGroupState: ("block_ids", "next_stored_chunk_idx", "offload_keys"),
    RequestOffloadState: (
        "config",
        "group_states",
        "num_locally_computed_tokens",
        "offloading_context",
        "req",
        "req_context",
        "transfer_jobs",
    ),
    TransferJobStatus: ("req_id", "pending_count", "keys", "is_store"),
    KVConnectorOutput: ("invalid_block_ids", "kv_connector_worker_meta"),
    KVCacheBlocks: ("blocks",),
    KVCacheBlock: ("block_id", "is_null"),
    SchedulerOffloadConfig: ("kv_group_configs", "blocks_per_chunk", "supports_partial_tail"),
    GroupOffloadConfig: (
        "group_idx",
        "hashes_per_chunk",
        "kv_event_group_spec",
        "tokens_per_block",
        "tokens_per_chunk",
        "sliding_window_size_in_chunks",
        "requires_cow_source",
    ),
    BlockStored: messages.BlockStored.__struct_fields__,
    BlockRemoved: messages.BlockRemoved.__struct_fields__,
    EventPublisherFactory: ("_registry",),
    OffloadingWorkerMetadata: ("completed_jobs", "transfer_stats"),
    AttentionSpec: (
        "kv_quant_mode",
        "max_tp_shards",
        "num_head_slots",
        "state_content_bytes",
        "tokens_per_state",
    ),
    MambaSpec: ("shapes", "dtypes", "mamba_type", "tp_replicated"),
    KVConnectorTransferResults: ("finished_sending", "finished_recving", "failed_recving"),
}
"""Fields we use, of dataclasses and named tuples."""


def complaints() -> list[str]:
    """What of the table does not hold for the installed vLLM."""
    found = []
    for wire in SIGNATURES:
        method = getattr(wire.owner, wire.name, None)
        if method is None:
            found.append(f"{wire.owner.__name__}.{wire.name} is gone")
            continue
        names = tuple(n for n in inspect.signature(method).parameters if n not in ("self", "cls"))
        if names != wire.parameters:
            found.append(f"{wire.owner.__name__}.{wire.name} takes {names}")
    for constructor, names in ATTRIBUTES.items():
        lost = set(names) - _set_by(constructor)
        found += [f"{constructor.__qualname__} sets no {n}" for n in sorted(lost)]
    for constructor, known in REPLACED.items():
        new = _set_by(constructor) - known
        found += [f"{constructor.__qualname__} sets {n}" for n in sorted(new)]
    for owner, names in FIELDS.items():
        lost = set(names) - set(inspect.get_annotations(owner))
        found += [f"{owner.__name__} has no {n}" for n in sorted(lost)]
    return found


def _set_by(constructor: Callable[..., Any]) -> set[str]:
    return {i.argval for i in dis.get_instructions(constructor) if i.opname == "STORE_ATTR"}


def check_upstream() -> None:
    """Raise KVTiersError ``UNSUPPORTED`` if vLLM is not as it was when this was tested."""
    found = complaints()
    if found:
        raise KVTiersError(
            f"this vLLM is not one that kvtiers supports ({SUPPORTED}): {'; '.join(found)}",
            kind=Kind.UNSUPPORTED,
            operation="start",
        )
