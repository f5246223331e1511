"""Cost per chunk of the manager on the scheduler's thread, beside upstream's.

Both sides run in this process, in interleaved pairs: LRU, batches of 64, one tier that answers at once,
metrics on, events off. Ours is driven through vLLM's interface, except for ``lookup_many_hit``, which is
our batched lookup against 64 of upstream's one-key calls. Prints one line per figure:

    RATIO manager.<op> <upstream's cost per chunk / ours>
    FLAT manager.<op> <(ours at 2 million keys - ours at 10 thousand) / the same of a bare OrderedDict>
"""

import gc
import os
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm.v1.kv_offload.base import (  # noqa: E402
    LookupResult,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager  # noqa: E402
from vllm.v1.kv_offload.tiering.manager import (  # noqa: E402
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

from kvtiers.chunks import ChunkLayout, GroupLayout, Lookup, RequestContext  # noqa: E402
from kvtiers.core.manager import ManagerOptions, TieringManager  # noqa: E402
from kvtiers.engines.vllm.events import KVEvents  # noqa: E402
from kvtiers.engines.vllm.manager import VllmManager  # noqa: E402
from kvtiers.engines.vllm.metrics import StatsExporter  # noqa: E402
from kvtiers.host.index import HostIndex  # noqa: E402
from kvtiers.host.policies import load_policy  # noqa: E402
from kvtiers.metrics import Metrics  # noqa: E402
from kvtiers.tiers.base import Job, JobOutcome  # noqa: E402

BATCH = 64
SMALL, LARGE = 10_000, 2_000_000
PAIRS = 9
ROUNDS = 40
GOALS = {
    "lookup_many_hit": 8.0,
    "lookup_one_hit": 2.0,
    "lookup_one_miss": 2.0,
    "store": 2.0,
    "load": 2.0,
    "touch": 2.0,
    "store_evict": 3.0,
    "arc_store_evict": 2.0,
}
END = ScheduleEndContext((), ())


def key(number: int) -> bytes:
    """A fresh key object, as long as vLLM's (SHA-256 and group)."""
    return number.to_bytes(8, "big") + bytes(28)


def batches(start: int, count: int) -> list[list[bytes]]:
    """``count`` batches of fresh keys from number ``start`` on."""
    return [[key(start + b * BATCH + i) for i in range(BATCH)] for b in range(count)]


class Region:
    """What upstream's primary tier asks of its region."""

    def __init__(self, num_chunks: int) -> None:
        self.view = memoryview(bytearray(num_chunks)).cast("B", (num_chunks, 1))

    def create_kv_memoryview(self) -> memoryview:
        return self.view

    def cleanup(self) -> None:
        pass


class UpstreamTier(SecondaryTierManager):
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


class OurTier:
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


def upstream(slots: int, policy: str) -> TieringOffloadingManager:
    """vLLM's manager with ``slots`` chunks of host memory."""
    region = Region(slots)
    primary = CPUPrimaryTierOffloadingManager(slots, region, cache_policy=policy)
    return TieringOffloadingManager(primary, [UpstreamTier(region.view)])


def ours(slots: int, policy: str) -> VllmManager:
    """Our manager behind vLLM's interface."""
    metrics = Metrics()
    page = memoryview(bytearray(4096))
    core = TieringManager(
        index=HostIndex(slots, load_policy(policy, capacity=slots)),
        layout=ChunkLayout((GroupLayout(0, 4096, 16),)),
        view=lambda slot, nbytes, writable: page,
        tiers=[OurTier()],
        sink=metrics,
        options=ManagerOptions(),
    )
    return VllmManager(
        core,
        clock=time.monotonic,
        stats=StatsExporter(metrics, ["1:instant"], 4096),
        events=KVEvents(False, describe=False),
        sink=metrics,
        on_shutdown=lambda: None,
    )


@dataclass
class Side:
    """One manager under test."""

    manager: Any
    requests: int = 0

    def request(self) -> ReqContext:
        """A new request."""
        self.requests += 1
        context = ReqContext(f"r{self.requests}")
        self.manager.on_new_request(context)
        return context

    def finish(self, context: ReqContext) -> None:
        """End it, and the step."""
        self.manager.on_request_finished(context)
        self.step()

    def step(self) -> None:
        self.manager.on_schedule_end(END)

    def fill(self, count: int) -> None:
        """Store keys 0 .. count - 1."""
        for start in range(0, count, BATCH * 16):
            context = self.request()
            names = [key(i) for i in range(start, min(start + BATCH * 16, count))]
            self.manager.prepare_store(names, context)
            self.manager.complete_store(names, context)
            self.finish(context)
        self.step()


Timed = Callable[[Side, list[list[bytes]]], float]


def lookup_one(side: Side, work: list[list[bytes]]) -> float:
    spent = 0.0
    for names in work:
        context = side.request()
        lookup = side.manager.lookup
        begun = time.perf_counter()
        for name in names:
            lookup(name, context)
        spent += time.perf_counter() - begun
        side.finish(context)
    return spent


def lookup_many(side: Side, work: list[list[bytes]]) -> float:
    if not isinstance(side.manager, VllmManager):
        return lookup_one(side, work)
    core = side.manager.core
    spent = 0.0
    for names in work:
        context = side.request()
        request = core.request(context.req_id)
        begun = time.perf_counter()
        core.lookup_many(names, request)
        spent += time.perf_counter() - begun
        side.finish(context)
    return spent


def store(side: Side, work: list[list[bytes]]) -> float:
    spent = 0.0
    for names in work:
        context = side.request()
        begun = time.perf_counter()
        output = side.manager.prepare_store(names, context)
        side.manager.complete_store(output.keys_to_store, context)
        side.step()
        spent += time.perf_counter() - begun
        side.finish(context)
    return spent


def load(side: Side, work: list[list[bytes]]) -> float:
    spent = 0.0
    for names in work:
        context = side.request()
        for name in names:
            side.manager.lookup(name, context)
        begun = time.perf_counter()
        side.manager.prepare_load(names, context)
        side.manager.complete_load(names, context)
        spent += time.perf_counter() - begun
        side.finish(context)
    return spent


def touch(side: Side, work: list[list[bytes]]) -> float:
    spent = 0.0
    for names in work:
        context = side.request()
        begun = time.perf_counter()
        side.manager.touch(names, context)
        spent += time.perf_counter() - begun
        side.finish(context)
    return spent


def resident(count: int) -> Callable[[int], list[list[bytes]]]:
    """Work over keys that are there, in strides so that successive rounds differ."""

    def work(turn: int) -> list[list[bytes]]:
        start = (turn * ROUNDS * BATCH * 7) % max(1, count - ROUNDS * BATCH)
        return batches(start, ROUNDS)

    return work


def absent(base: int) -> Callable[[int], list[list[bytes]]]:
    """Work over keys that were never seen."""
    return lambda turn: batches(base + turn * ROUNDS * BATCH, ROUNDS)


def compare(
    op: str, run: Timed, sides: tuple[Side, Side], work: Callable[[int], list[list[bytes]]]
) -> float:
    """Median of upstream's time over ours, in interleaved pairs on the same keys."""
    ratios = []
    for turn in range(PAIRS + 1):
        pair = [run(side, work(turn)) for side in sides]
        if turn:
            ratios.append(pair[0] / pair[1])
    ratio = statistics.median(ratios)
    print(f"RATIO manager.{op} {ratio:.2f}", flush=True)
    return ratio


def main() -> None:
    """Print every figure."""
    gc.disable()
    slots = 40_000
    sides = Side(upstream(slots, "lru")), Side(ours(slots, "lru"))
    for side in sides:
        side.fill(SMALL)
    far = 10_000_000
    compare("lookup_many_hit", lookup_many, sides, resident(SMALL))
    compare("lookup_one_hit", lookup_one, sides, resident(SMALL))
    compare("lookup_one_miss", lookup_one, sides, absent(far))
    compare("load", load, sides, resident(SMALL))
    compare("touch", touch, sides, resident(SMALL))
    roomy = Side(upstream(400_000, "lru")), Side(ours(400_000, "lru"))
    compare("store", store, roomy, absent(2 * far))
    for policy, name in (("lru", "store_evict"), ("arc", "arc_store_evict")):
        full = Side(upstream(SMALL, policy)), Side(ours(SMALL, policy))
        for side in full:
            side.fill(SMALL)
        compare(name, store, full, absent(3 * far))


if __name__ == "__main__":
    main()
