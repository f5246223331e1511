"""A file that appears under its name when it is whole, or never."""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from typing import BinaryIO

from kvtiers.errors import ConfigError, map_errors

_PREFIX = ".kvtiers-part-"


@contextlib.contextmanager
def whole_file(path: str) -> Iterator[BinaryIO]:
    """A new file, mode 0600, that takes the place of ``path`` when the body is done.

    Until then it lies beside it, locked (flock); what a killed process left there so goes first.
    Raises ConfigError if something that is no file is there, which is never replaced.
    """
    real = os.path.realpath(path)
    if os.path.lexists(real) and not os.path.isfile(real):
        raise ConfigError(f"{path!a} is no regular file: name one to write")
    folder = os.path.dirname(real)
    if not os.path.isdir(folder):
        raise ConfigError(f"{path!a} cannot be written: there is no folder {folder!a}")
    with map_errors("write", path):
        _sweep(folder)
        fd, temp = _locked(folder)
        try:
            with open(fd, "wb") as file:
                yield file
                file.flush()
                os.fsync(fd)
                os.replace(temp, real)  # before the lock goes with the descriptor
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temp)
            raise


def _locked(folder: str) -> tuple[int, str]:
    """A new file that no sweep takes. Raises OSError."""
    while True:
        fd, temp = tempfile.mkstemp(prefix=_PREFIX, dir=folder)
        with contextlib.suppress(OSError):  # where locks do not work no sweep gets one either
            fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return fd, temp
        os.close(fd)  # swept before it was locked


def _sweep(folder: str) -> None:
    """Delete what processes that died left in ``folder``, as far as that is allowed."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    _remove_if_dead(entry.path)


def _remove_if_dead(path: str) -> None:
    """Raises OSError, above all if somebody has it locked."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    finally:
        os.close(fd)
