"""What the parts of a log share: index, segments, files, and the one way to add to them."""

import logging
import threading
from collections import deque
from collections.abc import Sequence

from kvtiers.chunks import Key
from kvtiers.errors import Kind, KVTiersError, Retry, map_errors
from kvtiers.tiers.base import StoreContext
from kvtiers.tiers.fs.log import format as fmt
from kvtiers.tiers.fs.log.format import Row
from kvtiers.tiers.fs.log.index import LogIndex, Place
from kvtiers.tiers.fs.log.pool import Pool, Run, Segment, State
from kvtiers.tiers.fs.log.segment import SegmentFiles, is_lost, padded

_log = logging.getLogger("kvtiers")


class LogCore:
    """The state of one open log.

    ``lock`` guards index and pool and is never held during I/O.
    """

    def __init__(self, context: StoreContext, files: SegmentFiles, pool: Pool) -> None:
        self.context = context
        self.namespace = bytes.fromhex(context.namespace.id)
        self.files = files
        self.pool = pool
        self.index = LogIndex()
        self.deletions: deque[Key] = deque()
        """Chunks that are gone, which the log does not say yet."""
        self.lock = threading.Lock()

    def take_place(self, wanted: Sequence[tuple[Key, int]]) -> tuple[Segment, Run] | None:
        """Room in the active segment for at least the first of ``wanted``; ``append`` follows."""
        with self.lock:
            active = self.pool.active
            run = None if active is None else active.allocate(wanted)
            if active is None or run is None:
                return None
            active.writes += 1
            return active, run

    def append(
        self,
        segment: Segment,
        run: Run,
        payloads: Sequence[memoryview],
        moved_from: Sequence[Place] = (),
    ) -> KVTiersError | None:
        """Write a run to its place and make it visible; all of it, or nothing.

        ``moved_from``: where its chunks lay until now; one that is there no more is not made
        visible, and written down as deleted.
        """
        try:
            bodies = [padded(payload) for payload in payloads]
            rows = [
                (key, page, nbytes, fmt.checksum(self.namespace, key, body))
                for (key, page, nbytes, _), body in zip(run.rows, bodies, strict=True)
            ]
            head = self.files.scratch(fmt.pack_head(rows, segment.sequence))
            self.files.write(segment.number, run.page, [head, *(b for b in bodies if b.nbytes)])
            with self.lock:
                segment.wrote(rows)
                there = self._still_there(rows, moved_from) if moved_from else rows
                self.index.put(segment.number, [row for row in there if row[2]])
        except OSError as e:
            if is_lost(e):
                with self.lock:
                    segment.give_up()
            return mapped("write", self.files.path(segment.number), e)
        finally:
            self._end_write(segment)
        return None

    def _still_there(self, rows: Sequence[Row], moved_from: Sequence[Place]) -> list[Row]:
        there = []
        for row, at in zip(rows, moved_from, strict=True):
            if self.index.find(row[0]) == at:
                there.append(row)
            else:
                self.deletions.append(row[0])
        return there

    def _end_write(self, segment: Segment) -> None:
        with self.lock:
            segment.writes -= 1
            last = segment.state is State.FULL and not segment.writes
        if last:
            self.seal(segment)

    def seal(self, segment: Segment) -> None:
        """Nobody writes to it any more: its table makes it quick to read in again.

        Without one, after an error, it is looked through page by page.
        """
        try:
            self.write_table(segment, segment.rows)
        except OSError as e:
            _log.warning("%s: no table: %s", self.files.path(segment.number), e.strerror)
        finally:  # whatever happened, nobody but its eviction has business with it now
            with self.lock:
                segment.to(State.SEALED)
                segment.rows = []

    def write_table(self, segment: Segment, rows: Sequence[Row]) -> None:
        """Write the last pages. Raises OSError."""
        table = fmt.pack_table(rows, segment.sequence)
        end = fmt.pages_of(segment.nbytes)
        self.files.write_pages(segment.number, end - fmt.pages_of(len(table)), table)

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
            for key, at in self.index.items():
                segment = self.pool.segments.get(at.segment)
                assert segment is not None, f"{key.hex()} lies in no segment"
                assert segment.state is not State.FREE, f"{key.hex()} lies in a free segment"
                active = segment.state is State.ACTIVE
                end = segment.next_page if active else fmt.pages_of(segment.nbytes)
                assert at.page + at.pages <= end, f"{key.hex()} lies beyond the end"

    def __repr__(self) -> str:
        return f"<LogCore {self.index}, {self.pool}, {self.files}>"


def mapped(operation: str, path: str, error: OSError) -> KVTiersError:
    """``error`` in our family, without the frames that it came through: they hold memory."""
    try:
        with map_errors(operation, path):
            raise error
    except KVTiersError as e:
        e.__cause__ = e.__context__ = None
        return e.with_traceback(None)
