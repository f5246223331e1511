"""A manager over a small host memory, with tiers whose every answer a test decides."""

from collections.abc import Callable, Sequence

from kvtiers.chunks import (
    PAGE_BYTES,
    ChunkLayout,
    GroupLayout,
    Key,
    Lookup,
    OffloadPolicy,
    RequestContext,
    TierFilter,
    make_key,
)
from kvtiers.core.ledger import Request
from kvtiers.core.manager import ManagerOptions, TieringManager
from kvtiers.core.promote import PromoteOptions
from kvtiers.errors import Kind, KVTiersError
from kvtiers.events import Event, MissReason
from kvtiers.host.index import HostIndex
from kvtiers.host.policies import load_policy
from kvtiers.tiers.base import Job, JobKind, JobOutcome, JobReleased

GROUPS = (GroupLayout(0, PAGE_BYTES, 16), GroupLayout(1, PAGE_BYTES, 16, keeps_every_chunk=False))


def key(name: object, group: int = 0) -> Key:
    return make_key(str(name).encode().ljust(32, b"."), group)


def keys(*names: object) -> list[Key]:
    return [key(n) for n in names]


class ScriptedTier:
    """Says what it is told, moves real bytes, and finishes jobs when it is told to."""

    medium: str | None = "STORAGE"
    locality: str | None = "LOCAL"

    def __init__(self, name: str = "scripted", holds: Sequence[Key] = ()) -> None:
        self.name = name
        self.holds = {k: bytes([1]) * PAGE_BYTES for k in holds}
        self.verdicts: dict[Key, Lookup] = {}
        self.asked: list[Key] = []
        self.jobs: list[Job] = []
        self.accepts = True
        self.touched: list[Key] = []
        self.policy = OffloadPolicy.CHUNK
        self.finished_requests: list[str] = []
        self.reason = MissReason.ABSENT
        self._ended: list[JobOutcome | JobReleased] = []

    def lookup(self, keys: Sequence[Key], request: RequestContext) -> list[Lookup]:
        self.asked.extend(keys)
        held = {k: Lookup.HIT for k in self.holds}
        return [self.verdicts.get(k, held.get(k, Lookup.MISS)) for k in keys]

    def why_missed(self, key: Key) -> MissReason:
        return self.reason

    def submit_store(self, job: Job) -> bool:
        return self._take(job)

    def submit_load(self, job: Job) -> bool:
        return self._take(job)

    def get_finished_jobs(self) -> list[JobOutcome | JobReleased]:
        ended, self._ended = self._ended, []
        return ended

    def touch(self, keys: Sequence[Key]) -> None:
        self.touched.extend(keys)

    def drain_jobs(self, deadline_s: float) -> bool:
        self.finish_all()
        return True

    def shutdown(self, deadline_s: float) -> None:
        self.accepts = False

    def on_new_request(self, request: RequestContext) -> OffloadPolicy:
        return self.policy

    def on_request_finished(self, request: RequestContext) -> None:
        self.finished_requests.append(request.request_id)

    # -- what tests do ---------------------------------------------------------------------------

    def finish(self, job: Job, fail: Sequence[Key] = (), kind: Kind = Kind.IO) -> None:
        """Move the bytes of all chunks but ``fail``, and report."""
        done = [k for k in job.keys if k not in fail]
        for k, view in zip(job.keys, job.views, strict=True):
            if k in fail:
                continue
            if job.kind is JobKind.STORE:
                self.holds[k] = bytes(view)
            else:
                view[:] = self.holds[k]
        errors = {k: KVTiersError("told to fail", kind=kind) for k in fail}
        self.jobs.remove(job)
        self._ended.append(JobOutcome(job.id, tuple(done), errors, PAGE_BYTES * len(done), 0.001))

    def time_out(self, job: Job) -> None:
        """Report failure while the memory is still in use."""
        errors = {k: KVTiersError("late", kind=Kind.TIMEOUT) for k in job.keys}
        self._ended.append(JobOutcome(job.id, (), errors, memory_in_use=True))

    def release(self, job: Job) -> None:
        self.jobs.remove(job)
        self._ended.append(JobReleased(job.id))

    def report(self, ended: JobOutcome | JobReleased) -> None:
        self._ended.append(ended)

    def finish_all(self) -> None:
        for job in list(self.jobs):
            self.finish(job)

    def _take(self, job: Job) -> bool:
        if self.accepts:
            self.jobs.append(job)
        return self.accepts


class World:
    """Manager, memory, clock and event log of one test."""

    def __init__(
        self,
        slots: int = 8,
        tiers: Sequence[ScriptedTier] = (),
        policy: str = "lru",
        groups: Sequence[GroupLayout] = GROUPS,
        **options: object,
    ) -> None:
        self.now = 100.0
        self.tiers = list(tiers)
        self.memory = [bytearray(PAGE_BYTES) for _ in range(slots)]
        self.events: list[Event] = []
        self.index = HostIndex(slots, load_policy(policy, capacity=slots))
        promote = PromoteOptions(
            lookup_deadline_s=5.0, promote_deadline_s=30.0, promotion_wait_s=0.25
        )
        self.manager = TieringManager(
            index=self.index,
            layout=ChunkLayout(tuple(groups)),
            view=self._view,
            tiers=tiers,
            sink=self.events.append,
            options=ManagerOptions(promote=promote, **options),  # type: ignore[arg-type]
        )
        self.manager.poll(self.now)

    def _view(self, slot: int, nbytes: int, writable: bool) -> memoryview:
        view = memoryview(self.memory[slot])[:nbytes]
        return view if writable else view.toreadonly()

    def request(
        self,
        name: str = "r",
        tier_filter: TierFilter | None = None,
        end_of: Callable[[Key], int | None] | None = None,
    ) -> Request:
        context = RequestContext(name, None, tier_filter or TierFilter(), end_of)
        return self.manager.on_new_request(context)

    def step(self, seconds: float = 0.01) -> None:
        self.now += seconds
        self.manager.end_step(self.now)
        self.manager.check()

    def stored(self, names: Sequence[Key], request: Request | None = None) -> None:
        """Bring chunks into host memory as an engine does."""
        request = request or self.request(f"store-{self.now}-{len(self.events)}")
        plan = self.manager.store(list(names), request)
        for k, slot in zip(plan.keys, plan.slots, strict=True):
            self.memory[slot][:] = k.ljust(PAGE_BYTES, b"\0")
        self.manager.complete_store(plan.keys)

    def lookup(self, names: Sequence[Key], request: Request) -> list[Lookup]:
        return [self.manager.lookup(k, request) for k in names]

    def of(self, kind: type) -> list[Event]:
        return [e for e in self.events if isinstance(e, kind)]
