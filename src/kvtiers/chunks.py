"""The vocabulary: what a chunk is called, how large it is, and what a lookup can say.

A chunk is the offload unit: ``blocks_per_chunk`` blocks of one KV-cache group. It occupies one
slot of the host region and travels between tiers as one run of ``GroupLayout.chunk_bytes`` bytes.
"""

import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NewType

PAGE_BYTES = 4096
"""Slots, chunks and file payloads are multiples of this, so that O_DIRECT needs no copy."""

Key = NewType("Key", bytes)
"""Digest of the prefix that ends with the chunk, then the group index as u32 big-endian."""

MAX_WASTE = 0.1
"""The share of host memory that may be lost to chunks being of unequal size."""

GROUP_BYTES = 4
"""How many bytes of a key, its last ones, name the group."""


def make_key(digest: bytes, group: int) -> Key:
    """Name a chunk: ``digest`` of its whole prefix and the index of its KV-cache group."""
    return Key(digest + group_suffix(group))


def group_suffix(group: int) -> bytes:
    """How the keys of the KV-cache group with this index end."""
    return group.to_bytes(GROUP_BYTES, "big")


def key_digest(key: Key) -> bytes:
    """The prefix digest in ``key``."""
    return key[:-GROUP_BYTES]


def key_group(key: Key) -> int:
    """The KV-cache group index in ``key``."""
    return int.from_bytes(key[-GROUP_BYTES:], "big")


class Lookup(Enum):
    """What a lookup knows about a chunk."""

    MISS = "miss"
    """Absent: compute it."""
    HIT = "hit"
    """Ready in the tier that was asked."""
    HIT_PENDING = "hit_pending"
    """Found, its bytes are on the way to host memory: ask again."""
    RETRY = "retry"
    """Not known yet, a tier is still being asked: ask again."""


def round_up(size: int, multiple: int = PAGE_BYTES) -> int:
    """The smallest multiple of ``multiple`` that is at least ``size`` (bytes)."""
    return -(-size // multiple) * multiple


def granule_of(chunk_sizes: Collection[int]) -> int:
    """Bytes of a granule, in which places in host memory are counted; divides or holds each chunk.

    Chunks of nearly equal size all get the place of the largest one: then a granule is a slot.
    Otherwise it is their greatest common divisor, and a slot takes several. All sizes in bytes.
    """
    largest = max(chunk_sizes)
    if largest - min(chunk_sizes) <= MAX_WASTE * largest:
        return largest
    return math.gcd(*chunk_sizes)


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Size and span of the chunks of one KV-cache group."""

    group: int
    chunk_bytes: int
    """Bytes of one chunk: its pages and zeros up to a multiple of ``PAGE_BYTES``."""
    tokens_per_chunk: int
    keeps_every_chunk: bool = True
    """False for sliding windows and recurrent state, whose old chunks are never read."""


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """Sizes of the chunks of a model, by KV-cache group index."""

    groups: tuple[GroupLayout, ...]
    _sizes: Mapping[bytes, int] = field(init=False, repr=False, compare=False)
    """Bytes of a chunk by the end of its key, so that a size costs one look-up."""

    def __post_init__(self) -> None:
        sizes = {group_suffix(g.group): g.chunk_bytes for g in self.groups}
        object.__setattr__(self, "_sizes", sizes)

    @property
    def slot_bytes(self) -> int:
        """Bytes of the largest chunk of any group."""
        return max(g.chunk_bytes for g in self.groups)

    @property
    def prefix_group(self) -> GroupLayout:
        """The group whose chunks are the tokens that count: it has all of a prefix, if any has."""
        return next((g for g in self.groups if g.keeps_every_chunk), self.groups[0])

    def chunk_bytes(self, key: Key) -> int:
        """Bytes of the chunk that ``key`` names. Raises KeyError for an unknown group."""
        return self.chunk_sizes((key,))[0]

    def chunk_sizes(self, keys: Sequence[Key]) -> list[int]:
        """``chunk_bytes`` of each key. Raises KeyError if it meets an unknown group."""
        sizes = self._sizes
        if len(sizes) == 1:
            return [self.groups[0].chunk_bytes] * len(keys)
        try:
            return [sizes[key[-GROUP_BYTES:]] for key in keys]
        except KeyError as e:
            group = int.from_bytes(e.args[0], "big")
            raise KeyError(f"no KV-cache group {group} in {self!r}") from None

    def total_bytes(self, keys: Sequence[Key]) -> int:
        """Bytes of these chunks together; one of an unknown group counts nothing."""
        sizes = self._sizes
        if len(sizes) == 1:
            return self.groups[0].chunk_bytes * len(keys)
        return sum(sizes.get(key[-GROUP_BYTES:], 0) for key in keys)


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything that must be equal for two chunks of equal key to be interchangeable.

    ``fields`` holds JSON values only. ``id`` is the first 32 hex digits of the SHA-256 of their
    canonical JSON; the fields themselves are written as a manifest beside the data.
    """

    fields: Mapping[str, Any]
    id: str = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha256(self.manifest().encode()).hexdigest()
        object.__setattr__(self, "id", digest[:32])

    def manifest(self) -> str:
        """The fields as canonical JSON (sorted keys, no spaces)."""
        return json.dumps(self.fields, sort_keys=True, separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True, slots=True)
class TierMatch:
    """One alternative of a tier filter; ``None`` matches anything."""

    medium: str | None = None
    locality: str | None = None


@dataclass(frozen=True, slots=True)
class TierFilter:
    """Which secondary tiers a request may load from (``None``: all; empty: none)."""

    matches: tuple[TierMatch, ...] | None = None

    def allows(self, medium: str | None, locality: str | None) -> bool:
        """Whether a tier of this medium and locality may be asked."""
        if self.matches is None:
            return True
        return any(
            (m.medium is None or medium is None or m.medium == medium)
            and (m.locality is None or locality is None or m.locality == locality)
            for m in self.matches
        )


class OffloadPolicy(Enum):
    """Which chunks of a request are offered for storing."""

    CHUNK = "chunk"
    """Chunks that were computed now."""
    REQUEST = "request"
    """All chunks of the request, also those that were hits."""


@dataclass(slots=True)
class RequestContext:
    """What travels with every lookup and job of a request."""

    request_id: str
    kv_transfer_params: Mapping[str, Any] | None = None
    tier_filter: TierFilter = TierFilter()
    end_of: Callable[[Key], int | None] | None = field(default=None, repr=False, compare=False)
    """Tokens of the prompt up to the end of a chunk; None: nobody knows."""
    tokens: int | None = None
    """Of its prompt, if the engine says so."""
    arrived_at: float | None = None
    """Seconds since the epoch, if the engine says so."""
    internal: bool = False
    """Asked by ourselves, as for a peer: in no ``LookupsSettled``."""
