"""What happened, as frozen values in one stream; metrics, logs and engine events are folds over it.

Events are per batch, never per chunk, and named tuples: several are made for each batch on the
scheduler thread, at a third of the cost of a frozen dataclass. Tier names are labels such as
``0:primary`` or ``1:fs``. Being tuples, two events of different kinds can be equal: look at the
type first.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from kvtiers.chunks import Key

PRIMARY = "0:primary"
"""Label of host memory."""


def tier_label(position: int, name: str) -> str:
    """What metrics, events and logs call a tier: host memory is at position 0."""
    return f"{position}:{name}"


class Hop(StrEnum):
    """The four ways bytes move."""

    STORE = "store"
    CASCADE = "cascade"
    PROMOTE = "promote"
    LOAD = "load"


class Reason(StrEnum):
    """Why a chunk left a tier, or why one was not taken."""

    EVICTED = "evicted"
    RESET = "reset"
    CORRUPT = "corrupt"
    VANISHED = "vanished"
    FAILED = "failed"
    TIMEOUT = "timeout"
    PRESSURE = "pressure"
    NO_ROOM = "no_room"
    THRESHOLD = "threshold"


class Direction(StrEnum):
    """Which way chunks go between this engine and others."""

    IN = "in"
    OUT = "out"


class MissReason(StrEnum):
    """Why a tier did not give a request a chunk that it was asked for."""

    ABSENT = "absent"
    """It does not have it."""
    PENDING = "pending"
    """Its answer, or the chunk's way up, took longer than the request may wait."""
    CORRUPT = "corrupt"
    """It was damaged, and not stored again since."""
    FILTERED = "filtered"
    """The request may not load from this tier (``kv_load_tiers``)."""
    TIER_DOWN = "tier_down"
    """The tier, or the peer that would have it, is left alone after failures, or shut, and was not
    asked; or the peer cannot be reached."""
    WINDOW = "window"
    """It has it, but nothing reads it: the prefix that is loaded ends before it, for want of a
    chunk there or of what the model's windows and states need."""
    NO_ROOM = "no_room"
    """It has it, but host memory had no room for it."""
    FAILED = "failed"
    """It, or the copy to the accelerator, failed."""


class Run(NamedTuple):
    """Chunks of one group that follow each other in a prompt and met the same fate."""

    group: int
    first: int
    """Index of the first one in the prompt, in chunks of its group."""
    chunks: int
    source: str | None
    """Label of the tier where they were found; None: nowhere."""
    misses: tuple[tuple[str, MissReason], ...]
    """Tiers asked before it, or all, each with its reason."""
    key: Key | None = None
    """Of the first one, where it is known."""


class ChunksStored(NamedTuple):
    """These chunks are now resident in ``tier``."""

    tier: str
    keys: tuple[Key, ...]


class ChunksFound(NamedTuple):
    """These chunks are in ``tier``, but not by what this engine did since its start.

    Some of them may have been told of before. What the start-up scan finds comes in several events.
    """

    tier: str
    keys: tuple[Key, ...]
    complete: bool = True
    """False: there will be another event of this scan, whatever becomes of it."""


class TierReachable(NamedTuple):
    """What is in ``tier`` cannot be had for now, or can be had again; it was not lost."""

    tier: str
    reachable: bool


class ChunksRemoved(NamedTuple):
    """These chunks are no longer resident in ``tier``."""

    tier: str
    keys: tuple[Key, ...]
    reason: Reason


class ChunksPrompted(NamedTuple):
    """A new request has these chunks in its prompt, whether they were asked for or not."""

    keys: Sequence[Key]


class ChunksGenerated(NamedTuple):
    """A request that ended has these chunks beyond its prompt."""

    keys: Sequence[Key]


class PrefillTimed(NamedTuple):
    """The engine computed ``tokens`` of prompts within ``seconds``."""

    tokens: int
    seconds: float


class ChunksDeclined(NamedTuple):
    """``chunks`` were not taken at a hop; they are offered again when they can be."""

    hop: Hop
    tier: str
    chunks: int
    reason: Reason


