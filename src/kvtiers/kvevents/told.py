"""What readers were told and still holds, and changes of it as events. It changes nothing."""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from kvtiers.chunks import Key
from kvtiers.kvevents import spans
from kvtiers.kvevents.descriptions import Description
from kvtiers.kvevents.messages import KVEvent
from kvtiers.kvevents.shelf import Shelf
from kvtiers.kvevents.spans import Described, Group, Place
from kvtiers.kvevents.table import UNKNOWN, Known, ResidencyTable, chunk_name, final_hash

_NAME = (1 << 64) - 1


class Change(NamedTuple):
    """What is to be said of one chunk."""

    name: int
    known: Known
    """With what was said of it before."""
    bits: int
    """The tiers of which something changed."""


class Told:
    """Looks at what the narrator owns, on its thread."""

    def __init__(
        self,
        table: ResidencyTable,
        shelf: Shelf | None,
        bits: Mapping[str, int],
        places: Mapping[int, Place],
        groups: Mapping[int, Group],
    ) -> None:
        """``bits``: of the tiers that are told of, by label; ``places``: of the same, by bit."""
        self._table = table
        self._shelf = shelf
        self._bits = bits
        self._places = places
        self._groups = groups

    def has(self, tier: str, key: Key) -> bool:
        """Whether it was said that the tier has this, and still holds."""
        known = self._table.get(chunk_name(key)) or UNKNOWN
        return bool(known.said & self._bits.get(tier, 0))

    @property
    def said(self) -> int:
        """Chunks of which something was said and still holds."""
        return sum(1 for _, known in self._table.entries() if known.said)

    def inventory(self, max_chunks: int, max_parts: int) -> Iterator[list[KVEvent]]:
        """All that was said and still holds, parents first, in parts about so many chunks each.

        There are at most ``max_parts`` of them, 1 or more; for that they may be larger. All must
        be consumed before anything else is called.
        """
        names = in_order((name, known) for name, known in self._table.entries() if known.said)
        step = max(max_chunks, -(-len(names) // max_parts))
        for at in range(0, len(names), step):
            part = []
            for name in names[at : at + step]:
                known = self._table.get(name) or UNKNOWN
                part.append(Change(name, known._replace(said=0), known.said))
            yield self.events(part)

    def once_more(self, tier: str, key: Key) -> list[KVEvent]:
        """The events that say that the tier has this."""
        name = chunk_name(key)
        known = self._table.get(name) or UNKNOWN
        return self.events([Change(name, known._replace(said=0), self._bits[tier])])

    def events(self, changes: Iterable[Change]) -> list[KVEvent]:
        """What says these changes: what left, then what came, parents first."""
        gone: dict[tuple[int, int], list[int]] = {}
        come: dict[int, list[Described]] = {}
        bare: list[KVEvent] = []
        for name, known, bits in changes:
            end = final_hash(name, known.group)
            left = bits & known.said
            hashes = self._hashes(known, end) if left else ()
            description = self._description(known) if bits != left else None
            for bit, place in self._places.items():
                if left & bit:
                    gone.setdefault((bit, known.group), []).extend(hashes)
                elif not bits & bit:
                    continue
                elif description is None:
                    bare.append(spans.bare(end, known.group, place))
                else:
                    come.setdefault(bit, []).append(Described(known.group, description))
        told: list[KVEvent] = []
        for (bit, group), ends in gone.items():
            told += spans.removed(ends, group, self._places[bit])
        told += spans.stored([(self._places[b], c) for b, c in come.items()], self._groups)
        return told + bare

    def _hashes(self, known: Known, end: int) -> Sequence[int]:
        if not known.place or self._shelf is None:
            return [end]
        return self._shelf.hashes(known.place, end)

    def _description(self, known: Known) -> Description | None:
        if not known.place or self._shelf is None:
            return None
        return self._shelf.get(known.place)

    def __repr__(self) -> str:
        return f"<Told of {len(self._places)} tiers>"


def in_order(entries: Iterable[tuple[int, Known]]) -> "array[int]":
    """Names by where the chunks begin: parents come before children."""
    packed = sorted(known.start << 64 | name for name, known in entries)
    return array("Q", (p & _NAME for p in packed))
