"""Vectored reads and writes that are carried to their end."""

import errno
import os
from collections.abc import Sequence

Buffers = Sequence[memoryview]


def write_all(fd: int, buffers: Buffers, offset: int) -> None:
    """Write all of ``buffers`` at ``offset`` (bytes). Raises OSError.

    A full device may take a part first and name the error only when asked for the rest.
    """
    total = sum(b.nbytes for b in buffers)
    done = os.pwritev(fd, buffers, offset)
    while done < total:
        wrote = os.pwritev(fd, rest(buffers, done), offset + done)
        if wrote == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done += wrote


def read_all(fd: int, buffers: Buffers, offset: int) -> int:
    """Fill ``buffers`` from ``offset``. The bytes there were: fewer if the file is shorter."""
    return read_rest(fd, buffers, offset, os.preadv(fd, buffers, offset))


def read_rest(fd: int, buffers: Buffers, offset: int, done: int) -> int:
    """Go on with ``read_all`` after the first ``done`` bytes; returns as it does."""
    total = sum(b.nbytes for b in buffers)
    while done < total:
        got = os.preadv(fd, rest(buffers, done), offset + done)
        if got == 0:
            break
        done += got
    return done


def rest(buffers: Buffers, done: int) -> list[memoryview]:
    """What is left of ``buffers`` after their first ``done`` bytes."""
    left = []
    for buffer in buffers:
        if done < buffer.nbytes:
            left.append(buffer[done:])
        done = max(0, done - buffer.nbytes)
    return left
