"""How the bytes under a root are shared out among those that write there. Pure.

``claimed`` bounds from above what lies under the root together with what its writers may add
without asking again. A writer is granted a portion, spends it on files, and asks for more; what
it deletes it gives back. So the sum of all files is never above ``claimed``, and ``claimed`` is
never raised above the capacity.
"""

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from xxhash import xxh3_64_hexdigest

from kvtiers.chunks import PAGE_BYTES

Eviction = Literal["own", "external"]

STATE_BYTES = PAGE_BYTES
"""What the quota file takes; it grows by this much when it has to."""
RESERVED_BYTES = 3 * PAGE_BYTES
"""Never granted: for the two pages an opening store tries the disk with, and for such growth."""
MAX_PORTION = 64 << 20
_PORTIONS = 64
"""A capacity is granted in at least so many portions, divided by the number of writers."""
_MEMBER = re.compile(r"[0-9a-f]{32}/tmp/[0-9]{1,10}-[a-z0-9_]+")


@dataclass(slots=True)
class Member:
    """An engine under the root, named by its scratch folder, whose lock says that it lives."""

    capacity: int | None
    """What its configuration states; None: it leaves eviction to others."""
    held: int = 0
    """Bound of what it may still write on its own account, writes under way included."""


@dataclass(slots=True)
class Quota:
    """The account of one root, as its quota file holds it."""

    claimed: int | None = None
    """None: nobody has counted yet, and nothing is granted."""
    granted: int = 0
    """All that was ever granted: what a count has to add for what went on meanwhile."""
    suspect: bool = False
    """Somebody died with a grant: ``claimed`` may be more than there is."""
    counted_at: float = 0.0
    """Wall-clock time at which the last count ended."""
    cleaning_until: float = 0.0
    """Wall-clock time up to which a maintenance pass may delete chunks at any moment."""
    stated: int | None = None
    """The capacity that ruled last, for whoever comes when no engine lives."""
    eviction: Eviction | None = None
    """Who saw to the bound last; None: no engine was here since the file was made."""
    members: dict[str, Member] = field(default_factory=dict)

    @property
    def capacity(self) -> int | None:
        """The smallest that a living engine states; None if none does."""
        return min(
            (m.capacity for m in self.members.values() if m.capacity is not None), default=None
        )

    def available(self) -> int:
        """Bytes that can be granted; below zero if more than the capacity is claimed."""
        if self.claimed is None or self.capacity is None:
            return 0
        return self.capacity - RESERVED_BYTES - self.claimed

    def portion(self, size: int) -> int:
        """How much is taken at a time by one that needs ``size`` bytes now."""
        share = (self.capacity or 0) // (_PORTIONS * max(1, len(self.members)))
        return max(size, min(MAX_PORTION, share))

    def meet(self, name: str, capacity: int | None, held: int, freed: int) -> None:
        """A member is here: it holds ``held`` bytes, and ``freed`` bytes left the disk."""
        known = self.members.get(name)
        if known is None:  # it is new, or somebody took the file away
            self._claim(held)
            known = self.members[name] = Member(capacity)
        known.held = held
        self.stated = self.capacity
        self.eviction = "external" if capacity is None else "own"
        self.free(freed)

    def leave(self, name: str) -> None:
        """A member ends: what it holds is nobody's any more."""
        member = self.members.pop(name, None)
        if member is not None:
            self.free(member.held)

    def rename(self, old: str, new: str) -> None:
        """A member has another scratch folder now."""
        member = self.members.pop(old, None)
        if member is not None:
            self.members[new] = member

    def bury(self, dead: Iterable[str]) -> None:
        """These died. What they had written of their grants a count will tell."""
        for name in dead:
            member = self.members.pop(name)
            self.suspect = self.suspect or member.held > 0

    def grant(self, name: str, size: int) -> int:
        """Give ``name`` at least ``size`` bytes if they are there; how many, 0 if they are not."""
        available = self.available()
        if self.claimed is None or size > available:
            return 0
        given = min(self.portion(size), available)
        self._claim(given)
        self.granted += given
        self.members[name].held += given
        return given

    def free(self, size: int) -> None:
        """So many bytes left the disk."""
        self._claim(-size)

    def _claim(self, size: int) -> None:
        if self.claimed is not None:
            self.claimed = max(0, self.claimed + size)

    def begin_count(self) -> int:
        """What :meth:`counted` wants to be told of the time before the count."""
        return sum(m.held for m in self.members.values()) - self.granted

    def counted(self, found: int, before: int, at: float, *, whole: bool = True) -> None:
        """A walk that began at ``before`` and ended ``at`` found so many bytes on the disk.

        Whatever it missed was paid for by what members held then, or were granted since. If it
        was not ``whole`` there may be more, but no more than was claimed.
        """
        counted = found + before + self.granted
        self.claimed = counted if whole else max(counted, self.claimed or 0)
        self.counted_at = at
        self.suspect = False

    def plausible(self) -> bool:
        """Whether no sum is below zero, which would grant more than the capacity."""
        sums = [self.claimed or 0, *(member.held for member in self.members.values())]
        return min(sums) >= 0 and math.isfinite(self.counted_at)

    def to_bytes(self) -> bytes:
        """The text of the quota file: a checksum, a line of JSON, and blanks up to whole pages."""
        state = {
            "claimed": self.claimed,
            "granted": self.granted,
            "suspect": self.suspect,
            "counted_at": self.counted_at,
            "cleaning_until": self.cleaning_until,
            "stated": self.stated,
            "eviction": self.eviction,
            "members": {name: [m.capacity, m.held] for name, m in sorted(self.members.items())},
        }
        body = json.dumps(state, separators=(",", ":")).encode()
        text = xxh3_64_hexdigest(body).encode() + b" " + body
        pages = max(1, math.ceil((len(text) + 1) / STATE_BYTES))
        return text.ljust(pages * STATE_BYTES - 1) + b"\n"

    def check(self) -> None:
        """Raise AssertionError if more is held than is claimed."""
        held = sum(m.held for m in self.members.values())
        assert self.claimed is None or held <= self.claimed, f"{held} held, {self.claimed} claimed"

    def __repr__(self) -> str:
        return f"<Quota {self.claimed}/{self.capacity} bytes, {len(self.members)} members>"


def from_bytes(text: bytes) -> Quota:
    """What a quota file says; one that is new or damaged says that nobody has counted yet."""
    digest, _, body = text.rstrip().partition(b" ")
    if digest != xxh3_64_hexdigest(body).encode():
        return Quota()
    try:
        quota = _quota(json.loads(body))
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError):
        return Quota()
    return quota if quota.plausible() else Quota()


def _quota(state: dict[str, Any]) -> Quota:
    members = {
        name: Member(_whole(capacity), int(held))
        for name, (capacity, held) in state["members"].items()
        if _MEMBER.fullmatch(name)
    }
    return Quota(
        _whole(state["claimed"]),
        int(state["granted"]),
        bool(state["suspect"]),
        float(state["counted_at"]),
        float(state["cleaning_until"]),
        _whole(state["stated"]),
        _eviction(state["eviction"]),
        members,
    )


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)


def _eviction(value: Any) -> Eviction | None:
    if value not in ("own", "external", None):
        raise ValueError(value)
    found: Eviction | None = value
    return found
