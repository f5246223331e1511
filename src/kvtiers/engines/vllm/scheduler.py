"""vLLM's offloading scheduler with its holes mended: failed copies, declined chunks, resets.

Each override says what upstream does without it. A fault of ours in here switches us off and leaves
upstream's behaviour. All of upstream's private names that are used stand in
:mod:`kvtiers.engines.vllm.tripwires`.
"""

import copy
import time
from collections.abc import Callable
from itertools import chain
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.outputs import KVConnectorOutput

from kvtiers.engines.vllm import offers
from kvtiers.engines.vllm.blocksize import keeper_of
from kvtiers.engines.vllm.ownkeys import OwnKeyedState, tokens_per_link
from kvtiers.engines.vllm.pace import Pace
from kvtiers.engines.vllm.planned import PlanningScheduler
from kvtiers.engines.vllm.publishing import answer_late_readers, can_answer
from kvtiers.engines.vllm.spec import KVTiersSpec
from kvtiers.engines.vllm.telling import TiersTracker, build_tracker
from kvtiers.engines.vllm.worker import WorkerMetadata

_LAST_WORDS_S = 5.0
"""How long a shutdown waits until what describes chunks is written."""


class KVTiersScheduler(PlanningScheduler):
    """Scheduler side of :class:`kvtiers.engines.vllm.KVTiersConnector`."""

    def __init__(self, spec: KVTiersSpec, vllm_config: Any, kv_cache_config: Any) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        self.manager.flushes_are_reported = True
        self._keep_block_size = keeper_of(vllm_config.cache_config)
        self._tracker: TiersTracker | None = None
        if self.manager.events.enabled:
            self._tell(spec, vllm_config)
        self._own_link: int | None = None
        """Tokens per hash of our own names for chunks; None: vLLM names them."""
        if spec.settings.chunk_keys == "own":
            self._own_link = tokens_per_link(
                c.tokens_per_chunk for c in self.config.kv_group_configs
            )
            # Of a part of a block vLLM stores the state under a hash of its own.
            self.config = self.config._replace(supports_partial_tail=False)
        self._pace = Pace()
        self._declined: dict[str, offers.Declined] = {}
        self._failed_loads: set[int] = set()
        """Load jobs in flight that failed on some worker."""
        self._stale_reports: dict[int, int] = {}
        """Worker reports still due for jobs that were in flight at a reset, by job id."""

    def _tell(self, spec: KVTiersSpec, vllm_config: Any) -> None:
        """Have our announcer tell of the tiers, not vLLM's tracker.

        That one (0.32) describes chunks of full attention only, without what their hashes cover
        beside tokens, and forgets what describes a chunk when it leaves host memory.
        """
        tracker = build_tracker(
            spec.settings,
            self.manager.events.places,
            self.config.kv_group_configs,
            spec.namespace_id,
            str(vllm_config.cache_config.prefix_caching_hash_algo),
        )
        tracker.announcer.residents = self.manager.core.residents
        self.manager.events.announcer = tracker.announcer
        self.manager.events.queued = lambda: tracker.queued
        self.manager.events_are_due = lambda: tracker.pending
        tracker.sink = self.manager.note_told
        self._events_tracker = self._tracker = tracker
        if spec.settings.kv_event_inventory and can_answer(vllm_config.kv_events_config):
            max_bytes = spec.settings.kv_event_descriptions_bytes
            answer_late_readers(max_bytes, tracker.announcer.forgotten)

    def shutdown(self) -> None:
        """Stop the manager, then whoever tells of it."""
        super().shutdown()
        if self._tracker is not None:
            self._tracker.announcer.close(_LAST_WORDS_S)

    def on_new_request(self, request: Any) -> None:
        """Open the books of a request, before it is scheduled."""
        self._fenced(self._keep_block_size)
        super().on_new_request(request)
        self._fenced(self._note_prompt, request)
        if self._own_link is not None:
            status = self._req_status[request.request_id]
            self._req_status[request.request_id] = OwnKeyedState(
                config=self.config,
                req=request,
                req_context=status.req_context,
                offloading_context=status.offloading_context,
                tokens_per_link=self._own_link,
                on_fault=self.manager.become_inert,
            )

    def _make_boundary_key(
        self, request: Any, group_idx: int, boundary_tokens: int, req_context: Any
    ) -> OffloadKey:
        """The key of a state that ends with a chunk: ours, if chunks have names of our own."""
        status = self._req_status.get(request.request_id)
        if self._own_link is not None and status is not None:
            for config, state in zip(
                self.config.kv_group_configs, status.group_states, strict=True
            ):
                if config.group_idx == group_idx:
                    return state.offload_keys[boundary_tokens // config.tokens_per_chunk - 1]
        return super()._make_boundary_key(request, group_idx, boundary_tokens, req_context)

    def update_state_after_alloc(
        self, request: Any, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Plan the load of ``num_external_tokens``.

        With none, another connector may be about to fill the new blocks. Upstream learns of them
        when the request runs; but copies from these blocks must end before they are written, and
        requests that gave them back must not offer them.
        """
        if num_external_tokens == 0:
            self._current_batch_allocated_block_ids.update(
                b.block_id
                for group in blocks.blocks
                for b in group
                if b.block_hash is None and not b.is_null
            )
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take in finished copies.

        Upstream takes every copy for good and forgets jobs that a reset overtook. Here failed
        stores are dropped, failed loads become misses at once, and the slots of overtaken jobs are
        freed when every worker has let go of them. What rests on another connector's failed load is
        dropped too.
        """
        if connector_output.invalid_block_ids:
            self._fenced(self._note_invalid, connector_output.invalid_block_ids)
        meta = connector_output.kv_connector_worker_meta
        loads: dict[int, str] = {}
        if isinstance(meta, WorkerMetadata):
            self._fenced(self._note_failures, meta)
            self._fenced(self._note_stale, meta)
            loads = {
                j: self._jobs[j].req_id
                for j in meta.completed_jobs
                if j in self._jobs and not self._jobs[j].is_store
            }
        super().update_connector_output(connector_output)
        for job_id, req_id in loads.items():
            if job_id not in self._jobs:
                self._fenced(self._offer_after_load, job_id, req_id)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Close the step.

        Upstream (0.32) ends the engine when a request was preempted and resumed by a load in one
        step, as after a reset with running requests: it takes the load for a store to flush.
        """
        loading = {job.req_id for job in self._current_batch_load_jobs.values()}
        preempted = scheduler_output.preempted_req_ids
        if preempted and not loading.isdisjoint(preempted):
            scheduler_output = copy.copy(scheduler_output)
            scheduler_output.preempted_req_ids = set(preempted) - loading
        return super().build_connector_meta(scheduler_output)

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended; the device's blocks are free at once.

        Its answer says where its chunks are, if whoever sent it will want to know. Upstream lets an
        orchestrator invent and pass on all of that.
        """
        wait, params = super().request_finished(request)
        if self.manager.inert:
            return wait, params
        told = self.manager.handover.told(request.kv_transfer_params, request.request_id)
        return wait, params if told is None else {**(params or {}), **told}

    def _update_req_states(self, scheduler_output: SchedulerOutput) -> None:
        """Upstream keeps the blocks of a preempted request on its books until it is resumed."""
        super()._update_req_states(scheduler_output)
        self._fenced(self._forget_preempted, scheduler_output)
        self._fenced(self._note_prompts, scheduler_output)

    def _build_store_jobs(self, scheduler_output: SchedulerOutput) -> dict[int, TransferJob]:
        """Offer chunks for storing.

        Upstream never offers a declined chunk again, which leaves a hole in the prefix for good;
        it stores window chunks of which some blocks are gone already; and for a finished request it
        looks at blocks again that others may own by now.
        """
        self._fenced(self._before_offers, scheduler_output)
        jobs: dict[int, TransferJob] = super()._build_store_jobs(scheduler_output)
        self._fenced(self._after_offers)
        return jobs

    def reset_cache(self) -> None:
        """Forget host memory.

        Upstream offers window chunks again whose blocks others own by now, and reuses slots that a
        worker may still be writing.
        """
        self._stale_reports.update((j, s.pending_count) for j, s in self._jobs.items())
        self._declined.clear()
        self._failed_loads.clear()
        for status in self._req_status.values():
            self._forget_windows(status)
        super().reset_cache()
        if not self._stale_reports:
            self.manager.on_reset_flushed()

    def _fenced(self, call: Callable[..., None], *args: Any) -> None:
        if self.manager.inert:
            return
        try:
            call(*args)
        except Exception:  # the fence: a bug of ours must not end the engine
            self.manager.become_inert(call.__name__)

    def _note_prompt(self, request: Any) -> None:
        """Who asks why it missed will want to know."""
        tokens, arrived_at = request.num_prompt_tokens, request.arrival_time
        self.manager.note_prompt(request.request_id, tokens, arrived_at)

    def _note_failures(self, meta: WorkerMetadata) -> None:
        for job_id in meta.failed_jobs:
            status = self._jobs.get(job_id)
            if status is None:
                continue
            if status.is_store:
                self.manager.note_failed_store(status.keys)
            else:
                self._failed_loads.add(job_id)
                self.manager.note_failed_load(status.req_id)

    def _note_invalid(self, block_ids: set[int]) -> None:
        """Another connector failed to load these blocks, within a step in which their request ran:
        chunks of them were offered by then, and others were computed from them.
        """
        for job in self._jobs.values():
            states = self._req_status[job.req_id].group_states
            if job.is_store and not all(block_ids.isdisjoint(s.block_ids) for s in states):
                self.manager.note_failed_store(job.keys)

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

    def _offer_after_load(self, job_id: int, req_id: str) -> None:
        """The blocks a request found on the device may lack a chunk below, and what a failed load
        left out is computed: offer them. The request has not run since, so no block was reused.
        """
        failed = job_id in self._failed_loads
        self._failed_loads.discard(job_id)
        status = self._req_status.get(req_id)
        if status is None or status.req.is_finished():
            return
        for config, state in zip(self.config.kv_group_configs, status.group_states, strict=True):
            if not state.block_ids and (failed or not offers.has_window(config)):
                state.next_stored_chunk_idx = 0

    def _forget_preempted(self, scheduler_output: SchedulerOutput) -> None:
        for req_id in scheduler_output.preempted_req_ids or ():
            status = self._req_status.get(req_id)
            if status is not None and req_id not in scheduler_output.num_scheduled_tokens:
                self._declined.pop(req_id, None)
                for state in status.group_states:
                    state.block_ids.clear()

    def _note_prompts(self, scheduler_output: SchedulerOutput) -> None:
        """For statistics: the chunks of prompts and answers, and how fast prompts are computed."""
        for new in scheduler_output.scheduled_new_reqs:
            status = self._req_status.get(new.req_id)
            if status is not None:
                self.manager.core.prompted([k for g in status.group_states for k in g.offload_keys])
        for req_id in scheduler_output.finished_req_ids or ():
            status = self._req_status.get(req_id)
            if status is not None:
                self._note_answer(status)
        requests = len(scheduler_output.num_scheduled_tokens)
        timed = self._pace.step(
            scheduler_output.total_num_scheduled_tokens, requests, time.monotonic()
        )
        if timed is not None:
            self.manager.core.prefilled(*timed)

    def _note_answer(self, status: Any) -> None:
        groups = zip(self.config.kv_group_configs, status.group_states, strict=True)
        prompt = status.req.num_prompt_tokens
        keys = [k for c, g in groups for k in g.offload_keys[prompt // c.tokens_per_chunk :]]
        if keys:
            self.manager.core.generated(keys)

    def _before_offers(self, scheduler_output: SchedulerOutput) -> None:
        resumed = getattr(scheduler_output.scheduled_cached_reqs, "resumed_req_ids", ())
        self.manager.note_scheduled(resumed)
        for req_id in scheduler_output.finished_req_ids or ():
            status = self._req_status.get(req_id)
            if status is not None:
                self._forget_windows(status)
        self._offer_declined()
        for req_id in chain(
            scheduler_output.num_scheduled_tokens, scheduler_output.finished_req_ids or ()
        ):
            status = self._req_status.get(req_id)
            if status is not None:
                self._mark_partial_chunks(status)

    def _after_offers(self) -> None:
        configs, epoch = self.config.kv_group_configs, self.manager.core.room_epoch
        for req_id, keys in self.manager.take_declined().items():
            status = self._req_status.get(req_id)
            if status is None:
                continue
            end_of = status.req_context.get_offload_key_position
            first = offers.first_chunks(configs, keys, end_of)
            # Windows at once: later, vLLM would no longer see which of their blocks were reused.
            offers.rewind(configs, status.group_states, first, windows=True)
            known = self._declined.get(req_id)
            if known is None:
                self._declined[req_id] = offers.Declined(first, epoch)
            else:
                known.again(first, epoch)

    def _offer_declined(self) -> None:
        epoch = self.manager.core.room_epoch
        for req_id, declined in list(self._declined.items()):
            status = self._req_status.get(req_id)
            if status is None:
                del self._declined[req_id]
            elif declined.first and declined.due(epoch):
                offers.rewind(
                    self.config.kv_group_configs,
                    status.group_states,
                    declined.first,
                    windows=False,
                )
                declined.first = {}

    def _mark_partial_chunks(self, status: Any) -> None:
        end = self._calc_num_offloadable_tokens(status, status.req.num_tokens)
        for config, state in zip(self.config.kv_group_configs, status.group_states, strict=True):
            chunks = -(-end // config.tokens_per_chunk)
            offers.mark_partial_chunks(config, state, self.config.blocks_per_chunk, chunks)

    def _forget_windows(self, status: Any) -> None:
        offers.forget_below_next(
            self.config.kv_group_configs, status.group_states, self.config.blocks_per_chunk
        )

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant; of an inert manager nothing holds."""
        if self.manager.inert:
            return
        self.manager.check()
        self._pace.check()
        for declined in self._declined.values():
            declined.check(self.manager.core.room_epoch)
        assert all(n > 0 for n in self._stale_reports.values()), "a stale job is waited for in vain"
        assert self._failed_loads <= self._jobs.keys(), "a failed load is kept that has ended"

    def __repr__(self) -> str:
        return (
            f"<KVTiersScheduler {len(self._req_status)} requests, {len(self._jobs)} copy jobs,"
            f" {len(self._declined)} with declined chunks, {len(self._stale_reports)} stale;"
            f" {self.manager!r}>"
        )
