"""The one object an engine talks to. It owns the order of things within a scheduler step.

A step is: ``poll`` (once, before anything is asked), any number of lookups, stores and loads, then
``end_step``. Nothing here blocks, does I/O, starts a thread or reads a clock: ``now`` is monotonic
seconds and comes from the caller. All calls come from one thread.
"""

from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from kvtiers.chunks import ChunkLayout, Key, Lookup, OffloadPolicy, RequestContext
from kvtiers.core.attached import AttachedTier
from kvtiers.core.cascade import CascadeOptions, Cascades
from kvtiers.core.ledger import Ledger, Request
from kvtiers.core.load import Loads
from kvtiers.core.promote import PromoteOptions, Promotions
from kvtiers.core.settled import Settling
from kvtiers.core.store import StorePlan, Stores, UseCounter
from kvtiers.core.warm import WarmUp
from kvtiers.errors import Kind, KVTiersError
from kvtiers.events import (
    PRIMARY,
    ChunksGenerated,
    ChunksPrompted,
    ChunksRemoved,
    Hop,
    LookedUp,
    MissReason,
    PrefillTimed,
    Reason,
    Sink,
)
from kvtiers.host.chunkindex import ChunkIndex
from kvtiers.host.parts import HostUse
from kvtiers.tiers.base import JobOutcome, JobReleased, SecondaryTierManager
from kvtiers.tiers.views import ChunkViews


@dataclass(frozen=True, slots=True)
class ManagerOptions:
    """The core's limits."""

    promote: PromoteOptions = field(default_factory=PromoteOptions)
    cascade_max_pinned_fraction: float = 0.5
    store_threshold: int = 0
    """A chunk is stored once it was offered this often; below 2: at once."""
    max_tracker_size: int = 64_000
    job_deadline_s: float = 120.0
    """A tier that has not reported a job by then has failed it; its memory is not used again."""
    trace_lookups: bool = False
    """Say of each request which of its chunks were found where, and not only how many."""


