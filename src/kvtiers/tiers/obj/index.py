"""Where packed chunks lie, as far as an engine knows. Pure."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvtiers.chunks import Key
from kvtiers.tiers.obj.names import PackName
from kvtiers.tiers.obj.packs import Packed


class Place(NamedTuple):
    """Where the record of a chunk lies; of length 0: the pack says that the chunk is gone."""

    pack: PackName
    offset: int
    length: int


class PackIndex:
    """The packs that were seen, and where each chunk of them lies. One thread at a time.

    Of several packs that name a chunk the latest has the word. About 250 bytes a chunk; with more
    than ``max_chunks`` the oldest packs count as seen, and what is in them as absent.
    """

    def __init__(self, max_chunks: int) -> None:
        self._max_chunks = max_chunks
        self._places: dict[Key, Place] = {}
        self._packs: dict[PackName, tuple[Key, ...]] = {}

    def has_seen(self, pack: PackName) -> bool:
        """Whether it is known what is in this pack."""
        return pack in self._packs

    @property
    def packs(self) -> set[PackName]:
        """All that were seen."""
        return set(self._packs)

    def adopt(self, pack: PackName, entries: Sequence[Packed]) -> None:
        """Take in what a pack has. Nothing changes for a pack that was seen."""
        if pack in self._packs:
            return
        self._packs[pack] = tuple(entry.key for entry in entries)
        for entry in entries:
            known = self._places.get(entry.key)
            if known is None or known.pack < pack:
                self._places[entry.key] = Place(pack, entry.offset, entry.length)
        if len(self._places) > self._max_chunks:
            self._forget_the_oldest()

    def _forget_the_oldest(self) -> None:
        for pack in sorted(self._packs):
            if len(self._places) <= self._max_chunks:
                return
            self._clear(pack)
            self._packs[pack] = ()

    def find(self, key: Key) -> Place | None:
        """Where the chunk lies; None if it is in no pack that is known, or is gone."""
        place = self._places.get(key)
        return place if place is not None and place.length else None

    def forget(self, packs: Iterable[PackName]) -> list[Key]:
        """These packs are no more. The chunks that left with them."""
        left = []
        for pack in packs:
            if pack in self._packs:
                left += self._clear(pack)
                del self._packs[pack]
        return left

    def _clear(self, pack: PackName) -> list[Key]:
        left = []
        for key in self._packs[pack]:
            place = self._places.get(key)
            if place is not None and place.pack == pack:
                del self._places[key]
                if place.length:
                    left.append(key)
        return left

    def held_by(self, pack: PackName) -> list[tuple[Key, Place]]:
        """The chunks of which this pack has the last word, and that are there."""
        places = ((key, self._places.get(key)) for key in self._packs.get(pack, ()))
        return [(k, p) for k, p in places if p is not None and p.pack == pack and p.length]

    def __len__(self) -> int:
        return len(self._places)

    def check(self) -> None:
        """Raise AssertionError if a chunk lies in a pack that is not known to have it."""
        named = {(pack, key) for pack, keys in self._packs.items() for key in keys}
        lost = {(place.pack, key) for key, place in self._places.items()} - named
        assert not lost, f"{len(lost)} chunks lie in packs that do not name them"
        bound = max(self._max_chunks, max(map(len, self._packs.values()), default=0))
        assert len(self._places) <= bound, "more chunks than the bound"

    def __repr__(self) -> str:
        return f"<PackIndex {len(self._places)} chunks in {len(self._packs)} packs>"