class LookedUp(NamedTuple):
    """``queries`` chunks were resolved by ``tier``, of which ``hits`` were there."""

    tier: str
    queries: int
    hits: int


class LookupsSettled(NamedTuple):
    """A request's lookups are over: it loads what was found, or is computed. Once per settling.

    A preempted request, or one whose load failed, asks again, and settles again.
    """

    request_id: str
    asked: int
    """Chunks, of all groups, of which it was found out where they are: of a prefix hardly any after
    the first that was missing."""
    found: Mapping[str, int]
    """Chunks by the label of the tier they were found in; host memory's were there already."""
    missed: Mapping[tuple[str, MissReason], int]
    """Chunks by tier and reason; each counts for all tiers that were asked for it in vain."""
    loaded: Mapping[str, int]
    """Tokens of the prefix that is loaded, by the tier they were found in; empty: none is."""
    waited_s: float
    """From the first answer that was not final to this."""
    took_s: Mapping[str, float]
    """By tier, the longest that the request waited for an answer or a promotion."""
    runs: tuple[Run, ...] = ()
    """The first ones, by group and in order of the prompt; none unless somebody wants them
    (``ManagerOptions.trace_lookups``) and the engine says where chunks lie."""
    untold: int = 0
    """Chunks that are in no run."""
    prompt_tokens: int | None = None
    arrived_at: float | None = None
    """Seconds since the epoch."""


class LookupTimed(NamedTuple):
    """A sampled lookup took ``seconds``, or one that said RETRY resolved after ``waited_s``."""

    tier: str
    seconds: float | None = None
    waited_s: float | None = None


class TransferStarted(NamedTuple):
    """A cascade or promotion job was handed to ``tier``."""

    hop: Hop
    tier: str
    chunks: int


class TransferFinished(NamedTuple):
    """A cascade or promotion job ended: chunks ``done`` and ``failed``, bytes and seconds."""

    hop: Hop
    tier: str
    done: int
    failed: int
    bytes: int
    seconds: float
    """That the tier spent moving them."""
    reason: Reason | None = None
    took_s: float = 0.0
    """From being handed to the tier until its end was seen, waiting for others included."""


class ChunksCopied(NamedTuple):
    """``chunks`` were copied between host memory and accelerator."""

    hop: Hop
    chunks: int
    seconds: float
    """From the reservation of their slots, or their pins, until the copy was seen to have ended."""
    waited_s: float | None = None
    """Of a load whose request had to wait for chunks: from the first lookup that could not be
    answered to the same end."""
    bytes: int = 0
    """Of the chunks."""


class ChunksExchanged(NamedTuple):
    """``chunks`` came whole from other engines by ``tier``, or went out to them, since the last."""

    tier: str
    direction: Direction
    chunks: int
    bytes: int


class CopiesFailed(NamedTuple):
    """``chunks`` could not be copied between host memory and accelerator."""

    hop: Hop
    tier: str
    chunks: int


class EventsTold(NamedTuple):
    """So many KV events of a type (``BlockStored``, ...) about a medium were handed on."""

    type: str
    medium: str
    events: int


class DescriptionsDropped(NamedTuple):
    """Nobody will be told of so many chunks what they consist of: too many waited to be told."""

    chunks: int


class StoreOffered(NamedTuple):
    """``chunks`` absent chunks asked for room in host memory at once."""

    chunks: int


class WarmedUp(NamedTuple):
    """Of the chunks named hot so many came to host memory, were missing, or were not asked for."""

    promoted: int = 0
    missing: int = 0
    not_asked: int = 0


Event = (
    ChunksStored
    | ChunksFound
    | ChunksRemoved
    | ChunksPrompted
    | ChunksGenerated
    | PrefillTimed
    | TierReachable
    | ChunksDeclined
    | LookedUp
    | LookupsSettled
    | LookupTimed
    | TransferStarted
    | TransferFinished
    | ChunksCopied
    | ChunksExchanged
    | CopiesFailed
    | EventsTold
    | DescriptionsDropped
    | StoreOffered
    | WarmedUp
)

Sink = Callable[[Event], None]
"""Takes one event. Called on the thread that owns the emitter; must not block or raise."""
