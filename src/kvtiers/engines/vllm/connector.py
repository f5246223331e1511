"""The connector that users name: vLLM's offloading connector with our two sides in it."""

from contextlib import suppress
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
    build_offloading_config,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.config import OffloadingConfig

from kvtiers.config import KVTiersConfig, parse_config
from kvtiers.engines.vllm.accelerator import OWN_DEVICES
from kvtiers.engines.vllm.facts import gather
from kvtiers.engines.vllm.logs import saying_refusals
from kvtiers.engines.vllm.refusals import refuse_pipelines
from kvtiers.engines.vllm.scheduler import KVTiersScheduler
from kvtiers.engines.vllm.spec import KVTiersSpec
from kvtiers.engines.vllm.tripwires import check_upstream
from kvtiers.engines.vllm.worker import KVTiersWorker
from kvtiers.errors import ConfigError
from kvtiers.host.policies import find_policy
from kvtiers.host.region import check_capacity
from kvtiers.tiers import check_tiers

SPEC = {"spec_name": "KVTiersSpec", "spec_module_path": "kvtiers.engines.vllm"}


class KVTiersConnector(OffloadingConnector):
    """Named by ``kv_connector``, with ``"kv_connector_module_path": "kvtiers.engines.vllm"``."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        # Not OffloadingConnector.__init__: it would build its own scheduler and worker sides.
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        with saying_refusals(vllm_config.parallel_config.rank):
            self._build(vllm_config, role, kv_cache_config)

    def _build(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        check_upstream()
        settings = _check(vllm_config)
        config = _describe(vllm_config, kv_cache_config, settings)
        self._canonical_layout = True
        spec = KVTiersSpec(config, gather(vllm_config, kv_cache_config, config))
        self.connector_scheduler = None
        self.connector_worker = None
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = KVTiersScheduler(spec, vllm_config, kv_cache_config)
            _complete(vllm_config.kv_transfer_config)
        else:
            self.connector_worker = KVTiersWorker(spec, vllm_config, kv_cache_config)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """No; but where vLLM asks, no process was started yet: the time to refuse bad settings."""
        with saying_refusals():
            parse_config(extra_config)
        return super().requires_piecewise_for_cudagraph(extra_config)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Upstream's; bad settings are refused here by one process, instead of by every rank."""
        with saying_refusals():
            settings = _check(vllm_config)
            check_capacity(settings.cpu_bytes_to_use, 1, settings.region_directory)  # of any slots
        return super().get_required_kvcache_layout(vllm_config)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Finished and failed transfers; upstream's connector cannot report a failure."""
        worker: Any = self.connector_worker
        return worker.get_transfer_results(finished_req_ids)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Any:
        """Declare our metrics, in the API server's process, where no connector was built."""
        with saying_refusals():
            _check(vllm_config)
            _complete(vllm_config.kv_transfer_config)
        metrics = super().build_prom_metrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues
        )
        # Dashboards of older vLLM read these; upstream feeds them for its own specs only.
        metrics._observe_deprecated_metrics = True
        return metrics


# MultiConnector finds by name whose statistics it was sent; a server ends if it cannot.
with suppress(ValueError):  # somebody registered it before us
    KVConnectorFactory.register_connector(
        KVTiersConnector.__name__, "kvtiers.engines.vllm", KVTiersConnector.__name__
    )


def _check(vllm_config: Any) -> KVTiersConfig:
    """The settings. Raises ConfigError for what can be refused without the model."""
    settings = parse_config(vllm_config.kv_transfer_config.kv_connector_extra_config)
    check_tiers(settings.secondary_tiers)
    find_policy(settings.eviction_policy, settings.cache_policy_module_path)
    device = str(vllm_config.device_config.device_type)
    if device not in ("cpu", *OWN_DEVICES):  # vLLM's worker knows a stage's own layers only
        stages = vllm_config.parallel_config.pipeline_parallel_size
        refuse_pipelines(stages, f"vLLM's copy worker for {device}")
    refuse_other_hosts(vllm_config.parallel_config)
    return settings


def refuse_other_hosts(parallel: Any) -> None:
    """Raise ConfigError where a worker may run on another host than the scheduler.

    It would find a region of its own there, which nobody fills.
    """
    if parallel.nnodes_within_dp > 1:
        raise ConfigError(
            f"nnodes is {parallel.nnodes}, but the workers of an engine share host memory, which "
            "ends at a host; use one host for each engine",
            key="nnodes",
        )
    if parallel.world_size > 1 and str(parallel.distributed_executor_backend) == "ray":
        raise ConfigError(
            "distributed_executor_backend is ray, which may place workers on other hosts, but they "
            "share host memory; use mp",
            key="distributed_executor_backend",
        )


def _complete(transfer: Any) -> None:
    """Complete what the user wrote: which spec declares our metrics, and how failures end.

    vLLM reads both from the configuration later. A failed load is recomputed: "fail", vLLM's
    default, would end the request.
    """
    transfer.kv_connector_extra_config.update(SPEC)
    transfer.kv_load_failure_policy = "recompute"


def _describe(vllm_config: Any, kv_cache_config: Any, settings: KVTiersConfig) -> OffloadingConfig:
    """What is offloaded, in vLLM's words; vLLM's complaints become ConfigErrors."""
    if settings.block_size is not None:
        _check_span(settings, {g.kv_cache_spec.block_size for g in kv_cache_config.kv_cache_groups})
    try:
        return build_offloading_config(vllm_config, kv_cache_config)
    except (AssertionError, ValueError) as e:
        raise ConfigError(f"vLLM cannot offload the KV cache of this engine: {e}") from e


def _check_span(settings: KVTiersConfig, blocks: set[int]) -> None:
    """``blocks``: the spans, in tokens, of the blocks of all KV-cache groups."""
    if len(blocks) > 1:
        raise ConfigError(
            f"block_size is {settings.block_size}, but this model's KV-cache groups have blocks "
            f"of {' and '.join(map(str, sorted(blocks)))} tokens; set blocks_per_chunk instead",
            key="block_size",
        )
    for tokens_per_block in blocks:
        settings.chunk_blocks(tokens_per_block)
