"""The laws of eviction policies (``kvtiers.host.policies.base.EvictionPolicy``)."""

import random
from collections.abc import Collection, Sequence

from kvtiers.chunks import Key
from kvtiers.host.policies.base import EvictionPolicy, Staying
from kvtiers.testing.laws import Laws, hook, law, must
from kvtiers.testing.values import keys

_CAPACITY = 16
_STEPS = 400
_POOL = 3 * _CAPACITY
_QUESTIONS_PER_KEY = 4
"""How often a policy may ask whether a key may leave, on average over the keys it holds."""


class PolicyLaws(Laws):
    """Subclass it, define ``make``, and name the class ``Test...`` for pytest."""

    @hook
    def make(self, capacity: int) -> EvictionPolicy:
        """Hook: a new policy for ``capacity`` slots."""
        raise NotImplementedError

    @law("E1")
    def test_e1_evicts_exactly_as_many_as_asked_for(self) -> None:
        """``evict(n)`` returns n distinct keys that were in the policy, and they are in no more."""
        walk = _Walk(self.make(_CAPACITY), seed=1)
        for _ in range(_STEPS):
            walk.step(pinned=frozenset())
        must(walk.evictions > _CAPACITY, "the walk evicted next to nothing")

    @law("E2")
    def test_e2_never_evicts_what_is_not_evictable(self) -> None:
        """A key that is ``staying`` stays, wherever it stands; the others go."""
        walk = _Walk(self.make(_CAPACITY), seed=2)
        for _ in range(_STEPS):
            walk.step(pinned=walk.some_resident())

    @law("E3")
    def test_e3_returns_what_it_finds_and_keeps_the_rest(self) -> None:
        """Asked for more than is evictable, it returns what is, once each; the rest stays in."""
        policy, names = self.make(_CAPACITY), keys(*range(8))
        policy.insert(names)
        policy.touch(names[:4])
        free = {names[1], names[6]}
        found = policy.evict(5, _all_but(free))
        must(sorted(found) == sorted(free), f"found {len(found)} keys, 2 were evictable")
        must(policy.evict(3, _all_but(())) == [], "evicted although nothing was evictable")
        _must_count(policy, 6)
        rest = policy.evict(6, _anything)
        must(sorted(rest) == sorted(set(names) - free), "a key that was not evicted is lost")

    @law("E4")
    def test_e4_forgets_what_was_removed(self) -> None:
        """A removed key is never returned, leaves no place behind, and may come again."""
        policy, names = self.make(_CAPACITY), keys(*range(8))
        policy.insert(names)
        policy.touch(names[5:])
        policy.remove([*names[2:6], *keys("never seen")])
        _must_count(policy, 4)
        left = policy.evict(4, _anything)
        must(sorted(left) == sorted([*names[:2], *names[6:]]), "removed keys were evicted")
        policy.insert(names[2:6])
        again = policy.evict(4, _anything)
        must(sorted(again) == sorted(names[2:6]), "removed keys did not come again")

    @law("E5")
    def test_e5_clear_makes_it_new(self) -> None:
        """After ``clear`` it behaves as one that was just made: no key, no history."""
        used, new = self.make(_CAPACITY), self.make(_CAPACITY)
        walk = _Walk(used, seed=5)
        for _ in range(_STEPS):
            walk.step(pinned=frozenset())
        used.clear()
        _must_count(used, 0)
        first = _Walk(used, seed=6).victims(_STEPS)
        must(first == _Walk(new, seed=6).victims(_STEPS), "its history survived clear")

    @law("E6")
    def test_e6_is_deterministic(self) -> None:
        """The same calls choose the same victims, in the same order."""
        runs = [_Walk(self.make(_CAPACITY), seed=7).victims(_STEPS) for _ in range(3)]
        must(runs[0] == runs[1] == runs[2], "the same calls chose different victims")

    @law("E7")
    def test_e7_costs_do_not_grow_with_what_is_pinned(self) -> None:
        """Amortised, an eviction asks about a bounded number of keys, however many are pinned."""
        size = 512
        policy, names = self.make(size), keys(*range(size))
        policy.insert(names)
        pinned, asked = set(names[: size // 2]), 0

        def staying(candidates: Sequence[Key]) -> Collection[Key]:
            nonlocal asked
            asked += len(candidates)
            return pinned.intersection(candidates)

        for _ in range(size // 2):
            must(len(policy.evict(1, staying)) == 1, "found nothing to evict")
        limit = _QUESTIONS_PER_KEY * size
        must(asked <= limit, f"asked about {asked} keys to evict {size // 2}, at most {limit}")

    @law("E8")
    def test_e8_a_touch_changes_only_the_order(self) -> None:
        """Keys that are touched stay, once; unknown ones, evicted ones too, are ignored."""
        policy, names = self.make(_CAPACITY), keys(*range(6))
        policy.insert(names)
        gone = policy.evict(2, _anything)
        for _ in range(3):
            policy.touch([*gone, *names, *keys("never seen")])
        _must_count(policy, 4)
        left = policy.evict(4, _anything)
        must(sorted(left) == sorted(set(names) - set(gone)), "a touch brought in or lost a key")


class _Walk:
    """A random history that keeps a caller's promises, and checks the policy's at every step."""

    def __init__(self, policy: EvictionPolicy, seed: int) -> None:
        self._policy = policy
        self._rng = random.Random(seed)
        self._pool = keys(*range(_POOL))
        self._resident: dict[Key, None] = {}
        self.evictions = 0

    def some_resident(self) -> frozenset[Key]:
        """About half of what is resident."""
        return frozenset(k for k in self._resident if self._rng.random() < 0.5)

    def victims(self, steps: int) -> list[list[Key]]:
        """Walk, with pins; what was evicted in each step."""
        return [self.step(self.some_resident()) for _ in range(steps)]

    def step(self, pinned: frozenset[Key]) -> list[Key]:
        """Bring in, touch or remove something; the keys that were evicted to make room."""
        some = self._rng.sample(self._pool, self._rng.randint(1, 5))
        roll = self._rng.random()
        victims: list[Key] = []
        if roll < 0.6:
            victims = self._bring([k for k in some if k not in self._resident], pinned)
        elif roll < 0.9:
            self._policy.touch(some)
        else:
            self._policy.remove(some)
            for name in some:
                self._resident.pop(name, None)
        _must_count(self._policy, len(self._resident))
        self._policy.check()
        return victims

    def _bring(self, new: Sequence[Key], pinned: frozenset[Key]) -> list[Key]:
        evictable = [k for k in self._resident if k not in pinned]
        room = _CAPACITY - len(self._resident)
        count = min(max(0, len(new) - room), len(evictable))
        victims = self._policy.evict(count, pinned.intersection) if count else []
        must(len(victims) == count, f"evicted {len(victims)} keys instead of {count}")
        must(len(set(victims)) == count, "evicted a key twice")
        for victim in victims:
            must(victim in self._resident, "evicted a key that is not resident")
            must(victim not in pinned, "evicted a key that is not evictable")
            del self._resident[victim]
        self.evictions += count
        taken = list(new[: room + count])
        self._policy.insert(taken)
        self._resident.update(dict.fromkeys(taken))
        return victims


def _must_count(policy: EvictionPolicy, expected: int) -> None:
    must(len(policy) == expected, f"its length is {len(policy)}, {expected} keys are resident")


def _anything(_: Sequence[Key]) -> Collection[Key]:
    return ()


def _all_but(free: Collection[Key]) -> Staying:
    return lambda candidates: {k for k in candidates if k not in free}
