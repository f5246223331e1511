"""A progress bar on stderr; a line a step where stderr is no terminal."""

import sys
import time
from collections.abc import Callable
from typing import TextIO

_WIDTH = 30


class Progress:
    """Counts ``total`` steps of equal weight; a step may be worth several."""

    def __init__(
        self,
        total: int,
        stream: TextIO = sys.stderr,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total
        self._done = 0
        self._stream = stream
        self._clock = clock
        self._started = clock()
        self._terminal = stream.isatty()

    def check(self) -> None:
        """Raise AssertionError if more is done than there is."""
        assert 0 <= self._done <= self._total, f"{self!r}: more is done than there is"

    def __repr__(self) -> str:
        return f"<Progress {self._done} of {self._total}>"

    def show(self, doing: str) -> None:
        """Say what is going on now."""
        if self._terminal:
            self._stream.write(f"\r\x1b[K{self.bar()} {doing}")
        else:
            self._stream.write(f"{self.bar()} {doing}\n")
        self._stream.flush()

    def advance(self, steps: int = 1) -> None:
        """``steps`` more are done."""
        self._done = min(self._done + steps, self._total)

    def close(self) -> None:
        """Leave the line to others."""
        if self._terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def bar(self) -> str:
        """The bar, the share done and the seconds since the start."""
        share = self._done / self._total if self._total else 1.0
        filled = round(_WIDTH * share)
        seconds = self._clock() - self._started
        return f"[{'#' * filled}{'.' * (_WIDTH - filled)}] {share:4.0%} {seconds:4.0f} s"
