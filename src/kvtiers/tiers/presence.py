"""What a tier is known to hold, so that a lookup is dictionary work.

Pure and owned by one thread; ``now`` (monotonic seconds) is an argument.
"""

from collections import OrderedDict
from collections.abc import Iterable

from kvtiers.chunks import Key

_LEAST_DENIAL_S = 0.5
"""A "no" that is over before the next step asks would be asked for again and again."""

MAX_LOSSES = 65_536
"""Losses that are remembered. Stale news of an older one is believed until a load fails."""


class Presence:
    """Known chunks, bounded in number; and denials, which say "not now" until they expire.

    A denial is stronger than knowledge: a chunk that is there but failed to load is denied for a
    while. What somebody saw before a chunk was lost proves nothing: news carry the ``moment`` at
    which their bearer began to look. When the table overflows, the longest unused entries are
    forgotten, and from then on absence from the table proves nothing.
    """

    def __init__(self, max_chunks: int, denial_ttl_s: float) -> None:
        self._max_chunks = max_chunks
        self._denial_ttl_s = max(_LEAST_DENIAL_S, denial_ttl_s)
        self._held: OrderedDict[Key, bool] = OrderedDict()  # -> whether announced
        self._denied: OrderedDict[Key, float] = OrderedDict()
        self._lost: OrderedDict[Key, int] = OrderedDict()  # -> the moment of it
        self._overflowed = False
        self.moment = 0
        """Grows with every loss."""
        self.complete = False
        """Set by the owner when everything that was stored before is in the table."""

    def find(self, key: Key, now: float) -> bool | None:
        """True: there. False: not there, or not usable now. None: has to be asked."""
        denied_until = self._denied.get(key)
        if denied_until is not None and now < denied_until:
            return False
        if key in self._held:
            return True
        return False if self.complete and not self._overflowed else None

    def holds(self, key: Key) -> bool:
        """Whether the chunk is known to be stored, usable or not."""
        return key in self._held

    def add(self, keys: Iterable[Key], since: int | None = None) -> None:
        """These are there, by what was seen after the moment ``since``; None: just now."""
        if since is not None and self._lost:
            keys = [key for key in keys if self._lost.get(key, 0) <= since]
        for key in keys:
            self._denied.pop(key, None)
            self._held.setdefault(key, False)
        while len(self._held) > self._max_chunks:
            self._held.popitem(last=False)
            self._overflowed = True

    def announce(self, keys: Iterable[Key]) -> list[Key]:
        """These are there by our doing. Returns those that were not announced before.

        One that a question or the scan found first, between its write and this, is announced too.
        """
        new = [key for key in keys if not self._held.get(key, False)]
        self._held.update(dict.fromkeys(new, True))
        self.add(new)
        return new

    def discard(self, keys: Iterable[Key]) -> list[Key]:
        """These are gone. Returns those that were known."""
        known = []
        for key in keys:
            self.moment += 1
            self._lost[key] = self.moment
            self._lost.move_to_end(key)
            if key in self._held:
                del self._held[key]
                known.append(key)
        while len(self._lost) > MAX_LOSSES:
            self._lost.popitem(last=False)
        return known

    def deny(self, keys: Iterable[Key], now: float) -> None:
        """Do not find these until the time to live has passed, or until they are added."""
        for key in keys:
            self._denied[key] = now + self._denial_ttl_s
            self._denied.move_to_end(key)

    def touch(self, keys: Iterable[Key]) -> None:
        """Forget these last. Unknown keys are ignored."""
        for key in keys:
            if key in self._held:
                self._held.move_to_end(key)

    def expire(self, now: float) -> None:
        """Drop denials that are over; also the oldest ones above the bound."""
        denied = self._denied
        while denied:
            key, until = next(iter(denied.items()))
            if until > now and len(denied) <= self._max_chunks:
                return
            del denied[key]

    def __len__(self) -> int:
        return len(self._held)

    def check(self) -> None:
        """Raise AssertionError if a bound or the order of denials is broken."""
        assert len(self._held) <= self._max_chunks, "more chunks than the bound"
        assert len(self._lost) <= MAX_LOSSES, "more losses than the bound"
        times = list(self._denied.values())
        assert times == sorted(times), "denials are not in order of expiry"

    def __repr__(self) -> str:
        known = "complete" if self.complete and not self._overflowed else "partial"
        return f"<Presence {len(self._held)} held, {len(self._denied)} denied, {known}>"
