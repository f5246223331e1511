"""What is known of one pod at one point of its stream, as bytes. Pure.

Blocks are packed as they lie in memory, eight bytes each, so a snapshot is for machines of one byte
order; which one it is stands in its version.
"""

import sys
from collections.abc import Sequence
from typing import Annotated

import msgspec

from kvtiers.index.places import MAX_PLACES

_VERSION = 1 if sys.byteorder == "little" else 2


_Natural = Annotated[int, msgspec.Meta(ge=0)]
_Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """A pod's stream up to a batch, folded."""

    seq: _Number
    """Of the last batch that is in it."""
    digest: int
    """Of that batch's payload: the pod is the same process if it still has that batch."""
    complete: bool
    groups: Sequence[tuple[_Natural, str, _Natural, _Natural]]
    """Index, kind, tokens of a block, window."""
    places: Sequence[tuple[str, str, str, _Natural, bytes]]
    """Medium, locality, ownership, group, blocks."""
    more: Sequence[tuple[_Natural, _Natural, Annotated[int, msgspec.Meta(ge=1)]]]
    """Index of a place, block, how often it is held there beyond once."""


def packed(snapshot: Snapshot) -> bytes:
    """The bytes to keep."""
    return msgspec.msgpack.encode((_VERSION, snapshot))


def unpacked(data: bytes) -> Snapshot | None:
    """What was kept; None: it is damaged, of another version, or no pod can be so."""
    try:
        version, snapshot = msgspec.msgpack.decode(data, type=tuple[int, Snapshot])
    except (msgspec.DecodeError, ValueError):
        return None
    whole = len(snapshot.places) <= MAX_PLACES and all(
        len(place[-1]) % 8 == 0 for place in snapshot.places
    )
    return snapshot if whole and version == _VERSION else None
