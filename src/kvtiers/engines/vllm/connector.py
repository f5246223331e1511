"""The connector that users name: vLLM's offloading connector with our two sides in it."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
    build_offloading_config,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvtiers.config import parse_config
from kvtiers.engines.vllm.facts import gather
from kvtiers.engines.vllm.logs import adopt_vllm_logging, logger
from kvtiers.engines.vllm.scheduler import KVTiersScheduler
from kvtiers.engines.vllm.spec import KVTiersSpec
from kvtiers.engines.vllm.tripwires import check_upstream
from kvtiers.engines.vllm.worker import KVTiersWorker
from kvtiers.errors import KVTiersError

SPEC = {"spec_name": "KVTiersSpec", "spec_module_path": "kvtiers.engines.vllm"}


class KVTiersConnector(OffloadingConnector):
    """Named by ``kv_connector``, with ``"kv_connector_module_path": "kvtiers.engines.vllm"``."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        # Not OffloadingConnector.__init__: it would build its own scheduler and worker sides.
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        adopt_vllm_logging()
        try:
            self._build(vllm_config, role, kv_cache_config)
        except KVTiersError as e:
            logger.error("%s", e)
            raise

    def _build(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        check_upstream()
        _prepare(vllm_config.kv_transfer_config)
        config = build_offloading_config(vllm_config, kv_cache_config)
        self._canonical_layout = True
        spec = KVTiersSpec(config, gather(vllm_config, kv_cache_config, config))
        self.connector_scheduler = None
        self.connector_worker = None
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = KVTiersScheduler(spec, vllm_config, kv_cache_config)
        else:
            self.connector_worker = KVTiersWorker(spec, vllm_config, kv_cache_config)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Map host memory; refusals are said once more as a line of the log."""
        try:
            super().register_kv_caches(kv_caches)
        except KVTiersError as e:
            logger.error("%s", e)
            raise

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
        adopt_vllm_logging()
        _prepare(vllm_config.kv_transfer_config)
        metrics = super().build_prom_metrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues
        )
        # Dashboards of older vLLM read these; upstream feeds them for its own specs only.
        metrics._observe_deprecated_metrics = True
        return metrics


def _prepare(kv_transfer_config: Any) -> None:
    """Complete what the user wrote: which spec declares our metrics, and how failures end.

    vLLM reads both from the configuration later. A failed load is recomputed: "fail", vLLM's
    default, would end the request.
    """
    extra = kv_transfer_config.kv_connector_extra_config
    parse_config(extra)
    extra.update(SPEC)
    kv_transfer_config.kv_load_failure_policy = "recompute"
