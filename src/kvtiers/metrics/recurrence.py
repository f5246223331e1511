"""How often the chunks of prompts come back, and after how many others.

From it follows what hit rate more room would give. Of all keys only those that begin with small
bytes are looked at: digests are uniform, so a sample of the keys keeps each one's whole history,
and what is counted of it times the inverse of its share stands for all (SHARDS: Waldspurger, Park,
Garthwaite and Ahmad, "Efficient MRC construction with SHARDS", FAST 2015).
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence

from kvtiers.chunks import Key
from kvtiers.metrics.distinct import Distinct

ONE_IN = 16
"""Of so many keys one is counted."""
MEASURED_ONE_IN = 64
"""Of so many one is measured: how far apart its uses are."""
_SAMPLED = bytes([256 // ONE_IN])
_MEASURED = bytes([256 // MEASURED_ONE_IN])
MAX_MEASURED = 4096
"""Keys whose last use is remembered: 262,144 chunks. One that comes back later counts as new."""


def sampled(keys: Sequence[Key]) -> list[Key]:
    """Those that are looked at at all."""
    return [key for key in keys if key < _SAMPLED]


class Recurrence:
    """Follows sampled keys."""

    def __init__(self) -> None:
        self.asked = 0
        """Sampled chunks of prompts."""
        self.new = 0.0
        """Those of them that were never seen before, about."""
        self._seen = Distinct()
        self._last: OrderedDict[Key, int] = OrderedDict()
        """When a measured key was used last, the longest unused first."""
        self._times: list[int] = []
        """The same times, ascending."""
        self._now = 0

    @property
    def new_fraction(self) -> float | None:
        """The part of all chunks of prompts that nothing could have had; None: not known yet."""
        return min(1.0, self.new / self.asked) if self.asked else None

    def ask(self, keys: Sequence[Key]) -> list[int]:
        """A prompt has these sampled keys; distances of the measured ones that come back.

        A distance is the number of other chunks that were used since: a cache of more chunks that
        evicts what was not used for longest has it.
        """
        self.asked += len(keys)
        self.new += sum(map(self._seen.add, keys))
        measured = [self._use(key) for key in keys if key < _MEASURED]
        return [others * MEASURED_ONE_IN for others in measured if others is not None]

    def store(self, keys: Sequence[Key]) -> None:
        """These sampled keys are stored, be it that a prompt has them or that they were generated:
        they are not new any more.
        """
        for key in keys:
            self._seen.add(key)
            if key < _MEASURED and key not in self._last:
                self._use(key)

    def _use(self, key: Key) -> int | None:
        """How many others were used since it was; None: not known."""
        last, times = self._last, self._times
        before, others = last.pop(key, None), None
        if before is not None:
            after = bisect_right(times, before)
            others = len(times) - after
            del times[after - 1]
        self._now += 1
        last[key] = self._now
        times.append(self._now)
        if len(times) > MAX_MEASURED:
            last.popitem(last=False)
            del times[0]
        return others

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        self._seen.check()
        assert list(self._last.values()) == self._times, "times of use differ"
        assert len(self._times) <= MAX_MEASURED, "more keys are remembered than the bound"
        assert self.new >= 0, "less than nothing was new"

    def __repr__(self) -> str:
        return f"<Recurrence {self.asked} asked, {self.new:.0f} new, {len(self._times)} remembered>"
