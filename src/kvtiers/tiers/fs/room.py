"""Keeps the root within its capacity: the ledger's decisions, done to the disk."""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvtiers.errors import Kind, KVTiersError, Retry
from kvtiers.tiers.fs import names
from kvtiers.tiers.fs.quota import Ledger

_log = logging.getLogger("kvtiers")

_MAX_FAILURES = 16
"""Files that one write tries to evict in vain before it fails."""
_STUCK_S = 30.0
"""A file that could not be evicted is passed over for so long: it may have been the device."""
_NOTHING_LEAVES = contextlib.nullcontext()


class Room:
    """Room for files under ``root``, made by deleting the least recently used.

    ``capacity_bytes`` None: there is always room, and nothing is counted. Names are paths
    relative to the root. Any thread. ``on_evicted`` is called with the names that left.
    """

    def __init__(
        self,
        root: str,
        capacity_bytes: int | None,
        on_evicted: Callable[[Sequence[str]], None],
        clock: Callable[[], float],
    ) -> None:
        self._root = root
        self._bounded = capacity_bytes is not None
        self._ledger = Ledger(capacity_bytes or 0)
        self._on_evicted = on_evicted
        self._loaded = False
        self._clock = clock
        self._stuck: dict[str, float] = {}  # -> when to try again
        self._said_stuck = False
        self._state = threading.Lock()
        """Guards the ledger; never held during I/O."""
        self._making_room = threading.Lock()
        """Held while files leave, so that what one writer freed is not taken by another."""

    def using(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Within, ``name`` is not evicted."""
        return self._using(name) if self._bounded else _NOTHING_LEAVES

    @contextlib.contextmanager
    def _using(self, name: str) -> Iterator[None]:
        with self._state:
            self._ledger.begin(name)
        try:
            yield
        finally:
            with self._state:
                self._ledger.end(name)

    def may_hold(self, name: str) -> bool:
        """False if the file is not there or just about to leave; else look."""
        if not self._bounded:
            return True
        if not self._loaded:
            with self._making_room:
                self._load()
        with self._state:
            return self._ledger.holds(name)

    def reserve(self, token: str, size: int) -> None:
        """Make room for ``size`` bytes, until ``fill`` or ``release`` of ``token``.

        Raises KVTiersError if that is impossible: ``Kind.FULL``, or ``Kind.IO`` because files
        that should leave cannot be deleted.
        """
        if self._bounded:
            self._make_room(token, size)

    def trim(self) -> None:
        """Evict what is above the capacity, e.g. after it was lowered."""
        if self._bounded:
            with contextlib.suppress(KVTiersError):  # all that may leave has left
                self._make_room("trim", 0)
            self.release("trim")

    def _make_room(self, token: str, size: int) -> None:
        evicted: list[str] = []
        may_fail = _MAX_FAILURES
        try:
            with self._making_room:
                self._load()
                while True:
                    with self._state:
                        self._try_again_what_was_stuck()
                        victims = self._ledger.evict(size, self._stuck)
                        if victims is None:
                            raise self._stuck_error(size) if self._stuck else self._full(size)
                        if not victims:
                            self._ledger.promise(token, size)
                            return
                    left = self._delete_all(victims, may_fail)
                    evicted += left
                    may_fail -= len(victims) - len(left)
                    if may_fail <= 0:
                        raise self._stuck_error(size)
        finally:
            if evicted:
                self._on_evicted(evicted)

    def fill(self, token: str, name: str) -> None:
        """What was reserved is now on disk as ``name``."""
        if self._bounded:
            with self._state:
                self._stuck.pop(name, None)
                self._ledger.keep_promise(token, name)

    def release(self, token: str) -> None:
        """What was reserved is not used, unless it was filled."""
        if self._bounded:
            with self._state:
                self._ledger.break_promise(token)

    def touch(self, touched: Iterable[str]) -> None:
        """These were used, in this order."""
        with self._state:
            for name in touched:
                self._ledger.touch(name)

    def gone(self, name: str) -> None:
        """``name`` left the disk by other means."""
        with self._state:
            self._stuck.pop(name, None)
            self._ledger.gone(name)

    def put_last(self, name: str, size: int) -> None:
        """``name`` came to the disk by other means and is the first to leave."""
        if self._bounded:
            with self._state:
                self._ledger.put_last(name, size)

    def _full(self, size: int) -> KVTiersError:
        return KVTiersError(
            f"{self._root} has no room for {size} bytes within capacity_bytes "
            f"{self._ledger.capacity}",
            kind=Kind.FULL,
            retry=Retry.MAY,
            operation="write",
        )

    def _stuck_error(self, size: int) -> KVTiersError:
        return KVTiersError(
            f"{self._root} has no room for {size} bytes, because {len(self._stuck)} files in it "
            "that should leave cannot be deleted",
            kind=Kind.IO,
            retry=Retry.MAY,
            operation="write",
        )

    def _try_again_what_was_stuck(self) -> None:
        now = self._clock()
        while self._stuck and next(iter(self._stuck.values())) <= now:
            del self._stuck[next(iter(self._stuck))]

    def _delete_all(self, victims: Sequence[tuple[str, int]], may_fail: int) -> list[str]:
        """Those that left; the rest, untried after ``may_fail`` failures, stays and is counted."""
        left: list[str] = []
        kept: list[tuple[str, int]] = []
        for name, size in victims:
            if len(kept) < may_fail and self._delete(name):
                left.append(name)
            else:
                kept.append((name, size))
        with self._state:
            for name, size in reversed(kept):
                self._ledger.put_last(name, size)
        return left

    def _delete(self, name: str) -> bool:
        try:
            os.unlink(os.path.join(self._root, name))
        except FileNotFoundError:
            return True
        except OSError as e:
            if not self._said_stuck:
                self._said_stuck = True
                _log.warning("cannot evict %s/%s, said once: %s", self._root, name, e.strerror)
            with self._state:
                self._stuck.pop(name, None)  # to the end: in order of time
                self._stuck[name] = self._clock() + _STUCK_S
            return False
        return True

    def _load(self) -> None:
        if self._loaded:
            return
        files, other = measure(self._root)
        with self._state:
            self._ledger.load(files, other)
        self._loaded = True

    @property
    def used_bytes(self) -> int:
        """Bytes on disk and promised; 0 if unbounded or not counted yet."""
        return self._ledger.used

    def check(self) -> None:
        """Raise AssertionError if the ledger is wrong or above the capacity."""
        with self._state:
            self._ledger.check()
            if self._loaded and not self._stuck:
                assert self._ledger.used <= self._ledger.capacity, "above the capacity"

    def __repr__(self) -> str:
        return f"<Room {self._ledger}>" if self._bounded else "<Room unbounded>"


def measure(root: str) -> tuple[list[tuple[float, str, int]], int]:
    """What may leave - (last use, name, bytes), quarantine first - and bytes of the rest."""
    files, other = [], 0
    for namespace in names.namespaces(root):
        folder = os.path.join(root, namespace)
        chunks = {entry.path for _, entry in names.chunk_files(folder)}
        for path in _walk(folder):
            with contextlib.suppress(FileNotFoundError):
                info = os.stat(path, follow_symlinks=False)
                name = os.path.relpath(path, root)
                if path in chunks:
                    files.append((info.st_mtime, name, info.st_size))
                elif f"/{names.QUARANTINE}/" in name and names.chunk_key(os.path.basename(path)):
                    files.append((0.0, name, info.st_size))
                else:
                    other += info.st_size
    return files, other


def _walk(folder: str) -> Iterator[str]:
    for where, _, file_names in os.walk(folder):
        for name in file_names:
            yield os.path.join(where, name)
