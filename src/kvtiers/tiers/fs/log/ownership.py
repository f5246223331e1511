"""The folder of a log: who owns it, what it is for, whether it can be used.

``<root>/log/`` holds ``lock``, which the owner keeps locked (flock) while it lives, and the
segments; ``<root>/<namespace>/manifest.json`` says what the chunks of a namespace are.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable

from kvtiers.chunks import Namespace
from kvtiers.errors import ConfigError
from kvtiers.tiers.fs import folders, names
from kvtiers.tiers.options import bad_option

LOCK = "lock"
TEMP = "manifest.tmp"
"""A manifest on its way; one that lies there longer is of an owner that was killed."""
_PAUSES_S = (0.001, 0.01, 0.1)
"""Between tries for the lock: who only asks whose it is holds it for some microseconds."""


class Ownership:
    """The right to write to the log under ``root``, until ``close``.

    Raises ConfigError if another process has it, naming its id; OSError.
    """

    def __init__(self, root: str, pause: Callable[[float], None] = time.sleep) -> None:
        self.folder = os.path.join(root, names.LOG)
        folders.make_folder(self.folder, durable=True)
        path = os.path.join(self.folder, LOCK)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, folders.FILE_MODE)
        try:
            self._lock(root, pause)
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
                owner = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip()
                raise bad_option(
                    "root_dir",
                    f"is {root}, whose log belongs to the living process {owner or 'of another'}: "
                    "give each engine a folder of its own, or share one with layout files",
                )
        os.fchmod(self._fd, folders.FILE_MODE)
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def _locked(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Give it up. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def owner_of(root: str) -> int | None:
    """The process that owns the log under ``root``; 0 if it does not say, None if nobody does.

    It tries the lock, and lets go at once; an owner that comes at this very moment tries again.
    """
    try:
        fd = os.open(os.path.join(root, names.LOG, LOCK), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        said = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
        return int(said) if said.isdigit() else 0
    except OSError:
        return None
    finally:
        os.close(fd)
    return None


def open_namespace(root: str, namespace: Namespace) -> None:
    """Write the manifest, or compare it with ours. Raises ConfigError, OSError."""
    folder = os.path.join(root, namespace.id)
    folders.make_folder(folder, durable=True)
    temp = os.path.join(root, names.LOG, TEMP)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temp)
    folders.open_manifest(folder, namespace, lambda: temp)


def refuse_other_layout(root: str) -> None:
    """Raise ConfigError if ``root`` holds chunks of layout ``files``."""
    for namespace in names.namespaces(root):
        for entry in os.listdir(os.path.join(root, namespace)):
            if names.is_fan(entry):
                raise _other_layout(root)


def _other_layout(root: str) -> ConfigError:
    return bad_option(
        "root_dir",
        f"is {root}, which holds chunks of layout files: name another folder, or bring them over "
        "with kvtiers migrate",
    )


def other_bytes(root: str) -> int:
    """Bytes of ours under ``root`` that are no segments: the manifests."""
    total = 0
    for namespace in names.namespaces(root):
        with contextlib.suppress(OSError):
            total += os.stat(os.path.join(root, namespace, names.MANIFEST)).st_size
    return total
