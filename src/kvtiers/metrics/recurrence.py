"""How often the chunks of prompts come back, and after how many others.

From it follows what hit rate more room would give. Soon only those keys are looked at that begin
with small bytes: digests are uniform, so a sample of the keys keeps each one's whole history, and
what is counted of it times the inverse of its share stands for all (SHARDS: Waldspurger, Park,
Garthwaite and Ahmad, "Efficient MRC construction with SHARDS", FAST 2015).
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence

from kvtiers.chunks import Key
from kvtiers.metrics.distinct import Distinct

ONE_IN = 128
"""Of so many keys one is looked at in the end, and of so many one is measured from the start."""
EACH = 512
"""After so many keys of prompts half as many are looked at, down to one in ``ONE_IN``."""
MAX_MEASURED = 2048
"""Keys whose last use is remembered: 262,144 chunks. One that comes back later counts as new."""
_MEASURED = bytes([256 // ONE_IN])


class Recurrence:
    """Follows sampled keys."""

    def __init__(self) -> None:
        self.asked = 0
        """Chunks of prompts, as the sample has it."""
        self.new = 0.0
        """Those of them that were never seen before, about."""
        self._one_in = 1
        self._below: bytes | None = None
        """Keys are looked at that are less; None: all."""
        self._left = EACH
        """Until fewer are looked at."""
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
        """A prompt has these keys; distances of the measured ones that come back.

        A distance is the number of other chunks that were used since: a cache of more chunks that
        evicts what was not used for longest has it.
        """
        distances = []
        some = self._sampled(keys)
        for key in some:
            others = self._use(key) if key < _MEASURED else None
            if others is None:
                self.new += self._seen.add(key) * self._one_in
            else:  # it went by before
                distances.append(others * ONE_IN)
        self.asked += len(some) * self._one_in
        self._left -= len(some)
        if self._left <= 0 and self._one_in < ONE_IN:
            self._left, self._one_in = EACH, 2 * self._one_in
            self._below = bytes([256 // self._one_in])
        return distances

    def generated(self, keys: Sequence[Key]) -> None:
        """These were generated: as part of the next prompt they are not new any more."""
        for key in self._sampled(keys):
            self._seen.add(key)
            if key < _MEASURED and key not in self._last:
                self._use(key)

    def _sampled(self, keys: Sequence[Key]) -> Sequence[Key]:
        below = self._below
        if below is None:
            return keys
        if min(keys, default=below) >= below:  # most often; half of what looking at each costs
            return ()
        return [key for key in keys if key < below]

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
        assert 1 <= self._one_in <= ONE_IN, "another sample than may be"

    def __repr__(self) -> str:
        return f"<Recurrence {self.asked} asked, {self.new:.0f} new, {len(self._times)} remembered>"
