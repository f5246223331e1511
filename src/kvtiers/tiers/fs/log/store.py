"""Layout ``log``: chunks one behind the other in segments, for a local disk with one owner.

Many chunks are written and read by one vectored call, and where each lies is in memory. See
``format`` for the bytes, ``pool`` for what becomes of a segment, ``roller`` for what leaves.
"""

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence

from kvtiers.chunks import PAGE_BYTES, Key
from kvtiers.errors import Kind, KVTiersError, closed
from kvtiers.events import Reason
from kvtiers.tiers import record
from kvtiers.tiers.base import Capabilities, Entry, Item, StoreContext, Usage
from kvtiers.tiers.fs import folders
from kvtiers.tiers.fs.direct import DirectIO
from kvtiers.tiers.fs.layouts import settle_on_layout
from kvtiers.tiers.fs.log import format as fmt
from kvtiers.tiers.fs.log import ownership
from kvtiers.tiers.fs.log.core import LogCore
from kvtiers.tiers.fs.log.opening import bound_of_log, open_log
from kvtiers.tiers.fs.log.reading import forget_lost, read_items
from kvtiers.tiers.fs.log.removed import Renewal, removed
from kvtiers.tiers.fs.log.roller import Roller
from kvtiers.tiers.fs.log.segment import SegmentFiles
from kvtiers.tiers.options import bad_option

_log = logging.getLogger("kvtiers")

