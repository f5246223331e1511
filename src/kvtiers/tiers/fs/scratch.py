"""A folder for temporary files, per instance, that others can tell to be dead.

``<namespace>/tmp/<unique>/`` holds a ``lock`` that its instance keeps locked (flock) while it
lives; the kernel lets go however it dies. Whoever gets the lock may remove the folder. Only
what is certainly ours is removed: under a namespace's manifest, by our names, never by a link.
"""

import contextlib
import errno
import fcntl
import itertools
import os
import re
import shutil
import tempfile
from collections.abc import Iterable

from kvtiers.tiers.fs import names
from kvtiers.tiers.fs.folders import FILE_MODE, FOLDER_MODE, has_our_manifest, make_folder

_LOCK = "lock"
_OURS = re.compile(r"[0-9]{1,10}-[a-z0-9_]+")
_CONTENT = re.compile(r"[0-9]+")
_ATTEMPTS = 20
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Scratch:
    """The folder of one instance for temporary files in one namespace. Raises OSError."""

    def __init__(self, namespace_folder: str) -> None:
        temp = os.path.join(namespace_folder, names.TEMP)
        self._numbers = itertools.count()
        self._lock: int | None = None
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(FileNotFoundError):  # somebody clears the place meanwhile
                make_folder(temp)
                self.folder = tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=temp)
                self._lock = _lock_new(self.folder)
            if self._lock is not None:
                return
        raise FileNotFoundError(errno.ENOENT, "new folders vanish at once", temp)

    def path(self) -> str:
        """A name for a new file; never the same twice."""
        return f"{self.folder}/{next(self._numbers)}"

    def close(self) -> None:
        """Remove the folder. Idempotent: the number of a closed file is soon another's."""
        lock, self._lock = self._lock, None
        if lock is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.close(lock)

    def check(self) -> None:
        """Raise AssertionError if others could take the folder for a dead one's."""
        if self._lock is None:
            return
        try:
            held, named = os.fstat(self._lock), os.stat(os.path.join(self.folder, _LOCK))
        except OSError as e:
            raise AssertionError(f"{self!r}: its lock was closed, or taken away") from e
        assert os.path.samestat(held, named), f"{self!r}: its lock is another file"

    def __repr__(self) -> str:
        return f"<Scratch {self.folder}>"


def _lock_new(folder: str) -> int | None:
    """Make and hold the lock of a new folder; None if a sweeper took it for dead meanwhile."""
    os.chmod(folder, FOLDER_MODE)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = os.open(os.path.join(folder, _LOCK), flags, FILE_MODE)
    os.fchmod(fd, FILE_MODE)
    if not _lock(fd) or not os.path.exists(os.path.join(folder, _LOCK)):
        os.close(fd)
        return None
    return fd


def _lock(fd: int, without_locks: bool = True) -> bool:
    """Whether the lock was got; ``without_locks`` where the file system has none."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        return without_locks and e.errno != errno.EWOULDBLOCK
    return True


def is_alive(folder: str) -> bool:
    """Whether the instance with this scratch folder lives, as far as can be told."""
    try:
        fd = os.open(os.path.join(folder, _LOCK), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    try:
        return not _lock(fd, without_locks=False)
    finally:
        os.close(fd)


def dead(root: str, namespace: str) -> list[tuple[str, int]]:
    """The scratch folders of dead instances in one namespace, below the root, and their bytes."""
    found = []
    temp = f"{namespace}/{names.TEMP}"
    with contextlib.suppress(OSError):
        for name in sorted(filter(_OURS.fullmatch, os.listdir(os.path.join(root, temp)))):
            folder = os.path.join(root, temp, name)
            locked = os.path.lexists(os.path.join(folder, _LOCK))
            if locked and not os.path.islink(folder) and not is_alive(folder):
                found.append((f"{temp}/{name}", _bytes_in(folder)))
    return found


def _bytes_in(folder: str) -> int:
    with os.scandir(folder) as entries:
        return sum(entry.stat(follow_symlinks=False).st_size for entry in entries)


def sweep(root: str, namespaces: Iterable[str] | None = None) -> int:
    """Remove the scratch folders of dead instances under ``root``; how many. Raises OSError."""
    swept = 0
    for namespace in names.namespaces(root) if namespaces is None else namespaces:
        folder = os.path.join(root, namespace)
        if has_our_manifest(folder):
            with contextlib.suppress(OSError):  # absent, a link, or another user's
                swept += _sweep_folder(os.path.join(folder, names.TEMP))
    return swept


def _sweep_folder(temp: str) -> int:
    fd = os.open(temp, _FOLDER)
    try:
        return sum(_sweep_one(name, fd) for name in os.listdir(fd) if _OURS.fullmatch(name))
    finally:
        os.close(fd)


def _sweep_one(name: str, temp: int) -> bool:
    """Whether the folder ``name`` was a dead one's and is removed."""
    try:
        folder = os.open(name, _FOLDER, dir_fd=temp)
    except OSError:  # gone, or not ours to touch
        return False
    try:
        if not _clear(folder):
            return False
        os.rmdir(name, dir_fd=temp)
    except OSError:
        return False
    finally:
        os.close(folder)
    return True


def _clear(folder: int) -> bool:
    """Unlink what an instance leaves, the lock last; False if it lives or made no lock yet."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    lock = os.open(_LOCK, flags, dir_fd=folder)
    try:
        if not _lock(lock, without_locks=False):
            return False
        for left in os.listdir(folder):
            if _CONTENT.fullmatch(left):
                os.unlink(left, dir_fd=folder)
        os.unlink(_LOCK, dir_fd=folder)
        return True
    finally:
        os.close(lock)
