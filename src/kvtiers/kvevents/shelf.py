"""What chunks consist of, by the places that the table has of them; makes room when it is full."""

import logging
from collections.abc import Iterator, Sequence

from kvtiers.chunks import Key, key_digest
from kvtiers.hashing import event_hash
from kvtiers.kvevents.descriptions import Damaged, Description, encode
from kvtiers.kvevents.sidefile import SideFile
from kvtiers.kvevents.table import EXPECTED, UNKNOWN, Known, ResidencyTable, named

_log = logging.getLogger("kvtiers")

MAX_RECENT = 1024

_ONE_BLOCK = 1 << 62
"""In a place: the chunk is one block, whose hash is the end of the key."""


class Shelf:
    """Descriptions in a side file, for the chunks of one table. Owned by one thread."""

    def __init__(self, side: SideFile, table: ResidencyTable) -> None:
        """What is in the file already is there after ``recall``."""
        self._side = side
        self._table = table
        self._recent: dict[int, Description] = {}
        """What was described lately, by place: most of it is told of at once."""
        self._dropped = 0
        """Chunks that the table forgot since room was made last."""
        self._compacted_len = 0

    def recall(self) -> Iterator[None]:
        """Have the table learn of all that is in the file, one chunk for each item.

        A full file takes a minute and more: the engine's start must not wait for it. To be gone
        through before anything else is asked. Raises OSError.
        """
        for place, record in self._side.load():
            end = int.from_bytes(record.tail[-8:], "big")
            place |= _block_flag(record.description, end)
            known = Known(place, record.description.start, 0, 0, record.group)
            self._table.put(named(end, record.group), known)
            yield
        self._compacted_len = len(self._table)

    def put(self, key: Key, description: Description) -> int | None:
        """The place of a description from now on; None: there is no room for it.

        Making room may change the table. Raises ValueError if it is not sound, OSError.
        """
        record = encode(key, description)
        place = self._side.append(record)
        if place is None and 4 * self._dropped >= self._compacted_len:
            # If that fails it is not tried for each chunk again.
            self._dropped, self._compacted_len = 0, max(1, len(self._table))
            self._make_room()
            place = self._side.append(record)
        if place is None:
            return None
        place |= _block_flag(description, event_hash(key_digest(key)))
        if len(self._recent) >= MAX_RECENT:
            self._recent.clear()
        self._recent[place] = description
        return place

    def get(self, place: int) -> Description | None:
        """What is there; None, said in the log, if it cannot be read any more."""
        recent = self._recent.get(place)
        if recent is not None:
            return recent
        try:
            return self._side.read(place & ~_ONE_BLOCK).description
        except (Damaged, OSError) as e:
            _log.warning("what describes a chunk cannot be read, its hash must do: %s", e)
            return None

    def hashes(self, place: int, end: int) -> Sequence[int]:
        """Of the blocks of the chunk there, whose key ends with ``end``."""
        description = None if place & _ONE_BLOCK else self.get(place)
        return [end] if description is None else description.hashes

    def dropped(self) -> None:
        """The table forgot a chunk: making room may have become worth it."""
        self._dropped += 1

    def _make_room(self) -> None:
        """Forget what describes no chunk that is there; if need be also of those that may come."""
        self._compact(0xFFFF)
        if 4 * self._side.nbytes > 3 * self._side.max_bytes:
            self._compact(~EXPECTED)

    def _compact(self, mask: int) -> None:
        self._recent.clear()
        own = dict(self._kept(mask))
        for before, now in [*self._side.compact(sorted(own))]:
            name = own[before]
            known = self._table.get(name) or UNKNOWN
            self._table.put(name, known._replace(place=now | known.place & _ONE_BLOCK))
        self._dropped, self._compacted_len = 0, max(1, len(own))

    def _kept(self, mask: int) -> Iterator[tuple[int, int]]:
        """Place and name of what stays in the own file; chunks that nothing holds are dropped."""
        for name, known in self._table.entries():
            if not (known.resident & mask or known.said):
                self._table.drop(name)
            elif known.place and self._side.is_own(known.place & ~_ONE_BLOCK):
                yield known.place & ~_ONE_BLOCK, name

    def flush(self) -> None:
        """Give descriptions to the system, so that they outlive the process. Raises OSError."""
        self._side.flush()

    def close(self) -> None:
        """Let go of the side file. Raises OSError."""
        self._side.close()

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        assert len(self._recent) <= MAX_RECENT, "more is kept at hand than the bound"
        self._side.check()

    def __repr__(self) -> str:
        return f"<Shelf {len(self._recent)} at hand, {self._side!r}>"


def _block_flag(description: Description, end: int) -> int:
    return _ONE_BLOCK if len(description.hashes) == 1 and description.hashes[0] == end else 0
