"""Layout ``log``: chunks one after the other in segments, for a local disk with one owner.

Many chunks are written and read by one vectored call; the index is in memory; what leaves, leaves
by the segment, and what was used of it is written again (CLOCK's second chance, by the segment).
See ``format`` for the bytes, ``pool`` for what becomes of a segment.
"""

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

from kvtiers.chunks import PAGE_BYTES, Key
from kvtiers.errors import Kind, KVTiersError, Retry, map_errors
from kvtiers.events import Reason
from kvtiers.tiers import record
from kvtiers.tiers.base import Capabilities, Entry, Item, StoreContext
from kvtiers.tiers.fs import folders
from kvtiers.tiers.fs.direct import DirectIO
from kvtiers.tiers.fs.log import format as fmt
from kvtiers.tiers.fs.log import place, recovery
from kvtiers.tiers.fs.log.format import Header, Row
from kvtiers.tiers.fs.log.index import LogIndex, Place
from kvtiers.tiers.fs.log.pool import Pool, Segment, State
from kvtiers.tiers.fs.log.segment import Bounce, SegmentFiles, pages
from kvtiers.tiers.options import bad_option, require

_log = logging.getLogger("kvtiers")
T = TypeVar("T")

RUN_RECORDS = 256
"""Records that one call moves: their identity pages and payloads are two buffers each."""
RUN_PAGES = 4096
"""16 MiB: what one call moves, unless a chunk is larger."""
_MAX_TOUCHED = 100_000
_TOUCH_PORTION = 8192
_LEAST_SEGMENTS = 4
_SURVIVORS = 0.5
"""The part of a segment that may be written again when it leaves: the rest is room."""
_MOST_SEGMENT_BYTES = 256 << 20
_LEAST_CHUNKS = 4
"""Chunks of the largest kind that a segment holds at least."""
_SEGMENTS = 64
_NO_GROWTH_S = 30.0
"""After the disk was full, its own segments are used again for so long before it is asked."""


