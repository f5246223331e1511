"""What the parts of a log share: index, segments, files, and the one way to add to them."""

import errno
import math
import os
import threading
from collections import deque
from collections.abc import Sequence

from kvtiers.chunks import Key
from kvtiers.errors import Kind, KVTiersError, Retry, map_errors
from kvtiers.tiers.base import StoreContext
from kvtiers.tiers.complaints import Complaints
from kvtiers.tiers.fs.log import format as fmt
from kvtiers.tiers.fs.log.format import Row
from kvtiers.tiers.fs.log.index import Deletion, LogIndex
from kvtiers.tiers.fs.log.pool import Pool, Run, Segment, State
from kvtiers.tiers.fs.log.segment import SegmentFiles, is_lost, padded

_TABLE = "writing a table"


class LogCore:
    """The state of one open log.

    ``lock`` guards ``index``, ``pool`` with all of its segments, ``deletions`` and ``lost``, and is
    never held during I/O. Two things are read without it: whether a key is in the index, and which
    segment is the active one; who acts on either asks again within. Which segment is active, and
    which there are, is changed by the roller alone, each by one thread at a time, while the store
    is open. ``files`` and ``complaints`` see to themselves; the rest never changes.
    """

    def __init__(self, context: StoreContext, files: SegmentFiles, pool: Pool) -> None:
        self.context = context
        self.namespace = bytes.fromhex(context.namespace.id)
        self.files = files
        self.pool = pool
        self.index = LogIndex()
        self.deletions: deque[Deletion] = deque()
        """Chunks that are gone, which the log does not say yet."""
        self._under_way: set[int] = set()
        """Positions of the runs that are written now."""
        self._deleted_meanwhile: dict[Key, int] = {}
        """Deletions that reach what some of these runs may hold."""
        self.lost = False
        """The folder is there no more, or another's: nothing that is written counts."""
        self.complaints = Complaints(files.folder, context.clock)
        self.lock = threading.Lock()

    def find_room(self, wanted: Sequence[tuple[Key, int]]) -> tuple[Segment, Run] | None:
        """Room in the active segment for at least the first of ``wanted``; ``append`` follows."""
        with self.lock:
            return self._take(wanted)

    def find_room_for_copies(
        self, copies: Sequence[tuple[Key, memoryview]]
    ) -> tuple[Sequence[tuple[Key, memoryview]], tuple[Segment, Run] | None]:
        """Those whose chunk is not deleted meanwhile, and room for the first of them.

        Decided at one moment: a chunk that is written anew after its deletion comes behind its
        copy, and outlives that the copy is deleted.
        """
        with self.lock:
            there = [copy for copy in copies if copy[0] in self.index]
            return there, self._take([(key, payload.nbytes) for key, payload in there])

    def _take(self, wanted: Sequence[tuple[Key, int]]) -> tuple[Segment, Run] | None:
        active = self.pool.active
        run = None if active is None else active.allocate(wanted)
        if active is None or run is None:
            return None
        active.begin_write()
        self._under_way.add(fmt.position(active.sequence, run.page))
        return active, run

    def forget(self, gone: Sequence[Deletion]) -> None:
        """Have it written down that these were dropped from the index. With ``lock`` held."""
        self.deletions.extend(gone)
        first = self._first_under_way()
        self._deleted_meanwhile.update(d for d in gone if d[1] > first)

    def _first_under_way(self) -> float:
        """Position of the first run that is written now; infinite if none is."""
        return min(self._under_way, default=math.inf)

    def some_deleted(self) -> list[Deletion]:
        """Take as many of ``deletions`` as one run holds."""
        with self.lock:
            count = min(len(self.deletions), fmt.MAX_ROWS)
            return [self.deletions.popleft() for _ in range(count)]

    def append(
        self,
        segment: Segment,
        run: Run,
        payloads: Sequence[memoryview],
        moved: bool = False,
    ) -> KVTiersError | None:
        """Write a run to its room and make it visible; all of it, or nothing.

        ``moved``: these are copies. One whose chunk is there no more is not made visible, and
        written down as deleted.
        """
        return self._append(segment, run.page, run.rows, payloads, moved)

    def append_deletions(
        self, segment: Segment, run: Run, gone: Sequence[Deletion]
    ) -> KVTiersError | None:
        """Write a run of deletions to its room."""
        rows = [
            (key, page, 0, position)
            for (key, page, _, _), (_, position) in zip(run.rows, gone, strict=True)
        ]
        return self._append(segment, run.page, rows, [], False)

    def _append(
        self,
        segment: Segment,
        page: int,
        rows: Sequence[Row],
        payloads: Sequence[memoryview],
        moved: bool,
    ) -> KVTiersError | None:
        try:
            bodies = [padded(payload) for payload in payloads]
            rows = self._vouched_for(rows, bodies) if bodies else rows
            head = self.files.scratch(fmt.pack_head(rows, segment.sequence))
            self.files.write(segment.number, page, [head, *bodies])
            with self.lock:
                if self.lost:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
                rows = self._outlived(rows, segment.sequence)
                segment.wrote(rows)
                there = self._still_there(rows, segment.sequence) if moved else rows
                self.index.put(segment.number, segment.sequence, there)
        except OSError as e:
            if is_lost(e):
                with self.lock:
                    segment.give_up()
            return self.failed("write", segment.number, e)
        finally:
            self._end_write(segment, page)
        self.complaints.worked("write")
        return None

    def lose(self) -> list[Key]:
        """The folder is lost: nothing is claimed from now on. What was there; once."""
        with self.lock:
            self.lost = True
            self.deletions.clear()
            return self.index.clear()

    def failed(
        self, operation: str, number: int, error: OSError, costs: str = "hits"
    ) -> KVTiersError:
        """``error`` of the disk in our family; the first of its kind is said."""
        failure = mapped(operation, self.files.path(number), error)
        self.complaints.failed(operation, failure, costs)
        return failure

    def _vouched_for(self, rows: Sequence[Row], bodies: Sequence[memoryview]) -> list[Row]:
        return [
            (key, page, nbytes, fmt.checksum(self.namespace, key, body))
            for (key, page, nbytes, _), body in zip(rows, bodies, strict=True)
        ]

    def _still_there(self, rows: Sequence[Row], sequence: int) -> list[Row]:
        there = []
        for row in rows:
            if row[0] in self.index:
                there.append(row)
            else:
                self.forget([(row[0], fmt.position(sequence, row[1]))])
        return there

    def _outlived(self, rows: Sequence[Row], sequence: int) -> Sequence[Row]:
        """Without those whose chunk another call wrote behind them, and one deleted, meanwhile.

        The deletion reaches them where a segment is looked through in the order of its pages.
        """
        if not self._deleted_meanwhile:
            return rows
        upto = self._deleted_meanwhile
        return [r for r in rows if not r[2] or upto.get(r[0], -1) < fmt.position(sequence, r[1])]

    def _end_write(self, segment: Segment, page: int) -> None:
        with self.lock:
            self._under_way.remove(fmt.position(segment.sequence, page))
            if self._deleted_meanwhile:
                known, first = self._deleted_meanwhile, self._first_under_way()
                self._deleted_meanwhile = {key: at for key, at in known.items() if at > first}
            last = segment.end_write()
        if last:
            self.seal(segment)

    def seal_active(self) -> None:
        """Nothing more is appended, and nobody writes: the last segment gets its table."""
        with self.lock:
            active, self.pool.active = self.pool.active, None
            if active is not None:
                active.fill()
        if active is not None:
            self.seal(active)

    def seal(self, segment: Segment) -> None:
        """Nobody writes to it any more: its table makes it quick to read in again.

        Without one, after an error, it is looked through page by page.
        """
        try:
            self.write_table(segment, segment.rows)
            self.complaints.worked(_TABLE)
        except OSError as e:
            self.failed(_TABLE, segment.number, e, "time when it is opened")
        finally:  # whatever happened, nobody but its eviction has business with it now
            with self.lock:
                segment.sealed()

    def write_table(self, segment: Segment, rows: Sequence[Row]) -> None:
        """Write the last pages. Raises OSError."""
        write_table(self.files, segment.number, segment.nbytes, segment.sequence, rows)

    def full(self, what: str) -> KVTiersError:
        """The error of a write for which there is no room."""
        return KVTiersError(
            f"{self.files.folder} has no room: {what}",
            kind=Kind.FULL,
            retry=Retry.MAY,
            operation="write",
        )

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant, if any."""
        with self.lock:
            self.pool.check()
            self.index.check()
            self.complaints.check()
            writes = sum(segment.writes for segment in self.pool.segments.values())
            assert len(self._under_way) == writes, "runs are under way that nobody writes"
            assert self._under_way or not self._deleted_meanwhile, "old deletions are kept"
            for key, at in self.index.items():
                segment = self.pool.segments.get(at.segment)
                assert segment is not None, f"{key.hex()} lies in no segment"
                assert segment.state is not State.FREE, f"{key.hex()} lies in a free segment"
                active = segment.state is State.ACTIVE
                end = segment.next_page if active else fmt.pages_of(segment.nbytes)
                assert at.page + at.pages <= end, f"{key.hex()} lies beyond the end"

    def __repr__(self) -> str:
        return f"<LogCore {self.index}, {self.pool}, {self.files}>"


def write_table(
    files: SegmentFiles, number: int, nbytes: int, sequence: int, rows: Sequence[Row]
) -> None:
    """Write the last pages of a segment: what this use of it holds. Raises OSError."""
    table = fmt.pack_table(rows, sequence)
    files.write_pages(number, fmt.pages_of(nbytes) - fmt.pages_of(len(table)), table)


def mapped(operation: str, path: str, error: OSError) -> KVTiersError:
    """``error`` in our family, without the frames that it came through: they hold memory."""
    try:
        with map_errors(operation, path):
            raise error
    except KVTiersError as e:
        e.__cause__ = e.__context__ = None
        return e.with_traceback(None)
