"""Up 3, promote: secondary tier -> host memory. Who is asked, in which order, and for how long.

Tiers are asked in their configured order. The first HIT wins a slot in host memory and its bytes
are fetched; a RETRY holds the turn until the lookup deadline, then the next tier decides. What one
request asks for in a step becomes one job per tier, sent when the step ends.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvtiers.chunks import Key, Lookup
from kvtiers.core.attached import AttachedTier
from kvtiers.core.ledger import Asked, Departed, Flight, Ledger, Request
from kvtiers.core.outcomes import finished_event, miss_reasons
from kvtiers.events import (
    PRIMARY,
    ChunksDeclined,
    ChunksStored,
    Hop,
    LookupTimed,
    MissReason,
    Reason,
    Sink,
    TransferStarted,
)
from kvtiers.tiers.base import Job, JobKind, JobOutcome
from kvtiers.tiers.views import ChunkViews

# Bound once: looking an enum member up costs as much as looking a key up.
_HIT, _MISS, _PENDING = Lookup.HIT, Lookup.MISS, MissReason.PENDING


@dataclass(frozen=True, slots=True)
class PromoteOptions:
    """How long a request waits."""

    lookup_deadline_s: float = 5.0
    """A tier that still says RETRY after this has missed."""
    promote_deadline_s: float = 30.0
    """A request that still waits for chunks after this goes on without them."""
    promotion_wait_s: float = 0.25
    """How long a promotion waits for room in host memory that others are about to free."""


class Promotions:
    """Looks below host memory and fetches what is found."""

    def __init__(
        self,
        ledger: Ledger,
        tiers: Sequence[AttachedTier],
        views: Callable[[Sequence[Key], Sequence[int], bool], ChunkViews],
        emit: Sink,
        departed: Departed,
        options: PromoteOptions,
    ) -> None:
        self._ledger = ledger
        self._index = ledger.index
        self._tiers = tiers
        self._views = views
        self._emit = emit
        self._departed = departed
        self._options = options
        self._gathered: dict[AttachedTier, dict[str, tuple[Request, list[Key], list[int]]]] = {}
        self._counts: dict[AttachedTier, list[int]] = {t: [0, 0] for t in tiers}
        """Lookups resolved since the counts were last taken: queries and hits, by tier."""
        ledger.gathered = self._gathered_slots

    def seek(self, key: Key, request: Request, now: float) -> Lookup:
        """The verdict on a chunk that is not ready in host memory; one found begins its way up."""
        found = self._find(key, request, now)
        if isinstance(found, AttachedTier):
            return self._begin(key, found, request, now)
        return found

    def look(self, key: Key, request: Request, now: float, *, coming: bool) -> Lookup:
        """The same, but nothing is brought up: what a tier has is HIT_PENDING all the same, or with
        ``coming`` a MISS.
        """
        found = self._find(key, request, now)
        if isinstance(found, AttachedTier):
            return Lookup.MISS if coming else Lookup.HIT_PENDING
        return found

    def _find(self, key: Key, request: Request, now: float) -> AttachedTier | Lookup:
        """The tier that has the chunk, or a verdict where it is settled without one."""
        if key in self._index.filling or key in self._index.fetching:
            return self._wait(key, Lookup.HIT_PENDING, request, now)
        request.below.add(key)
        if request.gave_up:
            return _MISS
        for tier in self._turns(key, request):
            verdict = tier.lookup((key,), request.context)[0]
            silent = verdict is not _HIT and verdict is not _MISS
            if silent and self._may_go_on_asking(tier, key, request, now):
                return self._wait(key, Lookup.RETRY, request, now)
            mark = (tier.position, key)
            if mark not in request.verdicts:
                why = None if verdict is _HIT else _PENDING if silent else tier.why_missed(key)
                request.verdicts[mark] = why
                self._resolved(tier, key, request, now, verdict is _HIT)
            if verdict is _HIT:
                return tier
        return _MISS

    def flush(self, now: float) -> None:
        """Send what was gathered in this step: one job per tier and request."""
        gathered, self._gathered = self._gathered, {}
        for tier, by_request in gathered.items():
            for request, keys, slots in by_request.values():
                views = self._views(keys, slots, True)
                self._send(
                    Flight(Hop.PROMOTE, tier, tuple(keys), tuple(slots), views, request, now)
                )

    def finish(self, flight: Flight, outcome: JobOutcome, now: float) -> tuple[Key, ...]:
        """A promotion job ended; the chunks that are now ready in host memory."""
        request = flight.request
        slot_of = dict(zip(flight.keys, flight.slots, strict=True))
        reported = set(outcome.done) - outcome.failed.keys()  # a chunk in both did not come
        failed = [k for k in flight.keys if k not in reported]
        done = [k for k in flight.keys if k in reported]
        stored = self._index.settle(done, [slot_of[k] for k in done])
        if outcome.memory_in_use:
            self._index.drop([k for k in failed if self._index.fetching.get(k) == slot_of[k]])
            self._ledger.linger(outcome.job_id, flight, [slot_of[k] for k in failed])
        else:
            flight.views.release_all()
            self._index.settle(failed, [slot_of[k] for k in failed], failed)
        if stored:
            self._emit(ChunksStored(PRIMARY, tuple(stored)))
        if request is not None:
            request.note_wait(flight.tier.label, now - flight.started)
            self._landed(request, flight, stored, miss_reasons(failed, outcome))
        self._emit(finished_event(flight, outcome, len(done), len(failed), now))
        return tuple(stored)

    def expire(self, now: float) -> None:
        """Let requests go on that have waited too long."""
        late = [
            r
            for r in self._ledger.waiting.values()
            if r.waiting_since is not None
            and now - r.waiting_since >= self._options.promote_deadline_s
        ]
        for request in late:
            self._ledger.let_go(request)
            request.gave_up = True
            count = max(1, request.promoting)
            self._emit(ChunksDeclined(Hop.PROMOTE, PRIMARY, count, Reason.TIMEOUT))

    def forget_gathered(self) -> None:
        """Host memory is about to be reset: nothing that was gathered will be sent."""
        for by_request in self._gathered.values():
            for request, keys, slots in by_request.values():
                request.promoting -= len(keys)
                self._index.settle(keys, slots, keys)
        self._gathered.clear()

    def take_counts(self, tier: AttachedTier) -> tuple[int, int]:
        """Lookups that ``tier`` resolved since the last call: queries, and hits among them."""
        queries, hits = self._counts[tier]
        self._counts[tier] = [0, 0]
        return queries, hits

    @property
    def pending(self) -> bool:
        """Whether anything waits for the end of the step."""
        return bool(self._gathered)

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        on_the_way: Counter[Request] = Counter()
        for by_request in self._gathered.values():
            for request, keys, slots in by_request.values():
                for key, slot in zip(keys, slots, strict=True):
                    there = self._index.fetching.get(key)
                    assert there == slot, "a gathered chunk is not in the slot it was given"
                on_the_way[request] += len(keys)
        for flight in self._ledger.flights.values():
            if flight.request is not None:
                on_the_way[flight.request] += len(flight.keys)
        for request in self._ledger.requests.values():
            assert request.promoting == on_the_way[request], (
                f"{request.promoting} chunks are promoted for {request.context.request_id}, "
                f"{on_the_way[request]} are on the way"
            )
        for queries, hits in self._counts.values():
            assert 0 <= hits <= queries, "more hits than queries"

    def __repr__(self) -> str:
        count = sum(len(keys) for by in self._gathered.values() for _, keys, _ in by.values())
        return f"<Promotions {count} chunks wait for the end of the step>"

    def _gathered_slots(self) -> Iterator[int]:
        for by_request in self._gathered.values():
            for _, _, slots in by_request.values():
                yield from slots

    def _turns(self, key: Key, request: Request) -> Sequence[AttachedTier]:
        asked = request.asked.get(key)
        tiers = self._tiers[asked.turn :] if asked else self._tiers
        tier_filter = request.context.tier_filter
        if tier_filter.matches is None:
            return tiers
        return [t for t in tiers if tier_filter.allows(t.medium, t.locality)]

    def _may_go_on_asking(self, tier: AttachedTier, key: Key, request: Request, now: float) -> bool:
        turn = tier.position - 1
        asked = request.asked.get(key)
        if asked is None or asked.turn != turn or asked.since is None:
            request.asked[key] = Asked(turn, now)
            return True
        if now - asked.since < self._options.lookup_deadline_s:
            return True
        request.note_wait(tier.label, now - asked.since)
        request.asked[key] = Asked(turn + 1, None)
        return False

    def _resolved(
        self, tier: AttachedTier, key: Key, request: Request, now: float, hit: bool
    ) -> None:
        counts = self._counts[tier]
        counts[0] += 1
        counts[1] += hit
        asked = request.asked.get(key) if request.asked else None
        if asked is not None and asked.turn == tier.position - 1 and asked.since is not None:
            request.note_wait(tier.label, now - asked.since)
            self._emit(LookupTimed(tier.label, waited_s=now - asked.since))

    def _wait(self, key: Key, verdict: Lookup, request: Request, now: float) -> Lookup:
        if request.gave_up:
            request.below.add(key)
            request.verdicts[0, key] = _PENDING
            return Lookup.MISS
        self._start_waiting(request, now)
        return verdict

    def _start_waiting(self, request: Request, now: float) -> None:
        if request.waiting_since is None:
            request.waiting_since = now
            if request.waiting_began is None:
                request.waiting_began = now
            self._ledger.waiting[request.context.request_id] = request
            self._ledger.hold_for(request, request.hits)

    def _begin(self, key: Key, tier: AttachedTier, request: Request, now: float) -> Lookup:
        self._start_waiting(request, now)
        taken = self._index.reserve((key,), fetched=True)
        if not taken.keys:
            return self._no_room(key, tier, request, now)
        if taken.evicted:
            self._departed(taken.evicted, Reason.EVICTED)
        request.promoting += 1
        request.origin[key] = tier
        name = request.context.request_id
        _, keys, slots = self._gathered.setdefault(tier, {}).setdefault(name, (request, [], []))
        keys.append(key)
        slots.append(taken.slots[0])
        return Lookup.HIT_PENDING

    def _no_room(self, key: Key, tier: AttachedTier, request: Request, now: float) -> Lookup:
        """Wait a little if others will free slots; if only this request holds them, never."""
        if request.no_room_since is None:
            request.no_room_since = now
        own = len(request.held) + request.promoting
        others = self._index.held - own
        if others > 0 and now - request.no_room_since < self._options.promotion_wait_s:
            return Lookup.RETRY
        request.verdicts[tier.position, key] = MissReason.NO_ROOM
        if not request.no_room_told:
            request.no_room_told = True
            self._emit(ChunksDeclined(Hop.PROMOTE, tier.label, 1, Reason.NO_ROOM))
        return Lookup.MISS

    def _send(self, flight: Flight) -> None:
        request, tier = flight.request, flight.tier
        assert request is not None
        job_id = self._ledger.open(flight)
        self._emit(TransferStarted(Hop.PROMOTE, tier.label, len(flight.keys)))
        job = Job(job_id, JobKind.LOAD, flight.keys, flight.slots, flight.views, request.context)
        if tier.submit_load(job):
            return
        self._ledger.close(job_id, tier)
        flight.views.release_all()
        self._index.settle(flight.keys, flight.slots, flight.keys)
        self._landed(request, flight, (), dict.fromkeys(flight.keys, MissReason.TIER_DOWN))
        refused = JobOutcome(job_id, ())
        count = len(flight.keys)
        self._emit(finished_event(flight, refused, 0, count, flight.started, Reason.PRESSURE))

    def _landed(
        self,
        request: Request,
        flight: Flight,
        stored: Sequence[Key],
        failed: Mapping[Key, MissReason],
    ) -> None:
        request.promoting -= len(flight.keys)
        if request.finished:
            return
        if request.waiting_since is not None:
            self._ledger.hold_for(request, stored)
        for key, why in failed.items():
            request.origin.pop(key, None)
            request.asked[key] = Asked(flight.tier.position, None)
            request.verdicts[flight.tier.position, key] = why
