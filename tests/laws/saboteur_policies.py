"""Deliberately broken policies."""

import itertools
import random

from kvtiers.host.policies import ARCPolicy, LRUPolicy
from tests.laws.saboteurs import caught_by

POLICIES: dict[type, str] = {}


@caught_by("E1", POLICIES)
class ReturnsFewer(LRUPolicy):
    def evict(self, count, staying):
        return super().evict(count - 1 if count > 2 else count, staying)


@caught_by("E1", POLICIES)
class ReturnsMore(LRUPolicy):
    def evict(self, count, staying):
        return super().evict(count + 1, staying)


@caught_by("E1", POLICIES)
class KeepsWhatItEvicts(LRUPolicy):
    def evict(self, count, staying):
        victims = super().evict(count, staying)
        self.insert(victims[:1])
        return victims


@caught_by("E2", POLICIES)
class EvictsPinnedKeys(LRUPolicy):
    def evict(self, count, staying):
        return super().evict(count, lambda keys: ())


@caught_by("E3", POLICIES)
class LosesWhatItMayNotEvict(LRUPolicy):
    def evict(self, count, staying):
        found = super().evict(count, staying)
        if len(found) < count:
            self.clear()
        return found


@caught_by("E4", POLICIES)
class RemembersRemovedKeys(LRUPolicy):
    def remove(self, keys):
        pass


@caught_by("E5", POLICIES)
class KeepsItsHistory(ARCPolicy):
    def clear(self):
        self._t1.clear()
        self._t2.clear()


@caught_by("E6", POLICIES)
class RollsDice(LRUPolicy):
    dice = random.Random(1)

    def evict(self, count, staying):
        self.dice.shuffle(order := list(self._order))
        victims = [key for key in order if not staying([key])][:count]
        self.remove(victims)
        return victims


@caught_by("E7", POLICIES)
class WalksPastThePinnedEveryTime(LRUPolicy):
    def evict(self, count, staying):
        victims = list(itertools.islice((k for k in self._order if not staying([k])), count))
        self.remove(victims)
        return victims


@caught_by("E8", POLICIES)
class TakesInWhatIsTouched(LRUPolicy):
    def touch(self, keys):
        self.insert(keys)
