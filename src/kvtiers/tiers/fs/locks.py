"""Locks of files and folders (flock), waited for, but not for ever.

The kernel lets go of one however a process dies. One that is stopped, or hangs in a dead mount,
keeps it, and must not stop the others too.
"""

import contextlib
import errno
import fcntl
import time
from collections.abc import Callable

PATIENCE_S = 10.0
_SHORTEST_S, _LONGEST_S = 0.0002, 0.01
"""Between two tries. A turn at the quota file takes 50 us, or some ms while files leave."""
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""How a file system says that it has no locks."""
NO_FOLDER_LOCKS = (*NO_LOCKS, errno.EBADF, errno.EINVAL)
"""How it says that it has none of folders (NFS)."""


def lock(
    fd: int,
    path: str,
    holder: str,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Lock ``fd``, which is ``path``, for nobody else. Raises OSError.

    TimeoutError after 10 s: ``holder`` says who has kept it, such as "another process has held it".
    """
    until, pause = clock() + PATIENCE_S, _SHORTEST_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if clock() >= until:
                why = f"{holder} for {PATIENCE_S:g} s"
                raise TimeoutError(errno.ETIMEDOUT, why, path) from None
        sleep(pause)
        pause = min(2 * pause, _LONGEST_S)


def unlock(fd: int) -> None:
    """Let go of it now: a process that was forked meanwhile has the descriptor too."""
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
