"""Worker side: vLLM's transfer orders become copies; failures are told to the scheduler side."""

import logging
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from kvtiers.device.copier import Copier, Direction
from kvtiers.device.geometry import Geometry, plan_copies
from kvtiers.errors import KVTiersError
from kvtiers.host.region import Region

logger = logging.getLogger("kvtiers")


@dataclass
class WorkerMetadata(OffloadingWorkerMetadata):
    """vLLM's report of finished jobs, and which of them failed on at least one rank."""

    failed_jobs: set[int] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerMetadata":
        """Both ranks' reports as one."""
        merged = OffloadingWorkerMetadata.aggregate(self, other)
        return WorkerMetadata(
            completed_jobs=merged.completed_jobs,
            transfer_stats=merged.transfer_stats,
            failed_jobs=self.failed_jobs | getattr(other, "failed_jobs", set()),
        )


class CopyWorker(OffloadingWorker):
    """vLLM's worker interface over a :class:`~kvtiers.device.copier.Copier`.

    vLLM asserts that every submission and every result is a success, so a failure is reported as
    one and noted in ``failed``, which our connector reads.
    """

    def __init__(self, copier: Copier, geometry: Geometry, region: Region) -> None:
        self._copier = copier
        self._geometry = geometry
        self._region = region
        self._unplanned: list[int] = []
        self.failed: set[int] = set()

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Device -> host."""
        return self._submit(job_id, Direction.STORE, src_spec, dst_spec)

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        """Host -> device. One FIFO serves both directions, so ``expedited`` changes nothing."""
        return self._submit(job_id, Direction.LOAD, dst_spec, src_spec)

    def get_finished(self) -> list[TransferResult]:
        """Jobs that ended, failed ones included."""
        results = [TransferResult(job_id, True) for job_id in self._unplanned]
        self._unplanned.clear()
        for outcome in self._copier.poll():
            if not outcome.ok:
                self.failed.add(outcome.job_id)
                logger.error("copy job %d failed: %s", outcome.job_id, outcome.error)
            results.append(
                TransferResult(outcome.job_id, True, outcome.bytes, outcome.seconds)
                if outcome.ok
                else TransferResult(outcome.job_id, True)
            )
        return results

    def wait(self, job_ids: set[int]) -> None:
        """Block until these jobs ended."""
        self._copier.wait(job_ids)

    def shutdown(self) -> None:
        """Stop copying and let go of the region."""
        self._copier.close()
        self._region.close()

    def _submit(
        self, job_id: int, direction: Direction, device: GPULoadStoreSpec, host: LoadStoreSpec
    ) -> bool:
        try:
            slots = [int(s) for s in host.block_ids]
            if min(slots, default=0) < 0:
                raise _gone(job_id)
            plan = plan_copies(
                device.group_sizes,
                device.block_indices,
                [int(b) for b in device.block_ids],
                slots,
                self._geometry,
            )
            self._copier.submit(job_id, direction, plan)
        except Exception as e:  # vLLM ends the engine when a submission raises
            logger.error("copy job %d could not be started: %s", job_id, e)
            self.failed.add(job_id)
            self._unplanned.append(job_id)
        return True


def _gone(job_id: int) -> KVTiersError:
    from kvtiers.errors import Kind

    return KVTiersError(
        f"copy job {job_id} names a chunk that left host memory; it is recomputed",
        kind=Kind.VANISHED,
        operation="load",
    )


class KVTiersWorker(OffloadingConnectorWorker):
    """Worker side of :class:`kvtiers.engines.vllm.KVTiersConnector`."""

    def __init__(self, spec: Any, vllm_config: Any, kv_cache_config: Any) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        self._failed_jobs: set[int] = set()

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Note the shapes, which tell how K and V are packed, then register as upstream does."""
        self.spec.note_kv_caches(kv_caches)
        super().register_kv_caches(kv_caches)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Finished transfers, failed loads among them: upstream cannot tell."""
        owners = dict(self._load_jobs)
        sending, receiving = self.get_finished(finished_req_ids)
        failed: set[int] = getattr(self.worker, "failed", set())
        failed_requests = {r for j in failed if (r := owners.get(j)) is not None}
        self._failed_jobs |= failed
        failed.clear()
        return KVConnectorTransferResults(
            finished_sending=sending, finished_recving=receiving, failed_recving=failed_requests
        )

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        """The report to the scheduler side, with the failed jobs in it."""
        meta = super().build_connector_worker_meta()
        if meta is None:
            return None
        failed, self._failed_jobs = self._failed_jobs, set()
        return WorkerMetadata(meta.completed_jobs, meta.transfer_stats, failed)
