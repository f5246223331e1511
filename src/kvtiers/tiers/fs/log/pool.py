"""Which segments there are, what each is doing, and which leaves first. Pure, not synchronised.

What may become of a segment is the table ``_NEXT``, and nothing else does. Segments leave in the
order in which they were begun, those of other namespaces like ours.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from typing import NamedTuple

from kvtiers.chunks import PAGE_BYTES, Key
from kvtiers.tiers.fs.log.format import (
    FIRST_PAGE,
    MAX_CHUNK_PAGES,
    MAX_ROWS,
    Row,
    end_of,
    fits,
    head_pages,
    pages_of,
    row_bytes,
    table_pages,
)

RUN_PAGES = 4096
"""16 MiB: what one call moves, unless a chunk is larger."""


class State(Enum):
    """What a segment is doing."""

    FREE = "free"
    """It holds nothing, and nobody reads from it."""
    TAKEN = "taken"
    """It holds nothing, and its file is about to be made, begun or removed."""
    ACTIVE = "active"
    """Chunks are appended to it."""
    FULL = "full"
    """No more are, but writes are under way."""
    SEALED = "sealed"
    DRAINING = "draining"
    """Its chunks leave; reads are under way."""


class Event(Enum):
    """What happens to a segment."""

    FOUND = "found with chunks in it"
    TAKEN = "taken"
    BEGUN = "begun"
    FILLED = "filled"
    SEALED = "sealed"
    RESUMED = "resumed"
    """The last one, when the log is opened again."""
    LEFT = "told to leave"
    FREED = "freed"


_NEXT = {
    (State.FREE, Event.FOUND): State.SEALED,
    (State.FREE, Event.TAKEN): State.TAKEN,
    (State.TAKEN, Event.FREED): State.FREE,
    (State.TAKEN, Event.BEGUN): State.ACTIVE,
    (State.ACTIVE, Event.FILLED): State.FULL,
    (State.FULL, Event.SEALED): State.SEALED,
    (State.SEALED, Event.RESUMED): State.ACTIVE,
    (State.SEALED, Event.LEFT): State.DRAINING,
    (State.DRAINING, Event.FREED): State.FREE,
}


class Run(NamedTuple):
    """Room for a head from ``page`` on and payloads right behind it; checksums are to come."""

    page: int
    rows: list[Row]


@dataclass(slots=True, eq=False)
class Segment:
    """One file."""

    number: int
    nbytes: int
    state: State = State.FREE
    sequence: int = 0
    created_at: float = 0.0
    keys: list[Key] = field(default_factory=list)
    """Of the rows that it got; which of them still count, the index says."""
    rows: list[Row] = field(default_factory=list)
    """Until it is sealed: what its table will say."""
    next_page: int = FIRST_PAGE
    writes: int = 0
    reads: int = 0
    _table_bytes: int = 0
    """Of the rows of its table, as it will be at most."""
    _lengths: set[int] = field(default_factory=set)
    _emptied: bool = False
    """Its chunks have left, and somebody reads from it yet."""

    def to(self, event: Event) -> None:
        """Change the state. Raises ValueError, and changes nothing, if that cannot be."""
        following = _NEXT.get((self.state, event))
        if following is None:
            raise ValueError(f"{self!r} cannot be {event.value}")
        self.state = following

    def found(self, sequence: int, created_at: float) -> None:
        """It was there when the log was opened, of this use."""
        self.to(Event.FOUND)
        self.sequence, self.created_at = sequence, created_at

    def take(self) -> None:
        """Nobody else may: ``begin``, ``give_back`` or ``Pool.forget`` follows."""
        self.to(Event.TAKEN)

    def give_back(self) -> None:
        """It was made; or it could not be begun, or removed."""
        self.to(Event.FREED)

    def begin(self, sequence: int, created_at: float) -> None:
        """It is the active one, and empty."""
        self.to(Event.BEGUN)
        self.sequence, self.created_at = sequence, created_at
        self._clear()

    def _clear(self) -> None:
        self.keys, self.rows = [], []
        self.next_page = FIRST_PAGE
        self._table_bytes, self._lengths = 0, set()
        self._emptied = False

    def take_in(self, rows: Sequence[Row]) -> None:
        """What a table or a scan found in it; ``rows`` itself is kept by ``resume`` alone."""
        self.keys = [key for key, _, nbytes, _ in rows if nbytes]

    def resume(self, rows: Sequence[Row]) -> None:
        """It is the active one again, and goes on behind these."""
        self.to(Event.RESUMED)
        self.rows = list(rows)
        lengths = Counter(len(key) for key, *_ in rows)
        self._table_bytes = sum(n * row_bytes(length) for length, n in lengths.items())
        self._lengths = set(lengths)
        self.next_page = end_of(rows)

    def fill(self) -> bool:
        """Nothing more is appended; whether no write is under way, so that it is to be sealed."""
        self.to(Event.FILLED)
        return not self.writes

    def begin_write(self) -> None:
        """Room in it was handed out; ``end_write`` follows."""
        self.writes += 1

    def end_write(self) -> bool:
        """Whether that was the last one of a full segment, so that it is to be sealed."""
        self.writes -= 1
        return self.state is State.FULL and not self.writes

    def sealed(self) -> None:
        """Its table was written, or could not be."""
        self.to(Event.SEALED)
        self.rows = []

    def leave(self) -> None:
        """Its chunks are about to leave; ``emptied`` follows."""
        self.to(Event.LEFT)

    def begin_read(self) -> None:
        """Its bytes have to stay as they are; ``end_read`` follows."""
        self.reads += 1

    def end_read(self) -> None:
        """The last one frees a segment whose chunks have left."""
        self.reads -= 1
        self._free_if_unread()

    def emptied(self) -> None:
        """Its chunks have left: it is free once nobody reads from it."""
        self._clear()
        self._emptied = True
        self._free_if_unread()

    def _free_if_unread(self) -> None:
        if self._emptied and not self.reads:
            self._emptied = False
            self.to(Event.FREED)

    def allocate(self, wanted: Sequence[tuple[Key, int]]) -> Run | None:
        """Room for as many of ``wanted`` - key, bytes - as go into one run here; None: for none."""
        wanted = wanted[:MAX_ROWS]
        lengths = self._lengths | {len(key) for key, _ in wanted}
        rows = list(accumulate(row_bytes(len(key)) for key, _ in wanted))
        ends = list(accumulate(pages_of(nbytes) for _, nbytes in wanted))
        room = self.nbytes // PAGE_BYTES - self.next_page

        def is_too_much(last: int) -> bool:
            lists = head_pages(rows[last], len(lengths))
            lists += table_pages(self._table_bytes + rows[last], len(lengths))
            return ends[last] + lists > room or (last > 0 and ends[last] > RUN_PAGES)

        count = bisect_left(range(len(wanted)), True, key=is_too_much)
        if not count:
            return None
        wanted = wanted[:count]
        first = self.next_page + head_pages(rows[count - 1], len({len(key) for key, _ in wanted}))
        pages = accumulate(ends[:count], lambda _, end: first + end, initial=first)
        run = Run(
            self.next_page,
            [(key, page, nbytes, 0) for (key, nbytes), page in zip(wanted, pages, strict=False)],
        )
        self.next_page, self._lengths = first + ends[count - 1], lengths
        self._table_bytes += rows[count - 1]
        return run

    def give_up(self) -> None:
        """Its file is lost: there is no more room in it."""
        self.next_page = self.nbytes // PAGE_BYTES

    def wrote(self, rows: Iterable[Row]) -> None:
        """These are on the disk."""
        for row in rows:
            self.rows.append(row)
            if row[2]:
                self.keys.append(row[0])

    def __repr__(self) -> str:
        return (
            f"<Segment {self.number} {self.state.value}, use {self.sequence}: "
            f"{len(self.keys)} chunks, {self.writes} writes, {self.reads} reads>"
        )


class Pool:
    """The segments of one log, within ``capacity_bytes``."""

    def __init__(self, capacity_bytes: int, segment_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.segment_bytes = segment_bytes
        self.largest = min(segment_bytes - fits(0, 1), MAX_CHUNK_PAGES * PAGE_BYTES)
        """Bytes of the largest payload that a segment has room for, and the index a number."""
        self.segments: dict[int, Segment] = {}
        self.active: Segment | None = None
        self._sequence = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.nbytes for segment in self.segments.values())

    def next_sequence(self) -> int:
        """A number that no use of a segment had before."""
        self._sequence += 1
        return self._sequence

    def found(self, segment: Segment) -> None:
        """A file that was there when the log was opened."""
        self.segments[segment.number] = segment
        self._sequence = max(self._sequence, segment.sequence)

    def new(self) -> Segment | None:
        """A segment to be made, if there may be one more. It is taken."""
        if self.used_bytes + self.segment_bytes > self.capacity_bytes:
            return None
        number = next(n for n in range(len(self.segments) + 1) if n not in self.segments)
        segment = self.segments[number] = Segment(number, self.segment_bytes, State.TAKEN)
        return segment

    def forget(self, segment: Segment) -> None:
        """Its file is gone."""
        del self.segments[segment.number]

    def free(self) -> Segment | None:
        """One that holds nothing and has the right length."""
        return next((s for s in self._in(State.FREE) if s.nbytes == self.segment_bytes), None)

    def misfits(self) -> list[Segment]:
        """Free ones that are of another length, or too many."""
        free = list(self._in(State.FREE))
        surplus = max(0, self.used_bytes - self.capacity_bytes)
        wrong = [s for s in free if s.nbytes != self.segment_bytes]
        right = [s for s in free if s.nbytes == self.segment_bytes]
        while surplus > sum(s.nbytes for s in wrong) and right:
            wrong.append(right.pop())
        return wrong

    def victim(self) -> Segment | None:
        """The one that was begun first of those that nobody writes to."""
        sealed = self._in(State.SEALED)
        return min(sealed, key=lambda segment: segment.sequence, default=None)

    def last_sealed(self) -> Segment | None:
        """The one that was begun last."""
        sealed = self._in(State.SEALED)
        return max(sealed, key=lambda segment: segment.sequence, default=None)

    def is_last(self, segment: Segment) -> bool:
        """Whether no other that holds something was begun after it."""
        others = (s.sequence for s in self.segments.values() if s.state is not State.FREE)
        return segment.sequence >= max(others, default=0)

    def _in(self, state: State) -> Iterable[Segment]:
        return (s for s in self.segments.values() if s.state is state)

    def check(self) -> None:
        """Raise AssertionError if it holds too much or the states are wrong."""
        assert self.used_bytes <= self.capacity_bytes, "more than the capacity"
        active = list(self._in(State.ACTIVE))
        assert active == ([self.active] if self.active else []), "not one active segment"
        for segment in self.segments.values():
            quiet = segment.state in (State.SEALED, State.FREE, State.DRAINING)
            assert segment.writes == 0 or not quiet, f"{segment!r} is written to"
            assert segment.state is not State.FREE or not segment.reads, f"{segment!r} is read"
            assert segment.sequence <= self._sequence, f"{segment!r} is of the future"

    def __repr__(self) -> str:
        states = [s.state.value for s in list(self.segments.values())]
        counts = ", ".join(f"{states.count(s.value)} {s.value}" for s in State)
        return f"<Pool {self.used_bytes}/{self.capacity_bytes} bytes: {counts}>"
