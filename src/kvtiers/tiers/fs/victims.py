"""Which files leave next: the least recently used, found without walking the whole tree at once.

Folders are visited in turn, a section at a time. A chunk's folder is chosen by its digest, so
that a section is a fair sample: its oldest eighth is as good as anybody's. Once all sections were
visited the oldest files of the whole tree are known, and leave in order until they are used up.
"""

import heapq
import os
from collections.abc import Callable, Iterator

from kvtiers.tiers.fs import stamps, tree
from kvtiers.tiers.fs.tree import Candidate

_SECTION = 16_384
"""Files that one section looks at, or a few more: a tenth of a second on a local disk."""
_MAX_KNOWN = 65_536
_SHARE = 8
_STUCK_S = 30.0
"""A file that could not be deleted is passed over for so long: it may have been the device."""


class Victims:
    """The order of leaving under ``root``. One thread at a time.

    ``used_at`` gives the wall-clock time of a use that is not written to its file yet, or 0.
    """

    def __init__(
        self,
        root: str,
        used_at: Callable[[str], float],
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._root = root
        self._used_at = used_at
        self._clock = clock
        self._wall_clock = wall_clock
        self._walk: Iterator[list[Candidate]] | None = None
        self._known: list[Candidate] = []
        self._credit = 0
        """How many of the known may leave before more of the tree must be seen."""
        self.stuck: dict[str, float] = {}
        """Files that could not be deleted, and when to try again."""

    def next(self) -> Candidate | None:
        """The file that leaves next, if that is known; it is forgotten here."""
        now = self._wall_clock()
        while self._known and self._credit > 0:
            known = heapq.heappop(self._known)
            self._credit -= 1
            found = self._as_it_is(known)
            if found is None or stamps.in_use(found.stamp, now):
                continue
            if found.stamp <= known.stamp:
                return found
            heapq.heappush(self._known, found)  # it was used since
            self._credit += 1
        return None

    def look_further(self) -> bool:
        """Visit the next section; whether that was the last one of the tree."""
        if self._walk is None:
            self._walk = tree.candidates(self._root)
        self._try_again_what_was_stuck()
        seen: list[Candidate] = []
        for folder in self._walk:
            seen += [c for c in folder if c.name not in self.stuck]
            if len(seen) >= _SECTION:
                break
        else:
            self._walk = None
        self._known = heapq.nsmallest(_MAX_KNOWN, {c.name: c for c in self._known + seen}.values())
        ended = self._walk is None
        self._credit = len(self._known) if ended else max(1, len(seen) // _SHARE)
        return ended

    def put_off(self, name: str) -> None:
        """It could not be deleted."""
        self.stuck.pop(name, None)  # to the end: in order of time
        self.stuck[name] = self._clock() + _STUCK_S

    def _try_again_what_was_stuck(self) -> None:
        now = self._clock()
        while self.stuck and next(iter(self.stuck.values())) <= now:
            del self.stuck[next(iter(self.stuck))]

    def _as_it_is(self, known: Candidate) -> Candidate | None:
        """``known`` with its time and size of now; None if it is gone."""
        try:
            info = os.lstat(os.path.join(self._root, known.name))
        except OSError:
            return None
        stamp = info.st_mtime if known.stamp else 0.0
        if used := self._used_at(known.name):
            stamp = max(stamp, used)
        return Candidate(stamp, known.name, info.st_size)

    def check(self) -> None:
        """Raise AssertionError if more is remembered than may be."""
        assert len(self._known) <= _MAX_KNOWN, "more candidates than the bound"
        assert self._credit <= len(self._known), "more may leave than is known"

    def __repr__(self) -> str:
        return f"<Victims {len(self._known)} known, {len(self.stuck)} stuck>"
