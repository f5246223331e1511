"""What happened, as frozen values in one stream; metrics, logs and engine events are folds over it.

Events are per batch, never per chunk, and named tuples: several are made for each batch on the
scheduler thread, at a third of the cost of a frozen dataclass. Tier names are labels such as
``0:primary`` or ``1:fs``. Being tuples, two events of different kinds can be equal: look at the
type first.
"""

from collections.abc import Callable
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


class ChunksStored(NamedTuple):
    """These chunks are now resident in ``tier``."""

    tier: str
    keys: tuple[Key, ...]


class ChunksRemoved(NamedTuple):
    """These chunks are no longer resident in ``tier``."""

    tier: str
    keys: tuple[Key, ...]
    reason: Reason


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
    reason: Reason | None = None


class CopiesFailed(NamedTuple):
    """``chunks`` could not be copied between host memory and accelerator."""

    hop: Hop
    tier: str
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
    | ChunksRemoved
    | ChunksDeclined
    | LookedUp
    | LookupTimed
    | TransferStarted
    | TransferFinished
    | CopiesFailed
    | StoreOffered
    | WarmedUp
)

Sink = Callable[[Event], None]
"""Takes one event. Called on the thread that owns the emitter; must not block or raise."""
