"""The segment files of a log: made at their full length, read and written in whole pages.

O_DIRECT wants aligned memory: what it refuses is copied through a buffer that is. Any thread.
"""

import contextlib
import errno
import mmap
import os
import re
import stat
import threading
from collections.abc import Iterator, Sequence

from kvtiers.chunks import PAGE_BYTES
from kvtiers.tiers.fs import folders
from kvtiers.tiers.fs.direct import DirectIO, aligned
from kvtiers.tiers.fs.log import format as fmt
from kvtiers.tiers.fs.log.format import Header
from kvtiers.tiers.fs.vectored import read_all, write_all

SUFFIX = ".kvs"
_NUMBER = re.compile(r"[0-9]{8}")
_SCRATCH_PAGES = 8
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO must not block us
_ODD = (errno.ELOOP, errno.ENXIO, errno.ESPIPE, errno.EISDIR, errno.ENOTDIR)


def pages(count: int) -> memoryview:
    """``count`` zero pages of aligned memory."""
    return memoryview(mmap.mmap(-1, count * PAGE_BYTES))


def is_odd(error: OSError) -> bool:
    """Whether something that is no regular file stands in the place of a segment."""
    return error.errno in _ODD


def is_lost(error: OSError) -> bool:
    """Whether the file of a segment is not there, or another thing is."""
    return error.errno == errno.ENOENT or is_odd(error)


