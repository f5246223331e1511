"""What the time of a chunk's file says: when it was used, or until when it is promised.

``atime`` is not to be trusted (noatime, relatime), so uses are written into ``mtime``. A chunk
that was written or touched bears the time of that, and may leave when others were used later. A
chunk that somebody was told of, or reads, at ``t`` bears ``t + GRACE_S``: every process on the
mount sees that it is promised until then, and no reader needs a lock.
"""

import contextlib
import os

GRACE_S = 10.0
"""How long a chunk that was found or read does not leave: as long as a load may take."""
_LATEST_S = 6 * GRACE_S
"""A time further ahead is no promise but a wrong clock."""


def until_ns(now: float) -> int:
    """The time, for a file that is promised ``now``, in nanoseconds."""
    return int((now + GRACE_S) * 1e9)


def in_use(stamp: float, now: float) -> bool:
    """Whether a file of this time is promised to somebody."""
    return now < stamp <= now + _LATEST_S


def used_at(stamp: float, now: float) -> float:
    """When a file of this time was last used or written, within the grace time."""
    return min(stamp, now) if in_use(stamp, now) else stamp


def move_up(path: str, at: float) -> None:
    """Note that ``path`` was used ``at`` that time, unless its own is later, e.g. a promise."""
    with contextlib.suppress(OSError):
        if os.lstat(path).st_mtime < at:
            os.utime(path, (at, at), follow_symlinks=False)


def move_back(path: str, at: float, now: float) -> None:
    """Note that ``path`` was used ``at`` that time and not since, unless it is promised."""
    with contextlib.suppress(OSError):
        if os.lstat(path).st_mtime <= now:
            os.utime(path, (min(at, now), min(at, now)), follow_symlinks=False)


def promise(path: str, ns: int) -> bool | None:
    """Mark ``path`` as in use; False if it is not there, None if it cannot be marked.

    A name can be taken away (see ``leaving``) after the kernel has looked it up and before it sets
    the time: then the mark came too late. So the name has to be there afterwards, too.
    """
    try:
        os.utime(path, ns=(ns, ns), follow_symlinks=False)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return os.access(path, os.F_OK)
