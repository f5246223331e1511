"""A secondary tier as the core sees it: labelled, its abilities resolved, its faults fenced.

A tier that raises is a tier that answers nothing; after some faults in a row it is left alone for
a while. The engine never learns of it other than by misses.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from kvtiers.chunks import Key, Lookup, OffloadPolicy, RequestContext
from kvtiers.errors import KVTiersError
from kvtiers.events import (
    ChunksDeclined,
    ChunksExchanged,
    ChunksFound,
    ChunksRemoved,
    ChunksStored,
    Direction,
    Event,
    Hop,
    MissReason,
    Reason,
    TierReachable,
    tier_label,
)
from kvtiers.tiers.base import (
    Circuit,
    EmitsEvents,
    ExplainsMisses,
    FollowsRequests,
    FollowsSteps,
    HasPendingWork,
    Job,
    JobOutcome,
    JobReleased,
    KnowsPeers,
    KnowsResidents,
    KnowsStanding,
    KnowsUsage,
    Peers,
    SecondaryTierManager,
    Standing,
    TakesCascades,
    Usage,
)

logger = logging.getLogger("kvtiers")

T = TypeVar("T")

_VERDICTS = frozenset(Lookup)
_ABSENT = MissReason.ABSENT
_OF_TIERS = (
    *(ChunksStored, ChunksFound, ChunksRemoved),
    *(ChunksDeclined, ChunksExchanged, TierReachable),
)
"""Events that a tier may report."""

FAULTS_TO_FENCE = 3
FENCE_S = 30.0


class AttachedTier:
    """One secondary tier at its position; ``label`` is what metrics and events call it."""

    def __init__(self, tier: SecondaryTierManager, position: int) -> None:
        self.tier = tier
        self.position = position
        self.label = tier_label(position, tier.name)
        self.medium = tier.medium
        self.locality = tier.locality
        self.takes_cascades = not isinstance(tier, TakesCascades) or tier.takes_cascades
        """Whether chunks are offered to it at all."""
        self._requests = tier if isinstance(tier, FollowsRequests) else None
        self._steps = tier if isinstance(tier, FollowsSteps) else None
        self._pending = tier if isinstance(tier, HasPendingWork) else None
        self._events = tier if isinstance(tier, EmitsEvents) else None
        self._usage = tier if isinstance(tier, KnowsUsage) else None
        self._explains = tier if isinstance(tier, ExplainsMisses) else None
        self._standing = tier if isinstance(tier, KnowsStanding) else None
        self._peers = tier if isinstance(tier, KnowsPeers) else None
        self._residents = tier if isinstance(tier, KnowsResidents) else None
        self.now = 0.0
        """Monotonic seconds of the present step."""
        self._faults: dict[str, int] = {}
        """Faults in a row, by method."""
        self._fenced_until = 0.0
        self._says_reachable = True
        """By the last ``TierReachable`` of the tier's own."""
        self._said_reachable = True
        """By the last one that was handed on."""

    def lookup(self, keys: Sequence[Key], request: RequestContext) -> list[Lookup]:
        """The tier's verdicts, all MISS if it has none to give."""
        if not self._fenced:
            try:  # ``_guard`` spelled out: it would cost a quarter of every miss
                found = self.tier.lookup(keys, request)
                if type(found) is list and len(found) == len(keys) and _VERDICTS.issuperset(found):
                    self._well("lookup")
                    return found
                self._fault("lookup", f"it answered {_shown(found)}")
            except Exception as e:  # unhashable answers are caught here too
                self._fault("lookup", f"{type(e).__name__}: {e}")
        return [Lookup.MISS] * len(keys)

    def why_missed(self, key: Key) -> MissReason:
        """Why the tier's last verdict on this chunk was MISS."""
        hook = self._explains
        if hook is None and not self._faults:  # what most misses come to
            return _ABSENT
        if self._fenced:
            return MissReason.TIER_DOWN
        if hook is None or "lookup" in self._faults:
            return MissReason.FAILED if "lookup" in self._faults else _ABSENT
        return self._guard("why_missed", lambda: MissReason(hook.why_missed(key)), _ABSENT)

    def submit_store(self, job: Job) -> bool:
        """Whether the tier took a cascade."""
        return self._submit("submit_store", lambda: bool(self.tier.submit_store(job)))

    def submit_load(self, job: Job) -> bool:
        """Whether the tier took a promotion."""
        return self._submit("submit_load", lambda: bool(self.tier.submit_load(job)))

    def finished(self) -> list[JobOutcome | JobReleased]:
        """What ended since the last call."""
        try:
            ended = self.tier.get_finished_jobs()
            sound = list(filter(_is_sound_end, ended)) if type(ended) is list else []
            if type(ended) is list and len(sound) == len(ended):
                self._well("get_finished_jobs")
            else:  # what is sound counts all the same: its jobs ended
                self._fault("get_finished_jobs", f"it answered {_shown(ended)}")
            return sound
        except Exception as e:
            self._fault("get_finished_jobs", f"{type(e).__name__}: {e}")
            return []

    def usage(self) -> Usage | None:
        """How full the tier is, if it says so."""
        hook = self._usage
        usage = None if hook is None else self._guard("usage", hook.usage, None)
        return usage if isinstance(usage, Usage) else None

    def standing(self) -> Standing:
        """What the tier says that it does; one that is fenced is left alone, whatever it says.

        Of one that says nothing it is known that it is in use.
        """
        hook, nothing = self._standing, Standing(Circuit.CLOSED, None, None)
        said = nothing if hook is None else self._guard("standing", hook.standing, nothing)
        standing = said if isinstance(said, Standing) else nothing
        return standing._replace(circuit=Circuit.OPEN) if self._fenced else standing

    def peers(self) -> Peers | None:
        """Whom the tier says that it deals with, if it does with anybody."""
        hook = self._peers
        peers = None if hook is None else self._guard("peers", hook.peers, None)
        return peers if isinstance(peers, Peers) else None

    def residents(self) -> list[Key] | None:
        """All that the tier holds; none if it never says, None if it failed to say it now.

        Any thread, which may have to wait.
        """
        try:
            keys = [] if self._residents is None else list(self._residents.residents())
            if not _are_keys(keys):
                raise TypeError(f"it answered {_shown(keys)}")
        except Exception as e:  # the fence; faults are counted on another thread
            logger.warning(
                "tier %s did not say what it holds (%s: %s): what was told of it stands, and it "
                "is asked again when events are missed",
                self.label,
                type(e).__name__,
                e,
            )
            return None
        return keys

    def touch(self, keys: Sequence[Key]) -> None:
        """Pass on that these chunks were used."""
        if not self._fenced:
            self._guard("touch", lambda: self.tier.touch(keys), None)

    def on_new_request(self, request: RequestContext) -> OffloadPolicy:
        """The policy this tier wants for the request."""
        hook = self._requests
        if hook is None:
            return OffloadPolicy.CHUNK
        return self._guard(
            "on_new_request", lambda: hook.on_new_request(request), OffloadPolicy.CHUNK
        )

    def on_request_finished(self, request: RequestContext) -> None:
        """Nothing will be asked for this request any more."""
        hook = self._requests
        if hook is not None:
            self._guard("on_request_finished", lambda: hook.on_request_finished(request), None)

    def end_step(self) -> None:
        """The scheduler step is over."""
        if self._steps is not None and not self._fenced:
            self._guard("on_schedule_end", self._steps.on_schedule_end, None)

    def has_pending_work(self) -> bool:
        """Whether the tier needs more steps."""
        if self._pending is None or self._fenced:
            return False
        hook = self._pending.has_pending_work
        return self._guard("has_pending_work", lambda: bool(hook()), False)

    def take_events(self) -> list[Event]:
        """What the tier reports of its contents, and whether they can be had, fence included."""
        events: list[Event] = []
        if self._events is not None:
            told = self._guard("take_events", self._events.take_events, events, _are_sound_events)
            events = [e for e in told if not self._is_about_reach(e)]  # theirs stays as it is
        reachable = self._says_reachable and not self._fenced
        if reachable is not self._said_reachable:
            self._said_reachable = reachable
            events.append(TierReachable(self.label, reachable))
        return events

    def _is_about_reach(self, event: Event) -> bool:
        """Remembers what it says: while the tier is fenced that does not hold."""
        if not isinstance(event, TierReachable):
            return False
        self._says_reachable = event.reachable
        return True

    def drain_jobs(self, deadline_s: float) -> bool:
        """Whether the tier came to rest in time."""
        return self._guard("drain_jobs", lambda: bool(self.tier.drain_jobs(deadline_s)), False)

    def shutdown(self, deadline_s: float) -> None:
        """Stop the tier."""
        self._guard("shutdown", lambda: self.tier.shutdown(deadline_s), None)

    @property
    def _fenced(self) -> bool:
        return self.now < self._fenced_until

    def _submit(self, name: str, submit: Callable[[], bool]) -> bool:
        return False if self._fenced else self._guard(name, submit, False)

    def _guard(
        self,
        name: str,
        call: Callable[[], T],
        otherwise: T,
        sound: Callable[[object], bool] | None = None,
    ) -> T:
        try:
            result = call()
            if sound is not None and not sound(result):
                raise TypeError(f"it answered {_shown(result)}")
        except Exception as e:  # the fence: a plug-in's fault must not reach the engine
            self._fault(name, f"{type(e).__name__}: {e}")
            return otherwise
        self._well(name)
        return result

    def _well(self, name: str) -> None:
        if self._faults:
            self._faults.pop(name, None)

    def _fault(self, name: str, what: str) -> None:
        count = self._faults[name] = self._faults.get(name, 0) + 1
        if count == 1:
            logger.error("tier %s broke its contract in %s (%s)", self.label, name, what)
        if count >= FAULTS_TO_FENCE and not self._fenced:
            self._fenced_until = self.now + FENCE_S
            logger.error("tier %s is left alone for %g s", self.label, FENCE_S)

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        assert all(n > 0 for n in self._faults.values()), "a method failed no times in a row"
        assert self._fenced_until <= self.now + FENCE_S, "fenced for longer than a fence lasts"

    def __repr__(self) -> str:
        fenced = ", fenced" if self._fenced else ""
        return f"<AttachedTier {self.label} {self.tier!r}{fenced}>"


