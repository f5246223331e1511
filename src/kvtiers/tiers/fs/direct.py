"""One vectored read or write per file, past the page cache where that works.

O_DIRECT wants addresses, lengths and offsets that are multiples of the device's block; pages
satisfy all. It is decided per operation: what is answered with EINVAL goes the buffered way, and
if the memory was not to blame, the file system is not asked again.
"""

import contextlib
import errno
import mmap
import os
import stat
import threading
from typing import Literal

from kvtiers.chunks import PAGE_BYTES
from kvtiers.tiers.addresses import address_of
from kvtiers.tiers.fs.folders import FILE_MODE
from kvtiers.tiers.fs.vectored import read_rest, write_all

DirectIO = Literal["auto", "on", "off"]

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO must not block us
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_IRREGULAR = (errno.ELOOP, errno.ENXIO, errno.ESPIPE, errno.EISDIR)
"""How reading a link, a socket, a FIFO or a folder fails."""


def aligned(view: memoryview) -> bool:
    """Whether O_DIRECT may use ``view``: whole pages at a page boundary."""
    return view.nbytes % PAGE_BYTES == 0 and address_of(view) % PAGE_BYTES == 0


class DirectFiles:
    """Reads and writes whole files of one file system: a header page, then the payload."""

    def __init__(self, mode: DirectIO, fsync: bool) -> None:
        self.direct = mode != "off"
        """False from the start, or since the file system refused."""
        self.fsync = fsync
        """Whether a write waits for the device."""
        self._mode_as_asked: bool | None = None
        """Whether new files get the mode they are opened with; None: no file was made yet."""
        self._local = threading.local()

    def header(self) -> memoryview:
        """A page of this thread's own, aligned, for the header of the next operation."""
        return self._pages()[0]

    def _pages(self) -> tuple[memoryview, memoryview]:
        """The header page of this thread, and a page for what no file should have: more bytes."""
        try:
            pages: tuple[memoryview, memoryview] = self._local.pages
        except AttributeError:
            both = memoryview(mmap.mmap(-1, 2 * PAGE_BYTES))
            pages = self._local.pages = both[:PAGE_BYTES], both[PAGE_BYTES:]
        return pages

    def write(self, path: str, payload: memoryview) -> None:
        """Make the new file ``path`` of the thread's header page and ``payload``.

        It gets mode 0600 whatever the umask. Raises OSError; then a part of the file may be there.
        """
        flags = os.O_DIRECT if self.direct else 0
        try:
            self._write(path, payload, flags)
        except OSError as e:
            if not _refused(e, flags):
                raise
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            self._write(path, payload, 0)
            self._blame(payload)

    def _write(self, path: str, payload: memoryview, flags: int) -> None:
        fd = os.open(path, _WRITE | flags, FILE_MODE)
        try:
            self._set_mode(fd)
            write_all(fd, [self._pages()[0], payload], 0)
            if self.fsync:
                os.fsync(fd)
        finally:
            os.close(fd)

    def _set_mode(self, fd: int) -> None:
        """Mode 0600 in spite of umask and default ACL; what they do is seen at the first file."""
        if self._mode_as_asked is None:
            self._mode_as_asked = stat.S_IMODE(os.fstat(fd).st_mode) == FILE_MODE
        if not self._mode_as_asked:
            os.fchmod(fd, FILE_MODE)

    def read(self, path: str, payload: memoryview, stamp_ns: int | None = None) -> int:
        """Fill the thread's header page and ``payload`` from ``path``, which gets that time.

        Returns the size of the file, -1 if it is no regular file. If that is not the size of
        both, they may hold anything. Raises OSError.
        """
        flags = os.O_DIRECT if self.direct else 0
        try:
            try:
                return self._read(path, payload, flags, stamp_ns)
            except OSError as e:
                if not _refused(e, flags):
                    raise
            size = self._read(path, payload, 0, stamp_ns)
        except OSError as e:
            if e.errno in _IRREGULAR:
                return -1
            raise
        self._blame(payload)
        return size

    def _read(self, path: str, payload: memoryview, flags: int, stamp_ns: int | None) -> int:
        header, beyond = self._pages()
        expected = PAGE_BYTES + payload.nbytes
        fd = os.open(path, _READ | flags)
        try:
            if stamp_ns is not None:
                with contextlib.suppress(OSError):  # read-only, or another user's
                    os.utime(fd, ns=(stamp_ns, stamp_ns))
            got = os.preadv(fd, [header, payload, beyond], 0)
            if got == expected:  # so it ends there: no need to ask for its size
                return got
            size = os.fstat(fd).st_size
            return size if size != expected else read_rest(fd, [header, payload], 0, got)
        finally:
            os.close(fd)

    def _blame(self, payload: memoryview) -> None:
        """The buffered way worked where O_DIRECT did not: because of the memory, or never here."""
        if aligned(payload):
            self.direct = False

    def __repr__(self) -> str:
        return f"<DirectFiles {'direct' if self.direct else 'buffered'}>"


def _refused(error: OSError, flags: int) -> bool:
    return bool(flags) and error.errno == errno.EINVAL
