"""A file that appears under its name when it is whole, or never."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import BinaryIO

from kvtiers.errors import ConfigError, map_errors


@contextlib.contextmanager
def whole_file(path: str) -> Iterator[BinaryIO]:
    """A new file, mode 0600, that takes the place of ``path`` when the body is done.

    Raises ConfigError if something that is no file is there, which is never replaced.
    """
    real = os.path.realpath(path)
    if os.path.lexists(real) and not os.path.isfile(real):
        raise ConfigError(f"{path!a} is no regular file: name one to write")
    folder = os.path.dirname(real)
    if not os.path.isdir(folder):
        raise ConfigError(f"{path!a} cannot be written: there is no folder {folder!a}")
    with map_errors("write", path):
        fd, temp = tempfile.mkstemp(prefix=".kvtiers-", dir=folder)
        try:
            with open(fd, "wb") as file:
                yield file
                file.flush()
                os.fsync(fd)
            os.replace(temp, real)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temp)
            raise