def segment_bytes_for(capacity_bytes: int, chunk_bytes: int) -> int:
    """The length of segments that suits a capacity: 1/64 of it, 256 MiB at most.

    More where many are needed: there are never above 4096.
    """
    least = fmt.fits([fmt.pages_of(chunk_bytes)] * _LEAST_CHUNKS)
    fit = min(max(least, capacity_bytes // _SEGMENTS), max(least, _MOST_SEGMENT_BYTES))
    fit = max(fit, capacity_bytes // 4096)
    return min(fit // PAGE_BYTES, fmt.MAX_SEGMENT_PAGES) * PAGE_BYTES


class LogStore:
    """Chunks in segments under ``<root_dir>/log/``, at most ``capacity_bytes`` with all else there.

    Raises ConfigError, naming the option, if the folder cannot be used or has another owner.
    """

    capabilities = Capabilities(persistent=True, shared=False, instant=True)

    def __init__(
        self,
        context: StoreContext,
        root_dir: str,
        *,
        capacity_bytes: int,
        direct_io: DirectIO = "auto",
        fsync: bool = False,
    ) -> None:
        self._context = context
        self._id = context.namespace.id
        self._root = folders.open_root(root_dir)
        self._lock = threading.Lock()
        """Guards index and pool; never held during I/O."""
        self._rolling = threading.Lock()
        """Held by the lane that makes another segment the active one."""
        self._index = LogIndex()
        self._touched: deque[Key] = deque(maxlen=_MAX_TOUCHED)
        self._deleted: deque[Key] = deque()
        self._no_growth_until = 0.0
        self._said_damaged = self._closed = False
        self._scratch = threading.local()
        try:
            place.refuse_other_layout(self._root)
            self._ownership = place.Ownership(self._root)
        except OSError as e:
            raise folders.unusable(self._root, e) from e
        try:
            self._files = SegmentFiles(self._ownership.folder, direct_io, fsync)
            self._open(capacity_bytes)
            if direct_io == "on" and not self._files.direct:
                raise bad_option("direct_io", f'is "on", but {self._root} refuses it: use "auto"')
        except OSError as e:
            self._ownership.close()
            raise folders.unusable(self._root, e) from e
        except BaseException:
            self._ownership.close()
            raise

    # -- opening and closing --------------------------------------------------------------------

    def _open(self, capacity_bytes: int) -> None:
        place.open_namespace(self._root, self._context.namespace)
        self._pool = _sized(self._context, capacity_bytes, place.other_bytes(self._root))
        own = []
        for number, nbytes, header in recovery.headers(self._files):
            segment = Segment(number, nbytes)
            if header is not None:
                segment.state, segment.sequence = State.SEALED, header.sequence
                segment.created_at = header.created_at
                if header.namespace_id == self._id:
                    own.append((segment, header))
            self._pool.found(segment)
        for segment, header in sorted(own, key=lambda pair: pair[0].sequence):
            self._take_in(segment, header)
        self._shrink()
        self._resume({header.sequence for _, header in own})

    def _take_in(self, segment: Segment, header: Header) -> None:
        rows, sealed = recovery.rows_of(self._files, segment.number, header)
        segment.take_in(rows)
        self._index.put(segment.number, rows)
        if not sealed:
            with contextlib.suppress(OSError):  # then it is looked through again next time
                self._write_table(segment)

    def _shrink(self) -> None:
        """Bring what was found within a capacity or to a length that may have changed."""
        while self._pool.used_bytes > self._pool.capacity_bytes:
            victim = self._pool.victim()
            if victim is None:
                break
            self._empty(victim)
        for segment in self._pool.misfits():
            self._files.remove(segment.number)
            self._pool.forget(segment)

    def _resume(self, own: Iterable[int]) -> None:
        """Go on where the last owner stopped, if that was a segment of this namespace."""
        last = self._pool.last_sealed()
        if last is not None and last.sequence in own:
            end = last.nbytes // PAGE_BYTES - 1
            self._files.write(last.number, end, [pages(1)])  # its table is not the last word now
            last.to(State.ACTIVE)
            self._pool.active = last
        with contextlib.suppress(KVTiersError):  # a disk that is full now may have room later
            self._prepare()
        self._probe()

    def _probe(self) -> None:
        """Read a page of every open log, which also tells whether O_DIRECT works here."""
        for segment in islice(self._pool.segments.values(), 1):
            self._files.header(segment.number)

    def close(self) -> None:
        """Write down what the last segment holds; give the folder up."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(KVTiersError, OSError):
            self._flush_deletions()
        with self._lock:
            active, self._pool.active = self._pool.active, None
            if active is not None:
                active.to(State.FULL)
        if active is not None and not active.writes:
            with contextlib.suppress(OSError):
                self._write_table(active)
        self._ownership.close()

    # -- the contract ---------------------------------------------------------------------------

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """Whether each chunk is in the index. Never waits."""
        self._refuse_if_closed("contains")
        index = self._index
        return [key in index for key in keys]

    def write(self, items: Sequence[Item]) -> list[KVTiersError | None]:
        """Append each item unless it is there: one call to the disk for many."""
        self._refuse_if_closed("write")
        self._note_uses()
        results: list[KVTiersError | None] = [None] * len(items)
        todo = []
        for i, item in enumerate(items):
            results[i] = self._unfit(item)
            if results[i] is None and item.key not in self._index:
                todo.append(i)
        try:
            self._flush_deletions()
            while todo:
                segment, rows = self._allocate([_wanted(items[i]) for i in todo])
                part, todo = todo[: len(rows)], todo[len(rows) :]
                error = self._append(segment, rows, [items[i].view for i in part])
                for i in part:
                    results[i] = error
        except KVTiersError as e:
            for i in todo:
                results[i] = e.with_traceback(None)
        return results

    def read(self, items: Sequence[Item]) -> list[KVTiersError | None]:
        """Read and verify each item: neighbours on the disk by one call."""
        self._refuse_if_closed("read")
        results: list[KVTiersError | None] = [None] * len(items)
        with self._lock:
            found = [self._index.find(item.key) for item in items]
            numbers = {at.segment for at in found if at is not None}
            for number in numbers:
                self._pool.segments[number].reads += 1
        try:
            self._read_all(items, found, results)
        finally:
            for number in numbers:
                self._end_read(number)
        self._report_losses(items, found, results)
        self.touch([i.key for i, error in zip(items, results, strict=True) if error is None])
        return results

    def delete(self, keys: Sequence[Key]) -> None:
        """Forget these chunks, and write down that they are forgotten."""
        self._refuse_if_closed("delete")
        with self._lock:
            self._deleted.extend(self._index.drop(dict.fromkeys(keys)))
        self._flush_deletions()

    def scan(self) -> Iterator[Entry]:
        """What is in the index; used when its segment was begun."""
        self._refuse_if_closed("scan")
        with self._lock:
            began = {s.number: s.created_at for s in self._pool.segments.values()}
            items = self._index.items()
        return (Entry(k, at.pages * PAGE_BYTES, began.get(at.segment, 0.0)) for k, at in items)

    def touch(self, keys: Sequence[Key]) -> None:
        """Note the use; the next write takes it in."""
        self._refuse_if_closed("touch")
        self._touched.extend(keys)

    # -- writing --------------------------------------------------------------------------------

    def _unfit(self, item: Item) -> KVTiersError | None:
        if len(item.key) > record.MAX_KEY_BYTES:
            return record.key_too_long(item.key)
        needed = fmt.fits([fmt.pages_of(item.view.nbytes)])
        if needed > self._pool.segment_bytes or not item.view.nbytes:
            return self._full(f"a chunk of {item.view.nbytes} bytes fits into no segment")
        return None

    def _allocate(self, wanted: Sequence[tuple[Key, int]]) -> tuple[Segment, list[Row]]:
        """Places for at least the first of ``wanted``, in one segment, one behind the other."""
        while True:
            with self._lock:
                active = self._pool.active
                rows = [] if active is None else active.allocate(wanted, _run_length(wanted))
                if active is not None and rows:
                    active.writes += 1
                    return active, rows
            self._roll(active)

    def _append(
        self, segment: Segment, rows: Sequence[Row], views: Sequence[memoryview]
    ) -> KVTiersError | None:
        """Write these records to their places and make them visible."""
        try:
            tag, headers = fmt.tag(segment.sequence), self._headers()
            buffers = []
            for n, (row, view) in enumerate(zip(rows, views, strict=True)):
                header = headers[n * PAGE_BYTES : (n + 1) * PAGE_BYTES]
                header[:] = record.pack(row.key, self._id, view, tag)
                buffers.append(header)
                if row.pages:
                    buffers.append(Bounce(view).fill())
            self._files.write(segment.number, rows[0].page, buffers)
            with self._lock:
                segment.wrote(rows)
                self._index.put(segment.number, [row for row in rows if row.pages])
        except OSError as e:
            return _mapped("write", self._files.path(segment.number), e)
        finally:
            self._end_write(segment)
        return None

    def _headers(self) -> memoryview:
        """Pages of this thread's own for the identity pages of one call."""
        try:
            headers: memoryview = self._scratch.headers
        except AttributeError:
            headers = self._scratch.headers = pages(RUN_RECORDS)
        return headers

    def _end_write(self, segment: Segment) -> None:
        with self._lock:
            segment.writes -= 1
            seal = segment.state is State.FULL and not segment.writes
        if seal and not self._closed:
            self._seal(segment)

    def _seal(self, segment: Segment) -> None:
        """Nobody writes to it any more: its table makes it quick to read in again."""
        try:
            self._write_table(segment)
        except OSError as e:  # then it is looked through page by page
            _log.warning("%s: no table: %s", self._files.path(segment.number), e.strerror)
        with self._lock:
            segment.to(State.SEALED)
            segment.rows = []

    def _write_table(self, segment: Segment) -> None:
        table = fmt.pack_table(segment.rows, segment.sequence)
        end = segment.nbytes // PAGE_BYTES
        self._files.write_pages(segment.number, end - len(table) // PAGE_BYTES, table)

    def _flush_deletions(self) -> None:
        """Write down that chunks are gone, so that they do not come back when it is opened."""
        while self._deleted:
            gone: list[Key] = []
            with contextlib.suppress(IndexError):
                while len(gone) < RUN_RECORDS:
                    key = self._deleted.popleft()
                    if key not in self._index:  # else it was written again meanwhile
                        gone.append(key)
            while gone:
                segment, rows = self._allocate([(key, 0) for key in gone])
                error = self._append(segment, rows, [memoryview(b"")] * len(rows))
                if error is not None:
                    raise error
                gone = gone[len(rows) :]

    # -- segments come and go -------------------------------------------------------------------

    def _roll(self, seen: Segment | None) -> None:
        """Make another segment the active one, unless that was done meanwhile.

        Raises KVTiersError (``Kind.FULL``) if there is none to be had.
        """
        with self._rolling:
            if self._pool.active is not seen:
                return
            self._refuse_if_closed("write")
            following = self._spare()
            header = Header(
                self._pool.next_sequence(),
                following.nbytes,
                self._context.wall_clock(),
                self._id,
            )
            with map_errors("write", self._files.path(following.number)):
                self._files.begin(following.number, header)
            with self._lock:
                following.begin(header.sequence, header.created_at)
                self._pool.active = following
                if seen is not None:
                    seen.to(State.FULL)
                seal = seen is not None and not seen.writes
            if seen is not None and seal:
                self._seal(seen)
            self._prepare()

    def _spare(self) -> Segment:
        """A segment to begin. If none was prepared the oldest one leaves without more ado."""
        spare = self._pool.free() or self._grow()
        while spare is None:
            victim = self._pool.victim()
            if victim is None:
                raise self._full("every segment is in use")
            self._empty(victim)
            spare = self._pool.free()
        return spare

    def _grow(self) -> Segment | None:
        """One more segment; None if the capacity or the disk has no room."""
        if self._context.clock() < self._no_growth_until:
            return None
        segment = self._pool.new()
        if segment is None:
            return None
        try:
            self._files.make(segment.number, segment.nbytes)
        except OSError as e:
            self._pool.forget(segment)
            self._no_growth_until = self._context.clock() + _NO_GROWTH_S
            if not self._pool.segments:
                with map_errors("write", self._files.path(segment.number)):
                    raise
            _log.warning("%s cannot grow, what it has is used: %s", self._root, e.strerror)
            return None
        return segment

    def _prepare(self) -> None:
        """Have a free segment for the next time: the oldest leaves, what was used of it stays."""
        if self._pool.free() is not None or self._grow() is not None:
            return
        victim = self._pool.victim()
        if victim is not None:
            self._empty(victim, survive=True)

    def _empty(self, victim: Segment, *, survive: bool = False) -> None:
        """Evict the chunks of ``victim``; some of those that were used are written again."""
        with self._lock:
            victim.to(State.DRAINING)
        if survive:
            self._note_uses()
            self._write_again(victim)
        with self._lock:
            evicted = [k for k in dict.fromkeys(victim.keys) if self._lies_in(k, victim)]
            self._index.drop(evicted)
            victim.clear()
            free = not victim.reads
        if evicted:
            self._context.on_removed(evicted, Reason.EVICTED)
        if free:
            self._free(victim)

    def _lies_in(self, key: Key, segment: Segment) -> bool:
        at = self._index.find(key)
        return at is not None and at.segment == segment.number

    def _free(self, segment: Segment) -> None:
        with contextlib.suppress(OSError):  # then its chunks may come back when it is opened
            self._files.erase(segment.number)
        with self._lock:
            segment.to(State.FREE)

    def _write_again(self, victim: Segment) -> None:
        """Copy used chunks of ``victim`` to the active segment, as long as it has room."""
        room = int(victim.nbytes // PAGE_BYTES * _SURVIVORS)
        with self._lock:
            used = [
                (at, key)
                for key in dict.fromkeys(victim.keys)
                if self._index.was_used(key)
                and (at := self._index.find(key)) is not None
                and at.segment == victim.number
            ]
        for run in _runs(sorted(used)):
            room -= sum(1 + at.pages for at, _ in run)
            if room < 0 or not self._copy(victim, run):
                break

    def _copy(self, victim: Segment, run: Sequence[tuple[Place, Key]]) -> bool:
        """Whether there was room for all. Damaged chunks are left behind."""
        first, last = run[0][0], run[-1][0]
        buffer = pages(last.page + 1 + last.pages - first.page)
        try:
            if not self._files.read(victim.number, first.page, [buffer]):
                return True
        except OSError:
            return True
        tag, whole = fmt.tag(victim.sequence), []
        for at, key in run:
            start = (at.page - first.page) * PAGE_BYTES
            found = buffer[start : start + (1 + at.pages) * PAGE_BYTES]
            payload = record.intact(found, key, self._id, tag)
            if payload is not None:
                whole.append((key, payload))
        while whole:
            with self._lock:
                active = self._pool.active
                wanted = [(key, fmt.pages_of(len(payload))) for key, payload in whole]
                rows = [] if active is None else active.allocate(wanted, RUN_RECORDS)
                if active is None or not rows:
                    return False
                active.writes += 1
            part, whole = whole[: len(rows)], whole[len(rows) :]
            if self._append(active, rows, [payload for _, payload in part]) is not None:
                return False
        return True

    # -- reading --------------------------------------------------------------------------------

    def _read_all(
        self,
        items: Sequence[Item],
        found: Sequence[Place | None],
        results: list[KVTiersError | None],
    ) -> None:
        there = []
        for i, at in enumerate(found):
            if at is None:
                results[i] = self._error("read", "the chunk is gone", Kind.VANISHED)
            elif at.pages != fmt.pages_of(items[i].view.nbytes):
                results[i] = _corrupt(f"it has {at.pages} pages", items[i].key)
            else:
                there.append((at, i))
        for run in _runs(sorted(there)):
            self._read_run([(at, i, items[i]) for at, i in run], results)

    def _read_run(
        self, run: Sequence[tuple[Place, int, Item]], results: list[KVTiersError | None]
    ) -> None:
        """Records that lie one behind the other."""
        headers = self._headers()
        segment = self._pool.segments[run[0][0].segment]
        bounces = [Bounce(item.view) for _, _, item in run]
        buffers = []
        for n, bounce in enumerate(bounces):
            buffers += [headers[n * PAGE_BYTES : (n + 1) * PAGE_BYTES], bounce.buffer]
        try:
            whole = self._files.read(segment.number, run[0][0].page, buffers)
        except OSError as e:
            error = _mapped("read", self._files.path(segment.number), e)
            for _, i, _ in run:
                results[i] = error
            return
        tag = fmt.tag(segment.sequence)
        for n, ((_, i, item), bounce) in enumerate(zip(run, bounces, strict=True)):
            bounce.empty()
            header = headers[n * PAGE_BYTES : (n + 1) * PAGE_BYTES]
            if not whole:
                results[i] = _corrupt("its segment is short", item.key)
            else:
                results[i] = record.verify(header, item.key, self._id, item.view, tag)

    def _end_read(self, number: int) -> None:
        with self._lock:
            segment = self._pool.segments[number]
            segment.reads -= 1
            idle = segment.state is State.DRAINING and not segment.reads
            free = idle and not segment.keys  # else whoever empties it is still at it
        if free:
            self._free(segment)

    def _report_losses(
        self,
        items: Sequence[Item],
        found: Sequence[Place | None],
        results: Sequence[KVTiersError | None],
    ) -> None:
        """What is gone or damaged is forgotten, for good, and said."""
        gone: dict[Reason, list[Key]] = {Reason.VANISHED: [], Reason.CORRUPT: []}
        for item, at, error in zip(items, found, results, strict=True):
            if error is None or error.kind not in (Kind.VANISHED, Kind.CORRUPT):
                continue
            with self._lock:
                known = at is not None and self._index.drop_at(item.key, at)
            if known:
                self._deleted.append(item.key)
            if error.kind is Kind.VANISHED:
                gone[Reason.VANISHED].append(item.key)
            elif known:
                gone[Reason.CORRUPT].append(item.key)
                self._say_damaged(str(error))
        for reason, keys in gone.items():
            if keys:
                self._context.on_removed(keys, reason)

    def _say_damaged(self, problem: str) -> None:
        """Once: a disk that goes bad has many of them, and the metrics count each."""
        if not self._said_damaged:
            self._said_damaged = True
            _log.warning("a chunk in %s is a miss, said once: %s", self._files.folder, problem)

    # -- small things ---------------------------------------------------------------------------

    def _note_uses(self) -> None:
        """Take in a portion of what was touched."""
        used = []
        with contextlib.suppress(IndexError):
            for _ in range(_TOUCH_PORTION):
                used.append(self._touched.popleft())
        if used:
            with self._lock:
                self._index.use(used)

    def _refuse_if_closed(self, operation: str) -> None:
        if self._closed:
            raise self._error(operation, f"{operation} after close", Kind.CLOSED)

    def _full(self, what: str) -> KVTiersError:
        return KVTiersError(
            f"{self._root} has no room: {what}", kind=Kind.FULL, retry=Retry.MAY, operation="write"
        )

    def _error(self, operation: str, what: str, kind: Kind) -> KVTiersError:
        return KVTiersError(f"{self._context.name}: {what}", kind=kind, operation=operation)

    @property
    def direct(self) -> bool:
        """Whether it goes past the page cache, as far as the file system lets it."""
        return self._files.direct

    @property
    def used_bytes(self) -> int:
        """Bytes of all segments, whatever is in them."""
        return self._pool.used_bytes

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant, if any."""
        with self._lock:
            self._pool.check()
            for key, at in self._index.items():
                segment = self._pool.segments.get(at.segment)
                assert segment is not None, f"{key.hex()} lies in no segment"
                assert segment.state is not State.FREE, f"{key.hex()} lies in a free segment"
                last = at.page + at.pages
                assert last < segment.next_page, f"{key.hex()} lies beyond its segment's end"

    def __repr__(self) -> str:
        return f"<LogStore {self._root}: {self._index}, {self._pool}, {self._files}>"


def _sized(context: StoreContext, capacity_bytes: int, other_bytes: int) -> Pool:
    chunk = context.layout.slot_bytes
    segment = segment_bytes_for(capacity_bytes, chunk)
    room = capacity_bytes - other_bytes
    least = _LEAST_SEGMENTS * segment_bytes_for(0, chunk) + other_bytes
    require(
        room >= _LEAST_SEGMENTS * segment,
        "capacity_bytes",
        f"is {capacity_bytes}, too little for {_LEAST_SEGMENTS} segments of {_LEAST_CHUNKS} chunks "
        f"each: give at least {least}",
    )
    return Pool(room, segment)


def _wanted(item: Item) -> tuple[Key, int]:
    return item.key, fmt.pages_of(item.view.nbytes)


def _run_length(wanted: Sequence[tuple[Key, int]]) -> int:
    """How many of ``wanted`` one call writes; at least one."""
    total = 0
    for n, (_, count) in enumerate(wanted[:RUN_RECORDS]):
        total += 1 + count
        if total > RUN_PAGES:
            return max(1, n)
    return RUN_RECORDS


def _runs(there: Sequence[tuple[Place, T]]) -> Iterator[list[tuple[Place, T]]]:
    """Records that lie one behind the other, as many as one call reads."""
    run: list[tuple[Place, T]] = []
    total = 0
    for at, i in there:
        total += 1 + at.pages
        if run:
            before = run[-1][0]
            next_page = before.page + 1 + before.pages
            neighbour = at.segment == before.segment and at.page == next_page
            if not neighbour or len(run) == RUN_RECORDS or total > RUN_PAGES:
                yield run
                run, total = [], 1 + at.pages
        run.append((at, i))
    if run:
        yield run


def _mapped(operation: str, path: str, error: OSError) -> KVTiersError:
    """``error`` in our family, without the frames that it came through: they hold memory."""
    try:
        with map_errors(operation, path):
            raise error
    except KVTiersError as e:
        e.__cause__ = e.__context__ = None
        return e.with_traceback(None)


def _corrupt(what: str, key: Key) -> KVTiersError:
    return KVTiersError(
        f"the stored chunk {key.hex()} cannot be used: {what}", kind=Kind.CORRUPT, operation="read"
    )
