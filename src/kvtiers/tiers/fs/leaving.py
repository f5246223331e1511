"""How a chunk's file leaves: never one that was promised a moment ago, in whatever process.

Between the look that finds a file unpromised and its deletion somebody may find it. So it is
renamed first: from then on nobody finds it. Then its time tells whether somebody did before; if
so it gets its name back. Whoever reads meanwhile what was promised looks under both names. Only
one process does this at a time, with the quota file locked.
"""

import contextlib
import os

from kvtiers.tiers.fs import names, stamps


def _look(path: str) -> os.stat_result:
    """By opening it: over a network that asks the server, while a bare stat may be seconds old."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError:  # a link, a socket
        return os.lstat(path)
    try:
        return os.fstat(fd)
    finally:
        os.close(fd)


def take_away(path: str, stamp: float, now: float) -> bool:
    """Delete ``path``, which had this time when it was looked at; False if it was promised since.

    Raises FileNotFoundError if it is gone, and OSError if it cannot be deleted; then it stays.
    """
    aside = names.leaving(path)
    if aside is None:  # it lies where nobody finds it
        os.unlink(path)
        return True
    os.replace(path, aside)
    try:
        found = _look(aside).st_mtime
        if found == stamp or not stamps.in_use(found, now):
            os.unlink(aside)
            return True
    except BaseException:
        with contextlib.suppress(OSError):
            os.replace(aside, path)
        raise
    os.replace(aside, path)
    return False
