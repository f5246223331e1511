"""Layout ``log``: chunks one behind the other in segments, for a local disk with one owner.

Many chunks are written and read by one vectored call, and where each lies is in memory. See
``format`` for the bytes, ``pool`` for what becomes of a segment, ``roller`` for what leaves.
"""

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence

from kvtiers.chunks import PAGE_BYTES, Key
from kvtiers.errors import Kind, KVTiersError
from kvtiers.events import Reason
from kvtiers.tiers import record
from kvtiers.tiers.base import Capabilities, Entry, Item, StoreContext
from kvtiers.tiers.fs import folders
from kvtiers.tiers.fs.capacity import resolve
from kvtiers.tiers.fs.direct import DirectIO
from kvtiers.tiers.fs.log import format as fmt
from kvtiers.tiers.fs.log import ownership, recovery
from kvtiers.tiers.fs.log.core import LogCore
from kvtiers.tiers.fs.log.format import Header, Row
from kvtiers.tiers.fs.log.index import Place
from kvtiers.tiers.fs.log.pool import Pool, Segment, State
from kvtiers.tiers.fs.log.reading import read_items
from kvtiers.tiers.fs.log.roller import Roller
from kvtiers.tiers.fs.log.segment import SegmentFiles, pages
from kvtiers.tiers.options import bad_option, require

_log = logging.getLogger("kvtiers")

_LEAST_SEGMENTS = 4
_LEAST_CHUNKS = 4
"""Chunks of the largest kind that a segment holds at least."""
_SEGMENTS, _MAX_SEGMENTS = 64, 4096
_MOST_SEGMENT_BYTES = 256 << 20


