"""The index of chunks of one size: each takes a slot, and any slot will do."""

from collections.abc import Collection, Sequence, Set

from kvtiers.chunks import Key
from kvtiers.host.chunkindex import ChunkIndex
from kvtiers.host.parts import HostUse, Reservation
from kvtiers.host.policies.base import EvictionPolicy


class HostIndex(ChunkIndex):
    """One list of free slots, and one policy that orders all ready chunks."""

    policy: EvictionPolicy
    _free: list[int]

    def __init__(self, num_slots: int, policy: EvictionPolicy) -> None:
        super().__init__(policy)
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))

    def reserve(
        self, keys: Sequence[Key], protected: Set[Key] = frozenset(), *, fetched: bool = False
    ) -> Reservation:
        """Give slots to as many of ``keys`` as fit, from the front, and evict what that takes."""
        self._refuse_known(keys)
        evicted: Sequence[Key] = ()
        missing = len(keys) - len(self._free)
        if missing > 0:
            if len(self.ready) - len(self._held) - len(protected) < missing:
                missing = min(missing, self._evictable(protected))
            if missing > 0:
                evicted = self._evict(self.policy, missing, protected)
        count = min(len(keys), len(self._free))
        taken = keys[:count]
        slots = self._free[-1 : -count - 1 : -1]
        del self._free[len(self._free) - count :]
        filling = self.fetching if fetched else self.filling
        filling.update(zip(taken, slots, strict=True))
        return Reservation(tuple(taken), tuple(slots), tuple(evicted))

    def weigh(self, slots: Collection[int]) -> int:
        """How many they are."""
        return len(slots)

    @property
    def use(self) -> HostUse:
        """What the slots are doing now."""
        filling, orphaned = self.filling_count, self.orphaned
        pinned = self.held - filling - orphaned
        return HostUse(self.num_slots, self.resident, filling, pinned, orphaned)

    def _evictable(self, protected: Set[Key]) -> int:
        ready, held = self.ready, self._held
        there = ready.keys() & protected
        kept = len(there) - sum(ready[key] in held for key in there) if held else len(there)
        return len(ready) - len(held) - kept

    def _all_slots(self) -> list[int]:
        return list(range(self.num_slots))
