"""On CUDA, ROCm and XPU: vLLM's own copy worker, over our region.

Not yet run on an accelerator. What it would copy is tested byte for byte against our geometry with
vLLM's own address arithmetic. A copy that fails on a CUDA stream is sticky and may end the engine.
"""

import logging

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker
from vllm.v1.kv_offload.cpu.host_register import host_unregister

from kvtiers.device.copier import Direction
from kvtiers.device.cuda import RegionForVllm
from kvtiers.device.geometry import Geometry
from kvtiers.engines.vllm.worker import ReportingWorker
from kvtiers.errors import ConfigError, Kind, KVTiersError
from kvtiers.host.region import Region

logger = logging.getLogger("kvtiers")


class AcceleratorWorker(ReportingWorker):
    """vLLM's worker, with unwritten parts zeroed first and failures told apart."""

    def __init__(
        self,
        inner: OffloadingWorker,
        host: RegionForVllm,
        geometry: Geometry,
        region: Region,
        *,
        reports_failures: bool,
    ) -> None:
        super().__init__(geometry, region, reports_failures=reports_failures)
        self._inner = inner
        self._host = host

    def wait(self, job_ids: set[int]) -> None:
        """Block until these jobs ended."""
        self._inner.wait(job_ids)

    def _begin(
        self, job_id: int, direction: Direction, device: GPULoadStoreSpec, slots: LoadStoreSpec
    ) -> None:
        if direction is Direction.STORE:
            self._host.zero_unwritten(self._plan(device, slots))
            taken = self._inner.submit_store(job_id, device, slots)
        else:
            taken = self._inner.submit_load(job_id, slots, device)
        if not taken:
            raise KVTiersError(
                "vLLM's copy worker refused it", kind=Kind.IO, operation=direction.value
            )

    def _poll(self) -> list[TransferResult]:
        results: list[TransferResult] = self._inner.get_finished()
        for result in results:
            if not result.success:
                logger.error("copy job %d failed in vLLM's copy worker", result.job_id)
        return results

    def _stop(self) -> None:
        self._inner.shutdown()  # it unpins our region, which is unmapped after


def accelerator_worker(
    kv_caches: CanonicalKVCaches, geometry: Geometry, region: Region, *, reports_failures: bool
) -> AcceleratorWorker:
    """Build vLLM's worker over ``region``. Raises ConfigError where it cannot serve the model."""
    if any(ref.mapping is None for refs in kv_caches.group_data_refs for ref in refs):
        raise ConfigError(
            "this model's KV layout has no canonical form, and vLLM's copy worker for accelerators "
            "needs one; serve it without kvtiers"
        )
    host = RegionForVllm(region.buffer, geometry, host_unregister)
    inner = CPUOffloadingWorker(
        kv_caches=kv_caches,
        blocks_per_chunk=geometry.blocks_per_chunk,
        num_cpu_chunks=region.num_slots,
        mmap_region=host,
        canonical_layout=True,
    )
    return AcceleratorWorker(inner, host, geometry, region, reports_failures=reports_failures)
