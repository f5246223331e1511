"""Layout ``files``: one content-addressed file per chunk, for local and shared file systems.

A file is a header page (:mod:`kvtiers.tiers.record`) and the payload. It is written under
another name and renamed into place, so that it is seen whole or not at all; equal names have
equal bytes, so that writers of a shared mount need no coordination. See ``names`` for the tree.
"""

import contextlib
import logging
import mmap
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvtiers.chunks import PAGE_BYTES, Key
from kvtiers.errors import Kind, KVTiersError, map_errors
from kvtiers.events import Reason
from kvtiers.tiers import record
from kvtiers.tiers.base import Capabilities, Entry, Item, StoreContext
from kvtiers.tiers.fs import folders, names
from kvtiers.tiers.fs.direct import DirectFiles, DirectIO
from kvtiers.tiers.fs.recency import Recency
from kvtiers.tiers.fs.room import Room
from kvtiers.tiers.fs.scratch import Scratch, sweep
from kvtiers.tiers.options import bad_option, require

_log = logging.getLogger("kvtiers")

_MAX_QUARANTINED = 4
"""Damaged files kept per namespace for whoever wants to know what happened."""
_MAX_REOPENS = 8
"""How often one write makes the folder again while somebody clears it."""


class FilesStore:
    """Chunks as files under ``<root_dir>/<namespace id>/``.

    Raises ConfigError, naming the option, if the folder cannot be used. ``fsync`` False: a power
    cut may lose the chunks of the last seconds or leave damaged ones, which reads find out.
    """

    capabilities = Capabilities(persistent=True, shared=True)

    def __init__(
        self,
        context: StoreContext,
        root_dir: str,
        *,
        capacity_bytes: int | None = None,
        direct_io: DirectIO = "auto",
        fsync: bool = False,
    ) -> None:
        self._context = context
        self._id = context.namespace.id
        _check_capacity(context, capacity_bytes)
        self._root = folders.open_root(root_dir)
        self._folder = os.path.join(self._root, self._id)
        self._fsync = fsync
        self._io = DirectFiles(direct_io, fsync)
        self._room = Room(self._root, capacity_bytes, self._evicted, context.clock)
        self._recency = Recency(self._path, self._touch_room, context.clock)
        self._opening = threading.Lock()
        self._closed = False
        self._said_damaged = False
        try:
            self._scratch = self._open()
        except OSError as e:
            raise folders.unusable(self._root, e) from e
        try:
            sweep(self._root)
            self._probe()
        except OSError as e:
            self._scratch.close()
            raise folders.unusable(self._root, e) from e
        if direct_io == "on" and not self._io.direct:
            self.close()
            raise bad_option("direct_io", f'is "on", but {self._root} refuses it: use "auto"')

    def _open(self) -> Scratch:
        folders.make_folder(self._folder, durable=True)
        scratch = Scratch(self._folder)
        try:
            folders.open_manifest(self._folder, self._context.namespace, scratch.path)
        except BaseException:
            scratch.close()
            raise
        return scratch

    def _probe(self) -> None:
        """Write and read one real page, which also tells whether O_DIRECT works here."""
        path = self._scratch.path()
        page = memoryview(mmap.mmap(-1, PAGE_BYTES))
        try:
            self._io.write(path, page)
            self._io.read(path, page)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    @property
    def direct(self) -> bool:
        """Whether it goes past the page cache, as far as the file system lets it."""
        return self._io.direct

    # -- the contract ---------------------------------------------------------------------------

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """Whether each chunk's file is there. Raises KVTiersError if the folder cannot be used."""
        self._refuse_if_closed("contains")
        there = [_exists(self._path(key)) for key in keys]
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
        results = [self._caught("read", self._read, item) for item in items]
        self.touch([i.key for i, error in zip(items, results, strict=True) if error is None])
        return results

    def delete(self, keys: Sequence[Key]) -> None:
        """Unlink these chunks' files. Raises KVTiersError if that is not allowed."""
        self._refuse_if_closed("delete")
        for key in keys:
            with map_errors("delete", self._path(key)), contextlib.suppress(FileNotFoundError):
                os.unlink(self._path(key))
            self._room.gone(self._name(key))

    def scan(self) -> Iterator[Entry]:
        """Every chunk file of the namespace."""
        self._refuse_if_closed("scan")
        with map_errors("scan", self._root):
            self._room.trim()
        return self._scan()

    def _scan(self) -> Iterator[Entry]:
        with map_errors("scan", self._folder):
            for key, entry in names.chunk_files(self._folder):
                with contextlib.suppress(FileNotFoundError):
                    info = entry.stat(follow_symlinks=False)
                    yield Entry(key, max(0, info.st_size - PAGE_BYTES), info.st_mtime)

    def touch(self, keys: Sequence[Key]) -> None:
        """Note the use; the next write passes it on to the disk."""
        self._refuse_if_closed("touch")
        if keys:
            self._recency.note(keys, self._context.wall_clock())

    def close(self) -> None:
        """Write down what was used when; remove the temporary files."""
        if self._closed:
            return
        self._closed = True
        self._recency.finish()
        self._scratch.close()

    # -- one file -------------------------------------------------------------------------------

    def _caught(
        self, operation: str, act: Callable[[Item], None], item: Item
    ) -> KVTiersError | None:
        try:
            act(item)
        except KVTiersError as e:
            return e
        except OSError as e:
            try:
                with map_errors(operation, self._path(item.key)):
                    raise e
            except KVTiersError as mapped:
                return mapped
        return None

    def _write(self, item: Item) -> None:
        name = self._name(item.key)
        path = f"{self._root}/{name}"
        with self._room.using(name):
            if self._room.may_hold(name) and _exists(path):
                return
            for _ in range(_MAX_REOPENS):
                try:
                    self._write_new(item, name, path)
                    return
                except FileNotFoundError:  # somebody clears the folder under us
                    with contextlib.suppress(FileNotFoundError):
                        self._open_again()
            self._write_new(item, name, path)

    def _open_again(self) -> None:
        with self._opening:
            if self._closed or (os.path.isdir(self._scratch.folder) and self._has_manifest()):
                return
            old, self._scratch = self._scratch, self._open()
            old.close()

    def _has_manifest(self) -> bool:
        return _exists(os.path.join(self._folder, names.MANIFEST))

    def _write_new(self, item: Item, name: str, path: str) -> None:
        self._io.header()[:] = record.pack(item.key, self._id, item.view)
        temp = self._scratch.path()
        self._room.reserve(temp, PAGE_BYTES + item.view.nbytes)
        try:
            self._io.write(temp, item.view)
            self._move(temp, path)
            self._room.fill(temp, name)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temp)
            raise
        finally:
            self._room.release(temp)

    def _move(self, temp: str, path: str) -> None:
        try:
            os.replace(temp, path)
        except FileNotFoundError:
            if not self._has_manifest():  # no chunk without it
                raise
            folders.make_folder(os.path.dirname(path), durable=self._fsync)
            os.replace(temp, path)
        if self._fsync:
            folders.sync_folder(os.path.dirname(path))

    def _read(self, item: Item) -> None:
        name = self._name(item.key)
        path = f"{self._root}/{name}"
        with self._room.using(name):
            try:
                size = self._io.read(path, item.view)
            except FileNotFoundError:
                self._room.gone(name)
                self._context.on_removed([item.key], Reason.VANISHED)
                raise
            problem = self._problem(item, size)
            if problem is None:
                return
            if self._quarantine(name, path):
                self._say_damaged(path, problem)
                self._context.on_removed([item.key], Reason.CORRUPT)
        raise KVTiersError(
            f"{path}: {problem}", kind=Kind.CORRUPT, operation="read", context={"path": path}
        )

    def _problem(self, item: Item, size: int) -> str | None:
        expected = PAGE_BYTES + item.view.nbytes
        if size != expected:
            return misfit(size, expected)
        error = record.verify(self._io.header(), item.key, self._id, item.view)
        return None if error is None else str(error)

    def _say_damaged(self, path: str, problem: str) -> None:
        """Once: a disk that goes bad has many of them, and the metrics count each."""
        if not self._said_damaged:
            self._said_damaged = True
            _log.warning("%s was damaged and is a miss, said once: %s", path, problem)

    def _quarantine(self, name: str, path: str) -> bool:
        """Put a file aside; False if somebody else did, who then reports it."""
        folder = os.path.join(self._folder, names.QUARANTINE)
        aside = os.path.join(folder, os.path.basename(path))
        try:
            folders.make_folder(folder)
            os.replace(path, aside)
        except FileNotFoundError:
            return False
        except OSError as e:
            _log.warning("cannot put the damaged %s aside: %s", path, e.strerror)
            return True
        self._room.gone(name)
        with contextlib.suppress(OSError):
            info = os.lstat(aside)
            if stat.S_ISDIR(info.st_mode):
                with contextlib.suppress(OSError):
                    os.rmdir(aside)  # somebody's making: it stays if there is anything in it
            else:
                self._room.put_last(os.path.relpath(aside, self._root), info.st_size)
            self._trim_quarantine(folder)
        return True

    def _trim_quarantine(self, folder: str) -> None:
        with os.scandir(folder) as entries:
            kept = sorted(
                (e.stat(follow_symlinks=False).st_mtime, e.path)
                for e in entries
                if not e.is_dir(follow_symlinks=False) and names.chunk_key(e.name) is not None
            )
        for _, old in kept[:-_MAX_QUARANTINED]:
            with contextlib.suppress(OSError):
                os.unlink(old)
                self._room.gone(os.path.relpath(old, self._root))

    # -- recency --------------------------------------------------------------------------------

    def _touch_room(self, keys: Iterable[Key]) -> None:
        self._room.touch(self._name(key) for key in keys)

    def _evicted(self, evicted: Sequence[str]) -> None:
        ours = [n for n in evicted if n.startswith(self._id) and names.QUARANTINE not in n]
        keys = [names.chunk_key(os.path.basename(name)) for name in ours]
        self._context.on_removed([key for key in keys if key is not None], Reason.EVICTED)

    # -- small things ---------------------------------------------------------------------------

    def _name(self, key: Key) -> str:
        return f"{self._id}/{names.chunk_path(key)}"

    def _path(self, key: Key) -> str:
        return f"{self._folder}/{names.chunk_path(key)}"

    def _refuse_if_closed(self, operation: str) -> None:
        if self._closed:
            raise KVTiersError(
                f"{self._context.name}: {operation} after close",
                kind=Kind.CLOSED,
                operation=operation,
            )

    @property
    def used_bytes(self) -> int:
        """Bytes of all kvtiers files under the root, if there is a capacity; else 0."""
        return self._room.used_bytes

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant, if any."""
        self._room.check()
        self._recency.check()
        self._scratch.check()

    def __repr__(self) -> str:
        return f"<FilesStore {self._folder}: {self._room}, {self._io}>"


def _exists(path: str) -> bool:
    return os.access(path, os.F_OK)


def _check_capacity(context: StoreContext, capacity_bytes: int | None) -> None:
    if capacity_bytes is None:
        return
    least = context.layout.slot_bytes + PAGE_BYTES + len(context.namespace.manifest().encode())
    require(
        capacity_bytes >= least,
        "capacity_bytes",
        f"is {capacity_bytes}, less than one chunk with header and manifest: give at least {least}",
    )


def misfit(size: int, expected: int) -> str:
    """What is wrong with a file of ``size`` bytes (-1: no regular file) instead of ``expected``."""
    if size < 0:
        return "it is no regular file"
    how = "short" if size < expected else "long"
    return f"it is {how}: {size} bytes instead of {expected}"