def segment_bytes_for(capacity_bytes: int, chunk_bytes: int) -> int:
    """The length of segments that suits a capacity: 1/64 of it, 256 MiB at most.

    Longer where there would be above 4096, or a segment held fewer than four chunks.
    """
    least = fmt.fits(fmt.pages_of(chunk_bytes), _LEAST_CHUNKS)
    fit = max(least, min(capacity_bytes // _SEGMENTS, _MOST_SEGMENT_BYTES))
    fit = max(fit, capacity_bytes // _MAX_SEGMENTS)
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
        capacity_bytes: int | None = None,
        capacity_fraction: float | None = None,
        direct_io: DirectIO = "auto",
        fsync: bool = False,
    ) -> None:
        self._context = context
        self._root = folders.open_root(root_dir)
        self._said_damaged = self._closed = False
        self._writers = 0
        """Calls that may write to the disk: the last one out gives up the folder."""
        try:
            ownership.refuse_other_layout(self._root)
            self._ownership = ownership.Ownership(self._root)
        except OSError as e:
            raise folders.unusable(self._root, e) from e
        try:
            capacity = resolve(context, self._root, capacity_bytes, capacity_fraction)
            self._open(capacity, direct_io, fsync)
        except OSError as e:
            self._ownership.close()
            raise folders.unusable(self._root, e) from e
        except BaseException:
            self._ownership.close()
            raise

    # -- opening and closing --------------------------------------------------------------------

    def _open(self, capacity_bytes: int, direct_io: DirectIO, fsync: bool) -> None:
        ownership.open_namespace(self._root, self._context.namespace)
        files = SegmentFiles(self._ownership.folder, direct_io, fsync)
        room = capacity_bytes - ownership.other_bytes(self._root)
        files.restore_lengths(room)
        found = list(recovery.headers(files))
        pool = _sized(self._context, room, [n for _, n, header in found if header])
        self._core = LogCore(self._context, files, pool)
        self._roller = Roller(self._core)
        own, rows = self._find_segments(found), []
        for segment, header in own:
            rows = self._take_in(segment, header)
        self._shrink()
        if own and self._core.pool.last_sealed() is own[-1][0]:
            self._resume(own[-1][0], rows)
        if not pool.segments:
            with contextlib.suppress(KVTiersError):  # a disk that is full now may have room later
                self._roller.prepare()
        for number in list(pool.segments)[:1]:
            files.header(number)  # which also tells whether O_DIRECT works here
        if direct_io == "on" and not files.direct:
            raise bad_option("direct_io", f'is "on", but {self._root} refuses it: use "auto"')

    def _find_segments(
        self, found: Iterable[tuple[int, int, Header | None]]
    ) -> list[tuple[Segment, Header]]:
        """Count all; those of this namespace, the oldest first."""
        own = []
        for number, nbytes, header in found:
            segment = Segment(number, nbytes)
            if header is not None:
                segment.state, segment.sequence = State.SEALED, header.sequence
                segment.created_at = header.created_at
                if header.namespace_id == self._context.namespace.id:
                    own.append((segment, header))
            self._core.pool.found(segment)
        return sorted(own, key=lambda pair: pair[1].sequence)

    def _take_in(self, segment: Segment, header: Header) -> list[Row]:
        rows, sealed = recovery.rows_of(self._core.files, segment.number, header)
        segment.take_in(rows)
        self._core.index.put(segment.number, rows)
        if not sealed:
            with contextlib.suppress(OSError):  # then it is looked through again next time
                self._core.write_table(segment, rows)
        return rows

    def _shrink(self) -> None:
        """Bring what was found within a capacity, and to a length, that may have changed."""
        pool = self._core.pool
        self._roller.remove_misfits()
        while pool.used_bytes > pool.capacity_bytes and (victim := pool.victim()) is not None:
            self._roller.empty(victim)

    def _resume(self, last: Segment, rows: Sequence[Row]) -> None:
        """Go on where the last owner stopped: the table of the segment is not the last word."""
        end = fmt.pages_of(last.nbytes)
        self._core.files.write(last.number, end - 1, [pages(1)])
        last.resume(rows)
        self._core.pool.active = last

    def close(self) -> None:
        """Write down what the last segment holds; give the folder up."""
        with self._core.lock:
            busy = self._closed or self._writers
            self._closed = True
        if not busy:
            self._give_up()

    @contextlib.contextmanager
    def _writing(self, operation: str) -> Iterator[None]:
        """Within, the folder stays ours, even if a call hangs while the store is closed."""
        with self._core.lock:
            self._refuse_if_closed(operation)
            self._writers += 1
        try:
            yield
        finally:
            with self._core.lock:
                self._writers -= 1
                last = self._closed and not self._writers
            if last:
                self._give_up()

    def _give_up(self) -> None:
        with contextlib.suppress(KVTiersError):
            self._flush_deletions()
        core = self._core
        with core.lock:
            active, core.pool.active = core.pool.active, None
            if active is not None:
                active.to(State.FULL)
        if active is not None:
            core.seal(active)
        self._ownership.close()

    # -- the contract ---------------------------------------------------------------------------

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """Whether each chunk is in the index. Never waits."""
        self._refuse_if_closed("contains")
        index = self._core.index
        return [key in index for key in keys]

    def write(self, items: Sequence[Item]) -> list[KVTiersError | None]:
        """Append each item unless it is there: one call to the disk for many."""
        with self._writing("write"):
            return self._write(items)

    def _write(self, items: Sequence[Item]) -> list[KVTiersError | None]:
        self._roller.note_uses()
        results = [self._unfit(item) for item in items]
        index = self._core.index
        todo = [i for i, e in enumerate(results) if e is None and items[i].key not in index]
        try:
            self._flush_deletions()
            while todo:
                wanted = [(items[i].key, items[i].view.nbytes) for i in todo[: fmt.MAX_ROWS]]
                segment, run = self._roller.place(wanted)
                part, todo = todo[: len(run.rows)], todo[len(run.rows) :]
                error = self._core.append(segment, run, [items[i].view for i in part])
                for i in part:
                    results[i] = error
        except KVTiersError as e:
            for i in todo:
                results[i] = e.with_traceback(None)
        return results

    def read(self, items: Sequence[Item]) -> list[KVTiersError | None]:
        """Read and verify each item: neighbours on the disk by one call."""
        self._refuse_if_closed("read")
        core = self._core
        with core.lock:
            found = [core.index.find(item.key) for item in items]
            numbers = {at.segment for at in found if at is not None}
            for number in numbers:
                core.pool.segments[number].reads += 1
        try:
            results = read_items(core, items, found)
        finally:
            for number in numbers:
                self._end_read(number)
        if any(results):
            self._report_losses(items, found, results)
        self.touch([i.key for i, error in zip(items, results, strict=True) if error is None])
        return results

    def delete(self, keys: Sequence[Key]) -> None:
        """Forget these chunks, and write down that they are forgotten."""
        with self._writing("delete"):
            with self._core.lock:
                self._core.deletions.extend(self._core.index.drop(dict.fromkeys(keys)))
            self._flush_deletions()

    def scan(self) -> Iterator[Entry]:
        """What is in the index; used when its segment was begun."""
        self._refuse_if_closed("scan")
        with self._core.lock:
            began = {s.number: s.created_at for s in self._core.pool.segments.values()}
            items = self._core.index.items()
        return (Entry(k, at.pages * PAGE_BYTES, began.get(at.segment, 0.0)) for k, at in items)

    def touch(self, keys: Sequence[Key]) -> None:
        """Note the use; the next write takes it in."""
        self._refuse_if_closed("touch")
        self._roller.touch(keys)

    # -- inside ---------------------------------------------------------------------------------

    def _unfit(self, item: Item) -> KVTiersError | None:
        if len(item.key) > record.MAX_KEY_BYTES:
            return record.key_too_long(item.key)
        if not 0 < item.view.nbytes <= self._core.pool.largest:
            return self._core.full(f"a chunk of {item.view.nbytes} bytes fits into no segment")
        return None

    def _flush_deletions(self) -> None:
        """Write down that chunks are gone, so that they do not come back when it is opened."""
        while gone := self._some_deleted():
            while gone:
                segment, run = self._roller.place([(key, 0) for key in gone])
                nothing = [memoryview(b"")] * len(run.rows)
                error = self._core.append(segment, run, nothing)
                if error is not None:
                    raise error
                gone = gone[len(run.rows) :]

    def _some_deleted(self) -> list[Key]:
        gone: list[Key] = []
        with contextlib.suppress(IndexError):
            while len(gone) < fmt.MAX_ROWS:
                key = self._core.deletions.popleft()
                if key not in self._core.index:  # else it was written again meanwhile
                    gone.append(key)
        return gone

    def _end_read(self, number: int) -> None:
        core = self._core
        with core.lock:
            segment = core.pool.segments[number]
            segment.reads -= 1
            idle = segment.state is State.DRAINING and not segment.reads
            if idle and not segment.keys:  # else whoever empties it is still at it
                segment.to(State.FREE)

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
            with self._core.lock:
                known = at is not None and self._core.index.drop_at(item.key, at)
            if known:
                self._core.deletions.append(item.key)
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
            _log.warning("%s, said once: %s", self._core.files.folder, problem)

    def _refuse_if_closed(self, operation: str) -> None:
        if self._closed:
            raise KVTiersError(
                f"{self._context.name}: {operation} after close",
                kind=Kind.CLOSED,
                operation=operation,
            )

    @property
    def direct(self) -> bool:
        """Whether it goes past the page cache, as far as the file system lets it."""
        return self._core.files.direct

    @property
    def used_bytes(self) -> int:
        """Bytes of all segments, whatever is in them."""
        return self._core.pool.used_bytes

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant, if any."""
        self._core.check()

    def __repr__(self) -> str:
        return f"<LogStore {self._root}: {self._core}>"


def _sized(context: StoreContext, room: int, lengths: Iterable[int]) -> Pool:
    """A pool of segments as long as those that are there, if they suit; ``room`` in bytes."""
    chunk = context.layout.slot_bytes
    least = fmt.fits(fmt.pages_of(chunk), _LEAST_CHUNKS)
    few, many = room // _LEAST_SEGMENTS, max(least, room // _MAX_SEGMENTS)
    suit = [n for n in lengths if many <= n <= few and n % PAGE_BYTES == 0]
    segment = max(suit, default=segment_bytes_for(room, chunk))
    require(
        room >= _LEAST_SEGMENTS * segment,
        "capacity_bytes",
        f"leaves {room} bytes, too little for {_LEAST_SEGMENTS} segments of {_LEAST_CHUNKS} chunks "
        f"each: give at least {_LEAST_SEGMENTS * least} more than what else lies there",
    )
    return Pool(room, segment)
