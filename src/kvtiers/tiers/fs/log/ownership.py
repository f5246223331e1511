"""The folder of a log: who owns it, what it is for, whether it can be used.

``<root>/log/`` holds the segments and ``lock``, which the owner keeps locked (flock) while it
lives: a line with its number, and one with the bytes that the last owner stated as the capacity.
``<root>/<namespace>/manifest.json`` says what the chunks of a namespace are.
"""

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Callable

from kvtiers.chunks import Namespace
from kvtiers.errors import ConfigError
from kvtiers.tiers.fs import folders, names
from kvtiers.tiers.options import bad_option

LOCK = "lock"
TEMP = "manifest.tmp"
"""A manifest on its way; one that lies there longer is of an owner that was killed."""
LOCK_BYTES = 64
"""What the lock may come to say."""
_NUMBER = re.compile("[0-9]{1,20}")
_PAUSES_S = (0.001, 0.01, 0.1)
"""Between tries for the lock: who only asks whose it is holds it for some microseconds."""

_NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO)
"""How opening a link, a folder or a socket fails."""


class Ownership:
    """The right to write to the log under ``root``, until ``close``.

    Raises ConfigError if another process has it, naming its id, or the lock is no file; OSError.
    """

    def __init__(self, root: str, pause: Callable[[float], None] = time.sleep) -> None:
        self.folder = os.path.join(root, names.LOG)
        folders.make_folder(self.folder, durable=True)
        self._path = os.path.join(self.folder, LOCK)
        self._fd = _open_lock(self._path, os.O_RDWR | os.O_CREAT)
        try:
            self._lock(root, pause)
            self._file = os.fstat(self._fd)
        except BaseException:
            self.close()
            raise

    def _lock(self, root: str, pause: Callable[[float], None]) -> None:
        for seconds in _PAUSES_S:
            if self._locked():
                break
            pause(seconds)
        else:
            if not self._locked():
                owner, _ = _said(self._fd)
                raise bad_option(
                    "root_dir",
                    f"is {root}, whose log belongs to the living process {owner or 'of another'}: "
                    "give each engine a folder of its own, or share one with layout files",
                )
        os.fchmod(self._fd, folders.FILE_MODE)
        self._say(_said(self._fd)[1])

    def _say(self, capacity: str) -> None:
        lines = "".join(f"{line}\n" for line in (os.getpid(), capacity) if line)
        os.pwrite(self._fd, lines.encode(), 0)
        os.ftruncate(self._fd, len(lines))

    def keep_capacity(self, capacity_bytes: int) -> None:
        """Note how large the log may become, for who opens it without saying so. Raises OSError."""
        self._say(str(capacity_bytes))

    def _locked(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def holds(self) -> bool:
        """Whether the lock is where it was taken: who removed it may have another one there.

        True as well if that cannot be told, as on a disk that fails.
        """
        if self._fd < 0:
            return False
        try:
            return os.path.samestat(self._file, os.stat(self._path))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Give it up. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def refuse_lock(root: str) -> None:
    """Raise as :class:`Ownership` would of whatever is in its way, but another owner.

    Nothing is made. Raises ConfigError, OSError.
    """
    folders.refuse_no_folder(os.path.join(root, names.LOG))
    with contextlib.suppress(FileNotFoundError):
        os.close(_open_lock(os.path.join(root, names.LOG, LOCK), os.O_RDWR))


def owner_of(root: str) -> int | None:
    """The process that owns the log under ``root``; 0 if it does not say, None if nobody does.

    It tries the lock, and lets go at once; an owner that comes at this very moment tries again.
    Raises ConfigError if the lock is no file.
    """
    try:
        fd = _open_lock(os.path.join(root, names.LOG, LOCK), os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        owner, _ = _said(fd)
        return int(owner or 0)
    except OSError:
        return None
    finally:
        os.close(fd)
    return None


def kept_capacity(root: str) -> int | None:
    """Bytes that the last owner of the log under ``root`` stated; None if none did.

    Raises ConfigError if the lock is no file; OSError.
    """
    try:
        fd = _open_lock(os.path.join(root, names.LOG, LOCK), os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        _, capacity = _said(fd)
    finally:
        os.close(fd)
    return int(capacity) if capacity else None


def _open_lock(path: str, flags: int) -> int:
    """The descriptor of the lock; what is no file is neither waited for nor followed.

    Raises ConfigError, OSError.
    """
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, folders.FILE_MODE)
    except OSError as e:
        if e.errno in _NO_FILE:
            raise _no_file(path) from e
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _no_file(path)
    return fd


def _no_file(path: str) -> ConfigError:
    return bad_option(
        "root_dir", f"holds {path}, which is no file, so that it cannot be locked: move it away"
    )


def _said(fd: int) -> tuple[str, str]:
    """Owner and capacity as the lock says them; empty for what is not a number."""
    lines = os.pread(fd, 64, 0).decode("ascii", "replace").split("\n")
    owner, capacity = [line if _NUMBER.fullmatch(line) else "" for line in [*lines, "", ""][:2]]
    return owner, capacity


def open_namespace(root: str, namespace: Namespace) -> None:
    """Write the manifest, or compare it with ours. Raises ConfigError, OSError."""
    folder = os.path.join(root, namespace.id)
    folders.make_folder(folder, durable=True)
    temp = os.path.join(root, names.LOG, TEMP)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temp)
    folders.open_manifest(folder, namespace, lambda: temp)


def other_bytes(root: str, ours: Namespace) -> int:
    """Bytes of ours under ``root`` that are no segments, once the manifest of ``ours`` is there."""
    sizes = {ours.id: len(ours.manifest().encode())}
    for namespace in names.namespaces(root) if os.path.isdir(root) else ():
        with contextlib.suppress(OSError):
            sizes[namespace] = os.stat(os.path.join(root, namespace, names.MANIFEST)).st_size
    return LOCK_BYTES + sum(sizes.values())
