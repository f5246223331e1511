"""The two contracts a secondary tier can meet, and the values that cross them.

``ChunkStore`` is blocking bytes: simple to write, run on lanes by :mod:`kvtiers.tiers.runner`.
``SecondaryTierManager`` is the job form that the core talks to: it never blocks.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from types import MappingProxyType
from typing import NamedTuple, Protocol, runtime_checkable

from kvtiers.chunks import ChunkLayout, Key, Lookup, Namespace, OffloadPolicy, RequestContext
from kvtiers.errors import KVTiersError
from kvtiers.events import Event, MissReason, Reason
from kvtiers.tiers.views import ChunkViews


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a store can do. A method declared absent must refuse with ``Kind.UNSUPPORTED``."""

    persistent: bool
    """Chunks survive ``close`` and are found by the next instance; if not, it finds none."""
    shared: bool
    """Others may add or remove chunks: absence must be asked for, not remembered.

    If not, another instance for the same namespace at the same place is refused when it is opened,
    or has chunks of its own.
    """
    delete: bool = True
    scan: bool = True
    instant: bool = False
    """``contains`` answers from memory, without a system call or a lock that is held for longer
    than that: it is called on the scheduler thread, and lookups are answered at once."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored chunk as ``scan`` reports it. ``used_at`` is wall-clock seconds."""

    key: Key
    bytes: int
    used_at: float


@dataclass(frozen=True, slots=True)
class Item:
    """One chunk to write from, or to read into, ``view`` (C-contiguous bytes of one slot)."""

    key: Key
    view: memoryview


RemovalReport = Callable[[Sequence[Key], Reason], None]
"""A store calls it, on any thread, when chunks it held are gone by other than ``delete``."""


@dataclass(frozen=True, slots=True)
class Around:
    """What few stores and tiers need to know of the engine around them."""

    replica: int = 0
    """Index of the data-parallel engine, for what each must have for itself, such as a port."""
    memory: Callable[[], memoryview] | None = None
    """A view of all of host memory, the caller's own, for what reads it by address."""


@dataclass(frozen=True, slots=True)
class StoreContext:
    """What a store is given when it is built."""

    name: str
    """Type of the tier, or the name of its class."""
    label: str
    """What metrics, events and logs call the tier, e.g. ``1:fs``; for events of its own."""
    namespace: Namespace
    layout: ChunkLayout
    clock: Callable[[], float]
    """Monotonic seconds."""
    wall_clock: Callable[[], float]
    """Seconds since the epoch, for what is written to storage."""
    on_removed: RemovalReport
    engine: Around = Around()


class ChunkStore(Protocol):
    """Blocking storage of chunks.

    Every method but ``touch`` may block and is called on a lane thread; lanes call concurrently.
    A failure of one item never fails its neighbours. After ``close`` everything raises
    ``Kind.CLOSED``; closing twice is fine.
    """

    capabilities: Capabilities

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """Whether each key is present now. Raises KVTiersError if that cannot be found out."""

    def write(self, items: Sequence[Item]) -> list[KVTiersError | None]:
        """Store each item, atomically; one result per item, in order.

        Caller guarantees: the bytes do not change until the call returns; equal keys have equal
        bytes. Implementer must: make a chunk visible only when whole; treat a key that is present
        as success; make room itself within its capacity, or answer ``Kind.FULL``.
        """

    def read(self, items: Sequence[Item]) -> list[KVTiersError | None]:
        """Fill each item's view; one result per item, in order.

        Implementer must: write only into the item's own view; answer ``Kind.VANISHED`` for what
        is absent and ``Kind.CORRUPT`` for what is damaged, short or foreign, and report both
        through ``on_removed``. After an error the item's view may hold anything.
        """

    def delete(self, keys: Sequence[Key]) -> None:
        """Forget these chunks; an absent one is not an error."""

    def scan(self) -> Iterable[Entry]:
        """What is stored in this namespace, in no particular order."""

    def touch(self, keys: Sequence[Key]) -> None:
        """These chunks were used. Must not block; unknown keys are ignored."""

    def close(self) -> None:
        """Release everything. An error means failure to close with grace, not failure to close."""


