"""What becomes of a damaged file: put aside, or left in place and remembered."""

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable

from kvtiers.chunks import Key
from kvtiers.tiers.fs.quarantine import put_aside

_log = logging.getLogger("kvtiers")

_MAX_KNOWN = 65_536
_Identity = tuple[int, int, int]


class Damaged:
    """Which chunks' files are damaged and in place, as long as they are the same. Any thread.

    ``freed`` is told of bytes that leave the namespace's ``folder``; None: nothing may be moved
    there, because others see to what is deleted.
    """

    def __init__(self, folder: str, freed: Callable[[int], None] | None) -> None:
        self._folder = folder
        self._freed = freed
        self._said = False
        self._known: OrderedDict[Key, _Identity] = OrderedDict()
        self._lock = threading.Lock()

    def take_out(self, key: Key, path: str, problem: str) -> bool:
        """Take a damaged file out of the way; False if somebody else did, who then reports it."""
        try:
            if not self._put_aside(path):
                self._remember(key, path)
        except FileNotFoundError:
            return False
        self._say(path, problem)
        return True

    def _put_aside(self, path: str) -> bool:
        """Whether it was moved; if not it stays where it is. Raises FileNotFoundError."""
        if self._freed is None:
            return False
        try:
            self._freed(put_aside(self._folder, path))
        except FileNotFoundError:
            raise
        except OSError:
            return False
        return True

    def _say(self, path: str, problem: str) -> None:
        """Once: a disk that goes bad has many of them, and the metrics count each."""
        if not self._said:
            self._said = True
            _log.warning("%s was damaged and is a miss, said once: %s", path, problem)

    def _remember(self, key: Key, path: str) -> None:
        identity = _identity(path)
        with self._lock:
            if identity is not None:
                self._known[key] = identity
            while len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)

    def holds(self, key: Key, path: str) -> bool:
        """Whether the file that lies there now is known to be damaged."""
        known = self._known.get(key)
        if known is None:
            return False
        if _identity(path) == known:
            return True
        with self._lock:
            self._known.pop(key, None)  # somebody wrote it anew
        return False

    def __len__(self) -> int:
        return len(self._known)

    def check(self) -> None:
        """Raise AssertionError if more is remembered than may be."""
        assert len(self._known) <= _MAX_KNOWN, "more damaged files than the bound"

    def __repr__(self) -> str:
        return f"<Damaged {len(self._known)} files>"


def _identity(path: str) -> _Identity | None:
    try:
        info = os.lstat(path)
    except OSError:
        return None
    return info.st_ino, info.st_ctime_ns, info.st_size
