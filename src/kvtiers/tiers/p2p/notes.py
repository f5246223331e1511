"""What crosses between the scheduler thread and the I/O thread, and between that and serving.

Values only: whoever holds one may keep it. Nothing of a thread's own state goes along, but for the
memory of a job's chunks, which is the I/O thread's from ``Load`` to ``Loaded``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtiers.chunks import Key
from kvtiers.errors import Kind
from kvtiers.events import MissReason
from kvtiers.tiers.p2p.protocol import Role
from kvtiers.tiers.p2p.roles import Source


class Moved(NamedTuple):
    """Chunks, and their bytes, since the start; never changed, but replaced."""

    chunks: int = 0
    bytes: int = 0

    def plus(self, chunks: int, nbytes: int) -> "Moved":
        """With so many more."""
        return Moved(self.chunks + chunks, self.bytes + nbytes)


# -- scheduler thread -> I/O thread ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ask:
    """Find out which of these chunks the peer has."""

    number: int
    source: Source
    keys: tuple[Key, ...]
    deadline: float


@dataclass(frozen=True, slots=True)
class Load:
    """Bring these chunks into these views."""

    job: int
    source: Source
    keys: tuple[Key, ...]
    views: Sequence[memoryview]
    deadline: float


@dataclass(frozen=True, slots=True)
class Over:
    """Nothing more will be asked for this request."""

    source: Source


# -- I/O thread -> scheduler thread ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answered:
    """Chunks of a question that are known now: whether the peer has them, or will."""

    number: int
    found: dict[Key, bool]
    why: MissReason = MissReason.ABSENT
    """Why those are not to be had that it does not have, or did not say that it has."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a chunk did not come."""

    kind: Kind
    words: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """A part of a job ended. Each chunk of the job is in one of them."""

    job: int
    done: tuple[Key, ...]
    failed: dict[Key, Failure]
    bytes: int
    memory_in_use: bool = False


@dataclass(frozen=True, slots=True)
class Released:
    """The memory of a part that was still in use is free at last."""

    job: int


ToTier = Answered | Loaded | Released


# -- I/O thread -> serving thread ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Query:
    """A peer asks which of these can be had."""

    session: int
    question: int
    request: str
    role: Role
    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Demand:
    """A peer wants these brought."""

    session: int
    transfer: int
    request: str
    role: Role
    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Sent:
    """Chunks went out, or will not: their memory is read no more."""

    session: int
    transfer: int
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stopped:
    """A peer wants nothing more of a transfer."""

    session: int
    transfer: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A peer will ask nothing more for a request."""

    session: int
    request: str


@dataclass(frozen=True, slots=True)
class Gone:
    """A session ended: nothing of it is read any more."""

    session: int


@dataclass(frozen=True, slots=True)
class Local:
    """A ``remote_decoder`` request began here, or will store nothing more."""

    request: str
    begins: bool


ToServing = Query | Demand | Sent | Stopped | Finished | Gone | Local
