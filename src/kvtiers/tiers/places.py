"""What a tool sees of a tier's storage, without an engine and without a model.

A place holds namespaces, which say in their manifests what they are, and chunks, whose key,
namespace and bytes are vouched for by what is stored beside them. Looking at it locks nothing and
changes nothing: engines may be at work there all the while, and what they take away meanwhile is
not an error. Chunks are added and repaired through a ``ChunkStore``, the same one that an engine
uses; what leaves to make room leaves by the maintenance of the layout. :mod:`kvtiers.tiers.urls`
opens places.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from kvtiers.chunks import ChunkLayout, Key, Namespace
from kvtiers.errors import KVTiersError
from kvtiers.tiers.base import ChunkStore, Entry
from kvtiers.tiers.options import require

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
    """Manifests, indexes, locks, and what somebody put among them."""
    TRIAL = "trial"
    """Of a measurement, or left by one that was killed: no capacity counts it."""
    FOREIGN = "foreign"
    """Not ours: no capacity counts it."""


@dataclass(frozen=True, slots=True)
class Found:
    """A namespace of a place. ``namespace`` is None if its manifest is not what its id says."""

    id: str
    namespace: Namespace | None
    problem: str = ""
    """Why there is none: one sentence."""


def parse_manifest(manifest: bytes) -> Namespace | None:
    """The namespace that a manifest describes; None if it is none."""
    try:
        fields = json.loads(manifest)
        return Namespace(fields) if isinstance(fields, dict) else None
    except (ValueError, RecursionError):
        return None


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of files (their lengths, as ``capacity_bytes`` counts them) of one part."""

    namespace: str
    """Its id; empty for what lies beside the namespaces."""
    part: Part
    files: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Fault:
    """Damage in what is no chunk, such as the table of a segment."""

    namespace: str
    """Its id; empty if that is not known any more."""
    problem: str
    """One sentence, with the file."""
    repair: str = ""
    """What mending does to it, such as ``removed``; empty: nothing."""
    outcome: str = "left"
    """What became of it."""


@dataclass(frozen=True, slots=True)
class Aim:
    """What is to leave. None: no such bound."""

    max_bytes: int | None = None
    """Of all that lies there, or in the namespace."""
    older_than_s: float | None = None
    """What was not used for so long."""
    namespace: str | None = None
    """Only this one counts and leaves; its id."""

    def refuse_nonsense(self) -> None:
        """Raise ConfigError for a number below zero."""
        for key in ("max_bytes", "older_than_s"):
            value = getattr(self, key)
            require(value is None or value >= 0, key, f"is {value}: give 0 or more")


def how_many_leave(
    oldest_first: Iterable[tuple[float, int]], used: int, aim: Aim, now: float
) -> int:
    """Of what was last used (or written) when, and has so many bytes, how many leave where ``used``
    bytes lie.
    """
    count = 0
    for used_at, nbytes in oldest_first:
        old = aim.older_than_s is not None and used_at < now - aim.older_than_s
        if not old and (aim.max_bytes is None or used <= aim.max_bytes):
            break  # the rest is younger, and fits
        count += 1
        used -= nbytes
    return count


Left = tuple[str, int]
"""A name below the root, and its bytes."""


@dataclass(slots=True)
class Report:
    """What a maintenance pass removed, or in a dry run would remove."""

    before_bytes: int = 0
    """What lay there, or in the namespace that was named."""
    temporary: list[Left] = field(default_factory=list)
    """Of writers that are dead."""
    quarantined: list[Left] = field(default_factory=list)
    chunks: list[Left] = field(default_factory=list)
    """Files of chunks, in the order in which they left."""
    segments: list[Left] = field(default_factory=list)
    """Of a log, with the chunks in them, in the order in which they left."""
    packs: list[Left] = field(default_factory=list)
    """Objects that hold many small chunks, in the order in which they left."""
    by_namespace: Counter[str] = field(default_factory=Counter)
    """Chunks that left, on their own or with their segments or packs."""
    empty_folders: list[str] = field(default_factory=list)
    in_use: int = 0
    """Chunks that would have left, but were promised to an engine or used meanwhile."""
    failed: list[str] = field(default_factory=list)
    """What could not be deleted."""
    problems: list[str] = field(default_factory=list)
    """What else went wrong, such as a folder that was not counted; a sentence each."""

    @property
    def bytes(self) -> int:
        """All that left, or would leave."""
        lists = self.temporary, self.quarantined, self.chunks, self.segments, self.packs
        return sum(size for left in lists for _, size in left)


def unheard(done: int) -> None:
    """Progress that nobody follows."""


Payload = memoryview | KVTiersError
"""A verified chunk, page-aligned, valid until the next one is asked for; or why there is none."""


class Place(Protocol):
    """Storage of a tier, seen from outside. Every method may block and may raise KVTiersError.

    Implementer must: in all but ``open_store``, ``repair``, ``mend`` and ``maintain`` open files
    for reading only, stop no engine, and hold one chunk in memory, or 32 MiB; say through
    ``Complain`` what could not be looked at, and go on.
    """

    url: str
    """As the user may write it again."""
    layout: str
    """How bytes lie there, such as ``files``."""
    options: Mapping[str, Any]
    """What configures a tier at this place: an entry of ``secondary_tiers``."""
    site: tuple[str, ...]
    """Where it lies: what lies inside it begins with the same parts."""

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

    def repair(self, namespace: Namespace, damaged: Sequence[Entry]) -> list[str]:
        """Read these again, and take away what is damaged still, as for an engine.

        What became of each, in two or three words. Raises KVTiersError as ``open_store`` does.
        """

    def usage(self, advance: Callable[[int], None] = unheard) -> list[Usage]:
        """Bytes by namespace and part; parts without files are left out. ``advance``: of files."""

    def segments(self) -> list[int]:
        """Lengths of the segments, where chunks lie in any."""

    def capacity(self) -> int | None:
        """Bytes that the URL states as the bound, or else the engines here; None: nobody does."""

    def bound(self) -> int | None:
        """Bytes that a store opened here keeps within, by forgetting; None: no such bound."""

    def free(self) -> tuple[int, int] | None:
        """Bytes that are free where it lies, and of all of it; None: nobody knows."""

    def owner(self) -> int | None:
        """The living process that has the place for itself, so that no other may write; None if
        nobody has, 0 if it does not say who it is.
        """

    def faults(self, namespace_id: str) -> Iterator[Fault]:
        """What is damaged besides chunks, of one namespace; with an empty id: of none any more."""

    def mend(self, faults: Sequence[Fault]) -> list[Fault]:
        """The same, with what became of each. Raises KVTiersError if somebody owns the place."""

    def maintain(
        self,
        aim: Aim,
        *,
        dry_run: bool = False,
        advance: Callable[[int], None] = unheard,
    ) -> Report:
        """Remove what dead writers and tools left, and what is to leave; ``advance`` hears of
        bytes.

        Raises ConfigError for a wrong aim or if an engine owns the place; KVTiersError.
        """

    def open_store(self, namespace: Namespace, layout: ChunkLayout) -> ChunkStore:
        """A store to write to and delete from; the caller closes it.

        ``layout`` limits how large a chunk may be. Raises KVTiersError, naming the process, if an
        engine owns the place and shares it with nobody.
        """

    def backdate(self, namespace_id: str, copies: Sequence[Entry]) -> None:
        """These were just written, as copies of chunks that were used when the entries say.

        A layout that keeps no time of single chunks leaves it at that. What an engine found
        meanwhile stays as it is.
        """
