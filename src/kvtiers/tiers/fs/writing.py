"""The writing of one chunk's file: under another name, then renamed, so that it is seen whole.

Its bytes are reserved before and settled after, whatever goes wrong in between.
"""

import contextlib
import logging
import os
from collections.abc import Callable

from kvtiers.chunks import PAGE_BYTES
from kvtiers.tiers import record
from kvtiers.tiers.base import Item
from kvtiers.tiers.fs import folders
from kvtiers.tiers.fs.damaged import Damaged
from kvtiers.tiers.fs.direct import DirectFiles
from kvtiers.tiers.fs.room import Room, Unbounded
from kvtiers.tiers.fs.workplace import DISK_IS_FULL, Workplace

_log = logging.getLogger("kvtiers")

_MAX_REOPENS = 8
"""How often one write makes the folder again while somebody clears it."""
_MAX_WAYS_MADE = 2
"""How often one write has others leave because the disk is full below the capacity."""
_IN_VAIN_S = 60.0
"""If that did not help, nobody leaves for it for so long: it is not ours that fill the disk."""
_SAID_AGAIN_S = 600.0


class FileWriting:
    """Writes the files of one namespace. Any thread."""

    def __init__(
        self,
        namespace_id: str,
        io: DirectFiles,
        room: Room | Unbounded,
        place: Workplace,
        damaged: Damaged,
        clock: Callable[[], float],
    ) -> None:
        self._id = namespace_id
        self._io = io
        self._room = room
        self._place = place
        self._damaged = damaged
        self._clock = clock
        self._in_vain_until: float | None = None
        self._quiet_until: float | None = None

    def write(self, item: Item, path: str) -> None:
        """Make ``path`` of ``item``, unless somebody does meanwhile.

        Raises OSError, and KVTiersError if there is no room; then it is not there by our doing.
        """
        for _ in range(_MAX_REOPENS):
            try:
                self._write_new(item, path)
                return
            except FileNotFoundError:  # somebody clears the folder under us
                with contextlib.suppress(FileNotFoundError):
                    self._place.open_again()
        self._write_new(item, path)

    def _write_new(self, item: Item, path: str) -> None:
        page = record.pack(item.key, self._id, item.view)
        for way_made in range(_MAX_WAYS_MADE + 1):
            try:
                self._write_file(item, page, path)
                return
            except OSError as e:
                if e.errno not in DISK_IS_FULL or not self._makes_way(item, way_made):
                    raise

    def _makes_way(self, item: Item, made: int) -> bool:
        """Whether some of ours left, so that a full disk may have room. Not for ever in vain."""
        now = self._clock()
        if made == _MAX_WAYS_MADE:
            self._in_vain_until = now + _IN_VAIN_S
        if self._in_vain_until is not None and now < self._in_vain_until:
            return False
        if not self._room.make_way(PAGE_BYTES + item.view.nbytes):
            return False
        self._say_full(now)
        return True

    def _say_full(self, now: float) -> None:
        if self._quiet_until is None or now >= self._quiet_until:
            self._quiet_until = now + _SAID_AGAIN_S
            _log.warning(
                "%s: the disk is full below the capacity, so that chunks used least recently leave "
                "for new ones",
                self._place.root,
            )

    def _write_file(self, item: Item, page: bytes, path: str) -> None:
        size = len(page) + item.view.nbytes
        self._room.reserve(size)
        temp = ""
        try:
            temp = self._place.temp()
            self._io.header()[:] = page
            self._io.write(temp, item.view)
            moved = self._move(temp, path, self._damaged.holds(item.key, path))
        except BaseException:
            self._drop(temp, path, size)
            raise
        if not moved:
            self._drop(temp, path, size)
            return
        self._room.fill(size)
        if self._io.fsync:
            self._sync(path, size)

    def _sync(self, path: str, size: int) -> None:
        """Wait until its name is on the device, or take it back: it would count as stored."""
        try:
            folders.sync_folder(os.path.dirname(path))
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(path)
                self._room.freed(size)
            raise

    def _drop(self, temp: str, path: str, size: int) -> None:
        """Undo a write. What may lie on the disk yet goes on counting."""
        try:
            os.unlink(temp)
            gone = True
        except FileNotFoundError:  # never made; or renamed, over a network that says it failed
            gone = not os.path.lexists(path)
        except OSError:
            gone = False
        if gone:
            self._room.release(size)
        else:
            self._room.lose_track(size)

    def _move(self, temp: str, path: str, replace: bool) -> bool:
        """Whether ``path`` is ``temp`` now; not if somebody wrote it meanwhile."""
        if not replace and os.access(path, os.F_OK):
            return False
        try:
            os.replace(temp, path)
        except FileNotFoundError:
            if not self._place.has_manifest():  # no chunk without it
                raise
            folders.make_folder(os.path.dirname(path), durable=self._io.fsync)
            os.replace(temp, path)
        return True

    def __repr__(self) -> str:
        return f"<FileWriting {self._place}>"
