"""The two managers beside each other: vLLM's and ours, made and driven alike.

Both have the same number of slots, the same policy by name, metrics on, events off, and one tier
that misses every lookup and takes every store at once. Both are driven as vLLM's scheduler drives
its manager: the keys of a request are bytes objects of their own (SHA-256 of the prefix and the
group), each with its position noted in the request's context before the manager sees it; a step
ends with ``on_schedule_end`` and ``get_stats``.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager as UpstreamTierManager
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

from kvtiers.chunks import ChunkLayout, GroupLayout, Lookup, RequestContext
from kvtiers.core.manager import ManagerOptions, TieringManager
from kvtiers.engines.vllm.events import KVEvents
from kvtiers.engines.vllm.manager import VllmManager
from kvtiers.engines.vllm.metrics import StatsExporter
from kvtiers.events import Sink
from kvtiers.host.index import HostIndex
from kvtiers.host.policies import load_policy
from kvtiers.metrics import Metrics
from kvtiers.observe.gauges import Gauges
from kvtiers.tiers.base import Job, JobOutcome, SecondaryTierManager
from kvtiers.wiring import apart

BATCH = 64
"""Chunks of a request."""
TOKENS = 16
"""Tokens of a chunk."""
CHUNK_BYTES = 4096
_END = ScheduleEndContext((), ())
_GROUP = (0).to_bytes(4, "big")


def key(number: int) -> OffloadKey:
    """The key of chunk ``number``: a new object with every call."""
    return OffloadKey(sha256(number.to_bytes(8, "big")).digest() + _GROUP)


def request_keys(first: int) -> list[OffloadKey]:
    """The keys of a request whose chunks are ``first`` and the next ones."""
    return [key(first + i) for i in range(BATCH)]


class _Region:
    """What vLLM's primary tier asks of its region."""

    def __init__(self, num_chunks: int) -> None:
        self.view = memoryview(bytearray(num_chunks)).cast("B", (num_chunks, 1))

    def create_kv_memoryview(self) -> memoryview:
        return self.view

    def cleanup(self) -> None:
        pass


class _UpstreamTier(UpstreamTierManager):
    """Misses, and takes every store at once."""

    def __init__(self, view: memoryview) -> None:
        super().__init__(None, view, "instant")
        self.ended: list[JobResult] = []

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        return LookupResult.MISS

    def submit_store(self, job_metadata: Any) -> None:
        self.ended.append(JobResult(job_metadata.job_id, True))

    submit_load = submit_store

    def get_finished_jobs(self) -> list[JobResult]:
        ended, self.ended = self.ended, []
        return ended

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        pass


class _OurTier:
    """The same, in our contract."""

    name, medium, locality = "instant", None, None

    def __init__(self) -> None:
        self.ended: list[JobOutcome] = []

    def lookup(self, keys: Sequence[Any], request: RequestContext) -> list[Lookup]:
        return [Lookup.MISS] * len(keys)

    def submit_store(self, job: Job) -> bool:
        self.ended.append(JobOutcome(job.id, job.keys))
        return True

    submit_load = submit_store

    def get_finished_jobs(self) -> list[JobOutcome]:
        ended, self.ended = self.ended, []
        return ended

    def touch(self, keys: Sequence[Any]) -> None:
        pass

    def drain_jobs(self, deadline_s: float) -> bool:
        return True

    def shutdown(self, deadline_s: float) -> None:
        pass


def upstream(slots: int, policy: str = "lru") -> TieringOffloadingManager:
    """The manager of vLLM with ``slots`` chunks of host memory."""
    region: Any = _Region(slots)
    primary = CPUPrimaryTierOffloadingManager(slots, region, cache_policy=policy)
    return TieringOffloadingManager(primary, [_UpstreamTier(region.view)])


def ours(slots: int, policy: str = "lru", listen: Sink | None = None) -> VllmManager:
    """Our manager behind vLLM's interface; ``listen`` is told what happens, beside metrics."""
    page = memoryview(bytearray(CHUNK_BYTES))
    view = lambda slot, nbytes, writable: page  # noqa: E731
    return manager_over(_OurTier(), slots, CHUNK_BYTES, view, policy, listen)


def manager_over(
    tier: SecondaryTierManager,
    slots: int,
    chunk_bytes: int,
    view: Any,
    policy: str = "lru",
    listen: Sink | None = None,
) -> VllmManager:
    """Our manager with one tier, as ``wiring`` and the spec build it."""
    metrics = Metrics()
    sink = apart([metrics] if listen is None else [metrics, listen])
    core = TieringManager(
        index=HostIndex(slots, load_policy(policy, capacity=slots)),
        layout=ChunkLayout((GroupLayout(0, chunk_bytes, TOKENS),)),
        view=view,
        tiers=[tier],
        sink=sink,
        options=ManagerOptions(),
    )
    gauges = Gauges(metrics, core.tiers, chunk_bytes, lambda: core.backlogs)
    return VllmManager(
        core,
        clock=time.monotonic,
        stats=StatsExporter(metrics, gauges),
        events=KVEvents(False, describe=False),
        sink=metrics,
        on_shutdown=lambda: None,
    )


@dataclass(slots=True)
class Side:
    """One manager under test."""

    manager: Any
    requests: int = 0
    live: set[str] = field(default_factory=set)

    def request(self, names: Sequence[OffloadKey]) -> ReqContext:
        """A new request for these chunks."""
        self.requests += 1
        context = ReqContext(f"r{self.requests}")
        for i, name in enumerate(names):
            context.set_offload_key_position(name, (i + 1) * TOKENS)
        self.manager.on_new_request(context)
        self.live.add(context.req_id)
        return context

    def finish(self, context: ReqContext) -> None:
        """End the request, once."""
        if context.req_id in self.live:
            self.live.remove(context.req_id)
            self.manager.on_request_finished(context)

    def step(self) -> None:
        """End the step."""
        self.manager.on_schedule_end(_END)
        self.manager.get_stats()

    def fill(self, count: int, batch: int = BATCH * 16) -> None:
        """Store chunks 0 .. count - 1, the last one as the most recent."""
        for start in range(0, count, batch):
            names = [key(i) for i in range(start, min(start + batch, count))]
            context = self.request(names)
            self.manager.prepare_store(names, context)
            self.manager.complete_store(set(names), context)
            self.finish(context)
            self.step()
        self.step()
