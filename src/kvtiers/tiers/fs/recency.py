"""When which chunk was used, on its way to the disk: bounded, and in small portions."""

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable

from kvtiers.chunks import Key
from kvtiers.tiers.fs import stamps

_MAX_KEYS = 100_000
"""Uses that are remembered; above it the oldest are forgotten."""
_PORTION = 8192
"""Uses that one ``apply`` takes in."""
_STAMPS = 1024
"""Times of files that one ``apply`` sets: on a slow mount each is a round trip."""
_STAMP_EVERY_S = 10.0
"""Recency reaches the disk in batches; a kill forgets at most this much of it."""


class Recency:
    """Uses by key and wall-clock time. Any thread. ``path_of`` gives the file whose time is set."""

    def __init__(self, path_of: Callable[[Key], str], clock: Callable[[], float]) -> None:
        self._path_of = path_of
        self._clock = clock
        self._used: deque[tuple[Key, float]] = deque(maxlen=_MAX_KEYS)
        self._to_stamp: dict[Key, float] = {}
        self._stamped_at = clock()
        self._applying = threading.Lock()

    def note(self, keys: Iterable[Key], at: float) -> None:
        """These were used ``at`` that time. Never waits."""
        self._used.extend([(key, at) for key in keys])

    @property
    def pending(self) -> bool:
        """Whether any use is not in its file's time yet."""
        return bool(self._to_stamp)

    def used_at(self, key: Key) -> float:
        """When ``key`` was used, if its file does not say so yet; else 0."""
        return self._to_stamp.get(key, 0.0)

    def apply(self) -> None:
        """Take a portion in, and set the times of files when that is due."""
        if self._applying.acquire(blocking=False):  # else another lane is at it
            try:
                self._take_in(_PORTION)
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
            self._take_in(_MAX_KEYS)
            self._stamp(list(self._to_stamp)[-_PORTION:])

    def _take_in(self, portion: int) -> None:
        with contextlib.suppress(IndexError):
            for _ in range(portion):
                key, at = self._used.popleft()
                self._to_stamp.pop(key, None)  # to the end: in order of use
                self._to_stamp[key] = at
        for key in list(itertools.islice(self._to_stamp, max(0, len(self._to_stamp) - _MAX_KEYS))):
            del self._to_stamp[key]

    def _stamp(self, keys: Iterable[Key]) -> None:
        for key in keys:
            stamps.move_up(self._path_of(key), self._to_stamp[key])
            self._to_stamp.pop(key)

    def check(self) -> None:
        """Raise AssertionError if more is remembered than may be."""
        assert len(self._used) <= _MAX_KEYS, "more uses than the bound"
        assert len(self._to_stamp) <= _MAX_KEYS, "more times to set than the bound"

    def __repr__(self) -> str:
        return f"<Recency {len(self._used)} uses, {len(self._to_stamp)} times to set>"