_REASONS = {Kind.VANISHED: Reason.VANISHED, Kind.CORRUPT: Reason.CORRUPT}


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
        self._root = folders.path_of(root_dir)
        self._capacity = bound_of_log(context, self._root, capacity_bytes, capacity_fraction)
        self._direct_io, self._fsync = direct_io, fsync
        self._said_damaged = self._closed = False
        self._gate = threading.Lock()
        """Guards ``_writers`` and ``_closed``; never held during I/O."""
        self._writers = 0
        """Calls that may write to the disk: the last one out gives up the folder."""
        self._renewal = Renewal(self._root, self._start, context.clock)
        self._start()

    # -- opening and closing --------------------------------------------------------------------

    def _start(self) -> None:
        """Own the folder, and take in what is there. Raises ConfigError."""
        folders.open_root(self._root)
        settle_on_layout(self._root, "log")
        try:
            owned = ownership.Ownership(self._root)
        except OSError as e:
            raise folders.unusable(self._root, e) from e
        try:
            core, roller = self._open(owned.folder)
            owned.keep_capacity(self._capacity)
        except OSError as e:
            owned.close()
            raise folders.unusable(self._root, e) from e
        except BaseException:
            owned.close()
            raise
        self._ownership = owned  # before the core: see _is_lost
        self._core, self._roller = core, roller

    def _open(self, folder: str) -> tuple[LogCore, Roller]:
        ownership.open_namespace(self._root, self._context.namespace)
        files = SegmentFiles(folder, self._direct_io, self._fsync)
        others = ownership.other_bytes(self._root, self._context.namespace)
        opened = open_log(self._context, files, self._capacity - others)
        if self._direct_io == "on" and not files.direct:
            raise bad_option("direct_io", f'is "on", but {self._root} refuses it: use "auto"')
        return opened

    def close(self) -> None:
        """Write down what the last segment holds; give the folder up."""
        with self._gate:
            busy = self._closed or self._writers
            self._closed = True
        if not busy:
            self._give_up()

    @contextlib.contextmanager
    def _writing(self, operation: str) -> Iterator[None]:
        """Within, the folder stays ours, even if a call hangs while the store is closed."""
        with self._gate:
            self._refuse_if_closed(operation)
            self._writers += 1
        try:
            yield
        finally:
            with self._gate:
                self._writers -= 1
                last = self._closed and not self._writers
            if last:
                self._give_up()

    def _give_up(self) -> None:
        try:
            if not self._core.lost and self._ownership.holds():
                self._finish()
        finally:
            self._ownership.close()

    def _finish(self) -> None:
        with contextlib.suppress(KVTiersError):
            self._flush_deletions()
        self._core.seal_active()

    # -- a folder that somebody removed ---------------------------------------------------------

    def _is_lost(self, core: LogCore) -> bool:
        """Whether the folder of ``core`` is there no more, or another's: then it claims nothing.

        ``core`` is looked up before the ownership, which is the newer one if they differ.
        """
        if not core.lost and self._ownership.holds():
            return False
        gone = core.lose()
        if gone:
            self._context.on_removed(gone, Reason.VANISHED)
        return True

    def _see_to_folder(self) -> KVTiersError | None:
        """Begin a new log if the folder is gone. Returns the error if that failed.

        Refused while other writes run, which would go on in the new folder. Within ``_writing``.
        """
        core = self._core
        if not self._is_lost(core):
            return None
        with self._gate:
            alone = self._writers == 1
        if not alone:
            return removed(self._root, "and writes are under way")
        if self._core is not core:  # a call that has ended meanwhile began it anew
            return self._see_to_folder()
        self._ownership.close()
        return self._renewal.begin(core.complaints)

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
        lost = self._see_to_folder()
        if lost is not None:
            return [lost] * len(items)
        self._roller.note_uses()
        results = [self._unfit(item) for item in items]
        index = self._core.index
        todo = [i for i, e in enumerate(results) if e is None and items[i].key not in index]
        try:
            self._flush_deletions()
            while todo:
                wanted = [(items[i].key, items[i].view.nbytes) for i in todo[: fmt.MAX_ROWS]]
                segment, run = self._roller.make_room(wanted)
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
                core.pool.segments[number].begin_read()
        try:
            results = read_items(core, items, found)
        finally:
            with core.lock:
                for number in numbers:
                    core.pool.segments[number].end_read()
        if any(results):
            self._is_lost(core)
            self._report(forget_lost(core, items, found, results))
        self.touch([i.key for i, error in zip(items, results, strict=True) if error is None])
        return results

    def delete(self, keys: Sequence[Key]) -> None:
        """Forget these chunks, and write down that they are forgotten."""
        with self._writing("delete"):
            lost = self._see_to_folder()
            if lost is not None:
                raise lost.with_traceback(None)
            with self._core.lock:
                self._core.forget(self._core.index.drop(dict.fromkeys(keys)))
            self._flush_deletions()

    def scan(self) -> Iterator[Entry]:
        """What is in the index; used when its segment was begun."""
        self._refuse_if_closed("scan")
        core = self._core
        with core.lock:
            began = {s.number: s.created_at for s in core.pool.segments.values()}
            items = core.index.items()
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
        while gone := self._core.some_deleted():
            try:
                segment, run = self._roller.make_room([(key, 0) for key, _ in gone])
                part, gone = gone[: len(run.rows)], gone[len(run.rows) :]
                error = self._core.append_deletions(segment, run, part)
                if error is not None:
                    gone = part + gone
                    raise error
            finally:
                with self._core.lock:
                    self._core.deletions.extendleft(reversed(gone))

    def _report(self, lost: Sequence[tuple[Key, KVTiersError]]) -> None:
        for kind, reason in _REASONS.items():
            keys = [key for key, error in lost if error.kind is kind]
            if keys:
                self._context.on_removed(keys, reason)
        for _, error in lost:
            if error.kind is Kind.CORRUPT:
                self._say_damaged(str(error))

    def _say_damaged(self, problem: str) -> None:
        """Once: a disk that goes bad has many of them, and the metrics count each."""
        if not self._said_damaged:
            self._said_damaged = True
            _log.warning("%s, said once: %s", self._core.files.folder, problem)

    def _refuse_if_closed(self, operation: str) -> None:
        if self._closed:
            raise closed(self._context.name, operation)

    @property
    def direct(self) -> bool:
        """Whether it goes past the page cache, as far as the file system lets it."""
        return self._core.files.direct

    @property
    def used_bytes(self) -> int:
        """Bytes of all segments, whatever is in them."""
        core = self._core
        with core.lock:
            return core.pool.used_bytes

    def usage(self) -> Usage:
        """With what lies beside the segments; and the chunks in them that count."""
        beside = self._capacity - self._core.pool.capacity_bytes
        resident = self._core.index.pages * PAGE_BYTES
        return Usage(self.used_bytes + beside, self._capacity, resident)

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant, if any."""
        self._core.check()

    def __repr__(self) -> str:
        return f"<LogStore {self._root}: {self._core}>"
