"""The disk alone, called as a tier calls it: what a tier could reach there, and no more.

Calls of the same shape on as many threads, from and to memory of the same kind, and nothing else:
no index, no checksum, no eviction. The measurements under ``bench/`` use them as well.
"""

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from kvtiers.chunks import PAGE_BYTES
from kvtiers.tiers.fs.vectored import Buffers, read_all, write_all
from kvtiers.tiers.jobs import MAX_SLICE_BYTES

FANS = 256
"""Folders of layout ``files``, by the first byte of a key."""

Slot = Callable[[int], memoryview]
"""The memory of a chunk, by its number."""
Move = Callable[[int, Buffers, int], None]
"""Moves buffers at an offset of a descriptor. Raises OSError."""


class Bare(Protocol):
    """Numbered chunks on the disk alone. Every method may block and raises OSError. Any thread."""

    per_call: int
    """Chunks that one call moves at most."""

    def write(self, first: int, end: int) -> None:
        """Write the chunks from ``first`` up to ``end`` by one call."""

    def read(self, first: int, end: int) -> None:
        """Read them by one call."""

    def close(self) -> None:
        """Let go of the disk."""


class BareFiles:
    """A file for each chunk - open, one vectored call, close - as layout ``files`` has them."""

    per_call = 1

    def __init__(self, root: str, slot: Slot, direct: bool) -> None:
        self._root, self._slot = root, slot
        self._flags = os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        self._local = threading.local()
        for fan in range(FANS):
            os.makedirs(os.path.join(root, f"{fan:02x}"))

    def write(self, first: int, end: int) -> None:
        """Make the file of a chunk, which is new."""
        self._move(first, os.O_WRONLY | os.O_CREAT | os.O_EXCL, write_all)

    def read(self, first: int, end: int) -> None:
        """Read the file of a chunk."""
        self._move(first, os.O_RDONLY, _read)

    def _move(self, number: int, flags: int, move: Move) -> None:
        path = f"{self._root}/{number % FANS:02x}/{number:08x}"
        fd = os.open(path, flags | self._flags, 0o600)
        try:
            move(fd, [self._header(), self._slot(number)], 0)
        finally:
            os.close(fd)

    def _header(self) -> memoryview:
        """A page of this thread's own."""
        try:
            page: memoryview = self._local.page
        except AttributeError:
            page = self._local.page = memoryview(mmap.mmap(-1, PAGE_BYTES))
        return page

    def close(self) -> None:
        """Nothing is open."""


class BareSegments:
    """Chunks one behind the other in a preallocated file, many by a call, as a log has them."""

    def __init__(self, path: str, slot: Slot, chunk: int, count: int, direct: bool) -> None:
        """There is room for ``count`` chunks of ``chunk`` bytes."""
        self.per_call = max(1, MAX_SLICE_BYTES // chunk)
        self._slot, self._chunk = slot, chunk
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        self._fd = os.open(path, flags, 0o600)
        os.posix_fallocate(self._fd, 0, chunk * count)

    def write(self, first: int, end: int) -> None:
        """Write neighbours."""
        write_all(self._fd, self._slots(first, end), first * self._chunk)

    def read(self, first: int, end: int) -> None:
        """Read neighbours."""
        _read(self._fd, self._slots(first, end), first * self._chunk)

    def _slots(self, first: int, end: int) -> list[memoryview]:
        return [self._slot(number) for number in range(first, end)]

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def _read(fd: int, buffers: Buffers, offset: int) -> None:
    if read_all(fd, buffers, offset) < sum(b.nbytes for b in buffers):
        raise OSError(errno.EIO, "what was written is not there")


def run_calls(
    bare: Bare, act: Callable[[int, int], None], lanes: int, first: int, end: int
) -> None:
    """Move the chunks from ``first`` up to ``end`` by ``act``, a method of ``bare``, on threads."""

    def call(at: int) -> None:
        act(at, min(end, at + bare.per_call))

    on_threads(lanes, range(first, end, bare.per_call), call)


def on_threads(count: int, items: Iterable[int], act: Callable[[int], None]) -> None:
    """Call ``act`` with each of ``items``. Raises what the first of them raised."""
    left, lock = iter(items), threading.Lock()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            while not errors:
                with lock:
                    item = next(left, None)
                if item is None:
                    return
                act(item)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
