"""One vectored read or write per file, past the page cache where that works.

O_DIRECT wants addresses, lengths and offsets that are multiples of the device's block; pages
satisfy all. It is decided per operation: an unaligned buffer goes the buffered way, and a file
system that answers EINVAL is not asked again.
"""

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Sequence
from typing import Literal

from kvtiers.chunks import PAGE_BYTES

DirectIO = Literal["auto", "on", "off"]
FILE_MODE = 0o600

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO must not block us
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class _PyBuffer(ctypes.Structure):
    """CPython's ``Py_buffer`` (PEP 3118); only ``buf`` is of interest."""

    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


def address(view: memoryview) -> int:
    """Where the bytes of ``view`` lie; works for read-only views, where ctypes' own way fails."""
    buffer = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    try:
        return int(buffer.buf or 0)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))


def aligned(view: memoryview) -> bool:
    """Whether O_DIRECT may use ``view``: whole pages at a page boundary."""
    return view.nbytes % PAGE_BYTES == 0 and address(view) % PAGE_BYTES == 0


class DirectFiles:
    """Reads and writes whole files of one file system: a header page, then the payload."""

    def __init__(self, mode: DirectIO, fsync: bool) -> None:
        self.direct = mode != "off"
        """False from the start, or since the file system refused."""
        self._fsync = fsync
        self._local = threading.local()

    def header(self) -> memoryview:
        """A page of this thread's own, aligned, for the header of the next operation."""
        if not hasattr(self._local, "page"):
            self._local.page = memoryview(mmap.mmap(-1, PAGE_BYTES))
        page: memoryview = self._local.page
        return page

    def write(self, path: str, payload: memoryview, at: float) -> None:
        """Make the new file ``path`` of the thread's header page and ``payload``.

        It gets mode 0600 whatever the umask, and the modification time ``at`` (seconds). Raises
        OSError; then a part of the file may be there.
        """
        if self.direct and aligned(payload):
            try:
                self._write(path, payload, at, os.O_DIRECT)
                return
            except OSError as e:
                self._refused(e)
                _remove(path)
        self._write(path, payload, at, 0)

    def _write(self, path: str, payload: memoryview, at: float, flags: int) -> None:
        fd = os.open(path, _WRITE | flags, FILE_MODE)
        try:
            os.fchmod(fd, FILE_MODE)
            _write_all(fd, [self.header(), payload])
            os.utime(fd, (at, at))
            if self._fsync:
                os.fsync(fd)
        finally:
            os.close(fd)

    def read(self, path: str, payload: memoryview) -> int:
        """Fill the thread's header page and ``payload`` from ``path``.

        Returns the size of the file, -1 if it is no regular file. If that is not the size of
        both, nothing was read. Raises OSError.
        """
        if self.direct and aligned(payload):
            try:
                return self._read(path, payload, os.O_DIRECT)
            except OSError as e:
                self._refused(e)
        return self._read(path, payload, 0)

    def _read(self, path: str, payload: memoryview, flags: int) -> int:
        fd = os.open(path, _READ | flags)
        try:
            info = os.fstat(fd)
            if not _is_regular(info):
                return -1
            if info.st_size == PAGE_BYTES + payload.nbytes:
                return _read_all(fd, [self.header(), payload])
            return info.st_size
        finally:
            os.close(fd)

    def _refused(self, error: OSError) -> None:
        if error.errno != errno.EINVAL:
            raise error
        self.direct = False

    def __repr__(self) -> str:
        return f"<DirectFiles {'direct' if self.direct else 'buffered'}>"


def _is_regular(info: os.stat_result) -> bool:
    return (info.st_mode & 0o170000) == 0o100000


def _remove(path: str) -> None:
    if os.path.lexists(path):
        os.unlink(path)


def _write_all(fd: int, buffers: Sequence[memoryview]) -> None:
    """A full device may take a part first and name the error only when asked for the rest."""
    done, total = 0, sum(b.nbytes for b in buffers)
    while done < total:
        wrote = os.pwritev(fd, _rest(buffers, done), done)
        if wrote == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done += wrote


def _read_all(fd: int, buffers: Sequence[memoryview]) -> int:
    """Returns how many bytes there were; fewer than asked for if the file shrank meanwhile."""
    done, total = 0, sum(b.nbytes for b in buffers)
    while done < total:
        got = os.preadv(fd, _rest(buffers, done), done)
        if got == 0:
            break
        done += got
    return done


def _rest(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    rest = []
    for buffer in buffers:
        if done < buffer.nbytes:
            rest.append(buffer[done:])
        done = max(0, done - buffer.nbytes)
    return rest
