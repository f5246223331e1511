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

_NOTHING_LEAVES = contextlib.nullcontext()


class Room:
    """Room for files under ``root``, made by deleting the least recently used.

    ``capacity_bytes`` None: there is always room, and nothing is counted. Names are paths
    relative to the root. Any thread. ``on_evicted`` is called with the names that left.
    """

    def __init__(
        self, root: str, capacity_bytes: int | None, on_evicted: Callable[[Sequence[str]], None]
    ) -> None:
        self._root = root
        self._bounded = capacity_bytes is not None
        self._ledger = Ledger(capacity_bytes or 0)
        self._on_evicted = on_evicted
        self._loaded = False
        self._stuck: set[str] = set()
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

        Raises KVTiersError (``Kind.FULL``) if that is impossible.
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
        try:
            with self._making_room:
                self._load()
                while True:
                    with self._state:
                        victims = self._ledger.evict(size, self._stuck)
                        if victims is None:
                            raise self._full(size)
                        if not victims:
                            self._ledger.promise(token, size)
                            return
                    evicted += [name for name, bytes_ in victims if self._delete(name, bytes_)]
        finally:
            if evicted:
                self._on_evicted(evicted)

    def fill(self, token: str, name: str) -> None:
        """What was reserved is now on disk as ``name``."""
        if self._bounded:
            with self._state:
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

    def _delete(self, name: str, size: int) -> bool:
        try:
            os.unlink(os.path.join(self._root, name))
        except FileNotFoundError:
            return True
        except OSError as e:
            if not self._stuck:
                _log.warning("cannot evict %s/%s, said once: %s", self._root, name, e.strerror)
            with self._state:
                self._stuck.add(name)
                self._ledger.put_last(name, size)
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
                elif f"/{names.QUARANTINE}/" in name:
                    files.append((0.0, name, info.st_size))
                else:
                    other += info.st_size
    return files, other


def _walk(folder: str) -> Iterator[str]:
    for where, _, file_names in os.walk(folder):
        for name in file_names:
            yield os.path.join(where, name)
