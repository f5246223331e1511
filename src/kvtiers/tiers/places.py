"""What a tool sees of a tier's storage, without an engine and without a model.

A place holds namespaces, which say in their manifests what they are, and chunks, which say in
their headers what they are. Looking at it locks nothing and changes nothing: engines may be at
work there all the while, and what they take away meanwhile is not an error. Changes go through a
``ChunkStore``, the same one that an engine uses. :mod:`kvtiers.tiers.urls` opens places.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from kvtiers.chunks import ChunkLayout, Key, Namespace
from kvtiers.errors import KVTiersError
from kvtiers.tiers.base import ChunkStore, Entry

MAX_CHUNK_BYTES = 4 << 30
"""No tool takes more memory for one chunk; what claims to be larger is answered as an error."""

Complain = Callable[[str], None]
"""Told of what a place could not look at: one sentence each, any number of them."""


class Part(Enum):
    """What bytes at a place are for."""

    CHUNKS = "chunks"
    TEMPORARY = "temporary"
    """Of writes under way, or left by a writer that died."""
    RESERVED = "reserved"
    """Taken in advance, of a log: nothing is in it, or only what was deleted."""
    QUARANTINE = "quarantine"
    """Damaged chunks, put aside."""
    OTHER = "other"
    """Manifests, indexes, locks, and what is not ours."""


@dataclass(frozen=True, slots=True)
class Found:
    """A namespace of a place. ``namespace`` is None if its manifest is not what its id says."""

    id: str
    namespace: Namespace | None
    problem: str = ""
    """Why there is none: one sentence."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of files (their lengths, as ``capacity_bytes`` counts them) of one part."""

    namespace: str
    """Its id; empty for what lies beside the namespaces."""
    part: Part
    files: int
    bytes: int


Payload = memoryview | KVTiersError
"""A verified chunk, page-aligned, valid until the next one is asked for; or why there is none."""


class Place(Protocol):
    """Storage of a tier, seen from outside. Every method may block and may raise KVTiersError.

    Implementer must: in all but ``open_store`` open files for reading only, take no
    lock that an engine wants, and hold at most one chunk in memory; say through ``Complain`` what
    could not be looked at, and go on.
    """

    url: str
    """As the user may write it again."""
    layout: str
    """How bytes lie there, such as ``files``."""
    options: Mapping[str, Any]
    """What configures a tier at this place: an entry of ``secondary_tiers``."""

    def namespaces(self) -> list[Found]:
        """Every namespace, by id, damaged ones included."""

    def entries(self, namespace_id: str) -> Iterator[Entry]:
        """What is stored in one, in no order; nothing if it is absent. Bytes are of payloads."""

    def find(self, namespace_id: str, keys: Sequence[Key]) -> list[Entry | None]:
        """For each key what ``entries`` would say of it; None for what is absent."""

    def read(self, namespace_id: str, keys: Sequence[Key]) -> Iterator[tuple[Key, Payload]]:
        """Each key with its verified payload or an error, in order, one at a time.

        ``Kind.VANISHED`` for an absent chunk, ``Kind.CORRUPT`` for a damaged, short or foreign
        one, which stays where it is.
        """

    def usage(self) -> list[Usage]:
        """Bytes by namespace and part; parts without files are left out."""

    def open_store(
        self,
        namespace: Namespace,
        layout: ChunkLayout,
        wall_clock: Callable[[], float] = time.time,
    ) -> ChunkStore:
        """A store to write to and delete from; the caller closes it.

        ``layout`` limits how large a chunk may be; ``wall_clock`` says when a chunk that is
        touched was used, so that a copy may keep the time of its original. Raises KVTiersError,
        naming the process, if an engine owns the place and shares it with nobody.
        """
