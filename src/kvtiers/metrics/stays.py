"""How long chunks stay in a tier before they are evicted.

Of every so many chunks that come one is followed, and of fewer as a tier holds more: at most
``MAX_KEYS`` times are kept for each tier, whatever it holds.
"""

from collections.abc import Sequence

from kvtiers.chunks import Key

MAX_KEYS = 1024
_FIRST_ONE_IN = 32


class _Stays:
    """Those of one tier."""

    def __init__(self) -> None:
        self.since: dict[Key, float] = {}
        self._one_in = _FIRST_ONE_IN
        self._skip = 0
        """How many of those that come next are not followed."""

    def add(self, keys: Sequence[Key], now: float) -> None:
        """These came; some of them are followed."""
        if self._skip >= len(keys):
            self._skip -= len(keys)
            return
        followed = keys[self._skip :: self._one_in]
        self._skip += len(followed) * self._one_in - len(keys)
        for key in followed:
            self.since.setdefault(key, now)
        while len(self.since) > MAX_KEYS:
            self._one_in *= 2
            self.since = dict(list(self.since.items())[::2])


class Stays:
    """Follows chunks as they come to tiers and leave them."""

    def __init__(self) -> None:
        self._tiers: dict[str, _Stays] = {}

    def came(self, tier: str, keys: Sequence[Key], now: float) -> None:
        """These are resident in ``tier`` from ``now`` (seconds) on."""
        stays = self._tiers.get(tier)
        if stays is None:
            stays = self._tiers[tier] = _Stays()
        stays.add(keys, now)

    def left(self, tier: str, keys: Sequence[Key], now: float) -> list[float]:
        """These are resident no more; how long those stayed that were followed."""
        stays = self._tiers.get(tier)
        if stays is None:
            return []
        return [now - stays.since.pop(key) for key in stays.since.keys() & keys]

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        for tier, stays in self._tiers.items():
            assert len(stays.since) <= MAX_KEYS, f"too many chunks are followed in {tier}"

    def __repr__(self) -> str:
        followed = ", ".join(f"{t} {len(s.since)}" for t, s in self._tiers.items())
        return f"<Stays followed: {followed or 'none'}>"
