"""How long chunks stay in a tier before they are evicted.

Of a sample of keys only, which shrinks as a tier holds more: at most ``MAX_KEYS`` times are kept
for each tier, whatever it holds. A key belongs to the sample by its first bytes: digests are
uniform.
"""

from collections.abc import Sequence

from kvtiers.chunks import Key

MAX_KEYS = 4096
_ALL = 0xFFFF


class _Stays:
    """Those of one tier."""

    def __init__(self) -> None:
        self.since: dict[Key, float] = {}
        self._share = _ALL
        self.below = _ALL.to_bytes(2, "big")
        """Keys are followed that are less, as bytes."""

    def halve(self) -> None:
        """Follow half as many from now on."""
        self._share //= 2
        self.below = self._share.to_bytes(2, "big")
        self.since = {key: t for key, t in self.since.items() if key < self.below}


class Stays:
    """Follows sampled keys, as they come to tiers and leave them."""

    def __init__(self) -> None:
        self._tiers: dict[str, _Stays] = {}

    def came(self, tier: str, keys: Sequence[Key], now: float) -> None:
        """These are resident in ``tier`` from ``now`` (seconds) on."""
        stays = self._tiers.get(tier)
        if stays is None:
            stays = self._tiers[tier] = _Stays()
        stays.since.update((key, now) for key in keys if key < stays.below)
        while len(stays.since) > MAX_KEYS:
            stays.halve()

    def left(self, tier: str, keys: Sequence[Key], now: float) -> list[float]:
        """These are resident no more; how long those stayed that were followed."""
        stays = self._tiers.get(tier)
        if stays is None:
            return []
        came = (stays.since.pop(key, None) for key in keys)
        return [now - since for since in came if since is not None]

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        for tier, stays in self._tiers.items():
            assert len(stays.since) <= MAX_KEYS, f"too many keys are followed in {tier}"
            strays = [key for key in stays.since if key >= stays.below]
            assert not strays, f"{len(strays)} keys of {tier} are followed beside the sample"

    def __repr__(self) -> str:
        followed = ", ".join(f"{t} {len(s.since)}" for t, s in self._tiers.items())
        return f"<Stays followed: {followed or 'none'}>"
