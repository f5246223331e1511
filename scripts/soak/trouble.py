"""What is wrong with the disk of one process for a while: its own calls fail, or hang.

The process is told by a line of JSON on its standard input, and says by itself when it is over.
"""

import errno
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kvtiers.errors import Kind

HANG_S = 5.0
"""A call that hangs comes back after that."""
LATE_S = 5.0
"""What began while it was on may be told so long after it is over."""
RECOVERS_S = 45.0
"""So long after it is over a write has worked."""


@dataclass(frozen=True)
class Ill:
    """A kind of trouble: which calls, what they do instead, how often, and what may come of it."""

    calls: tuple[str, ...]
    code: int | None
    """None: the call hangs, and then does what it should."""
    share: float
    excused: tuple[Kind, ...]


ILLS = {
    "full": Ill(("pwritev", "posix_fallocate"), errno.ENOSPC, 1.0, ()),
    "failing writes": Ill(("pwritev",), errno.EIO, 0.5, (Kind.IO,)),
    "failing reads": Ill(("preadv",), errno.EIO, 0.5, (Kind.IO,)),
    "failing account": Ill(("pwrite",), errno.EIO, 0.5, (Kind.IO,)),
    "unlisted": Ill(("scandir",), errno.EACCES, 0.5, (Kind.IO,)),
    "hanging": Ill(("pwritev", "preadv"), None, 0.005, (Kind.TIMEOUT,)),
}
STOPPED, BESIDE = "stopped", "another process is stopped"
"""These are told in the same way. Nothing is wrong with the disk, but others wait for locks."""
_WAITING = Ill((), None, 0.0, (Kind.IO, Kind.TIMEOUT))


class Disk:
    """The calls of this process to the disk. Any thread."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._ill: Ill | None = None
        self._until = 0.0
        self._excused: dict[Kind, float] = {}
        self._waits_for_write: tuple[str, float] | None = None
        """The last trouble, and when it is over, until a write has worked since."""
        for call in sorted({call for ill in ILLS.values() for call in ill.calls}):
            setattr(os, call, self._around(call, getattr(os, call)))

    def listen(self, lines: Iterable[str] = sys.stdin) -> None:
        """Take what is told from now on."""
        threading.Thread(target=self._take_all, args=(lines,), daemon=True).start()

    def _take_all(self, lines: Iterable[str]) -> None:
        for line in lines:
            what, seconds = json.loads(line)
            self._ill, now = ILLS.get(what, _WAITING), time.monotonic()
            self._until = now + seconds
            for kind in self._ill.excused:
                self._excused[kind] = self._until + HANG_S + LATE_S
            self._waits_for_write = (what, self._until)
            if what == STOPPED:
                os.kill(os.getpid(), signal.SIGSTOP)  # wherever it is, with whatever it locked

    def _around(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            ill = self._ill
            if ill is not None and name in ill.calls and self._strikes(ill):
                if ill.code is not None:
                    if name == "pwritev" and self._dice.random() < 0.5:
                        fd, buffers, offset = args
                        real(fd, buffers[:1], offset)  # a part is there
                    raise OSError(ill.code, os.strerror(ill.code), str(args[0]))
                time.sleep(HANG_S)
            return real(*args, **kwargs)

        return call

    def _strikes(self, ill: Ill) -> bool:
        return time.monotonic() < self._until and self._dice.random() < ill.share

    def excuses(self, kind: Kind | None) -> bool:
        """Whether an error of this kind may come of it."""
        return kind is not None and time.monotonic() < self._excused.get(kind, 0.0)

    def worked(self, operation: str) -> bool:
        """An operation did what it should; whether it is the first write since a trouble."""
        if operation != "write" or self._waits_for_write is None:
            return False
        over = time.monotonic() > self._waits_for_write[1] + LATE_S
        if over:
            self._waits_for_write = None
        return over

    def must_have_recovered(self) -> None:
        """Raise SystemExit if nothing was written for long after the last trouble."""
        waits = self._waits_for_write
        if waits is not None and time.monotonic() > waits[1] + RECOVERS_S:
            raise SystemExit(f"no write worked for {RECOVERS_S:g} s after this: {waits[0]}")
