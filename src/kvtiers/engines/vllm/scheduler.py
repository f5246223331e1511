"""vLLM's offloading scheduler with its holes mended: failed copies, declined chunks, resets.

Each override says what upstream does without it. All of upstream's private names that are used
stand in :mod:`kvtiers.engines.vllm.tripwires`.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import OffloadingSpec, OffloadKey
from vllm.v1.outputs import KVConnectorOutput

from kvtiers.chunks import Key, key_group
from kvtiers.engines.vllm.manager import VllmManager
from kvtiers.engines.vllm.worker import WorkerMetadata


class KVTiersScheduler(OffloadingConnectorScheduler):
    """Scheduler side of :class:`kvtiers.engines.vllm.KVTiersConnector`."""

    manager: VllmManager

    def __init__(self, spec: OffloadingSpec, vllm_config: Any, kv_cache_config: Any) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        self._rewinds: dict[str, int] = {}
        """Requests with declined chunks, and the room epoch in which they were declined."""
        self._stale_reports: dict[int, int] = {}
        """Worker reports still due for jobs that were in flight at a reset, by job id."""

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take in finished copies.

        Upstream takes every copy for good and forgets jobs that a reset overtook. Here failed
        stores are dropped, failed loads become misses at once, and the slots of overtaken jobs are
        freed when every worker has let go of them.
        """
        meta = connector_output.kv_connector_worker_meta
        if not isinstance(meta, WorkerMetadata):
            super().update_connector_output(connector_output)
            return
        self._note_failures(meta)
        self._note_stale(meta)
        loads = [j for j in meta.completed_jobs if j in self._jobs and not self._jobs[j].is_store]
        owners = {j: self._jobs[j].req_id for j in loads}
        super().update_connector_output(connector_output)
        for job_id, req_id in owners.items():
            if job_id not in self._jobs:
                self._offer_from_the_start(req_id)

    def _build_store_jobs(self, scheduler_output: SchedulerOutput) -> dict[int, TransferJob]:
        """Offer chunks for storing.

        Upstream never offers a declined chunk again, which leaves a hole in the prefix for good;
        and it stores window chunks of which some blocks are gone already.
        """
        self._rewind_where_room_was_made()
        self._skip_partial_chunks()
        jobs: dict[int, TransferJob] = super()._build_store_jobs(scheduler_output)
        epoch = self.manager.core.room_epoch
        for req_id, keys in self.manager.take_declined().items():
            if req_id in self._req_status:
                self._rewind_windows(req_id, keys)
                self._rewinds[req_id] = epoch
        return jobs

    def reset_cache(self) -> None:
        """Forget host memory; upstream reuses slots that a worker may still be writing."""
        self._stale_reports.update((j, s.pending_count) for j, s in self._jobs.items())
        self._rewinds.clear()
        super().reset_cache()
        if not self._stale_reports:
            self.manager.on_reset_flushed()

    def _note_failures(self, meta: WorkerMetadata) -> None:
        for job_id in meta.failed_jobs:
            status = self._jobs.get(job_id)
            if status is None:
                continue
            if status.is_store:
                self.manager.note_failed_store(status.keys)
            else:
                self.manager.note_failed_load(status.req_id)

    def _note_stale(self, meta: WorkerMetadata) -> None:
        if not self._stale_reports:
            return
        for job_id, count in meta.completed_jobs.items():
            left = self._stale_reports.get(job_id)
            if left is None:
                continue
            if left > count:
                self._stale_reports[job_id] = left - count
            else:
                del self._stale_reports[job_id]
        if not self._stale_reports:
            self.manager.on_reset_flushed()

    def _offer_from_the_start(self, req_id: str) -> None:
        """After a load: the blocks a request found on the device may lack a chunk below it.

        Safe only before the request runs again, when no block of it can have been reused.
        """
        status = self._req_status.get(req_id)
        if status is None or status.req.is_finished():
            return
        for state in status.group_states:
            if not state.block_ids:
                state.next_stored_chunk_idx = 0

    def _rewind_where_room_was_made(self) -> None:
        epoch = self.manager.core.room_epoch
        for req_id, declined_in in list(self._rewinds.items()):
            status = self._req_status.get(req_id)
            if status is None:
                del self._rewinds[req_id]
            elif declined_in != epoch:
                del self._rewinds[req_id]
                for config, state in zip(
                    self.config.kv_group_configs, status.group_states, strict=True
                ):
                    if config.sliding_window_size_in_chunks is None:
                        state.next_stored_chunk_idx = 0

    def _rewind_windows(self, req_id: str, declined: list[Key]) -> None:
        """Groups whose blocks may be freed while the request runs are rewound at once: upstream
        looks for reused blocks only from the next chunk to store on.
        """
        status = self._req_status[req_id]
        first: dict[int, int] = {}
        for key in declined:
            end = status.req_context.get_offload_key_position(OffloadKey(key))
            if end is not None:
                group = key_group(key)
                first[group] = min(first.get(group, end), end)
        for config, state in zip(self.config.kv_group_configs, status.group_states, strict=True):
            end = first.get(config.group_idx)
            if end is not None and config.sliding_window_size_in_chunks is not None:
                index = max(0, end // config.tokens_per_chunk - 1)
                state.next_stored_chunk_idx = min(state.next_stored_chunk_idx, index)

    def _skip_partial_chunks(self) -> None:
        """Mark window chunks that lost a block, so that they are not stored with zeros in them."""
        per_chunk = self.config.blocks_per_chunk
        if per_chunk == 1:
            return
        for status in self._req_status.values():
            for config, state in zip(
                self.config.kv_group_configs, status.group_states, strict=True
            ):
                if config.sliding_window_size_in_chunks is None or config.requires_cow_source:
                    continue
                blocks = state.block_ids
                begin = state.next_stored_chunk_idx * per_chunk
                for start in range(begin, len(blocks) - per_chunk + 1, per_chunk):
                    if 0 in blocks[start : start + per_chunk]:
                        blocks[start + per_chunk - 1] = 0
