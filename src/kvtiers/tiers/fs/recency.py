"""When which chunk was used, on its way to the disk: bounded, and in small portions."""

import contextlib
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable

from kvtiers.chunks import Key

_MAX_KEYS = 100_000
"""Uses that are remembered; above it the oldest are forgotten."""
_PORTION = 8192
"""Uses that one ``apply`` passes on."""
_STAMPS = 1024
"""Times of files that one ``apply`` sets: on a slow mount each is a round trip."""
_STAMP_EVERY_S = 10.0
"""Recency reaches the disk in batches; a kill forgets at most this much of it."""


class Recency:
    """Uses by key and wall-clock time. Any thread.

    ``path_of`` gives the file whose time is set; ``touch`` is told the order of use.
    """

    def __init__(
        self,
        path_of: Callable[[Key], str],
        touch: Callable[[Iterable[Key]], None],
        clock: Callable[[], float],
    ) -> None:
        self._path_of = path_of
        self._touch = touch
        self._clock = clock
        self._used: deque[tuple[Key, float]] = deque(maxlen=_MAX_KEYS)
        self._to_stamp: dict[Key, float] = {}
        self._stamped_at = clock()
        self._applying = threading.Lock()

    def note(self, keys: Iterable[Key], at: float) -> None:
        """These were used ``at`` that time. Never waits."""
        self._used.extend([(key, at) for key in keys])

    def apply(self) -> None:
        """Pass a portion on."""
        if self._applying.acquire(blocking=False):  # else another lane is at it
            try:
                self._pass_on(_PORTION)
                now = self._clock()
                due = now - self._stamped_at >= _STAMP_EVERY_S
                if due or len(self._to_stamp) >= _PORTION:
                    self._stamp(list(itertools.islice(self._to_stamp, _STAMPS)))
                if due and not self._to_stamp:
                    self._stamped_at = now
            finally:
                self._applying.release()

    def finish(self) -> None:
        """Set the times of what was used last."""
        with self._applying:
            self._pass_on(_MAX_KEYS)
            self._stamp(list(self._to_stamp)[-_PORTION:])

    def _pass_on(self, portion: int) -> None:
        used: dict[Key, float] = {}
        with contextlib.suppress(IndexError):
            for _ in range(portion):
                key, at = self._used.popleft()
                used[key] = at
        self._touch(used)
        for key, at in used.items():
            self._to_stamp.pop(key, None)  # to the end: in order of use
            self._to_stamp[key] = at
        for key in list(itertools.islice(self._to_stamp, max(0, len(self._to_stamp) - _MAX_KEYS))):
            del self._to_stamp[key]

    def _stamp(self, keys: Iterable[Key]) -> None:
        for key in keys:
            at = self._to_stamp.pop(key)
            with contextlib.suppress(OSError):
                os.utime(self._path_of(key), (at, at))

    def check(self) -> None:
        """Raise AssertionError if more is remembered than may be."""
        assert len(self._used) <= _MAX_KEYS, "more uses than the bound"
        assert len(self._to_stamp) <= _MAX_KEYS, "more times to set than the bound"

    def __repr__(self) -> str:
        return f"<Recency {len(self._used)} uses, {len(self._to_stamp)} times to set>"
