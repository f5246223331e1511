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

from kvtiers.device.cuda import RegionForVllm
from kvtiers.device.geometry import Geometry, plan_copies
from kvtiers.errors import ConfigError
from kvtiers.host.region import Region

logger = logging.getLogger("kvtiers")


class AcceleratorWorker(OffloadingWorker):
    """vLLM's worker, with unwritten parts zeroed first and failures told apart."""

    def __init__(
        self, inner: OffloadingWorker, host: RegionForVllm, geometry: Geometry, region: Region
    ) -> None:
        self._inner = inner
        self._host = host
        self._geometry = geometry
        self._region = region
        self._refused: list[int] = []
        self.failed: set[int] = set()

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Device -> host."""
        try:
            plan = plan_copies(
                src_spec.group_sizes,
                src_spec.block_indices,
                [int(b) for b in src_spec.block_ids],
                [int(s) for s in dst_spec.block_ids],
                self._geometry,
            )
            self._host.zero_unwritten(plan)
            self._inner.submit_store(job_id, src_spec, dst_spec)
        except Exception as e:  # vLLM ends the engine when a submission raises
            self._refuse(job_id, e)
        return True

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        """Host -> device."""
        if min((int(s) for s in src_spec.block_ids), default=0) < 0:
            self._refuse(job_id, "a chunk left host memory")
            return True
        try:
            self._inner.submit_load(job_id, src_spec, dst_spec)
        except Exception as e:  # vLLM ends the engine when a submission raises
            self._refuse(job_id, e)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Jobs that ended, failed ones included: vLLM asserts success, ``failed`` tells ours."""
        results = [TransferResult(job_id, True) for job_id in self._refused]
        self._refused.clear()
        for result in self._inner.get_finished():
            if not result.success:
                self.failed.add(result.job_id)
                result.success = True
            results.append(result)
        return results

    def wait(self, job_ids: set[int]) -> None:
        """Block until these jobs ended."""
        self._inner.wait(job_ids)

    def shutdown(self) -> None:
        """Stop copying; the inner worker unpins our region, then it is unmapped."""
        self._inner.shutdown()
        self._region.close()

    def _refuse(self, job_id: int, why: object) -> None:
        logger.error("copy job %d could not be started: %s", job_id, why)
        self.failed.add(job_id)
        self._refused.append(job_id)


def accelerator_worker(
    kv_caches: CanonicalKVCaches, geometry: Geometry, region: Region
) -> AcceleratorWorker:
    """Build vLLM's worker over ``region``. Raises ConfigError where it cannot serve the model."""
    from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker
    from vllm.v1.kv_offload.cpu.host_register import host_unregister

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
    return AcceleratorWorker(inner, host, geometry, region)
