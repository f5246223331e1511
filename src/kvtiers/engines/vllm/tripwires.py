"""Everything of vLLM that we override or reach into, in one table, checked at start.

vLLM's offloading interface changes with every release. Where a name or a signature is not what was
built and tested against, starting is refused in plain words rather than left to fail under load.
"""

import inspect
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
    RequestGroupState,
    TransferJobStatus,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvtiers.errors import Kind, KVTiersError

SUPPORTED = ">= 0.32, < 0.34"


@dataclass(frozen=True, slots=True)
class Signature:
    """A method we override or call, and the parameters it must have, besides ``self``/``cls``."""

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
    Signature(OffloadingConnectorScheduler, "__init__", ("spec", "vllm_config", "kv_cache_config")),
    Signature(OffloadingConnectorScheduler, "update_connector_output", ("connector_output",)),
    Signature(OffloadingConnectorScheduler, "_build_store_jobs", ("scheduler_output",)),
    Signature(OffloadingConnectorScheduler, "reset_cache", ()),
    Signature(OffloadingConnectorWorker, "__init__", ("spec", "vllm_config", "kv_cache_config")),
    Signature(OffloadingConnectorWorker, "register_kv_caches", ("kv_caches",)),
    Signature(OffloadingConnectorWorker, "get_finished", ("finished_req_ids",)),
    Signature(OffloadingConnectorWorker, "build_connector_worker_meta", ()),
)

ATTRIBUTES = {
    OffloadingConnectorScheduler.__init__: ("_jobs", "_req_status", "config", "manager"),
    OffloadingConnectorWorker.__init__: ("_load_jobs", "worker", "spec"),
}
"""Instance attributes we use, which the constructor must mention."""

FIELDS = {
    RequestGroupState: ("block_ids", "next_stored_chunk_idx", "offload_keys"),
    TransferJobStatus: ("req_id", "pending_count", "keys", "is_store"),
}
"""Dataclass fields we use."""


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
        mentioned = constructor.__code__.co_names
        found += [f"{constructor.__qualname__} sets no {n}" for n in names if n not in mentioned]
    for owner, names in FIELDS.items():
        fields = getattr(owner, "__dataclass_fields__", {})
        found += [f"{owner.__name__} has no {n}" for n in names if n not in fields]
    return found


def check_upstream() -> None:
    """Raise KVTiersError ``UNSUPPORTED`` if vLLM is not as it was when this was tested."""
    found = complaints()
    if found:
        raise KVTiersError(
            f"this vLLM is not one that kvtiers supports ({SUPPORTED}): {'; '.join(found)}",
            kind=Kind.UNSUPPORTED,
            operation="start",
        )
