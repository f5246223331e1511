"""Layout ``files``: one content-addressed file per chunk, for local and shared file systems.

A file is a header page (:mod:`kvtiers.tiers.record`) and the payload. It is written under
another name and renamed into place, so that it is seen whole or not at all; equal names have
equal bytes, so that writers of a shared mount need no coordination. See ``names`` for the tree.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Sequence

from kvtiers.chunks import PAGE_BYTES, Key
from kvtiers.errors import Kind, KVTiersError, closed, map_errors
from kvtiers.events import Reason
from kvtiers.tiers import record
from kvtiers.tiers.base import Capabilities, Entry, Item, StoreContext, Usage
from kvtiers.tiers.complaints import Complaints
from kvtiers.tiers.fs import capacity, folders, names, stamps
from kvtiers.tiers.fs.account import Account
from kvtiers.tiers.fs.damaged import Damaged
from kvtiers.tiers.fs.direct import DirectFiles, DirectIO
from kvtiers.tiers.fs.layouts import settle_on_layout
from kvtiers.tiers.fs.quota import Eviction
from kvtiers.tiers.fs.recency import Recency
from kvtiers.tiers.fs.room import Room, Unbounded
from kvtiers.tiers.fs.victims import Victims
from kvtiers.tiers.fs.workplace import Workplace
from kvtiers.tiers.fs.writing import FileWriting
from kvtiers.tiers.options import bad_option


class FilesStore:
    """Chunks as files under ``<root_dir>/<namespace id>/``.

    Raises ConfigError, naming the option, if the folder cannot be used. ``eviction`` "external":
    others see to the bound, and no chunk is ever deleted here. ``fsync`` False: a power cut may
    lose the chunks of the last seconds or leave damaged ones, which reads find out.
    """

    def __init__(
        self,
        context: StoreContext,
        root_dir: str,
        *,
        eviction: Eviction = "own",
        capacity_bytes: int | None = None,
        capacity_fraction: float | None = None,
        direct_io: DirectIO = "auto",
        fsync: bool = False,
    ) -> None:
        capacity.check_stated(eviction, capacity_bytes, capacity_fraction)
        self._owns = eviction == "own"
        self.capabilities = Capabilities(persistent=True, shared=True, delete=self._owns)
        self._context = context
        self._id = context.namespace.id
        self._root = folders.path_of(root_dir)
        bound = None
        if self._owns:
            bound = capacity.bound_of_files(context, self._root, capacity_bytes, capacity_fraction)
        folders.open_root(self._root)
        settle_on_layout(self._root, "files")
        self._folder = os.path.join(self._root, self._id)
        self._io = DirectFiles(direct_io, fsync)
        self._recency = Recency(self._path, context.clock)
        self._complaints = Complaints(self._root, context.clock)
        self._closed = False
        self._account = Account(self._root, bound, context.clock, context.wall_clock)
        self._room = self._bounded_room() if self._owns else Unbounded()
        self._damaged = Damaged(self._folder, self._room.freed if self._owns else None)
        self._place = Workplace(context.namespace, self._root, self._account, self._room)
        self._place.open(self._io)
        self._writing = FileWriting(
            self._id, self._io, self._room, self._place, self._damaged, context.clock
        )
        if direct_io == "on" and not self._io.direct:
            self.close()
            raise bad_option("direct_io", f'is "on", but {self._root} refuses it: use "auto"')

    def _bounded_room(self) -> Room:
        clock, wall_clock = self._context.clock, self._context.wall_clock
        victims = Victims(self._root, self._used_at, clock, wall_clock)
        return Room(self._root, self._account, victims, self._evicted, clock, wall_clock)

    @property
    def direct(self) -> bool:
        """Whether it goes past the page cache, as far as the file system lets it."""
        return self._io.direct

    # -- the contract ---------------------------------------------------------------------------

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """Whether each chunk's file is there. Raises KVTiersError if the folder cannot be used.

        Where evictions are near, what is found is marked as in use, for every engine to see.
        """
        return self._contains(keys, self._mark())

    def still_there(self, keys: Sequence[Key]) -> list[bool]:
        """The same, marking nothing."""
        return self._contains(keys, None)

    def _contains(self, keys: Sequence[Key], until: int | None) -> list[bool]:
        self._refuse_if_closed("contains")
        there = [self._is_there(key, self._path(key), until) for key in keys]
        if not all(there):  # of a mount that is dead nothing is known
            with map_errors("contains", self._folder), contextlib.suppress(FileNotFoundError):
                os.stat(self._folder)
        return there

    def write(self, items: Sequence[Item]) -> list[KVTiersError | None]:
        """Store each item under its name unless it is there."""
        self._refuse_if_closed("write")
        self._recency.apply()
        return [self._caught("write", self._write, item) for item in items]

    def read(self, items: Sequence[Item]) -> list[KVTiersError | None]:
        """Read and verify each item; what fails verification is put aside."""
        self._refuse_if_closed("read")
        return [self._caught("read", self._read, item) for item in items]

    def delete(self, keys: Sequence[Key]) -> None:
        """Unlink these chunks' files. Raises KVTiersError if that is not allowed."""
        self._refuse_if_closed("delete")
        if not self._owns:
            raise KVTiersError(
                f'{self._root}: eviction is "external", so kvtiers deletes no chunk',
                kind=Kind.UNSUPPORTED,
                operation="delete",
            )
        for path in map(self._path, keys):
            with map_errors("delete", path), contextlib.suppress(FileNotFoundError):
                size = os.lstat(path).st_size
                os.unlink(path)
                self._room.freed(size)

    def scan(self) -> Iterator[Entry]:
        """Every chunk file of the namespace."""
        self._refuse_if_closed("scan")
        with map_errors("scan", self._root):
            self._room.trim()
        return self._scan()

    def _scan(self) -> Iterator[Entry]:
        with map_errors("scan", self._folder):
            now = self._context.wall_clock()
            for key, entry in names.chunk_files(self._folder):
                with contextlib.suppress(FileNotFoundError):
                    info = entry.stat(follow_symlinks=False)
                    used_at = stamps.used_at(info.st_mtime, now)
                    yield Entry(key, max(0, info.st_size - PAGE_BYTES), used_at)

    def touch(self, keys: Sequence[Key]) -> None:
        """Note the use; the next write passes it on to the disk."""
        self._refuse_if_closed("touch")
        if keys:
            self._recency.note(keys, self._context.wall_clock())

    def close(self) -> None:
        """Write down what was used when; remove the temporary files; leave the quota."""
        if self._closed:
            return
        self._closed = True
        self._recency.finish()
        self._place.close()

    # -- one file -------------------------------------------------------------------------------

    def _caught(
        self, operation: str, act: Callable[[Item], None], item: Item
    ) -> KVTiersError | None:
        try:
            act(item)
        except KVTiersError as e:
            error = e
        except OSError as e:
            try:
                with map_errors(operation, self._path(item.key)):
                    raise e
            except KVTiersError as mapped:
                error = mapped
        else:
            return None
        self._complaints.failed(operation, error)
        return error

    def _mark(self) -> int | None:
        """The time for files that are used now; None if nobody needs to know at once."""
        now = self._context.wall_clock()
        return stamps.until_ns(now) if self._account.evictions_are_near(now) else None

    def _is_there(self, key: Key, path: str, until: int | None) -> bool:
        if self._damaged and self._damaged.holds(key, path):
            return False
        marked = None if until is None else stamps.promise(path, until)
        return os.access(path, os.F_OK) if marked is None else marked

    def _write(self, item: Item) -> None:
        path = self._path(item.key)
        if self._is_there(item.key, path, None):
            self.touch([item.key])
            return
        self._writing.write(item, path)
        self._complaints.worked("write")

    def _read(self, item: Item) -> None:
        path = self._path(item.key)
        until = stamps.until_ns(self._context.wall_clock())
        try:
            if self._damaged and self._damaged.holds(item.key, path):
                raise FileNotFoundError(errno.ENOENT, "it is known to be damaged", path)
            size = self._read_file(path, item.view, until)
        except FileNotFoundError:
            self._context.on_removed([item.key], Reason.VANISHED)
            raise
        problem = self._problem(item, size)
        if problem is None:
            self._complaints.worked("read")
            return
        if self._damaged.take_out(item.key, path, problem):
            self._context.on_removed([item.key], Reason.CORRUPT)
        raise KVTiersError(
            f"{path}: {problem}", kind=Kind.CORRUPT, operation="read", context={"path": path}
        )

    def _read_file(self, path: str, view: memoryview, until: int) -> int:
        try:
            return self._io.read(path, view, until)
        except FileNotFoundError:  # or it was about to leave, and gets its name back
            for name in (names.leaving(path), path):
                with contextlib.suppress(FileNotFoundError):
                    return self._io.read(str(name), view, until)
            raise

    def _problem(self, item: Item, size: int) -> str | None:
        expected = PAGE_BYTES + item.view.nbytes
        if size != expected:
            return misfit(size, expected)
        error = record.verify(self._io.header(), item.key, self._id, item.view)
        return None if error is None else str(error)

    # -- recency --------------------------------------------------------------------------------

    def _used_at(self, name: str) -> float:
        """When a file of ours was used, if it does not say so itself yet."""
        key = self._key(name) if self._recency.pending else None
        return 0.0 if key is None else self._recency.used_at(key)

    def _evicted(self, evicted: Sequence[str]) -> None:
        keys = map(self._key, evicted)
        self._context.on_removed([key for key in keys if key is not None], Reason.EVICTED)

    # -- small things ---------------------------------------------------------------------------

    def _key(self, name: str) -> Key | None:
        """The key of a chunk of this namespace by its file's name below the root."""
        namespace, folder, file_name = name.split("/")
        return names.key_at(folder, file_name) if namespace == self._id else None

    def _path(self, key: Key) -> str:
        return f"{self._folder}/{names.chunk_path(key)}"

    def _refuse_if_closed(self, operation: str) -> None:
        if self._closed:
            raise closed(self._context.name, operation)

    @property
    def used_bytes(self) -> int:
        """Bytes of all kvtiers files under the root, if they are counted; else 0."""
        return self._room.used_bytes

    def usage(self) -> Usage | None:
        """Of the whole root, as its quota file has it; None where others see to the bound."""
        return Usage(self.used_bytes, self._account.capacity) if self._owns else None

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant, if any."""
        self._room.check()
        self._recency.check()
        self._place.check()
        self._damaged.check()
        self._complaints.check()

    def __repr__(self) -> str:
        return f"<FilesStore {self._folder}: {self._room}, {self._io}>"


def misfit(size: int, expected: int) -> str:
    """What is wrong with a file of ``size`` bytes (-1: no regular file) instead of ``expected``."""
    if size < 0:
        return "it is no regular file"
    how = "short" if size < expected else "long"
    return f"it is {how}: {size} bytes instead of {expected}"
