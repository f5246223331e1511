"""vLLM's ``OffloadingManager`` over our core: names and values are translated, nothing decided.

A fault of ours must never end the engine: whatever escapes the core makes this manager inert -
every lookup is a miss, nothing is stored any more - and is logged once with its traceback.
"""

import functools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.base import TierFilter as VllmTierFilter
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtiers.chunks import Key, Lookup, RequestContext, TierFilter, TierMatch, key_group
from kvtiers.core.ledger import Request
from kvtiers.core.load import NO_SLOT
from kvtiers.core.manager import TieringManager
from kvtiers.engines.vllm.events import KVEvents
from kvtiers.engines.vllm.handover import Handover
from kvtiers.engines.vllm.metrics import StatsExporter
from kvtiers.events import PRIMARY, Event, LookupTimed, Sink
from kvtiers.observe.server import Observer

logger = logging.getLogger("kvtiers")

M = TypeVar("M", bound=Callable[..., Any])
T = TypeVar("T")

_HIT, _MISS = LookupResult.HIT, LookupResult.MISS
_SAMPLE_EVERY = 32
"""One lookup in so many is timed: reading the clock costs as much as a hit."""
_WALKED_PER_SORTED = 4
"""To walk over so many chunks costs less than to sort one by the request's book of positions."""
_ORPHAN_STEPS = 4
"""Steps after a reset by which a worker has surely flushed, where the engine does not tell."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked before anything is brought up."""

    coming: bool
    """Whether, of what is not in host memory, only what is on its way up counts as found."""
    below: set[Key] = field(default_factory=set)
    """What was found, and is not in host memory yet."""


def _fenced(otherwise: Callable[[], Any]) -> Callable[[M], M]:
    """Answer ``otherwise()`` when inert, and become inert when the method raises."""

    def wrap(method: M) -> M:
        @functools.wraps(method)
        def call(self: "VllmManager", *args: Any, **kwargs: Any) -> Any:
            if self.inert:
                return otherwise()
            try:
                return method(self, *args, **kwargs)
            except Exception:
                self.become_inert(method.__name__)
                return otherwise()

        return cast(M, call)

    return wrap