class SegmentFiles:
    """The files ``<folder>/<number>.kvs``. Everything raises OSError."""

    def __init__(self, folder: str, mode: DirectIO, fsync: bool) -> None:
        self.folder = folder
        self.direct = mode != "off"
        """False from the start, or since the file system refused."""
        self._fsync = fsync
        self._local = threading.local()

    def path(self, number: int) -> str:
        """The file of a segment."""
        return os.path.join(self.folder, f"{number:08d}{SUFFIX}")

    def numbers(self) -> dict[int, int]:
        """Which there are, and their lengths in bytes."""
        found = {}
        with os.scandir(self.folder) as entries:
            for entry in entries:
                stem = entry.name.removesuffix(SUFFIX)
                if _NUMBER.fullmatch(stem) and stem != entry.name:
                    with contextlib.suppress(FileNotFoundError):
                        info = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(info.st_mode):
                            found[int(stem)] = info.st_size
        return found

    def make(self, number: int, nbytes: int) -> None:
        """A new file with all of its blocks; none is left if there is no room for them."""
        path = self.path(number)
        self._clear(path)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, folders.FILE_MODE)
        try:
            os.fchmod(fd, folders.FILE_MODE)
            os.posix_fallocate(fd, 0, nbytes)
            if self._fsync:
                os.fsync(fd)
                folders.sync_folder(self.folder)
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(fd)

    def _clear(self, path: str) -> None:
        """Whatever has the name of a new segment is nothing that we know."""
        with contextlib.suppress(FileNotFoundError):
            try:
                os.unlink(path)
            except IsADirectoryError:
                os.rmdir(path)

    def restore_lengths(self, room: int) -> None:
        """Give files that were cut short or lengthened the length that they say they have.

        What else they hold is not lost with it. None is lengthened if all would be above ``room``.
        """
        found = self.numbers()
        for number, nbytes in found.items():
            header = self.header(number) if nbytes >= PAGE_BYTES else None
            if header is None or header.segment_bytes == nbytes:
                continue
            others = sum(found.values()) - nbytes
            if header.segment_bytes < nbytes or others + header.segment_bytes <= room:
                found[number] = header.segment_bytes
                with contextlib.suppress(OSError), self.opened(number, 0, write=True) as fd:
                    os.ftruncate(fd, header.segment_bytes)
                    os.posix_fallocate(fd, 0, header.segment_bytes)

    def remove(self, number: int) -> None:
        """Delete the file; an absent one is fine."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path(number))

    @contextlib.contextmanager
    def opened(self, number: int, flags: int, *, write: bool = False) -> Iterator[int]:
        """A descriptor of the segment."""
        mode = os.O_RDWR if write else os.O_RDONLY
        fd = os.open(self.path(number), mode | _FLAGS | flags)
        try:
            yield fd
        finally:
            os.close(fd)

    def write(self, number: int, page: int, buffers: Sequence[memoryview]) -> None:
        """Write whole pages from ``page`` on; on the device on return, if so asked."""
        flags = os.O_DIRECT if self.direct else 0
        try:
            self._write(number, page, buffers, flags)
        except OSError as e:
            if not _refused(e, flags):
                raise
            copies = _aligned_copies(buffers)
            self._write(number, page, copies or buffers, flags if copies else 0)
            self._blame(copies)

    def _write(self, number: int, page: int, buffers: Sequence[memoryview], flags: int) -> None:
        with self.opened(number, flags, write=True) as fd:
            write_all(fd, buffers, page * PAGE_BYTES)
            if self._fsync:
                os.fdatasync(fd)

    def read(self, number: int, page: int, buffers: Sequence[memoryview]) -> bool:
        """Fill whole pages from ``page`` on; False if the file is shorter."""
        flags = os.O_DIRECT if self.direct else 0
        try:
            return self._read(number, page, buffers, flags)
        except OSError as e:
            if not _refused(e, flags):
                raise
        copies = _aligned_copies(buffers)
        whole = self._read(number, page, copies or buffers, flags if copies else 0)
        self._blame(copies)
        for buffer, copy in zip(buffers, copies or buffers, strict=True):
            if copy is not buffer:
                buffer[:] = copy
        return whole

    def _read(self, number: int, page: int, buffers: Sequence[memoryview], flags: int) -> bool:
        with self.opened(number, flags) as fd:
            return read_all(fd, buffers, page * PAGE_BYTES) == sum(b.nbytes for b in buffers)

    def _blame(self, copies: list[memoryview] | None) -> None:
        """The buffered way worked where O_DIRECT did not: because of the memory, or never here."""
        if copies is None:
            self.direct = False

    def scratch(self, data: bytes) -> memoryview:
        """``data``, whole pages, in aligned memory of this thread's own, until the next call."""
        try:
            buffer: memoryview = self._local.pages
        except AttributeError:
            buffer = self._local.pages = pages(_SCRATCH_PAGES)
        if len(data) > len(buffer):
            buffer = self._local.pages = pages(fmt.pages_of(len(data)))
        buffer[: len(data)] = data
        return buffer[: len(data)]

    def write_pages(self, number: int, page: int, data: bytes) -> None:
        """Write ``data``, whole pages, from ``page`` on."""
        buffer = pages(len(data) // PAGE_BYTES)
        buffer[:] = data
        self.write(number, page, [buffer])

    def read_pages(self, number: int, page: int, count: int) -> memoryview | None:
        """``count`` pages from ``page`` on; None if the file is shorter."""
        buffer = pages(count)
        return buffer if self.read(number, page, [buffer]) else None

    def header(self, number: int) -> Header | None:
        """What the segment says of itself; None if nothing valid."""
        page = self.read_pages(number, 0, 1)
        return None if page is None else fmt.parse_header(page)

    def __repr__(self) -> str:
        return f"<SegmentFiles {self.folder} {'direct' if self.direct else 'buffered'}>"


def _refused(error: OSError, flags: int) -> bool:
    return bool(flags) and error.errno == errno.EINVAL


def padded(payload: memoryview) -> memoryview:
    """``payload`` as whole pages: itself if it is, else a copy."""
    if payload.nbytes % PAGE_BYTES == 0:
        return payload
    copy = pages(fmt.pages_of(payload.nbytes))
    copy[: payload.nbytes] = payload
    return copy


def _aligned_copies(buffers: Sequence[memoryview]) -> list[memoryview] | None:
    """The buffers with copies of those that O_DIRECT cannot use; None if it can use all."""
    if all(aligned(buffer) for buffer in buffers):
        return None
    copies = []
    for buffer in buffers:
        copies.append(buffer if aligned(buffer) else pages(buffer.nbytes // PAGE_BYTES))
        if copies[-1] is not buffer:
            copies[-1][:] = buffer
    return copies
