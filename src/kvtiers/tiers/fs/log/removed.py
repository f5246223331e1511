"""A log whose folder somebody removed under its engine: begun anew, or why not."""

import errno
import logging
import os
from collections.abc import Callable

from kvtiers.errors import Kind, KVTiersError, Retry
from kvtiers.tiers.complaints import Complaints
from kvtiers.tiers.fs import folders

_log = logging.getLogger("kvtiers")

_TRY_EVERY_S = 30.0


class Renewal:
    """Begins a log anew where it was removed. By one thread at a time.

    ``begin`` opens it, and raises ConfigError; ``clock`` is in seconds. Made while it is not
    removed: it is not begun anew on another file system, as where a disk was unmounted.
    """

    def __init__(self, root: str, begin: Callable[[], None], clock: Callable[[], float]) -> None:
        self._root = root
        self._begin = begin
        self._clock = clock
        self._device = os.stat(folders.nearest_folder(root)).st_dev
        self._failure: KVTiersError | None = None
        self._again_at = 0.0

    def begin(self, complaints: Complaints) -> KVTiersError | None:
        """Try it, at most every 30 s. Returns the error of the last try if it failed."""
        now = self._clock()
        if self._failure is None or now >= self._again_at:
            self._failure = self._try(complaints)
            self._again_at = now + _TRY_EVERY_S
        return self._failure

    def _try(self, complaints: Complaints) -> KVTiersError | None:
        try:
            if os.stat(folders.nearest_folder(self._root)).st_dev != self._device:
                raise OSError(errno.EXDEV, "another file system is in its place")
            self._begin()
        except (KVTiersError, OSError) as e:
            failure = removed(self._root, f"and cannot be begun anew: {e}")
            complaints.failed("write", failure)
            return failure
        _log.warning("%s was removed under this engine: the log is begun anew", self._root)
        return None

    def __repr__(self) -> str:
        return f"<Renewal {self._root}: {self._failure or 'nothing failed'}>"


def removed(root: str, why: str) -> KVTiersError:
    """The error of a write where the folder is gone, ``why`` there is no other."""
    return KVTiersError(
        f"{root} was removed under this engine, {why}",
        kind=Kind.IO,
        retry=Retry.MAY,
        operation="write",
    )
