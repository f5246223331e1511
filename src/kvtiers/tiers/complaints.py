"""What is wrong with the medium, said once when it begins and once when it has passed."""

import logging
import threading
from collections.abc import Callable

from kvtiers.errors import Kind, KVTiersError

_log = logging.getLogger("kvtiers")

_AGAIN_S = 60.0
"""A trouble that comes and goes is said at most so often."""
_OF_THE_MEDIUM = (Kind.FULL, Kind.IO)


class Complaints:
    """Any thread. ``place`` is what is complained about."""

    def __init__(self, place: str, clock: Callable[[], float]) -> None:
        self._place = place
        self._clock = clock
        self._lock = threading.Lock()
        self._quiet_until: dict[tuple[str, Kind], float] = {}
        self.open: dict[str, KVTiersError] = {}
        """By operation, what was said and has not passed."""

    def failed(self, operation: str, error: KVTiersError, costs: str = "hits") -> None:
        """An operation failed, on one chunk or one segment; only the first is said."""
        if error.kind not in _OF_THE_MEDIUM or operation in self.open:
            return
        what, now = (operation, error.kind), self._clock()
        with self._lock:
            if now < self._quiet_until.get(what, now):
                return
            self._quiet_until[what] = now + _AGAIN_S
            self.open[operation] = error
        _log.warning(
            "%s: %s fails, which costs %s and nothing else; said once until it works: %s",
            self._place,
            operation,
            costs,
            error,
        )

    def worked(self, operation: str) -> None:
        """An operation did what it should."""
        if operation in self.open:
            with self._lock:
                passed = self.open.pop(operation, None)
            if passed is not None:
                _log.info("%s: %s works again", self._place, operation)

    def check(self) -> None:
        """Raise AssertionError if something is complained about that never began."""
        began = {operation for operation, _ in self._quiet_until}
        assert set(self.open) <= began, "a complaint without a beginning"

    def __repr__(self) -> str:
        return f"<Complaints {sorted(self.open)}>"
