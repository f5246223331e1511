"""Records of descriptions in a file: appended to, read at a place, kept over a restart.

Without a folder the file has no name and is gone with the process. In a folder each engine has a
file of its own, which it holds a lock on, and reads those of others. An engine that starts goes on
with a file that nobody holds.
"""

import contextlib
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from itertools import islice

from kvtiers.kvevents.descriptions import HEAD_BYTES, Damaged, Record, decode, length

_MAGIC = b"KVDESC1\n"
_PREAMBLE_BYTES = len(_MAGIC) + 32
_OFFSET_BITS = 40
_FLUSH_BYTES = 1 << 18
_READ_BYTES = 1 << 20
SUFFIX = ".kvd"
_NEW = ".new"
MAX_OTHERS = 256
"""Files of others that are read: each takes a descriptor of the engine's."""


class SideFile:
    """The own file of an engine and those of others. A place is a whole number above 0.

    ``dialect`` says how blocks are cut and named: files of another are not looked at. Owned by one
    thread. Raises OSError.
    """

    def __init__(self, folder: str | None, dialect: str, max_bytes: int) -> None:
        """``max_bytes`` bounds the own file."""
        self.max_bytes = max_bytes
        self._folder = folder
        self._preamble = _MAGIC + hashlib.sha256(dialect.encode()).digest()
        self._files: list[int] = []
        self._buffer = bytearray()
        if folder is not None:
            os.makedirs(folder, mode=0o700, exist_ok=True)
        self._path, own = self._own()
        self._files.append(own)
        self._written = max(os.fstat(own).st_size, _PREAMBLE_BYTES)
        if folder is not None:
            self._files += self._others(folder)

    # -- opening -------------------------------------------------------------------------------

    def _own(self) -> tuple[str | None, int]:
        if self._folder is None:
            with tempfile.TemporaryFile(prefix="kvtiers-") as file:
                fd = os.dup(file.fileno())
            os.pwrite(fd, self._preamble, 0)
            return None, fd
        for path in self._paths(self._folder):
            own = self._opened(path, os.O_RDWR)
            if own is None:
                continue
            if _locked(own) and _same(own, path):
                _unlink_rest(path)
                return path, own
            os.close(own)
        return self._made(self._folder)

    def _made(self, folder: str) -> tuple[str, int]:
        """A new file, complete and locked before it has its name."""
        digest = self._preamble[-32:].hex()[:12]
        fd, path = tempfile.mkstemp(prefix=f"{digest}-", suffix=_NEW, dir=folder)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.pwrite(fd, self._preamble, 0)
        name = path.removesuffix(_NEW) + SUFFIX
        os.replace(path, name)
        return name, fd

    def _others(self, folder: str) -> list[int]:
        paths = [path for path in self._paths(folder) if path != self._path]
        found = (self._opened(path, os.O_RDONLY) for path in paths)
        return [*islice((fd for fd in found if fd is not None), MAX_OTHERS)]

    @staticmethod
    def _paths(folder: str) -> list[str]:
        names = sorted(n for n in os.listdir(folder) if n.endswith(SUFFIX))
        return [os.path.join(folder, n) for n in names]

    def _opened(self, path: str, how: int) -> int | None:
        """A file of this dialect; None: it is of another, is gone by now, or cannot be read."""
        try:
            fd = os.open(path, how | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        with contextlib.suppress(OSError):
            if os.pread(fd, _PREAMBLE_BYTES, 0) == self._preamble:
                return fd
        os.close(fd)
        return None

    # -- use -----------------------------------------------------------------------------------

    def load(self) -> Iterator[tuple[int, Record]]:
        """All records with their places. The own file is cut off where one is not whole."""
        for number, fd in enumerate(self._files):
            end = _PREAMBLE_BYTES
            for offset, record in _records(fd):
                end = offset + int.from_bytes(os.pread(fd, 4, offset + 4), "little")
                yield number << _OFFSET_BITS | offset, record
            if number == 0 and end < self._written:
                os.ftruncate(fd, end)
                self._written = end

    @property
    def nbytes(self) -> int:
        """Bytes of the own file."""
        return self._written + len(self._buffer)

    def append(self, record: bytes) -> int | None:
        """The place of a new record; None: it would be over the bound.

        After an OSError it is not there, and those before it are.
        """
        if self.nbytes + len(record) > self.max_bytes:
            return None
        place = self.nbytes
        self._buffer += record
        if len(self._buffer) >= _FLUSH_BYTES:
            try:
                self.flush()
            except OSError:
                del self._buffer[place - self._written :]
                raise
        return place

    def flush(self) -> None:
        """Give what was appended to the system."""
        if self._buffer:
            _write_all(self._files[0], self._buffer, self._written)
            self._written += len(self._buffer)
            self._buffer.clear()

    def read(self, place: int) -> Record:
        """The record at a place. Raises Damaged if it is not whole any more."""
        number, offset = place >> _OFFSET_BITS, place & ((1 << _OFFSET_BITS) - 1)
        if number == 0 and offset >= self._written:
            at = offset - self._written
            size = length(bytes(self._buffer[at : at + HEAD_BYTES]))
            return decode(bytes(self._buffer[at : at + size]))
        fd = self._files[number]
        head = os.pread(fd, 4096, offset)
        size = length(head[:HEAD_BYTES])
        return decode(head[:size] if size <= len(head) else os.pread(fd, size, offset))

    def is_own(self, place: int) -> bool:
        """Whether it is a place in the own file."""
        return place >> _OFFSET_BITS == 0

    def compact(self, places: Iterable[int]) -> Iterator[tuple[int, int]]:
        """Keep only what is at these places of the own file: where each was, and is now.

        All of it must be consumed.
        """
        self.flush()
        old, new = self._files[0], self._fresh()
        end = _PREAMBLE_BYTES
        try:
            for place in places:
                size = length(os.pread(old, HEAD_BYTES, place))
                _write_all(new, bytearray(os.pread(old, size, place)), end)
                yield place, end
                end += size
            if self._path is not None:
                os.replace(self._path + _NEW, self._path)
        except BaseException:
            os.close(new)
            _unlink_rest(self._path)
            raise
        self._files[0], self._written = new, end
        os.close(old)

    def _fresh(self) -> int:
        """What is to take the place of the own file: who holds the lock on that may make it."""
        if self._path is None:
            return self._own()[1]
        fd = os.open(self._path + _NEW, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.pwrite(fd, self._preamble, 0)
        return fd

    def close(self) -> None:
        """Write what is left, let go of the lock. Twice is fine."""
        try:
            if self._files:
                self.flush()
        finally:
            while self._files:
                os.close(self._files.pop())

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        assert self.nbytes <= max(self.max_bytes, _PREAMBLE_BYTES) or not self._buffer, (
            "more was appended than the bound"
        )
        if self._files:
            size = os.fstat(self._files[0]).st_size
            assert size == self._written, f"{size} bytes are in the file, not {self._written}"

    def __repr__(self) -> str:
        others = max(0, len(self._files) - 1)
        return f"<SideFile {self._path or 'without a name'}: {self.nbytes} bytes, {others} others>"


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _same(fd: int, path: str) -> bool:
    """Whether the file has not lost its name between opening and locking."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), os.stat(path))
    return False


def _unlink_rest(path: str | None) -> None:
    """What a compaction that was not ended has left."""
    if path is not None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path + _NEW)


def _write_all(fd: int, data: bytearray, offset: int) -> None:
    at = 0
    with memoryview(data) as view:
        while at < len(view):
            with view[at:] as rest:  # let go of also if it fails: else ``data`` cannot be cut
                at += os.pwrite(fd, rest, offset + at)


def _records(fd: int) -> Iterator[tuple[int, Record]]:
    """Whole records from the beginning, with their offsets, up to the first that is none."""
    offset, data, at = _PREAMBLE_BYTES, b"", 0
    while True:
        try:
            if len(data) - at < HEAD_BYTES or len(data) - at < length(data[at : at + HEAD_BYTES]):
                data = data[at:] + os.pread(fd, _READ_BYTES, offset + len(data) - at)
                at = 0
            size = length(data[at : at + HEAD_BYTES])
            while len(data) < size:
                more = os.pread(fd, _READ_BYTES, offset + len(data))
                if not more:
                    return
                data += more
            record = decode(data[at : at + size])
        except Damaged:
            return
        yield offset, record
        offset += size
        at += size
