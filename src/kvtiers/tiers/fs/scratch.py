"""A folder for temporary files, per instance, that others can tell to be dead.

``<namespace>/tmp/<unique>/`` holds a ``lock`` that its instance keeps locked (flock) while it
lives; the kernel lets go however it dies. Whoever gets the lock may remove the folder.
"""

import contextlib
import errno
import fcntl
import itertools
import os
import shutil
import tempfile

from kvtiers.tiers.fs import names
from kvtiers.tiers.fs.folders import FILE_MODE, FOLDER_MODE, make_folder

_LOCK = "lock"


class Scratch:
    """The folder of one instance for temporary files in one namespace. Raises OSError."""

    def __init__(self, namespace_folder: str) -> None:
        temp = os.path.join(namespace_folder, names.TEMP)
        make_folder(temp)
        self._numbers = itertools.count()
        while True:
            self.folder = tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=temp)
            lock = _lock_new(self.folder)
            if lock is not None:
                self._lock = lock
                return

    def path(self) -> str:
        """A name for a new file; never the same twice."""
        return f"{self.folder}/{next(self._numbers)}"

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._lock)

    def __repr__(self) -> str:
        return f"<Scratch {self.folder}>"


def _lock_new(folder: str) -> int | None:
    """Make and hold the lock of a new folder; None if a sweeper took it for dead meanwhile."""
    os.chmod(folder, FOLDER_MODE)
    try:
        fd = _open_lock(folder)
    except FileNotFoundError:
        return None
    if not _lock(fd) or not os.path.exists(os.path.join(folder, _LOCK)):
        os.close(fd)
        return None
    return fd


def _open_lock(folder: str) -> int:
    fd = os.open(os.path.join(folder, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    os.fchmod(fd, FILE_MODE)
    return fd


def _lock(fd: int, without_locks: bool = True) -> bool:
    """Whether the lock was got; ``without_locks`` where the file system has none."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        return without_locks and e.errno != errno.EWOULDBLOCK
    return True


def sweep(root: str) -> int:
    """Remove the scratch folders of dead instances under ``root``; how many. Raises OSError."""
    swept = 0
    for namespace in names.namespaces(root):
        temp = os.path.join(root, namespace, names.TEMP)
        with contextlib.suppress(OSError):  # absent, or another user's
            for name in os.listdir(temp):
                swept += _sweep_one(os.path.join(temp, name))
    return swept


def _sweep_one(folder: str) -> bool:
    try:
        fd = _open_lock(folder)
    except OSError:  # gone, or not ours to touch
        return False
    try:
        if not _lock(fd, without_locks=False):
            return False
        shutil.rmtree(folder, ignore_errors=True)
        return True
    finally:
        os.close(fd)