class Usage(NamedTuple):
    """How full a store is. None: not known, or unbounded."""

    used_bytes: int | None
    """Of all that counts towards the bound, other namespaces included."""
    capacity_bytes: int | None
    resident_bytes: int | None = None
    """Of the chunks of this namespace that are known to be there, without counting."""


@runtime_checkable
class KnowsUsage(Protocol):
    """Optional: a store that is bounded or knows what it holds, or a tier over one."""

    def usage(self) -> Usage | None:
        """How full it is; None if that is not known.

        Of a store it is asked on a lane: after a transfer, at most once a second, and once more
        when the last one is over. Of a tier it is asked on the scheduler thread, and must not
        block.
        """


class Circuit(IntEnum):
    """Whether a tier is in use."""

    CLOSED = 0
    """It is."""
    TRIAL = 1
    """It is being tried again."""
    OPEN = 2
    """It is left alone after failures in a row."""


class Standing(NamedTuple):
    """What a tier is doing now."""

    circuit: Circuit
    jobs: int | None
    """Taken and not reported, of both kinds; None: not known."""
    job_bytes: int | None
    """Of host memory that jobs of both kinds hold, taken and not ended; None: not known."""


@runtime_checkable
class KnowsStanding(Protocol):
    """Optional: a tier that says what it is doing, for people."""

    def standing(self) -> Standing:
        """Asked on the scheduler thread; must not block."""


class Peers(NamedTuple):
    """How many other engines a tier knows, by what it has to do with them now."""

    connected: int
    """They are asked, and answer."""
    dialling: int
    """They are about to be asked."""
    left_alone: int
    """They are not asked after they failed."""
    idle: int
    """They were asked, and are nothing to us now."""
    served: int
    """They ask us; one may be among the others too."""


@runtime_checkable
class KnowsPeers(Protocol):
    """Optional: a tier that deals with other engines, for people."""

    def peers(self) -> Peers:
        """Asked on the scheduler thread; must not block."""


class JobKind(Enum):
    """Direction of a job, seen from host memory."""

    STORE = "store"
    """Host memory -> tier (a cascade)."""
    LOAD = "load"
    """Tier -> host memory (a promotion)."""


@dataclass(slots=True, eq=False)
class Job:
    """Chunks to move between slots of the host region and one tier.

    ``views[i]`` is the chunk ``keys[i]`` in slot ``slots[i]``: read-only for stores, writable for
    loads, cut when it is first asked for. The slots are pinned until the job's outcome (and its
    release, see ``JobOutcome``); from then on the views are dead.
    """

    id: int
    kind: JobKind
    keys: tuple[Key, ...]
    slots: tuple[int, ...]
    views: ChunkViews
    request: RequestContext | None = None


class JobOutcome(NamedTuple):
    """How a job ended. ``done`` and ``failed`` are disjoint and together are the job's keys."""

    job_id: int
    done: tuple[Key, ...]
    failed: Mapping[Key, KVTiersError] = MappingProxyType({})
    bytes: int = 0
    seconds: float = 0.0
    memory_in_use: bool = False
    """True when the deadline passed but a thread may still touch the views: a ``JobReleased``
    follows when it no longer can, and the slots must not be used before."""


class JobReleased(NamedTuple):
    """The memory of a job that was reported with ``memory_in_use`` is free at last."""

    job_id: int


