"""One engine's place under a root: its namespace's folder, its scratch folder, its membership."""

import contextlib
import errno
import mmap
import os
import threading

from kvtiers.chunks import PAGE_BYTES, Namespace
from kvtiers.errors import Kind, KVTiersError
from kvtiers.tiers.fs import folders, names
from kvtiers.tiers.fs.account import Account
from kvtiers.tiers.fs.direct import DirectFiles
from kvtiers.tiers.fs.locks import NO_LOCKS
from kvtiers.tiers.fs.quota import RESERVED_BYTES
from kvtiers.tiers.fs.room import Room, Unbounded
from kvtiers.tiers.fs.scratch import Scratch, sweep
from kvtiers.tiers.options import bad_option

DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT)


class Workplace:
    """Where an engine keeps the chunks of ``namespace`` under ``root``. Any thread."""

    def __init__(
        self, namespace: Namespace, root: str, account: Account, room: Room | Unbounded
    ) -> None:
        self._namespace = namespace
        self.root = root
        self._folder = os.path.join(root, namespace.id)
        self._account = account
        self._room = room
        self._opening = threading.Lock()
        self._closed = False
        self._scratch: Scratch

    def open(self, io: DirectFiles) -> None:
        """Make it, and try it with one page. Raises ConfigError; then nothing is left open."""
        try:
            self._scratch = self._make()
        except BaseException as e:
            self._leave()
            self._remove_what_is_empty()
            raise _refusal(self.root, e) from e
        try:
            sweep(self.root)
            try:
                self._probe(io)
            except OSError as e:
                if e.errno not in DISK_IS_FULL or not self._room.make_way(RESERVED_BYTES):
                    raise
                self._probe(io)
        except BaseException as e:
            self.close()
            raise _refusal(self.root, e) from e

    def _remove_what_is_empty(self) -> None:
        """Leave no folder of a namespace behind that nobody could make sense of."""
        for folder in (os.path.join(self._folder, names.TEMP), self._folder):
            with contextlib.suppress(OSError):
                os.rmdir(folder)

    def open_again(self) -> None:
        """Make it anew after somebody cleared it. Raises OSError and KVTiersError."""
        with self._opening:
            old = self._scratch
            if self._closed or (os.path.isdir(old.folder) and self.has_manifest()):
                return
            self._scratch = self._make()
            old.close()

    def _make(self) -> Scratch:
        folders.make_folder(self._folder, durable=True)
        scratch = Scratch(self._folder)
        try:
            self._join(scratch)
            self._open_manifest(scratch)
        except BaseException:
            scratch.close()
            raise
        return scratch

    def _join(self, scratch: Scratch) -> None:
        try:
            self._account.join(scratch.folder)
        except OSError as e:
            if e.errno not in NO_LOCKS:
                raise
            if self._account.bounded:
                raise bad_option(
                    "eviction",
                    f'is "own", but the file system that holds {self.root} has no locks, by '
                    'which engines keep a bound together: mount it with locks or say "external"',
                ) from e

    def _open_manifest(self, scratch: Scratch) -> None:
        size = len(self._namespace.manifest().encode())
        if self.has_manifest() or not self._account.counted:  # it is counted with the rest
            size = 0
        self._room.reserve(size)
        try:
            folders.open_manifest(self._folder, self._namespace, scratch.path)
        except BaseException:
            self._room.release(size)
            raise
        self._room.fill(size)

    def _probe(self, io: DirectFiles) -> None:
        """Write and read one real page, which also tells whether O_DIRECT works here."""
        path = self._scratch.path()
        page = memoryview(mmap.mmap(-1, PAGE_BYTES))
        with self._account.alone():
            try:
                io.write(path, page)
                io.read(path, page)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)

    def temp(self) -> str:
        """A name for a new file that others do not see; never the same twice."""
        return self._scratch.path()

    def has_manifest(self) -> bool:
        """Whether the namespace's folder says what lies in it."""
        return os.access(os.path.join(self._folder, names.MANIFEST), os.F_OK)

    def close(self) -> None:
        """Remove the temporary files, then give back what they were granted. Idempotent."""
        if not self._closed:
            self._closed = True
            self._scratch.close()
            self._leave()

    def _leave(self) -> None:
        with contextlib.suppress(OSError):  # others find us dead
            self._account.leave()

    def check(self) -> None:
        """Raise AssertionError if others could take it for a dead one's."""
        self._scratch.check()

    def __repr__(self) -> str:
        return f"<Workplace {self._folder}>"


def _refusal(root: str, error: BaseException) -> BaseException:
    """What an opening that failed with ``error`` raises."""
    if isinstance(error, OSError):
        return folders.unusable(root, error)
    if isinstance(error, KVTiersError) and error.kind is not Kind.CONFIG:
        return bad_option("root_dir", f"cannot be opened: {error}")
    return error
