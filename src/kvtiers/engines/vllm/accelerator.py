"""On CUDA, ROCm and XPU: vLLM's own copy worker over our region, or our copier on CUDA.

Ours is for models whose chunks vLLM's worker cannot make. Neither was run on an accelerator so far:
what they would copy is tested byte for byte against our geometry, vLLM's with its own address
arithmetic, ours with CPU tensors. A copy that fails on a CUDA stream is sticky and may end the
engine.
"""

import logging
from collections.abc import Callable

import torch
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
from kvtiers.device.cuda import RegionForVllm, vllm_compatible
from kvtiers.device.cuda_copier import CudaCopier
from kvtiers.device.geometry import Geometry
from kvtiers.device.streams import CudaDevice, Device
from kvtiers.engines.vllm.worker import ReportingWorker
from kvtiers.errors import ConfigError, Kind, KVTiersError
from kvtiers.host.region import Region

logger = logging.getLogger("kvtiers")

OWN_DEVICES: dict[str, Callable[[torch.device], Device]] = {"cuda": CudaDevice}
"""Kinds of devices that our own copier can use."""


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


def unfit_for_vllm(kv_caches: CanonicalKVCaches, geometry: Geometry) -> str | None:
    """Why vLLM's copy worker cannot make the chunks; None: it can."""
    if any(ref.mapping is None for refs in kv_caches.group_data_refs for ref in refs):
        return "the KV layout of some layers has no canonical form"
    return vllm_compatible(geometry)


def vllms_worker(
    kv_caches: CanonicalKVCaches, geometry: Geometry, region: Region, *, reports_failures: bool
) -> ReportingWorker:
    """Build vLLM's worker over ``region``. It moves bytes by vLLM's mapping, as ``geometry`` must
    say, and makes no chunks but those that are not :func:`unfit_for_vllm`.
    """
    host = RegionForVllm(region.buffer, geometry, host_unregister)
    inner = CPUOffloadingWorker(
        kv_caches=kv_caches,
        blocks_per_chunk=geometry.blocks_per_chunk,
        num_cpu_chunks=region.num_slots,
        mmap_region=host,
        canonical_layout=True,
    )
    return AcceleratorWorker(inner, host, geometry, region, reports_failures=reports_failures)


def own_copier(
    kv_caches: CanonicalKVCaches, geometry: Geometry, region: Region, reason: str
) -> CudaCopier:
    """Our copier over ``region``, because of ``reason``. Raises ConfigError if it has no such
    device.
    """
    tensors = [t.tensor for t in kv_caches.tensors]
    device = tensors[0].device
    make = OWN_DEVICES.get(device.type)
    if make is None:
        raise ConfigError(
            f"this model cannot be offloaded from this {device.type} device, for which kvtiers has "
            f"no copier of its own: {reason}; serve it without kvtiers"
        )
    logger.warning(
        "kvtiers uses a copier of its own, which was not run on a GPU so far, because vLLM's copy "
        "worker cannot make the chunks of this model: %s",
        reason,
    )
    return CudaCopier(tensors, region.buffer, geometry, make(device))
