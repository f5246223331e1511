"""How long chunks stay in a tier before they are evicted.

Of every so many chunks that come one is followed, and of fewer as a tier holds more: at most
``MAX_KEYS`` times are kept for each tier, whatever it holds.
"""

from collections.abc import Sequence

from kvtiers.chunks import Key

MAX_KEYS = 1024
_FIRST_ONE_IN = 32


class Stays:
    """Follows chunks as they come to a tier and leave it."""

    def __init__(self) -> None:
        self._since: dict[Key, float] = {}
        self._one_in = _FIRST_ONE_IN
        self._skip = 0
        """How many of those that come next are not followed."""

    def came(self, keys: Sequence[Key], now: float) -> None:
        """These are resident from ``now`` (seconds) on; some of them are followed."""
        if self._skip >= len(keys):
            self._skip -= len(keys)
            return
        followed = keys[self._skip :: self._one_in]
        self._skip += len(followed) * self._one_in - len(keys)
        for key in followed:
            self._since.setdefault(key, now)
        while len(self._since) > MAX_KEYS:
            self._one_in *= 2
            self._since = dict(list(self._since.items())[::2])

    def left(self, keys: Sequence[Key], now: float) -> list[float]:
        """These are resident no more; how long those stayed that were followed."""
        since = self._since
        return [now - since.pop(key) for key in since.keys() & keys]

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        assert len(self._since) <= MAX_KEYS, "too many chunks are followed"

    def __repr__(self) -> str:
        return f"<Stays {len(self._since)} followed, one in {self._one_in}>"