class VllmManager(OffloadingManager):
    """One per engine, in the scheduler process."""

    def __init__(
        self,
        core: TieringManager,
        *,
        clock: Callable[[], float],
        stats: StatsExporter,
        events: KVEvents,
        sink: Sink,
        on_shutdown: Callable[[], None],
        shutdown_deadline_s: float = 10.0,
    ) -> None:
        self.core = core
        self.handover = Handover(None)
        """For peers, if there are any."""
        self.observer: Observer | None = None
        """Ends with this."""
        self.inert = False
        self._clock = clock
        self._stats = stats
        self._counted = True
        """Whether statistics could be made up so far."""
        self.events = events
        self.events_are_due: Callable[[], bool] = lambda: False
        """Whether there are KV events that only a step would hand over."""
        self.sink = sink
        self._on_shutdown = on_shutdown
        self._shutdown_deadline_s = shutdown_deadline_s
        self._polled = False
        self._lookups = 0
        self._failed_stores: set[Key] = set()
        self._failed_loads: set[str] = set()
        self._declined: dict[str, list[Key]] = {}
        self._plan: Plan | None = None
        self._orphans: list[int] = []
        self._orphan_steps = 0
        self._closed = False
        self.flushes_are_reported = hasattr(OffloadingManager, "on_reset_flushed")
        """Whether somebody calls ``on_reset_flushed``; else some steps after a reset must do."""

    # -- requests ------------------------------------------------------------------------------

    @_fenced(RequestOffloadingContext)
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Adopt the request; REQUEST_LEVEL if some tier wants all of its chunks."""
        request = self._adopt(req_context)
        policy = OffloadPolicy.REQUEST_LEVEL if request.wants_all else OffloadPolicy.CHUNK_LEVEL
        return RequestOffloadingContext(policy=policy)

    @_fenced(lambda: None)
    def on_request_finished(self, req_context: ReqContext) -> None:
        """No further lookup, store or load will be asked for this request."""
        self._declined.pop(req_context.req_id, None)
        self.core.on_request_finished(self._request(req_context))

    # -- up ------------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """The verdict on one chunk."""
        if self.inert:
            return _MISS
        try:
            if not self._polled:
                self._begin_step()
            request = req_context.get_state(Request) or self._adopt(req_context)
            self._lookups += 1
            ours: Any = key  # a call to rename it would cost a fifth of a hit
            if self._plan is not None:
                return self._planned(self._plan, ours, request)
            if self._lookups % _SAMPLE_EVERY:
                return _verdict(self.core.lookup(ours, request))
            return self._timed_lookup(ours, request)
        except Exception:
            self.become_inert("lookup")
            return _MISS

    @contextmanager
    def planning(self, *, coming: bool) -> Iterator[set[Key]]:
        """Within it lookups bring nothing up. What is stored below is HIT, or with ``coming`` what
        is on its way up; such chunks are gathered in the set that it gives.
        """
        self._plan = Plan(coming)
        try:
            yield self._plan.below
        finally:
            self._plan = None

    @_fenced(lambda: CacheHitSource.EXTERNAL_UNSPECIFIED)
    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """Where the chunk came from when this request's lookup found it."""
        request = req_context.get_state(Request)
        tier = None if request is None else self.core.source(Key(key), request)
        if tier is None:
            return CacheHitSource.HOST
        if tier.tier.name == "p2p":
            return CacheHitSource.P2P
        by_medium = {"STORAGE": CacheHitSource.DISK, "CPU": CacheHitSource.HOST}
        return by_medium.get(tier.medium or "", CacheHitSource.EXTERNAL_UNSPECIFIED)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Slots to copy from; ``NO_SLOT`` makes the worker fail the job: it is recomputed."""
        names = _ours(keys)
        slots = self._load(names, req_context) or [NO_SLOT] * len(names)
        return CPULoadStoreSpec(slots)

    @_fenced(list)
    def _load(self, keys: Sequence[Key], req_context: ReqContext) -> list[int]:
        return self.core.load(keys, self._request(req_context))

    @_fenced(lambda: None)
    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """The copy ended, well unless ``note_failed_load`` was called for this request."""
        failed = req_context.req_id in self._failed_loads
        self._failed_loads.discard(req_context.req_id)
        self.core.complete_load(self._request(req_context), ok=not failed, now=self._clock())

    @_fenced(lambda: None)
    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """These chunks were used."""
        self.core.touch(_ours(keys))

    # -- down ----------------------------------------------------------------------------------

    @_fenced(lambda: PrepareStoreOutput([], CPULoadStoreSpec([]), []))
    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Slots for the chunks that are to be copied, in the order in which they were offered."""
        if not self._polled:
            # vLLM 0.32 stores after on_schedule_end: this must not count as the next step's poll.
            self.core.poll(self._clock())
        offered = _ours(keys)
        if not offered:
            return PrepareStoreOutput([], CPULoadStoreSpec([]), [])
        one_group = key_group(offered[0]) == key_group(offered[-1])
        ordered = offered if one_group else _prefix_order(offered, req_context)
        plan = self.core.store(ordered, self._request(req_context))
        if plan.declined:
            self._declined.setdefault(req_context.req_id, []).extend(plan.declined)
        taken, slots = plan.keys, plan.slots
        if not one_group:
            slot_of = dict(zip(taken, slots, strict=True))
            taken = [k for k in offered if k in slot_of]
            slots = [slot_of[k] for k in taken]
        return PrepareStoreOutput(_theirs(taken), CPULoadStoreSpec(slots), _theirs(plan.evicted))

    @_fenced(lambda: None)
    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """The copies ended, well unless ``note_failed_store`` was called for these chunks."""
        with self.core.exclusive:  # others may store too, and change what is looked through
            names = self._stored_in_order(keys, req_context)
        failed: Collection[Key] = () if success else names
        if self._failed_stores:
            failed = [k for k in names if not success or k in self._failed_stores]
            self._failed_stores.difference_update(names)
        self.core.complete_store(names, failed, now=self._clock())

    # -- what vLLM's interface cannot say, for our own connector ----------------------------------

    def note_prompt(self, req_id: str, tokens: int, arrived_at: float) -> None:
        """How long the prompt of a new request is, and when it came (seconds since the epoch)."""
        request = self.core.request(req_id)
        if request is not None:
            request.context.tokens, request.context.arrived_at = tokens, arrived_at

    def note_failed_store(self, keys: Iterable[OffloadKey]) -> None:
        """The copies of these chunks failed on some worker; ``complete_store`` follows."""
        self._failed_stores.update(cast(Iterable[Key], keys))

    def note_failed_load(self, req_id: str) -> None:
        """The request's load failed on some worker; ``complete_load`` follows."""
        self._failed_loads.add(req_id)

    @_fenced(lambda: None)
    def note_scheduled(self, req_ids: Iterable[str]) -> None:
        """These requests run now, for the first time or again after a preemption."""
        self._scheduled(req_ids)

    def _scheduled(self, req_ids: Iterable[str]) -> None:
        for req_id in req_ids:
            request = self.core.request(req_id)
            if request is not None:
                self.core.on_request_scheduled(request)

    def take_declined(self) -> dict[str, list[Key]]:
        """Chunks for which there was no room since the last call, by request id."""
        declined, self._declined = self._declined, {}
        return declined

    # -- steps ---------------------------------------------------------------------------------

    @_fenced(lambda: None)
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Send what the step gathered."""
        self._scheduled(context.new_req_ids)
        self.core.end_step(self._clock())
        self._polled = False
        if self._orphans and not self.flushes_are_reported:
            self._orphan_steps -= 1
            if self._orphan_steps <= 0:
                self.on_reset_flushed()

    @_fenced(lambda: False)
    def has_pending_work(self) -> bool:
        """Whether the engine should go on stepping although it has nothing to schedule."""
        if self.core.has_pending_work(self._clock()) or self.events_are_due():
            self._stats.expect()
            return True
        return bool(self._counting(lambda: self._stats.owes(self.core.use)))

    def note_told(self, event: Event) -> None:
        """Something was handed on, as the event says; perhaps after the step's statistics."""
        self._stats.counted()
        self.sink(event)

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Residency changes since the last call."""
        with self.core.exclusive:
            return self.events.take()

    @_fenced(lambda: None)
    def get_stats(self) -> Any:
        """What gathered since the last call, under vLLM's metric names."""
        core = self.core
        return self._counting(lambda: self._stats.take(core.use, self._clock(), quiet=core.quiet))

    def _counting(self, call: Callable[[], T]) -> T | None:
        """What the statistics say; None from the first fault of theirs on."""
        if not self._counted:
            return None
        try:
            with self.core.exclusive:
                return call()
        except Exception:
            self._counted = False
            logger.exception(
                "kvtiers could not make up its statistics and sends none any more; offloading goes "
                "on. Please report the traceback."
            )
            return None

    # -- new in vLLM 0.33 ------------------------------------------------------------------------

    @property
    def lock(self) -> AbstractContextManager[None]:
        """Excludes who serves peers, if there are any; else all calls come from one thread."""
        return cast(AbstractContextManager[None], self.core.exclusive)

    def config_info(self) -> list[dict[str, str]]:
        """Labels of ``kv_offload_config_info``; see ``KVTiersSpec.config_info_keys``."""
        return [{}]

    # -- life ----------------------------------------------------------------------------------

    @_fenced(lambda: None)
    def reset_cache(self) -> None:
        """Forget host memory; slots in flight on a device wait for ``on_reset_flushed``."""
        self._failed_stores.clear()
        self._failed_loads.clear()
        self._declined.clear()
        self._orphans.extend(self.core.reset())
        self._orphan_steps = _ORPHAN_STEPS

    @_fenced(lambda: None)
    def on_reset_flushed(self) -> None:
        """No worker touches a slot any more that was in flight at the last reset."""
        orphans, self._orphans = self._orphans, []
        if orphans:
            self.core.release_device(orphans)

    def shutdown(self) -> None:
        """Cascade what still can be, stop the tiers, give the memory back. Twice is fine."""
        if self._closed:
            return
        self._closed = True
        try:
            # What an inert manager believes of its slots may be wrong: nothing of it goes to disk.
            deadline_s = 0.0 if self.inert else self._shutdown_deadline_s
            self.core.shutdown(deadline_s, self._clock)
        except Exception:
            logger.exception("kvtiers did not shut down with grace")
        if self.observer is not None:
            self.observer.close()
        self._on_shutdown()

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant; of an inert manager nothing holds."""
        if self.inert:
            return
        self.core.check()
        assert all(self._declined.values()), "a request declined nothing"
        assert self._plan is None, "a plan has no end"
        if self._orphans and not self.flushes_are_reported:
            assert self._orphan_steps > 0, "slots wait for a flush that nobody will report"

    def __repr__(self) -> str:
        return f"<VllmManager{' INERT' if self.inert else ''} {self.core!r}>"

    # -- inside --------------------------------------------------------------------------------

    def _stored_in_order(self, keys: Collection[OffloadKey], req_context: ReqContext) -> list[Key]:
        """Chunks by the prefix they end; slots were reserved in that order."""
        if not isinstance(keys, set | frozenset):
            return _ours(keys)
        storing = self.core.storing
        if len(storing) <= _WALKED_PER_SORTED * len(keys):
            return [key for key in storing if key in keys]
        return _prefix_order(_ours(keys), req_context)

    def _begin_step(self) -> None:
        self._polled = True
        self.core.poll(self._clock())

    def _request(self, req_context: ReqContext) -> Request:
        return req_context.get_state(Request) or self._adopt(req_context)

    def _adopt(self, req_context: ReqContext) -> Request:
        end_of: Any = req_context.get_offload_key_position
        context = RequestContext(
            req_context.req_id,
            self.handover.understood(req_context.kv_transfer_params, req_context.req_id),
            _tier_filter(req_context.load_tier_filter),
            end_of,
        )
        request = self.core.on_new_request(context)
        req_context.set_state(request)
        return request

    def _planned(self, plan: Plan, key: Key, request: Request) -> LookupResult:
        verdict = self.core.look(key, request, coming=plan.coming)
        if verdict is Lookup.HIT_PENDING:
            plan.below.add(key)
            return _HIT
        return _verdict(verdict)

    def _timed_lookup(self, key: Key, request: Request) -> LookupResult:
        begun = self._clock()
        verdict = self.core.lookup(key, request)
        seconds = self._clock() - begun
        with self.core.exclusive:  # whoever serves peers is heard by the same sink
            self.sink(LookupTimed(PRIMARY, seconds=seconds))
        return _verdict(verdict)

    def become_inert(self, where: str) -> None:
        """Switch offloading off after a fault of ours, and say so with its traceback."""
        self.inert = True
        logger.exception(
            "kvtiers failed in %s and is switched off for the rest of this process; "
            "the engine goes on without offloading. Please report the traceback.",
            where,
        )
        try:
            self.core.retire()
            self.events.nothing_is_there()
        except Exception:
            logger.exception("kvtiers could not tell its peers and routers")


def _verdict(verdict: Lookup) -> LookupResult:
    if verdict is Lookup.HIT:
        return _HIT
    if verdict is Lookup.MISS:
        return _MISS
    return LookupResult.HIT_PENDING if verdict is Lookup.HIT_PENDING else LookupResult.RETRY


def _tier_filter(given: VllmTierFilter) -> TierFilter:
    if given is VllmTierFilter.ALL:
        return TierFilter()
    return TierFilter(
        tuple(
            TierMatch(m.medium and m.medium.value, m.locality and m.locality.value)
            for m in given.matchers
        )
    )


def _ours(keys: Collection[OffloadKey]) -> list[Key]:
    """Keys are the same bytes on both sides; to rename them one by one would cost time."""
    return cast(list[Key], list(keys))


def _theirs(keys: list[Key]) -> list[OffloadKey]:
    return cast(list[OffloadKey], keys)


def _prefix_order(keys: list[Key], req_context: ReqContext) -> list[Key]:
    """Chunks by the prefix they end: vLLM gives them group by group, or in no order at all."""
    end_of: Any = req_context.get_offload_key_position
    try:
        return sorted(keys, key=end_of)
    except TypeError:  # it does not know all of them
        return sorted(keys, key=lambda key: end_of(key) or 0)
