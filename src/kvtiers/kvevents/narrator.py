"""What engines are told of tiers: a fold over our events, and the difference to what was said.

The table knows of each chunk which tiers have it and of which that was said. What to say is the
difference, so nothing is said twice, and nothing that happened is lost when there was no time to
say it: at worst it is found by going through the table. Owned by one thread.
"""

import logging
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvtiers.chunks import Key, key_group
from kvtiers.events import ChunksFound, ChunksRemoved, ChunksStored, Event, TierReachable
from kvtiers.kvevents import spans
from kvtiers.kvevents.descriptions import Damaged, Description, encode
from kvtiers.kvevents.messages import KVEvent
from kvtiers.kvevents.sidefile import SideFile
from kvtiers.kvevents.spans import Described, Group, Place
from kvtiers.kvevents.table import (
    EXPECTED,
    MAX_TIERS,
    UNKNOWN,
    Known,
    ResidencyTable,
    chunk_name,
    final_hash,
    named,
)

_log = logging.getLogger("kvtiers")

MAX_CHANGED = 65_536
"""Changes that are remembered one by one; beyond that the table is gone through."""
MAX_WANTED = 65_536
MAX_RECENT = 1024


class Narrator:
    """Takes events and descriptions, gives what is to be said.

    With a ``side`` file it tells of blocks, with tokens, where it was told what a chunk consists
    of; else, and of other chunks, of the hash that ends the chunk. Hashes are 64-bit integers.
    """

    def __init__(
        self, places: Mapping[str, Place], groups: Mapping[int, Group], side: SideFile | None
    ) -> None:
        """``places``: the tiers that are told of, by label. Raises OSError if ``side`` fails."""
        self._bits: dict[str, int] = {}
        self._places: dict[int, Place] = {}
        for label, place in places.items():
            self.add_place(label, place)
        self._groups = groups
        self._side = side
        self._table = ResidencyTable()
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
        self._recent: dict[int, Description] = {}
        """What was described lately, by place: most of it is told of at once."""
        self._dropped = 0
        self._compacted_len = 0
        self.wanted: set[Key] = set()
        """Chunks that are there and have no description. Others may read it on any thread."""
        if side is not None:
            self._load(side)

    def _load(self, side: SideFile) -> None:
        for place, record in side.load():
            name = named(int.from_bytes(record.tail[-8:], "big"), record.group)
            start = record.description.start
            self._table.put(name, Known(place, start, 0, 0, record.group))
        self._compacted_len = len(self._table)

    def add_place(self, label: str, place: Place) -> None:
        """Tell of this tier too. Raises ValueError if there are too many."""
        if label in self._bits:
            return
        if len(self._bits) >= MAX_TIERS:
            raise ValueError(f"{label} is a tier too many: only {MAX_TIERS} can be told of")
        bit = 1 << len(self._bits)
        self._bits[label], self._places[bit] = bit, place

    # -- in ------------------------------------------------------------------------------------

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
            known = self._table.get(name) or UNKNOWN
            resident = known.resident & ~EXPECTED | bit
            if resident != known.resident:
                kept = Known(known.place, known.start, resident, known.said, key_group(key))
                self._table.put(name, kept)
            if not known.said & bit:
                self._note(name)
            if not known.place and self._side is not None and len(self.wanted) < MAX_WANTED:
                self.wanted.add(key)

    def _left(self, tier: str, keys: Iterable[Key]) -> None:
        bit = self._bits.get(tier, 0)
        for key in keys:
            name = chunk_name(key)
            known = self._table.get(name)
            if known is None or not known.resident & bit:
                continue
            self._keep(name, known._replace(resident=known.resident & ~bit))
            if known.said & bit:
                self._note(name)
            if not known.resident & ~bit:
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
        if self._side is None:
            return
        name = chunk_name(key)
        known = self._table.get(name) or UNKNOWN
        flag = EXPECTED if expected else 0
        if known.place:
            if flag & ~known.resident:
                self._table.put(name, known._replace(resident=known.resident | flag))
            return
        place = self._write(encode(key, description))
        if place is None:
            return
        if len(self._recent) >= MAX_RECENT:
            self._recent.clear()
        self._recent[place] = description
        known = self._table.get(name) or UNKNOWN  # making room may have changed the table
        group = key_group(key)
        for bit in self._places:
            if known.said & bit:  # it was told of by its hash alone: that is taken back
                self._withdrawn.append((bit, group, final_hash(name, group)))
        resident = known.resident | flag
        self._table.put(name, Known(place, description.start, resident, 0, group))
        self.wanted.discard(key)
        if known.resident & ~EXPECTED:
            self._note(name)

    def _write(self, record: bytes) -> int | None:
        assert self._side is not None
        place = self._side.append(record)
        if place is None and 4 * self._dropped >= self._compacted_len:
            self._make_room(self._side)
            place = self._side.append(record)
        return place

    def _make_room(self, side: SideFile) -> None:
        """Forget what describes no chunk that is there; if need be also of those that may come."""
        self._compact(side, 0xFFFF)
        if 4 * side.nbytes > 3 * side.max_bytes:
            self._compact(side, ~EXPECTED)

    def _compact(self, side: SideFile, mask: int) -> None:
        self._recent.clear()
        own = {}
        for name, known in self._table.entries():
            if not (known.resident & mask or known.said):
                self._table.drop(name)
            elif known.place and side.is_own(known.place):
                own[known.place] = name
        for before, now in [*side.compact(sorted(own))]:
            name = own[before]
            known = self._table.get(name) or UNKNOWN
            self._table.put(name, known._replace(place=now))
        self._dropped, self._compacted_len = 0, len(own)

    def _keep(self, name: int, known: Known) -> None:
        if known.resident or known.said:
            self._table.put(name, known)
        else:
            self._table.drop(name)
            self._dropped += 1

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
                self._keep(name, known._replace(said=self._shown(known)))

    def has_said(self, tier: str, key: Key) -> bool:
        """Whether it was said that the tier has this, and still holds."""
        known = self._table.get(chunk_name(key)) or UNKNOWN
        return bool(known.said & self._bits.get(tier, 0))

    def start_of(self, key: Key) -> int | None:
        """The position of the first token, if the chunk is described."""
        known = self._table.get(chunk_name(key)) or UNKNOWN
        return known.start if known.place else None

    def once_more(self, tier: str, key: Key) -> list[KVEvent]:
        """The events that say that the tier has this."""
        name = chunk_name(key)
        known = self._table.get(name) or UNKNOWN
        return self._events([(name, known._replace(said=0), self._bits[tier])])

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
                changes.append((name, known, change))
                self._keep(name, known._replace(said=known.said ^ change))
        return told + self._events(changes)

    def inventory(self, max_chunks: int, max_parts: int) -> Iterator[list[KVEvent]]:
        """All that was said and still holds, parents first, in parts about so many chunks each.

        There are at most ``max_parts`` of them, 1 or more; for that they may be larger. All must
        be consumed before anything else is called.
        """
        names = self._in_order((name, known) for name, known in self._table.entries() if known.said)
        step = max(max_chunks, -(-len(names) // max_parts))
        for at in range(0, len(names), step):
            part = []
            for name in names[at : at + step]:
                known = self._table.get(name) or UNKNOWN
                part.append((name, known._replace(said=0), known.said))
            yield self._events(part)

    @property
    def said(self) -> int:
        """Chunks of which something was said and still holds."""
        return sum(1 for _, known in self._table.entries() if known.said)

    def _shown(self, known: Known) -> int:
        return known.resident & ~(EXPECTED | self._unreachable | self._finding | self._hidden)

    def _next(self, max_chunks: int) -> Sequence[int]:
        if self._hidden and not (self._to_sweep or self._sweep or self._changed):
            self._hidden = 0
            self._go_through_all()
        if self._to_sweep and self._swept >= len(self._sweep):
            self._to_sweep, self._swept = False, 0
            differing = ((n, k) for n, k in self._table.entries() if self._shown(k) != k.said)
            self._sweep = self._in_order(differing)
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

    def _in_order(self, entries: Iterable[tuple[int, Known]]) -> "array[int]":
        """Names by where the chunks begin: parents come before children."""
        packed = sorted(known.start << 64 | name for name, known in entries)
        return array("Q", (p & ((1 << 64) - 1) for p in packed))

    def _events(self, changes: Sequence[tuple[int, Known, int]]) -> list[KVEvent]:
        """Events for chunks, what is known of them, and the tiers of which something changed."""
        gone: dict[tuple[int, int], list[int]] = {}
        come: dict[int, list[Described]] = {}
        bare: list[KVEvent] = []
        for name, known, change in changes:
            description = self._description(known)
            end = final_hash(name, known.group)
            for bit, place in self._places.items():
                if not change & bit:
                    continue
                if known.said & bit:
                    hashes = [end] if description is None else description.hashes
                    gone.setdefault((bit, known.group), []).extend(hashes)
                elif description is None:
                    bare.append(spans.bare(end, known.group, place))
                else:
                    come.setdefault(bit, []).append(Described(known.group, description))
        told: list[KVEvent] = []
        for (bit, group), hashes in gone.items():
            told += spans.removed(hashes, group, self._places[bit])
        told += spans.stored([(self._places[b], c) for b, c in come.items()], self._groups)
        return told + bare

    def _description(self, known: Known) -> Description | None:
        if not known.place or self._side is None:
            return None
        recent = self._recent.get(known.place)
        if recent is not None:
            return recent
        try:
            return self._side.read(known.place).description
        except (Damaged, OSError) as e:
            _log.warning("what describes a chunk cannot be read, its hash must do: %s", e)
            return None

    # -- life ----------------------------------------------------------------------------------

    def flush(self) -> None:
        """Give descriptions to the system, so that they outlive the process."""
        if self._side is not None:
            self._side.flush()

    def close(self) -> None:
        """Let go of the side file."""
        if self._side is not None:
            self._side.close()

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
        if self._side is not None:
            self._side.check()

    def __repr__(self) -> str:
        ahead = len(self._changed) + len(self._sweep) - self._swept
        return f"<Narrator {len(self._table)} chunks, {ahead} changes to say, {self._side!r}>"