class SecondaryTierManager(Protocol):
    """A tier below host memory, in the form the core talks to.

    All methods are called on the scheduler thread and must neither block nor raise; ``drain_jobs``
    and ``shutdown`` alone may wait, within their deadline.
    """

    name: str
    """Type of the tier, e.g. ``fs``; the core adds its position."""
    medium: str | None
    """``CPU`` or ``STORAGE``, for tier filters, KV events and hit sources; None: neither."""
    locality: str | None
    """``LOCAL`` or ``REMOTE``."""

    def lookup(self, keys: Sequence[Key], request: RequestContext) -> list[Lookup]:
        """MISS, HIT or RETRY for each key. A RETRY must resolve within the tier's deadline."""

    def submit_store(self, job: Job) -> bool:
        """Take a cascade, or answer False under pressure: it will be offered again."""

    def submit_load(self, job: Job) -> bool:
        """Take a promotion of chunks that were HIT, or answer False (they become misses)."""

    def get_finished_jobs(self) -> list[JobOutcome | JobReleased]:
        """What ended since the last call. Exactly one outcome per taken job, by its deadline."""

    def touch(self, keys: Sequence[Key]) -> None:
        """These chunks were used in a higher tier; keep them longer."""

    def drain_jobs(self, deadline_s: float) -> bool:
        """Wait until no job is in flight, at most ``deadline_s``; whether that was reached."""

    def shutdown(self, deadline_s: float) -> None:
        """Stop. Jobs that did not end are never reported; nothing is taken any more."""


@runtime_checkable
class TakesCascades(Protocol):
    """Optional: a tier that says whether chunks may be stored in it; without it they may."""

    takes_cascades: bool
    """If False it is offered none."""


@runtime_checkable
class FollowsRequests(Protocol):
    """Optional: a tier that keeps state per request."""

    def on_new_request(self, request: RequestContext) -> OffloadPolicy:
        """A request arrived; which of its chunks this tier wants to be offered."""

    def on_request_finished(self, request: RequestContext) -> None:
        """No lookup, store or load for this request will follow."""


@runtime_checkable
class FollowsSteps(Protocol):
    """Optional: a tier that batches its work by scheduler step."""

    def on_schedule_end(self) -> None:
        """The step is over: send what was gathered."""


@runtime_checkable
class HasPendingWork(Protocol):
    """Optional: a tier that needs the engine to go on stepping."""

    def has_pending_work(self) -> bool:
        """Whether steps are needed although no request is scheduled."""


@runtime_checkable
class ExplainsMisses(Protocol):
    """Optional: a tier that says why it has missed; without it, the chunk is absent."""

    def why_missed(self, key: Key) -> MissReason:
        """Why the lookup before this said MISS of ``key``. Asked at once, per request and chunk."""


@runtime_checkable
class Peeks(Protocol):
    """Optional: a tier that people can ask what it has, beside its work. Any thread, at any time.

    Neither method changes anything.
    """

    def peek(self, keys: Sequence[Key]) -> list[Lookup | MissReason]:
        """HIT for what is there, why the others would be a MISS now, or RETRY: not known without
        asking. Must not block.
        """

    def ask_store(self, keys: Sequence[Key]) -> list[bool] | KVTiersError:
        """Whether each is there, from whoever knows for sure. May block."""


@runtime_checkable
class EmitsEvents(Protocol):
    """Optional: a tier that reports what it holds."""

    def take_events(self) -> list[Event]:
        """Events since the last call, in order, under the tier's label."""


@runtime_checkable
class ChecksAgain(Protocol):
    """Optional, of a store in which ``contains`` is a sign that chunks are about to be used, or has
    a no for what cannot be had now.
    """

    def still_there(self, keys: Sequence[Key]) -> list[bool]:
        """As ``contains``, without being such a sign, and with a no for what is gone only."""


@runtime_checkable
class KnowsResidents(Protocol):
    """Optional: a tier that says what it holds to those who missed events of it. Any thread.

    Without it, all that was said of the tier is taken back then.
    """

    def residents(self) -> Iterable[Key]:
        """All chunks that it holds, as its events say or will say. May block; raises KVTiersError.

        What happened during the call may be in it or not. If it raises, what was said stands, and
        it is asked again when more was missed.
        """