def _all(values: Iterable[object], kinds: type | tuple[type, ...]) -> bool:
    return all(isinstance(v, kinds) for v in values)


def _is_sound_end(end: object) -> bool:
    if isinstance(end, JobReleased):
        return isinstance(end.job_id, int)
    return (
        isinstance(end, JobOutcome)
        and isinstance(end.job_id, int)
        and isinstance(end.done, tuple | list)
        and _are_keys(end.done)
        and isinstance(end.failed, Mapping)
        and (not end.failed or _all(end.failed.values(), KVTiersError))
        and _is_amount(end.bytes)
        and _is_amount(end.seconds)
    )


def _are_keys(values: Sequence[object]) -> bool:
    return set(map(type, values)) <= {bytes}


def _is_amount(value: object) -> bool:
    """A counter that went down, or is no number, ends the process that shows it."""
    return isinstance(value, int | float) and 0 <= value < math.inf


def _are_sound_events(events: object) -> bool:
    return isinstance(events, list) and all(map(_is_sound_event, events))


def _is_sound_event(event: object) -> bool:
    if not isinstance(event, _OF_TIERS) or not isinstance(event.tier, str):
        return False
    if isinstance(event, TierReachable):
        return isinstance(event.reachable, bool)
    if isinstance(event, ChunksDeclined):
        known = isinstance(event.hop, Hop) and isinstance(event.reason, Reason)
        return known and isinstance(event.chunks, int) and event.chunks >= 0
    if isinstance(event, ChunksExchanged):
        known = isinstance(event.direction, Direction)
        return known and _is_amount(event.chunks) and _is_amount(event.bytes)
    if isinstance(event, ChunksRemoved) and not isinstance(event.reason, Reason):
        return False
    return isinstance(event.keys, tuple | list) and _are_keys(event.keys)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
