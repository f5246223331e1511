"""Damaged files that are left in place, because others see to what is deleted."""

import os
import threading
from collections import OrderedDict

from kvtiers.chunks import Key

_MAX_KNOWN = 65_536
_Identity = tuple[int, int, int]


class Damaged:
    """Which chunks' files are damaged, as long as they are the same files. Any thread."""

    def __init__(self) -> None:
        self._known: OrderedDict[Key, _Identity] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, key: Key, path: str) -> None:
        """The file of ``key`` is damaged."""
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
