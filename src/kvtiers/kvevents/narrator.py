"""What engines are told of tiers: a fold over our events, and the difference to what was said.

The table knows of each chunk which tiers have it and of which that was said. What to say is the
difference, so nothing is said twice, and nothing that happened is lost when there was no time to
say it: at worst it is found by going through the table. Owned by one thread.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvtiers.chunks import Key, key_group
from kvtiers.events import ChunksFound, ChunksRemoved, ChunksStored, Event, TierReachable
from kvtiers.kvevents import spans
from kvtiers.kvevents.descriptions import Description
from kvtiers.kvevents.messages import KVEvent
from kvtiers.kvevents.shelf import Shelf
from kvtiers.kvevents.sidefile import SideFile
from kvtiers.kvevents.spans import Group, Place
from kvtiers.kvevents.table import (
    EXPECTED,
    MAX_TIERS,
    UNKNOWN,
    Known,
    ResidencyTable,
    chunk_name,
    final_hash,
)
from kvtiers.kvevents.told import Change, Told, in_order

MAX_CHANGED = 65_536
"""Changes that are remembered one by one; beyond that the table is gone through."""
MAX_WANTED = 65_536


class Narrator:
    """Takes events and descriptions, gives what is to be said.

    With a ``side`` file it tells of blocks, with tokens, where it was told what a chunk consists
    of; else, and of other chunks, of the hash that ends the chunk. Hashes are 64-bit integers.
    """

    def __init__(
        self, places: Mapping[str, Place], groups: Mapping[int, Group], side: SideFile | None
    ) -> None:
        """``places``: the tiers that are told of, by label.

        ``recall`` is to be gone through before news are taken.
        """
        self._table = ResidencyTable()
        self._shelf = None if side is None else Shelf(side, self._table)
        self._bits: dict[str, int] = {}
        self._places: dict[int, Place] = {}
        self.told = Told(self._table, self._shelf, self._bits, self._places, groups)
        """What was said and still holds. To look at, on the owner's thread."""
        for label, place in places.items():
            self.add_place(label, place)
        self._unreachable = 0
        """Tiers of which nothing can be had now."""
        self._finding = 0
        """Tiers whose start-up scan is under way: told of when it is over, parents first."""
        self._hidden = 0
        """Tiers of which all is being taken back, to be said again."""
        self._changed: dict[int, None] = {}
        self._to_sweep = False
        self._sweep = array("Q")
        self._swept = 0
        self._withdrawn: list[tuple[int, int, int]] = []
        self.wanted: set[Key] = set()
        """Chunks that are there and have no description. Others may read it on any thread."""

    def add_place(self, label: str, place: Place) -> None:
        """Tell of this tier too. Raises ValueError if there are too many."""
        if label in self._bits:
            return
        if len(self._bits) >= MAX_TIERS:
            raise ValueError(f"{label} is a tier too many: only {MAX_TIERS} can be told of")
        bit = 1 << len(self._bits)
        self._bits[label], self._places[bit] = bit, place

    # -- in ------------------------------------------------------------------------------------

    def recall(self) -> Iterator[None]:
        """Take up what was described before, one chunk for each item. Raises OSError."""
        if self._shelf is not None:
            yield from self._shelf.recall()

    def take(self, event: Event) -> None:
        """Something happened."""
        if isinstance(event, ChunksStored):
            self._arrived(event.tier, event.keys)
        elif isinstance(event, ChunksRemoved):
            self._left(event.tier, event.keys)
        elif isinstance(event, ChunksFound):
            self._found(event)
        elif isinstance(event, TierReachable):
            self._reached(event)

    def _arrived(self, tier: str, keys: Iterable[Key]) -> None:
        bit = self._bits.get(tier, 0)
        if not bit:
            return
        for key in keys:
            name = chunk_name(key)
            known = self._table.get(name)
            if known is None:
                known = Known(resident=bit, group=key_group(key))
                self._table.put(name, known)
            elif known.resident & (bit | EXPECTED) != bit:
                self._table.mark(name, known.resident & ~EXPECTED | bit, known.said)
            if not known.said & bit:
                self._note(name)
            if not known.place and self._shelf is not None and len(self.wanted) < MAX_WANTED:
                self.wanted.add(key)

    def _left(self, tier: str, keys: Iterable[Key]) -> None:
        bit = self._bits.get(tier, 0)
        for key in keys:
            name = chunk_name(key)
            known = self._table.get(name)
            if known is None or not known.resident & bit:
                continue
            resident = known.resident & ~bit
            self._keep(name, resident, known.said)
            if known.said & bit:
                self._note(name)
            if not resident:
                self.wanted.discard(key)

    def recount(self, tier: str, keys: Iterable[Key]) -> Iterator[None]:
        """The tier has these and no others, whatever was heard; one chunk for each item.

        To be gone through before anything else is asked.
        """
        bit, here = self._bits.get(tier, 0), list(keys)
        names = {chunk_name(key) for key in here}
        for name, known in self._table.entries():
            if known.resident & bit and name not in names:
                self._keep(name, known.resident & ~bit, known.said)
                if known.said & bit:
                    self._note(name)
            yield
        for key in here:
            self._arrived(tier, (key,))
            yield
        for key in [*self.wanted]:
            known = self._table.get(chunk_name(key)) or UNKNOWN
            if not known.resident & ~EXPECTED:
                self.wanted.discard(key)

    def _found(self, event: ChunksFound) -> None:
        bit = self._bits.get(event.tier, 0)
        if not event.complete:
            self._finding |= bit
        self._arrived(event.tier, event.keys)
        if event.complete and self._finding & bit:
            self._finding &= ~bit
            self._go_through_all()

    def _reached(self, event: TierReachable) -> None:
        bit = self._bits.get(event.tier, 0)
        if bool(self._unreachable & bit) is event.reachable and bit:
            self._unreachable ^= bit
            self._go_through_all()

    def describe(self, key: Key, description: Description, *, expected: bool) -> None:
        """What a chunk consists of; ``expected``: it is about to be stored somewhere."""
        if self._shelf is None:
            return
        name = chunk_name(key)
        known = self._table.get(name) or UNKNOWN
        flag = EXPECTED if expected else 0
        if known.place:
            if flag & ~known.resident:
                self._table.mark(name, known.resident | flag, known.said)
            return
        place = self._shelf.put(key, description)
        if place is None:
            return
        group = key_group(key)
        for bit in self._places if known.said else ():
            if known.said & bit:  # it was told of by its hash alone: that is taken back
                self._withdrawn.append((bit, group, final_hash(name, group)))
        resident = known.resident | flag
        self._table.put(name, Known(place, description.start, resident, 0, group))
        self.wanted.discard(key)
        if known.resident & ~EXPECTED:
            self._note(name)

    def _keep(self, name: int, resident: int, said: int) -> None:
        if resident or said:
            self._table.mark(name, resident, said)
        else:
            self._table.drop(name)
            if self._shelf is not None:
                self._shelf.dropped()

    def _note(self, name: int) -> None:
        if self._to_sweep:
            return
        self._changed[name] = None
        if len(self._changed) > MAX_CHANGED:
            self._go_through_all()

    def _go_through_all(self) -> None:
        self._to_sweep = True
        self._changed.clear()

    # -- out -----------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether there may be something to say."""
        ahead = self._to_sweep or self._swept < len(self._sweep)
        return bool(ahead or self._changed or self._withdrawn or self._hidden)

    def renew(self) -> None:
        """Take back all that was said, then say it again.

        For readers that have forgotten some of it: what was said since is not said twice so.
        """
        self._hidden = sum(self._places)
        self._go_through_all()

    def settle(self) -> None:
        """All that there is to say was said by others."""
        changed, self._changed = self._changed, {}
        self._withdrawn.clear()
        names = [n for n, _ in self._table.entries()] if self._to_sweep else changed
        self._to_sweep = False
        for name in names:
            known = self._table.get(name)
            if known is not None:
                self._keep(name, known.resident, self._shown(known))

    def start_of(self, key: Key) -> int | None:
        """The position of the first token, if the chunk is described."""
        known = self._table.get(chunk_name(key)) or UNKNOWN
        return known.start if known.place else None

    def speak(self, max_chunks: int) -> list[KVEvent]:
        """The next things to say, about at most so many chunks."""
        withdrawn, self._withdrawn = self._withdrawn, []
        told: list[KVEvent] = []
        for bit, group, block_hash in withdrawn:
            told += spans.removed([block_hash], group, self._places[bit])
        names = self._next(max_chunks)
        changes = []
        for name in names:
            known = self._table.get(name)
            if known is None:
                continue
            change = self._shown(known) ^ known.said
            if change:
                changes.append(Change(name, known, change))
                self._keep(name, known.resident, known.said ^ change)
        return told + self.told.events(changes)

    def _shown(self, known: Known) -> int:
        return known.resident & ~(EXPECTED | self._unreachable | self._finding | self._hidden)

    def _next(self, max_chunks: int) -> Sequence[int]:
        if self._hidden and not (self._to_sweep or self._sweep or self._changed):
            self._hidden = 0
            self._go_through_all()
        if self._to_sweep and self._swept >= len(self._sweep):
            self._to_sweep, self._swept = False, 0
            differing = ((n, k) for n, k in self._table.entries() if self._shown(k) != k.said)
            self._sweep = in_order(differing)
        if self._swept < len(self._sweep):
            names = self._sweep[self._swept : self._swept + max_chunks]
            self._swept += len(names)
            if self._swept >= len(self._sweep):
                self._sweep, self._swept = array("Q"), 0
            return names
        if len(self._changed) <= max_chunks:
            changed, self._changed = self._changed, {}
            return [*changed]
        first = [name for name, _ in zip(self._changed, range(max_chunks), strict=False)]
        for name in first:
            del self._changed[name]
        return first

    # -- life ----------------------------------------------------------------------------------

    def flush(self) -> None:
        """Give descriptions to the system, so that they outlive the process. Raises OSError."""
        if self._shelf is not None:
            self._shelf.flush()

    def close(self) -> None:
        """Let go of the side file."""
        if self._shelf is not None:
            self._shelf.close()

    @property
    def nbytes(self) -> int:
        """Bytes of memory for what is known of chunks."""
        return self._table.nbytes + 8 * len(self._sweep)

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        self._table.check()
        assert len(self._changed) <= MAX_CHANGED + 1, "more changes than the bound"
        ahead = {*self._changed, *self._sweep[self._swept :]}
        for name, known in self._table.entries():
            assert known.resident or known.said or known.place, "a chunk is kept for nothing"
            if self._shown(known) != known.said and not self._to_sweep:
                assert name in ahead, "a change will never be said"
        if self._shelf is not None:
            self._shelf.check()

    def __repr__(self) -> str:
        ahead = len(self._changed) + len(self._sweep) - self._swept
        return f"<Narrator {len(self._table)} chunks, {ahead} changes to say, {self._shelf!r}>"
