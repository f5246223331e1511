"""The quota file of a root: one small file, changed under a lock by whoever writes there.

The lock is that of the file itself. It is held for arithmetic and for one bounded portion of
deletes, never for a walk.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

from kvtiers.tiers.fs import names
from kvtiers.tiers.fs.folders import FILE_MODE
from kvtiers.tiers.fs.locks import lock, unlock
from kvtiers.tiers.fs.quota import Quota, from_bytes

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_MAX_BYTES = 1 << 20


class QuotaFile:
    """The account of ``root``. Any thread, any process. Methods raise OSError; see ``locks``."""

    def __init__(
        self,
        root: str,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.path = os.path.join(root, names.QUOTA)
        self._clock = clock
        self._sleep = sleep
        self._fd: int | None = None
        self._ours = threading.Lock()
        """Among our threads: the lock of the file is the process's."""
        self._peeked: tuple[bytes, Quota] = (b"", Quota())

    @contextlib.contextmanager
    def locked(self) -> Iterator[Quota]:
        """The account, to be changed; written when the body ends without an exception."""
        with self._ours:
            fd = self._locked_file()
            try:
                before = os.pread(fd, _MAX_BYTES, 0)
                quota = from_bytes(before)
                yield quota
                _write(fd, quota, before)
            finally:
                unlock(fd)

    def _locked_file(self) -> int:
        while True:
            if self._fd is None:
                self._fd = os.open(self.path, _FLAGS, FILE_MODE)
                with contextlib.suppress(OSError):  # whatever the umask
                    os.fchmod(self._fd, FILE_MODE)
            lock(self._fd, self.path, "another process has held it", self._clock, self._sleep)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._fd), os.stat(self.path)):
                    return self._fd
            self._close()  # somebody took it away: the next one is the account

    def peek(self) -> Quota:
        """The account as it was a moment ago, without waiting; to be read only."""
        try:
            text = b"" if self._fd is None else os.pread(self._fd, _MAX_BYTES, 0)
        except OSError:
            text = b""
        said, quota = self._peeked
        if text != said:
            quota = from_bytes(text)
            self._peeked = (text, quota)
        return quota

    def __enter__(self) -> "QuotaFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file, which stays. Idempotent."""
        with self._ours:
            self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def check(self) -> None:
        """Raise AssertionError if the account contradicts itself."""
        self.peek().check()

    def __repr__(self) -> str:
        return f"<QuotaFile {self.path}: {self.peek()}>"


def read_quota(root: str) -> Quota:
    """The account as it was a moment ago, without a lock, and without making one."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(os.path.join(root, names.QUOTA), flags)
    except OSError:
        return Quota()
    try:
        return from_bytes(os.pread(fd, _MAX_BYTES, 0))
    except OSError:
        return Quota()
    finally:
        os.close(fd)


def refuse_quota(root: str) -> None:
    """Raise OSError if what is there cannot be the account. Nothing is made."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(os.path.join(root, names.QUOTA), flags)
    except FileNotFoundError:
        return
    try:
        os.pread(fd, _MAX_BYTES, 0)
    finally:
        os.close(fd)


def _write(fd: int, quota: Quota, before: bytes) -> None:
    text = quota.to_bytes()
    if len(text) > len(before) and quota.claimed is not None:
        quota.free(len(before) - len(text))  # it counts too
        text = quota.to_bytes()
    text = text.ljust(len(before))
    if text == before:
        return
    done = 0
    while done < len(text):
        done += os.pwrite(fd, text[done:], done)
