"""Touching the pages of a region before anybody waits for them.

Allocating a file in memory gives it pages, but maps none: the first touch of each costs a process a
page fault, and whoever is first fills it with zeros. A first store is eight times as slow for it
(0.4 s for each GiB instead of 0.05). So a thread of the lowest priority touches them all while the
engine gets ready, 4 MiB at a time. Of a core that it shares with a busy model it gets next to
nothing: who starts it where the model is tied to a core says how to get away from there.

Faults are each process's own, so each process touches all pages. Each begins at another part: so
the zeros, at least, are written by all ranks together.
"""

import ctypes
import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from kvtiers.chunks import PAGE_BYTES

logger = logging.getLogger("kvtiers")

PORTION_BYTES = 4 << 20
_SAYS_EVERY_S = 10.0
_MADV_POPULATE_WRITE = 23
"""madvise(2), Linux 5.14: take write faults for pages without writing to them."""
_GIB = 1 << 30

_libc = ctypes.CDLL(None, use_errno=True)


def populate(pages: memoryview) -> None:
    """Map ``pages``, whose bytes stay as they are. Raises OSError.

    Without the interpreter's lock, except on a kernel that has no call for it: there a byte of each
    page is read, after which a page of a shared mapping can be written without a fault, too.
    """
    start = ctypes.c_char.from_buffer(pages)
    address, length = ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(pages))
    failed = _libc.madvise(address, length, _MADV_POPULATE_WRITE)
    code = ctypes.get_errno()
    del start  # or the view could not be released when this raises
    if not failed:
        return
    if code != errno.EINVAL:
        raise OSError(code, os.strerror(code))
    bytes(pages[::PAGE_BYTES])


def portions(total: int, turn: int = 0, turns: int = 1) -> list[range]:
    """Ranges that cover ``total`` bytes, from the first of part ``turn`` of ``turns`` round."""
    starts = range(0, total, PORTION_BYTES)
    first = len(starts) * turn // turns
    return [
        range(start, min(start + PORTION_BYTES, total))
        for start in (*starts[first:], *starts[:first])
    ]


def stay() -> None:
    """The thread may run where it was started."""


class PageToucher:
    """A thread that touches all of ``area`` once; ``stop`` it before the area is unmapped.

    ``prepare`` is called on it first; it must not raise.
    """

    def __init__(
        self,
        area: memoryview,
        turn: int = 0,
        turns: int = 1,
        *,
        prepare: Callable[[], None] = stay,
        touch: Callable[[memoryview], None] = populate,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prepare = prepare
        self._area = area
        self.total = len(area)
        self._portions = portions(len(area), turn, turns)
        self._touch = touch
        self._clock = clock
        self._stopping = threading.Event()
        self.touched = 0
        """Bytes so far."""
        self._thread = threading.Thread(target=self._work, name="kvtiers-toucher", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Touch no more, and wait for the portion under way. Twice is fine."""
        self._stopping.set()
        self._thread.join()

    def wait(self) -> None:
        """Block until all is touched."""
        self._thread.join()

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant, if any."""
        assert 0 <= self.touched <= self.total, "more was touched than there is"

    def __repr__(self) -> str:
        state = "at work" if self._thread.is_alive() else "ended"
        return f"<PageToucher {state}: {self.touched} of {self.total} bytes>"

    def _work(self) -> None:
        self._prepare()
        with suppress(OSError):  # a priority is a wish
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        began = said = self._clock()
        logger.info("touching %.1f GiB of host memory in the background", self.total / _GIB)
        try:
            for portion in self._portions:
                if self._stopping.is_set():
                    return
                with self._area[portion.start : portion.stop] as pages:
                    self._touch(pages)
                self.touched += len(portion)
                if self._clock() >= said + _SAYS_EVERY_S:
                    said = self._clock()
                    done = self.touched / _GIB
                    logger.info("touched %.1f of %.1f GiB so far", done, self.total / _GIB)
        except OSError as e:
            logger.warning(
                "host memory was touched up to %.1f GiB only (%s): the first stores beyond take "
                "longer",
                self.touched / _GIB,
                e,
            )
        else:
            logger.info(
                "touched %.1f GiB of host memory in %.1f s",
                self.total / _GIB,
                self._clock() - began,
            )
