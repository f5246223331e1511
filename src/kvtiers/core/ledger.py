"""The books: who touches which slot, which jobs are in flight, and what each request waits for.

Every job is closed exactly once. A slot that something may still touch is never handed out again:
the index keeps it held, or orphaned, until the ledger is told that the toucher is gone.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvtiers.chunks import Key, RequestContext
from kvtiers.core.attached import AttachedTier
from kvtiers.events import Hop, MissReason, Reason
from kvtiers.host.chunkindex import ChunkIndex
from kvtiers.tiers.views import ChunkViews


class Departed(Protocol):
    """Told when chunks leave host memory."""

    def __call__(self, keys: Sequence[Key], reason: Reason) -> None:
        """``keys`` are resident no more."""


@dataclass(slots=True)
class Asked:
    """Where the search for one chunk stands: the tier whose turn it is, and since when."""

    turn: int
    since: float | None
    """None: it has not said anything yet."""


@dataclass(slots=True, eq=False)
class Request:
    """What the core remembers of a live request. The engine passes it back with every call."""

    context: RequestContext
    wants_all: tuple[AttachedTier, ...] = ()
    """Tiers with request-level policy: they are offered this request's resident chunks too."""
    offered: set[Key] = field(default_factory=set)
    """Chunks of this request's prefix: none of them makes room for another."""
    hits: set[Key] = field(default_factory=set)
    """Chunks that lookups found ready in host memory since the last load."""
    below: set[Key] = field(default_factory=set)
    """Chunks that host memory lacked when they were first asked for."""
    origin: dict[Key, AttachedTier] = field(default_factory=dict)
    """The tier each promoted chunk came from."""
    asked: dict[Key, Asked] = field(default_factory=dict)
    held: dict[Key, int] = field(default_factory=dict)
    """Slots kept for this request while others of its chunks are on the way."""
    promoting: int = 0
    """Chunks reserved or on the way for this request."""
    waiting_since: float | None = None
    """When this request first had to wait for a promotion; None if it does not wait."""
    no_room_since: float | None = None
    no_room_told: bool = False
    loading: tuple[tuple[Key, ...], tuple[int, ...]] | None = None
    verdicts: dict[tuple[int, Key], MissReason | None] = field(default_factory=dict)
    """What each tier, by position, had to say of a chunk: why it missed, or None if it has it. Of
    host memory (0) only what is not plain absence."""
    took_s: dict[str, float] = field(default_factory=dict)
    """By tier, the longest that was waited for an answer or a promotion."""
    waiting_began: float | None = None
    """When it first waited since the engine began to ask, also when it has given up waiting."""
    load_began: tuple[float, float | None] = (0.0, None)
    """When the last load was planned, and what ``waiting_began`` was then."""
    gave_up: bool = False
    """Waited too long: do without what is not in host memory."""
    load_failed: bool = False
    """A load failed: serve this request no more, so that it is computed and cannot loop."""
    finished: bool = False

    def forget_lookups(self) -> None:
        """The engine stopped asking: what it asked and was told is over."""
        self.hits.clear()
        self.below.clear()
        self.asked.clear()
        self.verdicts.clear()
        self.took_s.clear()
        self.waiting_began = None
        self.gave_up = self.no_room_told = False

    def note_wait(self, tier: str, seconds: float) -> None:
        """An answer or a promotion of ``tier`` took so long."""
        self.took_s[tier] = max(seconds, self.took_s.get(tier, 0.0))


@dataclass(slots=True, eq=False)
class Flight:
    """A job in flight between host memory and one tier. Never changed."""

    hop: Hop
    tier: AttachedTier
    keys: tuple[Key, ...]
    slots: tuple[int, ...]
    views: ChunkViews
    """What its tier was given; dead when the tier has let go."""
    request: Request | None = None
    started: float = 0.0
    weight: int = 0
    """What its slots take of host memory, if somebody has to know."""


class Ledger:
    """Jobs in flight, device transfers in flight, live requests."""

    def __init__(self, index: ChunkIndex) -> None:
        self.index = index
        self.flights: dict[int, Flight] = {}
        self.lingering: dict[int, tuple[Flight, tuple[int, ...]]] = {}
        """Closed jobs whose tier may still touch some of their slots."""
        self.device_orphans: Counter[int] = Counter()
        """Slots in flight between host and device at a reset, and how many touch each."""
        self.gathered: Callable[[], Iterable[int]] = tuple
        """Slots of promotions that wait for the end of the step."""
        self.requests: dict[str, Request] = {}
        self.waiting: dict[str, Request] = {}
        """Requests that hold slots or wait for promotions: those with a deadline."""
        self._next_job = 0

    def open(self, flight: Flight) -> int:
        """Record a job about to be handed to its tier; its id."""
        job_id = self._next_job
        self._next_job += 1
        self.flights[job_id] = flight
        return job_id

    def close(self, job_id: int, tier: AttachedTier) -> Flight | None:
        """Take a job off the books; None if ``tier`` has no such job (it breaks its contract)."""
        flight = self.flights.get(job_id)
        if flight is None or flight.tier is not tier:
            return None
        del self.flights[job_id]
        return flight

    def overdue(self, before: float) -> list[tuple[int, Flight]]:
        """Jobs that were started before then and are not closed."""
        late = []
        for job_id, flight in self.flights.items():  # in the order in which they started
            if flight.started >= before:
                break
            late.append((job_id, flight))
        return late

    def linger(self, job_id: int, flight: Flight, slots: Sequence[int]) -> None:
        """The job is over, but its tier may still touch ``slots``."""
        self.lingering[job_id] = (flight, tuple(slots))

    def linger_over(self, job_id: int, tier: AttachedTier) -> Flight | None:
        """``tier`` let go of a lingering job's slots; of no other's, whatever it says."""
        flight, slots = self.lingering.get(job_id, (None, ()))
        if flight is None or flight.tier is not tier:
            return None
        del self.lingering[job_id]
        flight.views.release_all()
        self.index.release(slots)
        return flight

    def hold_for(self, request: Request, keys: Iterable[Key]) -> None:
        """Keep ready chunks in place for a request that still waits for others."""
        fresh = [k for k in keys if k not in request.held and k in self.index.ready]
        if fresh:
            request.held.update(zip(fresh, self.index.hold(fresh), strict=True))
            self.waiting[request.context.request_id] = request

    def let_go(self, request: Request) -> None:
        """Release what was kept for this request; it waits no longer."""
        if request.held:
            self.index.release(list(request.held.values()))
            request.held.clear()
        request.waiting_since = request.no_room_since = None
        self.waiting.pop(request.context.request_id, None)

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        for name in self.waiting:
            assert name in self.requests, f"{name} waits but is not live"
        expected = Counter(self._touched_slots())
        actual = self.index.hold_counts()
        assert expected == actual, f"slots are held by {actual}, on the books are {expected}"
        self.index.check()

    def _touched_slots(self) -> Iterator[int]:
        for flight in self.flights.values():
            yield from flight.slots
        for _, slots in self.lingering.values():
            yield from slots
        yield from self.index.filling.values()
        yield from self.device_orphans.elements()
        yield from self.gathered()
        for request in self.requests.values():
            yield from request.held.values()
            if request.loading is not None:
                yield from request.loading[1]

    def __repr__(self) -> str:
        return (
            f"<Ledger {len(self.requests)} requests ({len(self.waiting)} waiting),"
            f" {len(self.flights)} jobs, {len(self.index.filling)} storing,"
            f" {len(self.lingering)} lingering>"
        )
