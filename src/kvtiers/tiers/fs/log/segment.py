"""The segment files of a log: made at their full length, read and written in whole pages.

O_DIRECT wants aligned memory: what is not is copied through a buffer that is. Any thread.
"""

import contextlib
import errno
import mmap
import os
import stat
from collections.abc import Iterator, Sequence

from kvtiers.chunks import PAGE_BYTES
from kvtiers.tiers.fs import folders
from kvtiers.tiers.fs.direct import DirectIO, aligned
from kvtiers.tiers.fs.log import format as fmt
from kvtiers.tiers.fs.log.format import Header
from kvtiers.tiers.fs.vectored import read_all, write_all

SUFFIX = ".kvs"
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW


def pages(count: int) -> memoryview:
    """``count`` zero pages of aligned memory."""
    return memoryview(mmap.mmap(-1, count * PAGE_BYTES))


class SegmentFiles:
    """The files ``<folder>/<number>.kvs``. Everything raises OSError."""

    def __init__(self, folder: str, mode: DirectIO, fsync: bool) -> None:
        self.folder = folder
        self.direct = mode != "off"
        """False from the start, or since the file system refused."""
        self._fsync = fsync

    def path(self, number: int) -> str:
        """The file of a segment."""
        return os.path.join(self.folder, f"{number:08d}{SUFFIX}")

    def numbers(self) -> dict[int, int]:
        """Which there are, and their lengths in bytes."""
        found = {}
        with os.scandir(self.folder) as entries:
            for entry in entries:
                stem, suffix = os.path.splitext(entry.name)
                if suffix == SUFFIX and stem.isascii() and stem.isdigit():
                    with contextlib.suppress(FileNotFoundError):
                        info = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(info.st_mode):
                            found[int(stem)] = info.st_size
        return found

    def make(self, number: int, nbytes: int) -> None:
        """A new file with all of its blocks; none is left if there is no room for them."""
        path = self.path(number)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | _FLAGS, folders.FILE_MODE)
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

    def remove(self, number: int) -> None:
        """Delete the file; an absent one is fine."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path(number))

    @contextlib.contextmanager
    def opened(self, number: int, *, write: bool = False) -> Iterator[int]:
        """A descriptor of the segment."""
        mode = os.O_RDWR if write else os.O_RDONLY
        fd = os.open(self.path(number), mode | _FLAGS | (os.O_DIRECT if self.direct else 0))
        try:
            yield fd
        finally:
            os.close(fd)

    def write(self, number: int, page: int, buffers: Sequence[memoryview]) -> None:
        """Write aligned whole pages from ``page`` on; on the device on return, if so asked."""
        try:
            self._write(number, page, buffers)
        except OSError as e:
            if not self._refused(e):
                raise
            self._write(number, page, buffers)

    def _write(self, number: int, page: int, buffers: Sequence[memoryview]) -> None:
        with self.opened(number, write=True) as fd:
            write_all(fd, buffers, page * PAGE_BYTES)
            if self._fsync:
                os.fdatasync(fd)

    def read(self, number: int, page: int, buffers: Sequence[memoryview]) -> bool:
        """Fill aligned whole pages from ``page`` on; False if the file is shorter."""
        try:
            return self._read(number, page, buffers)
        except OSError as e:
            if not self._refused(e):
                raise
            return self._read(number, page, buffers)

    def _read(self, number: int, page: int, buffers: Sequence[memoryview]) -> bool:
        with self.opened(number) as fd:
            return read_all(fd, buffers, page * PAGE_BYTES) == sum(b.nbytes for b in buffers)

    def _refused(self, error: OSError) -> bool:
        """Whether O_DIRECT is to blame; it is not tried again."""
        if not self.direct or error.errno != errno.EINVAL:
            return False
        self.direct = False
        return True

    def begin(self, number: int, header: Header) -> None:
        """Write the first page: what was in the segment is not valid any more."""
        self.write_pages(number, 0, fmt.pack_header(header))

    def erase(self, number: int) -> None:
        """Make the segment one that holds nothing, also for whoever opens the log later."""
        self.write(number, 0, [pages(1)])

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


class Bounce:
    """A payload as whole aligned pages: itself if it is so, else a copy. Within one call."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._fit = view.nbytes % PAGE_BYTES == 0 and aligned(view)
        self.buffer = view if self._fit else pages(fmt.pages_of(view.nbytes))

    def fill(self) -> memoryview:
        """Take the payload in, to be written."""
        if not self._fit:
            self.buffer[: self._view.nbytes] = self._view
        return self.buffer

    def empty(self) -> None:
        """Give what was read to its view."""
        if not self._fit:
            self._view[:] = self.buffer[: self._view.nbytes]
