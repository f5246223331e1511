"""Down 2, cascade: host memory -> every secondary tier that lacks the chunk.

A chunk confirmed in host memory joins the backlog of each tier. When a step ends the backlogs are
sent, oldest first, as far as the pin budget and the tier's own queue allow; what is refused stays
in the backlog and is offered again while the chunk is resident. So a slow tier never pins more than
its share of host memory, and a tier that was down catches up with what is still there.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from kvtiers.chunks import Key
from kvtiers.core.attached import AttachedTier
from kvtiers.core.ledger import Flight, Ledger
from kvtiers.core.outcomes import finished_event
from kvtiers.core.queue import ChunkQueue
from kvtiers.events import ChunksDeclined, Hop, Reason, Sink, TransferStarted
from kvtiers.tiers.base import Job, JobKind, JobOutcome
from kvtiers.tiers.views import ChunkViews

SOON_S = 5.0
"""An idle engine goes on stepping for a backlog whose pause is over by then."""

ATTEMPTS = 3
"""A chunk that a tier failed to take this often in a row is parked for ``park_s``."""


@dataclass(frozen=True, slots=True)
class CascadeOptions:
    """How much a cascade may hold on to."""

    max_pinned_slots: int
    """Host slots that the cascades to one tier may pin; granules where chunks take several."""
    chunks_per_job: int = 64
    backoff_s: float = 1.0
    """Pause of a tier after a failed job; doubles with each pause in a row."""
    backoff_max_s: float = 60.0
    park_s: float = 60.0
    refusal_pause_s: float = 0.05
    """Pause of a tier that refused a job; doubles with each refusal in a row."""
    refusal_pause_max_s: float = 2 * SOON_S
    """More than an idle engine waits for: a tier that refuses everything lets it rest."""


@dataclass(slots=True, eq=False)
class _Backlog:
    """What one tier still lacks, oldest first, and how it has been doing."""

    queue: ChunkQueue = field(default_factory=ChunkQueue)
    attempts: dict[Key, int] = field(default_factory=dict)
    parked: OrderedDict[Key, float] = field(default_factory=OrderedDict)
    """Chunks that failed too often, and when they are offered again; soonest first."""
    paused_until: float = 0.0
    pauses: int = 0
    """Pauses in a row, without a success between them."""
    refusals: int = 0
    """Jobs in a row that the tier refused."""
    pinned: int = 0
    """Host slots that jobs to this tier pin now."""


class Cascades:
    """Backlogs per tier and the jobs made of them."""

    def __init__(
        self,
        ledger: Ledger,
        tiers: Sequence[AttachedTier],
        views: Callable[[Sequence[Key], Sequence[int], bool], ChunkViews],
        emit: Sink,
        options: CascadeOptions,
    ) -> None:
        self._ledger = ledger
        self._index = ledger.index
        self._views = views
        self._emit = emit
        self._options = options
        self._backlogs = {tier: _Backlog() for tier in tiers if tier.takes_cascades}

    def offer(
        self,
        keys: Sequence[Key],
        *,
        source: AttachedTier | None = None,
        only: Collection[AttachedTier] | None = None,
    ) -> None:
        """These chunks are resident in host memory; the tier ``source`` has them already."""
        for tier, backlog in self._backlogs.items():
            if tier is not source and (only is None or tier in only):
                parked = backlog.parked
                backlog.queue.add([k for k in keys if k not in parked] if parked else keys)

    def departed(self, keys: Sequence[Key]) -> None:
        """These chunks left host memory: what was not sent by now is lost to the tiers below."""
        for tier, backlog in self._backlogs.items():
            lost = list(backlog.queue.discard(keys))
            if backlog.parked:
                lost += [k for k in keys if backlog.parked.pop(k, None) is not None]
            if lost:
                for key in lost:
                    backlog.attempts.pop(key, None)
                self._emit(ChunksDeclined(Hop.CASCADE, tier.label, len(lost), Reason.EVICTED))

    def flush(self, now: float) -> None:
        """Send what the budget and the tiers allow."""
        for tier, backlog in self._backlogs.items():
            _unpark(backlog, now)
            while backlog.queue and backlog.paused_until <= now:
                if not self._send_one(tier, backlog, now):
                    break

    def finish(self, flight: Flight, outcome: JobOutcome, now: float) -> None:
        """A cascade job ended."""
        backlog = self._backlogs[flight.tier]
        if outcome.memory_in_use:
            self._ledger.linger(outcome.job_id, flight, flight.slots)
        else:
            flight.views.release_all()
            self._index.release(flight.slots)
            self.let_go(flight)
        failed: list[Key] = []
        if outcome.failed or outcome.done != flight.keys:
            reported = set(outcome.done) - outcome.failed.keys()
            failed = [k for k in flight.keys if k not in reported]
        if backlog.attempts:
            for key in set(flight.keys).difference(failed):
                backlog.attempts.pop(key, None)
        if failed:
            self._take_back(backlog, failed, now)
        else:
            backlog.pauses = 0
            if backlog.refusals:
                backlog.paused_until = now  # a job's room came free
        done = len(flight.keys) - len(failed)
        self._emit(finished_event(flight, outcome, done, len(failed), now))

    def let_go(self, flight: Flight) -> None:
        """The tier no longer touches the slots of a job."""
        self._backlogs[flight.tier].pinned -= flight.weight

    def forget(self) -> None:
        """Host memory was reset: nothing is left to send."""
        for backlog in self._backlogs.values():
            backlog.queue.clear()
            backlog.attempts.clear()
            backlog.parked.clear()

    def end_pauses(self) -> None:
        """Offer everything once more now: there may be no later."""
        for backlog in self._backlogs.values():
            backlog.paused_until = 0.0
            backlog.queue.add(tuple(backlog.parked))
            backlog.parked.clear()

    @property
    def backlogs(self) -> dict[str, int]:
        """Chunks that wait, parked ones included, by label of the tier."""
        return {t.label: len(b.queue) + len(b.parked) for t, b in self._backlogs.items()}

    @property
    def waiting(self) -> int:
        """Chunks in backlogs, over all tiers."""
        return sum(self.backlogs.values())

    def due(self, now: float) -> bool:
        """Whether some backlog can be sent now or soon, so that steps are worth taking for it."""
        return any(b.queue and b.paused_until <= now + SOON_S for b in self._backlogs.values())

    def _send_one(self, tier: AttachedTier, backlog: _Backlog, now: float) -> bool:
        keys = self._next_batch(backlog)
        if not keys:
            return False
        slots = tuple(self._index.hold(keys))
        views = self._views(keys, slots, False)
        weight = self._index.weigh(slots)
        flight = Flight(Hop.CASCADE, tier, keys, slots, views, started=now, weight=weight)
        job_id = self._ledger.open(flight)
        if tier.submit_store(Job(job_id, JobKind.STORE, keys, slots, views)):
            backlog.pinned += weight
            backlog.refusals = 0
            self._emit(TransferStarted(Hop.CASCADE, tier.label, len(keys)))
            return True
        self._ledger.close(job_id, tier)
        flight.views.release_all()
        self._index.release(slots)
        backlog.queue.put_back(keys)
        pause = self._options.refusal_pause_s * 2 ** min(backlog.refusals, 16)
        backlog.paused_until = now + min(pause, self._options.refusal_pause_max_s)
        if not backlog.refusals:
            self._emit(ChunksDeclined(Hop.CASCADE, tier.label, len(keys), Reason.PRESSURE))
        backlog.refusals += 1
        return False

    def _next_batch(self, backlog: _Backlog) -> tuple[Key, ...]:
        room = (self._options.max_pinned_slots - backlog.pinned) // self._index.widest
        return backlog.queue.take(max(0, min(room, self._options.chunks_per_job)))

    def _take_back(self, backlog: _Backlog, failed: Sequence[Key], now: float) -> None:
        if backlog.paused_until <= now:
            pause = self._options.backoff_s * 2 ** min(backlog.pauses, 16)
            backlog.pauses += 1
            backlog.paused_until = now + min(pause, self._options.backoff_max_s)
        for key in failed:
            if key not in self._index.ready:
                backlog.attempts.pop(key, None)
                continue
            attempts = backlog.attempts.get(key, 0) + 1
            backlog.attempts[key] = attempts
            if attempts < ATTEMPTS:
                backlog.queue.add((key,))
            else:
                backlog.queue.discard((key,))  # it was offered again meanwhile
                backlog.parked[key] = now + self._options.park_s

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        lingering = [flight for flight, _ in self._ledger.lingering.values()]
        pinning = [*self._ledger.flights.values(), *lingering]
        flights = [f for f in pinning if f.hop is Hop.CASCADE]
        for tier, backlog in self._backlogs.items():
            backlog.queue.check()
            twice = [k for k in backlog.queue if k in backlog.parked]
            assert not twice, f"{len(twice)} chunks of {tier.label} are both parked and queued"
            pinned = sum(f.weight for f in flights if f.tier is tier)
            assert backlog.pinned == pinned, f"pinned slots of {tier.label} do not add up"
            assert pinned <= self._options.max_pinned_slots, f"{tier.label} pins beyond its share"
            strays = [k for k in (*backlog.queue, *backlog.parked) if k not in self._index.ready]
            assert not strays, f"{len(strays)} chunks in the backlog of {tier.label} left"

    def __repr__(self) -> str:
        waiting = ", ".join(f"{t.label} {len(b.queue)}" for t, b in self._backlogs.items())
        pinned = sum(b.pinned for b in self._backlogs.values())
        return f"<Cascades {pinned} slots pinned; waiting: {waiting or 'none'}>"


def _unpark(backlog: _Backlog, now: float) -> None:
    while backlog.parked:
        key, due = next(iter(backlog.parked.items()))
        if due > now:
            return
        del backlog.parked[key]
        backlog.queue.add((key,))
