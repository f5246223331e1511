"""Worker side: vLLM's transfer orders become copies; failures are told to the scheduler side."""

import logging
from abc import abstractmethod
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

from kvtiers.core.load import NO_SLOT
from kvtiers.device.copier import Copier, Direction
from kvtiers.device.geometry import Geometry
from kvtiers.device.plans import CopyPlan, plan_copies
from kvtiers.engines.vllm.stages import of_stage
from kvtiers.errors import Kind, KVTiersError
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


class ReportingWorker(OffloadingWorker):
    """What all our copying sides have in common: a job that fails is reported, never raised.

    vLLM's own connector asserts that every submission and every result is a success. With
    ``reports_failures`` it is told of failures, and ends the engine: wrong bytes never count.
    Without, it hears of successes only, and whoever built this worker must ask ``take_failed``
    after each ``get_finished``.
    """

    def __init__(self, geometry: Geometry, region: Region, *, reports_failures: bool) -> None:
        """``region`` is closed by ``shutdown``."""
        self._geometry = geometry
        self._region = region
        self._reports_failures = reports_failures
        self._refused: list[int] = []
        self._failed: set[int] = set()
        self._unfinished = 0
        self._ended = 0

    @abstractmethod
    def _begin(
        self, job_id: int, direction: Direction, device: GPULoadStoreSpec, slots: LoadStoreSpec
    ) -> None:
        """Start a job whose slots all exist; an exception refuses it."""

    @abstractmethod
    def _poll(self) -> list[TransferResult]:
        """Jobs that ended since the last call, failures as failures; each has been logged."""

    @abstractmethod
    def _stop(self) -> None:
        """Stop copying and let go of the region's memory."""

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
        """Host -> device. Jobs run in order of submission, so ``expedited`` changes nothing."""
        return self._submit(job_id, Direction.LOAD, dst_spec, src_spec)

    def get_finished(self) -> list[TransferResult]:
        """Jobs that ended, failed and refused ones included."""
        ended = [TransferResult(job_id, False) for job_id in self._refused] + self._poll()
        self._refused.clear()
        self._unfinished -= len(ended)
        self._ended += len(ended)
        failed = {r.job_id for r in ended if not r.success}
        if failed and self._reports_failures:
            logger.error(
                "vLLM's own OffloadingConnector ends the engine when a copy fails; under "
                "KVTiersConnector the request would be computed instead"
            )
        elif failed:
            self._failed |= failed
            ended = [r if r.success else TransferResult(r.job_id, True) for r in ended]
        return ended

    def take_failed(self) -> set[int]:
        """Jobs that failed although ``get_finished`` said otherwise, since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    def shutdown(self) -> None:
        """Stop copying and let go of the region."""
        try:
            self._stop()
        finally:
            self._region.close()

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant, if any."""
        assert len(set(self._refused)) == len(self._refused), "a job was refused twice"
        assert len(self._refused) <= self._unfinished, "more jobs refused than submitted"
        assert not (self._reports_failures and self._failed), "a reported failure is kept back"

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__}: {self._unfinished} unfinished, {len(self._refused)} of them "
            f"refused, {self._ended} ended, {len(self._failed)} failures to take>"
        )

    def _plan(self, device: GPULoadStoreSpec, slots: LoadStoreSpec) -> CopyPlan:
        return plan_copies(
            device.group_sizes,
            device.block_indices,
            [int(b) for b in device.block_ids],
            [int(s) for s in slots.block_ids],
            self._geometry,
        )

    def _submit(
        self, job_id: int, direction: Direction, device: GPULoadStoreSpec, slots: LoadStoreSpec
    ) -> bool:
        self._unfinished += 1
        try:
            if NO_SLOT in slots.block_ids:
                raise _gone(direction)
            self._begin(job_id, direction, device, slots)
        except Exception as e:  # vLLM ends the engine when a submission raises
            logger.error("copy job %d could not be started: %s", job_id, e)
            self._refused.append(job_id)
        return True


def _gone(direction: Direction) -> KVTiersError:
    return KVTiersError(
        "a chunk of it has left host memory", kind=Kind.VANISHED, operation=direction.value
    )


class CopyWorker(ReportingWorker):
    """vLLM's worker interface over a :class:`~kvtiers.device.copier.Copier`."""

    def __init__(
        self, copier: Copier, geometry: Geometry, region: Region, *, reports_failures: bool
    ) -> None:
        super().__init__(geometry, region, reports_failures=reports_failures)
        self._copier = copier

    def wait(self, job_ids: set[int]) -> None:
        """Block until these jobs ended."""
        self._copier.wait(job_ids)

    def _begin(
        self, job_id: int, direction: Direction, device: GPULoadStoreSpec, slots: LoadStoreSpec
    ) -> None:
        self._copier.submit(job_id, direction, self._plan(device, slots))

    def _poll(self) -> list[TransferResult]:
        outcomes = self._copier.poll()
        for outcome in outcomes:
            if not outcome.ok:
                logger.error("copy job %d failed: %s", outcome.job_id, outcome.error)
        return [TransferResult(o.job_id, o.ok, o.bytes, o.seconds) for o in outcomes]

    def _stop(self) -> None:
        self._copier.close()


class KVTiersWorker(OffloadingConnectorWorker):
    """Worker side of :class:`kvtiers.engines.vllm.KVTiersConnector`."""

    worker: ReportingWorker
    """Built by our spec, to keep failures back for us."""

    def __init__(self, spec: Any, vllm_config: Any, kv_cache_config: Any) -> None:
        super().__init__(spec, of_stage(vllm_config), kv_cache_config)
        self._failed_jobs: set[int] = set()

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Note the shapes, which tell how K and V are packed, then register as upstream does."""
        self.spec.note_kv_caches(kv_caches)
        super().register_kv_caches(kv_caches)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Finished transfers, failed loads among them: upstream cannot tell."""
        owners = dict(self._load_jobs)
        sending, receiving = self.get_finished(finished_req_ids)
        failed = self.worker.take_failed()
        failed_requests = {r for j in failed if (r := owners.get(j)) is not None}
        self._failed_jobs |= failed
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

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant, if any."""
        self.worker.check()