class TieringManager:
    """Host memory as the gateway between an accelerator and the tiers below."""

    exclusive: AbstractContextManager[object] = nullcontext()
    """For callers who need several calls in a row; held by nobody else, who are none here."""

    def __init__(
        self,
        *,
        index: ChunkIndex,
        layout: ChunkLayout,
        view: Callable[[int, int, bool], memoryview],
        tiers: Sequence[SecondaryTierManager],
        sink: Sink,
        options: ManagerOptions | None = None,
    ) -> None:
        """``view(slot, nbytes, writable)`` is the memory of one slot, not copied."""
        options = options or ManagerOptions()
        self._index = index
        self._ready = index.ready
        self._layout = layout
        self._view = view
        self._emit = sink
        self.tiers = tuple(AttachedTier(t, i + 1) for i, t in enumerate(tiers))
        self._ledger = Ledger(index)
        takers = sum(tier.takes_cascades for tier in self.tiers)
        share = options.cascade_max_pinned_fraction / max(1, takers)
        pinned = max(index.widest, int(index.num_slots * share))
        self._cascades = Cascades(
            self._ledger, self.tiers, self._views, sink, CascadeOptions(max_pinned_slots=pinned)
        )
        counter = (
            UseCounter(options.store_threshold, options.max_tracker_size)
            if options.store_threshold >= 2
            else None
        )
        sizes = layout.total_bytes
        self._stores = Stores(self._ledger, sink, self._departed, sizes, counter)
        self._loads = Loads(self._ledger, sink, self._departed, sizes)
        self._settling = Settling(self.tiers, layout, traced=options.trace_lookups)
        self._promotions = Promotions(
            self._ledger, self.tiers, self._views, sink, self._departed, options.promote
        )
        self._job_deadline_s = options.job_deadline_s
        self._touched: list[Key] = []
        self._warm_up: WarmUp | None = None
        self._now = 0.0
        self.room_epoch = 0
        """Grows whenever slots may have become free: time to offer declined chunks again."""

    # -- requests ------------------------------------------------------------------------------

    def on_new_request(self, context: RequestContext) -> Request:
        """A request arrived. The handle goes with every later call for it."""
        wants_all = tuple(
            t for t in self.tiers if t.on_new_request(context) is OffloadPolicy.REQUEST
        )
        request = Request(context, wants_all)
        self._ledger.requests[context.request_id] = request
        return request

    def request(self, request_id: str) -> Request | None:
        """The handle of a live request."""
        return self._ledger.requests.get(request_id)

    def prompted(self, keys: Sequence[Key]) -> None:
        """A new request has these chunks in its prompt: once per request, for statistics."""
        self._emit(ChunksPrompted(keys))

    def generated(self, keys: Sequence[Key]) -> None:
        """A request has ended with these chunks beyond its prompt, for statistics."""
        self._emit(ChunksGenerated(keys))

    def prefilled(self, tokens: int, seconds: float) -> None:
        """The engine computed ``tokens`` of prompts in so long: what loads save is told by it."""
        self._emit(PrefillTimed(tokens, seconds))

    def on_request_scheduled(self, request: Request) -> None:
        """The engine stopped asking and began to compute: what was kept for it is let go."""
        if request.loading is None:
            self._ledger.let_go(request)
        self._settle_lookups(request)

    def on_request_finished(self, request: Request) -> None:
        """No lookup, store or load for this request will follow; completions may."""
        if request.finished:
            return
        request.finished = True
        self._ledger.let_go(request)
        self._settle_lookups(request)
        for tier in self.tiers:
            tier.on_request_finished(request.context)
        if request.loading is None:
            self._ledger.requests.pop(request.context.request_id, None)

    # -- up: lookup, promote, load ---------------------------------------------------------------

    def lookup(self, key: Key, request: Request) -> Lookup:
        """The verdict on one chunk; a chunk found below begins its way up."""
        if key in self._ready and not request.load_failed:
            request.hits.add(key)
            if request.waiting_since is not None and key not in request.held:
                self._ledger.hold_for(request, (key,))
            return Lookup.HIT
        if request.load_failed:
            request.below.add(key)
            request.verdicts[0, key] = MissReason.FAILED
            return Lookup.MISS
        return self._promotions.seek(key, request, self._now)

    def look(self, key: Key, request: Request, *, coming: bool = False) -> Lookup:
        """The verdict on one chunk, for a plan: what is found below is HIT_PENDING and stays there.

        So of all that is there only what will be read comes up, by a ``lookup``. With ``coming``
        only what is on its way already counts as found.
        """
        if key in self._ready or request.load_failed:
            return self.lookup(key, request)
        return self._promotions.look(key, request, self._now, coming=coming)

    def lookup_many(self, keys: Sequence[Key], request: Request) -> list[Lookup]:
        """The verdicts on chunks in prefix order, up to and including the first MISS."""
        ready = self._ready
        if request.waiting_since is None and not request.load_failed:
            hit = Lookup.HIT
            verdicts = [hit for k in keys if k in ready]
            if len(verdicts) == len(keys):
                request.hits.update(keys)
                return verdicts
        verdicts = []
        for key in keys:
            verdicts.append(self.lookup(key, request))
            if verdicts[-1] is Lookup.MISS:
                break
        return verdicts

    def resident(self, keys: Sequence[Key]) -> list[Key]:
        """Those of ``keys`` whose bytes are whole in host memory, in their order."""
        there = self._ready.keys() & keys
        return [key for key in keys if key in there] if there else []

    def load(self, keys: Sequence[Key], request: Request) -> list[int]:
        """Pin chunks that were HIT for copying to the accelerator; their slots.

        A chunk that is gone gets the slot -1: the engine must fail that copy and recompute.
        """
        slots = self._loads.plan(keys, request, self._now)
        request.hits.update(k for k in keys if k in self._ready)
        whole = request.loading is not None and len(request.loading[1]) == len(keys)
        self._settle_lookups(request, keys if whole else ())
        return slots

    def complete_load(self, request: Request, ok: bool = True, *, now: float | None = None) -> None:
        """The copy to the accelerator ended. If it failed its chunks are misses from now on.

        With ``now`` it is told how long it took.
        """
        self._loads.complete(request, ok, now)
        request.origin.clear()
        self.room_epoch += 1
        if request.finished:
            self._ledger.requests.pop(request.context.request_id, None)

    def source(self, key: Key, request: Request) -> AttachedTier | None:
        """The tier a chunk was promoted from for this request; None if host memory had it."""
        return request.origin.get(key)

    def warm(self, keys: Sequence[Key]) -> None:
        """Promote these from the tiers before anybody asks, as far as there is room to spare."""
        self._warm_up = WarmUp(
            keys, self.on_new_request, self.lookup, self.on_request_finished, self._emit
        )

    # -- down: store, cascade --------------------------------------------------------------------

    def store(self, keys: Sequence[Key], request: Request) -> StorePlan:
        """Reserve slots for offered chunks, in prefix order; what is resident counts as used."""
        request.offered.update(keys)
        plan = self._stores.plan(keys, request.offered, self._now, at_once=bool(request.wants_all))
        if plan.resident:
            self._touched.extend(plan.resident)
            if request.wants_all:
                self._cascades.offer(plan.resident, only=request.wants_all)
        return plan

    def complete_store(
        self, keys: Collection[Key], failed: Collection[Key] = (), *, now: float | None = None
    ) -> None:
        """The copies from the accelerator ended; what did not fail is resident and cascades.

        With ``now`` it is told how long it took.
        """
        stored = self._stores.complete(keys, failed, now)
        self.room_epoch += 1
        if stored and self.tiers:
            self._cascades.offer(stored)

    @property
    def storing(self) -> Mapping[Key, int]:
        """Slots that copies from the accelerator fill, in the order in which they were reserved."""
        return self._index.filling

    def touch(self, keys: Sequence[Key]) -> None:
        """These chunks were used where this object does not see it, e.g. on the accelerator."""
        self._index.touch(keys)
        self._touched.extend(keys)

    # -- steps -----------------------------------------------------------------------------------

    def poll(self, now: float) -> None:
        """Take in what the tiers finished."""
        self._now = now
        for tier in self.tiers:
            tier.now = now
            for ended in tier.finished():
                self._ended(tier, ended)

    def end_step(self, now: float) -> None:
        """Send what the step gathered: promotions first, then cascades, touches and questions."""
        self.poll(now)
        if self._ledger.flights:
            self._fail_overdue(now)
        if self._warm_up is not None:
            self._go_on_warming(self._warm_up, now)
        if self._promotions.pending:
            self._promotions.flush(now)
        if self._ledger.waiting:
            self._promotions.expire(now)
        self._cascades.flush(now)
        touched, self._touched = self._touched, []
        for tier in self.tiers:
            if touched:
                tier.touch(touched)
            tier.end_step()
            for event in tier.take_events():
                self._emit(event)
            queries, hits = self._promotions.take_counts(tier)
            if queries:
                self._emit(LookedUp(tier.label, queries, hits))

    def has_pending_work(self, now: float) -> bool:
        """Whether steps are needed although the engine has nothing to schedule."""
        return (
            bool(self._ledger.flights)
            or self._warm_up is not None
            or self._promotions.pending
            or self._cascades.due(now)
            or any(t.has_pending_work() for t in self.tiers)
        )

    # -- life ------------------------------------------------------------------------------------

    def reset(self) -> tuple[int, ...]:
        """Forget everything in host memory; the tiers below keep what they have.

        Returns the slots that the device may still touch. They are not used again until
        ``release_device`` is told so.
        """
        self._promotions.forget_gathered()
        device = list(self._index.filling.values())
        for request in list(self._ledger.requests.values()):
            self._ledger.let_go(request)
            if request.loading is not None:
                device.extend(request.loading[1])
                request.loading = None
            request.forget_lookups()
            request.offered.clear()
            request.origin.clear()
            if request.finished:
                del self._ledger.requests[request.context.request_id]
        self._cascades.forget()
        self._stores.forget()
        resident = tuple(self._ready)  # what is filling was never said to be stored
        self._index.clear()
        if resident:
            self._emit(ChunksRemoved(PRIMARY, resident, Reason.RESET))
        self._touched.clear()
        self._ledger.device_orphans.update(device)
        self.room_epoch += 1
        return tuple(device)

    def retire(self) -> None:
        """Give nothing to others any more, who are none here."""

    def release_device(self, slots: Sequence[int]) -> None:
        """The device no longer touches these slots, which were in flight at a reset."""
        self._index.release(list(slots))
        self._ledger.device_orphans -= Counter(slots)
        self.room_epoch += 1

    def drain(self, deadline_s: float, clock: Callable[[], float]) -> bool:
        """Send and await what is in flight or in a backlog; whether all ended in time."""
        until = clock() + deadline_s
        if self._warm_up is not None:
            self._warm_up.stop()
        self._cascades.end_pauses()
        while True:
            self.end_step(clock())
            left = until - clock()
            if not self._ledger.flights and not self._cascades.due(self._now):
                return self._cascades.waiting == 0
            if left <= 0:
                return False
            for tier in self.tiers:
                tier.drain_jobs(min(left, 1.0))

    def shutdown(self, deadline_s: float, clock: Callable[[], float]) -> None:
        """Cascade what still can be, then stop the tiers; at most about ``deadline_s``.

        With a deadline of 0 nothing more is sent.
        """
        until = clock() + deadline_s
        try:
            if deadline_s > 0:
                self.drain(deadline_s / 2, clock)
        finally:
            for tier in self.tiers:
                tier.shutdown(max(0.1, until - clock()))

    @property
    def ready(self) -> Container[Key]:
        """Chunks whose bytes are whole in host memory. To look at, on any thread."""
        return self._ready

    def residents(self, label: str) -> list[Key] | None:
        """All chunks in host memory, or in a tier; None if the tier failed to say it.

        On any thread, which may have to wait.
        """
        if label == PRIMARY:
            return list(self._ready)
        return next((tier.residents() for tier in self.tiers if tier.label == label), [])

    @property
    def use(self) -> HostUse:
        """What host memory is doing now."""
        return self._index.use

    @property
    def quiet(self) -> bool:
        """Whether no request is live and no job is in flight: there may be no further step."""
        return not (self._ledger.requests or self._ledger.flights)

    @property
    def backlogs(self) -> dict[str, int]:
        """Chunks that wait for a cascade, by label of the tier."""
        return self._cascades.backlogs

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        self._ledger.check()
        self._cascades.check()
        self._promotions.check()
        self._stores.check()
        if self._warm_up is not None:
            self._warm_up.check()
        for tier in self.tiers:
            tier.check()

    def __repr__(self) -> str:
        return (
            f"<TieringManager {self._index!r} {self._ledger!r} {self._cascades!r}"
            f" tiers [{', '.join(t.label for t in self.tiers)}]>"
        )

    # -- inside ----------------------------------------------------------------------------------

    def _go_on_warming(self, warm_up: WarmUp, now: float) -> None:
        use = self.use
        room = use.slots // 2 - use.resident - use.filling - use.orphaned
        warm_up.step(now, room // self._index.widest, busy=bool(self._ledger.waiting))
        if warm_up.ended:
            self._warm_up = None

    def _views(self, keys: Sequence[Key], slots: Sequence[int], writable: bool) -> ChunkViews:
        view, sizes = self._view, self._layout.chunk_sizes(keys)
        return ChunkViews(lambda i: view(slots[i], sizes[i], writable), sizes)

    def _ended(self, tier: AttachedTier, ended: JobOutcome | JobReleased) -> None:
        self.room_epoch += 1
        if isinstance(ended, JobReleased):
            self._let_go(ended.job_id, tier)
            return
        flight = self._ledger.close(ended.job_id, tier)
        if flight is None:
            if not ended.memory_in_use:
                self._let_go(ended.job_id, tier)
            return
        if flight.hop is Hop.CASCADE:
            self._cascades.finish(flight, ended, self._now)
            return
        stored = self._promotions.finish(flight, ended, self._now)
        if stored:
            self._cascades.offer(stored, source=tier)

    def _let_go(self, job_id: int, tier: AttachedTier) -> None:
        flight = self._ledger.linger_over(job_id, tier)
        if flight is not None and flight.hop is Hop.CASCADE:
            self._cascades.let_go(flight)

    def _fail_overdue(self, now: float) -> None:
        for job_id, flight in self._ledger.overdue(now - self._job_deadline_s):
            late = KVTiersError(
                f"tier {flight.tier.label} did not report a job in {self._job_deadline_s:g} s",
                kind=Kind.TIMEOUT,
            )
            failed = dict.fromkeys(flight.keys, late)
            self._ended(flight.tier, JobOutcome(job_id, (), failed, memory_in_use=True))

    def _departed(self, keys: Sequence[Key], reason: Reason) -> None:
        self._emit(ChunksRemoved(PRIMARY, tuple(keys), reason))
        self._cascades.departed(keys)

    def _settle_lookups(self, request: Request, loading: Sequence[Key] = ()) -> None:
        """Lookups of this request are over for now: count each chunk once, touch what was found."""
        hits, below = request.hits, request.below
        if not hits and not below:
            request.waiting_began = None
            return
        found = len(hits.difference(below)) if below else len(hits)
        self._emit(LookedUp(PRIMARY, found + len(below), found))
        if not request.context.internal:
            self._emit(self._settling.of(request, self._now, loading))
        self._touched.extend(request.hits)
        request.forget_lookups()
