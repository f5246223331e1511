"""Where each chunk lies in the log: one number per key. Pure, not synchronised.

About 190 bytes a chunk, its key included (``make bench`` measures it).
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvtiers.chunks import PAGE_BYTES, Key
from kvtiers.tiers.fs.log.format import MAX_CHUNK_PAGES, MAX_SEGMENT_PAGES, Row, position

_CHECKSUM_BITS = 64
_PAGE_BITS = MAX_SEGMENT_PAGES.bit_length() - 1
_PAGES_BITS = MAX_CHUNK_PAGES.bit_length()
_SEGMENT_SHIFT = 1 + _PAGES_BITS + _PAGE_BITS + _CHECKSUM_BITS
_USED = 1
"""The chunk was used since it was written to this location."""


class Location(NamedTuple):
    """The payload of a chunk: segment number, first page, pages; and what vouches for it."""

    segment: int
    page: int
    pages: int
    checksum: int


def _unpack(packed: int) -> Location:
    packed >>= 1
    pages = packed & MAX_CHUNK_PAGES
    packed >>= _PAGES_BITS
    page = packed & (MAX_SEGMENT_PAGES - 1)
    packed >>= _PAGE_BITS
    return Location(packed >> _CHECKSUM_BITS, page, pages, packed & ((1 << _CHECKSUM_BITS) - 1))


def _pages(packed: int) -> int:
    return packed >> 1 & MAX_CHUNK_PAGES


Deletion = tuple[Key, int]
"""A chunk that is gone, and the position of its last row that this is said of."""


class LogIndex:
    """Key -> location, and whether it was used there.

    ``in`` may be asked on any thread, also while another thread changes the index.
    """

    def __init__(self) -> None:
        self._locations: dict[Key, int] = {}
        self._sequences: dict[int, int] = {}
        """Of the present use of each segment."""
        self.pages = 0
        """Of all chunks together."""

    def __contains__(self, key: Key) -> bool:
        return key in self._locations

    def __len__(self) -> int:
        return len(self._locations)

    def find(self, key: Key) -> Location | None:
        """Where the chunk lies; None: nowhere."""
        packed = self._locations.get(key)
        return None if packed is None else _unpack(packed)

    def put(self, segment: int, sequence: int, rows: Iterable[Row]) -> None:
        """Take in rows of this use of ``segment``, in whatever order they were completed.

        Of two locations of a chunk the later one holds; a deletion leaves what is later than it.
        """
        self._sequences[segment] = sequence
        locations, base = self._locations, segment << _CHECKSUM_BITS
        for key, page, nbytes, checksum in rows:
            known = locations.get(key)
            if not nbytes:
                if known is not None and self._position(known) <= checksum:
                    del locations[key]
                    self.pages -= _pages(known)
            elif known is None or self._position(known) <= position(sequence, page):
                pages = -(-nbytes // PAGE_BYTES)
                self.pages += pages if known is None else pages - _pages(known)
                locations[key] = (
                    ((base | checksum) << _PAGE_BITS | page) << _PAGES_BITS | pages
                ) << 1

    def _position(self, packed: int) -> int:
        at = _unpack(packed)
        return position(self._sequences[at.segment], at.page)

    def use(self, keys: Iterable[Key]) -> None:
        """These were used. Unknown keys are ignored."""
        locations = self._locations
        for key in keys:
            packed = locations.get(key)
            if packed is not None and not packed & _USED:
                locations[key] = packed | _USED

    def used_in(self, segment: int, keys: Iterable[Key]) -> list[tuple[Location, Key]]:
        """Those of ``keys`` that lie in ``segment`` and were used since they were written there."""
        there = ((self._locations.get(key, 0), key) for key in keys)
        return [
            (_unpack(packed), key)
            for packed, key in there
            if packed & _USED and packed >> _SEGMENT_SHIFT == segment
        ]

    def evict(self, segment: int, keys: Iterable[Key]) -> list[Key]:
        """Forget those of ``keys`` that lie in ``segment``; which these were."""
        locations, evicted = self._locations, []
        for key in keys:
            packed = locations.get(key)
            if packed is not None and packed >> _SEGMENT_SHIFT == segment:
                del locations[key]
                self.pages -= _pages(packed)
                evicted.append(key)
        return evicted

    def drop(self, keys: Iterable[Key]) -> list[Deletion]:
        """Forget these; returns those that were known, and up to where that forgets them."""
        found = ((key, self._locations.pop(key, None)) for key in keys)
        gone = [(key, packed) for key, packed in found if packed is not None]
        self.pages -= sum(_pages(packed) for _, packed in gone)
        return [(key, self._position(packed)) for key, packed in gone]

    def drop_at(self, key: Key, location: Location) -> list[Deletion]:
        """Forget ``key`` if it lies there."""
        return self.drop([key]) if self.find(key) == location else []

    def clear(self) -> list[Key]:
        """Forget all; returns what was there."""
        gone = list(self._locations)
        self._locations.clear()
        self.pages = 0
        return gone

    def items(self) -> Iterator[tuple[Key, Location]]:
        """All chunks and where they lie, as they are now."""
        return ((key, _unpack(packed)) for key, packed in list(self._locations.items()))

    def check(self) -> None:
        """Raise AssertionError if a location is none."""
        for key, packed in self._locations.items():
            assert _unpack(packed).pages, f"{key.hex()} has no bytes"
        assert self.pages == sum(map(_pages, self._locations.values())), "pages do not add up"

    def __repr__(self) -> str:
        return f"<LogIndex {len(self._locations)} chunks>"
