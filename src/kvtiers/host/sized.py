"""The index of chunks of several sizes: slabs move between the size classes as these need them."""

from collections.abc import Callable, Iterable, Sequence, Set

from kvtiers.chunks import Key
from kvtiers.errors import KVTiersError
from kvtiers.host.chunkindex import ChunkIndex
from kvtiers.host.parts import HostUse, Reservation
from kvtiers.host.policies.base import EvictionPolicy
from kvtiers.host.pressure import Pressure
from kvtiers.host.slabpool import Slab, SlabPool
from kvtiers.host.slabs import SizeClasses, floor_slabs

_ASKED = 16
"""Of so many slabs, the ones not used for longest, one is looked for that may be given away; of
all, if the taker has nothing else."""
_COMPARED = 4
"""Of so many that may be, the one with the fewest chunks is."""


class ClassPolicies:
    """One policy for each size class; together they order all ready chunks."""

    def __init__(self, policies: Sequence[EvictionPolicy], classes: SizeClasses) -> None:
        self.by_class = tuple(policies)
        self._split = classes.split

    def insert(self, keys: Sequence[Key]) -> None:
        """These became ready."""
        for size_class, some in self._split(keys).items():
            self.by_class[size_class].insert(some)

    def touch(self, keys: Sequence[Key]) -> None:
        """These were used; unknown ones are ignored."""
        for size_class, some in self._split(keys).items():
            self.by_class[size_class].touch(some)

    def remove(self, keys: Sequence[Key]) -> None:
        """These left, and no policy chose them."""
        for size_class, some in self._split(keys).items():
            self.by_class[size_class].remove(some)

    def clear(self) -> None:
        """Forget everything."""
        for policy in self.by_class:
            policy.clear()

    def __len__(self) -> int:
        return sum(map(len, self.by_class))

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant, if any."""
        for policy in self.by_class:
            policy.check()

    def __repr__(self) -> str:
        return f"<ClassPolicies {self.by_class}>"


class SizedIndex(ChunkIndex):
    """Slots of several sizes in slabs; ``num_slots`` counts granules.

    A class that needs room takes free slots and spare slabs first. Then, if another class is under
    clearly less pressure, a slab of that class, whose chunks are evicted; else victims that its own
    policy chooses; and if none of those may leave, a slab of any class that has more than a floor.
    """

    _free: SlabPool

    def __init__(
        self,
        num_slabs: int,
        slab_granules: int,
        classes: SizeClasses,
        policy: Callable[[int], EvictionPolicy],
    ) -> None:
        """``policy(capacity)`` builds the policy of a class that may come to have so many chunks.

        Caller guarantees: at least one slab for each class.
        """
        floor = floor_slabs(num_slabs, len(classes.spans))
        pool = SlabPool(num_slabs, slab_granules, classes.spans, floor)
        others = (len(classes.spans) - 1) * floor
        self._policies = ClassPolicies(
            [policy((num_slabs - others) * chunks) for chunks in pool.chunks_per_slab], classes
        )
        super().__init__(self._policies)
        self.num_slots = pool.num_granules
        self.widest = max(classes.spans)
        self._free = pool
        self._classes = classes
        self._pressure = Pressure(len(classes.spans), pool.num_granules)

    def reserve(
        self, keys: Sequence[Key], protected: Set[Key] = frozenset(), *, fetched: bool = False
    ) -> Reservation:
        """Give slots to as many chunks of each class as fit, from its front; evict for them."""
        self._refuse_known(keys)
        found: dict[Key, int] = {}
        evicted: list[Key] = []
        try:
            for size_class, wanted in self._classes.split(keys).items():
                evicted += self._make_room(size_class, len(wanted), protected)
                found.update(zip(wanted, self._free.take(size_class, wanted), strict=False))
        except KVTiersError:
            self._free.extend(found.values())
            raise
        taken = {key: found[key] for key in keys if key in found}
        (self.fetching if fetched else self.filling).update(taken)
        return Reservation(tuple(taken), tuple(taken.values()), tuple(evicted))

    def hold(self, keys: Sequence[Key]) -> list[int]:
        """Pin ready keys, once for each time they are named; returns their slots, in order."""
        slots = super().hold(keys)
        self._free.used(slots)
        return slots

    def touch(self, keys: Sequence[Key]) -> None:
        """These keys were used; unknown ones are ignored."""
        super().touch(keys)
        self._free.used([self.ready[key] for key in keys if key in self.ready])

    def clear(self) -> list[Key]:
        """Drop everything, and all history; returns what was there."""
        self._pressure.clear()
        return super().clear()

    def weigh(self, slots: Iterable[int]) -> int:
        """How many granules they have."""
        return self._free.weigh(slots)

    @property
    def use(self) -> HostUse:
        """What the granules are doing now. Costs O(held slots)."""
        resident = sum(
            len(policy) * span
            for policy, span in zip(self._policies.by_class, self._free.spans, strict=True)
        )
        filling = self.weigh(self.filling.values()) + self.weigh(self.fetching.values())
        pinned, held = self.weigh(self._held), self.filling_count + len(self._held)
        per_chunk = (filling + pinned) / held if held else 1.0
        orphaned = self.weigh(self._orphans)
        return HostUse(self.num_slots, resident, filling, pinned, orphaned, per_chunk)

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant, if any. Costs O(slots)."""
        super().check()
        self._free.check()
        self._pressure.check()
        for size_class, policy in enumerate(self._policies.by_class):
            ready = sum(self._free.class_of(slot) == size_class for slot in self.ready.values())
            if len(policy) != ready:
                raise AssertionError(f"{self!r}: the policy of class {size_class} differs")

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}; {self._free!r}>"

    def _all_slots(self) -> list[int]:
        return self._free.all_slots()

    def _make_room(self, size_class: int, count: int, protected: Set[Key]) -> list[Key]:
        """Evict what it takes for ``count`` chunks, or as far as it goes; what was evicted."""
        missing = count - self._free.room(size_class)
        if missing <= 0:
            return []
        span = self._free.spans[size_class]
        self._pressure.lacked(size_class, missing * span)
        evicted = self._take_slabs(size_class, count, protected)
        missing = count - self._free.room(size_class)
        if missing > 0:
            evicted += self._evict_own(size_class, missing, protected)
        else:  # what a slab has beyond that will not be lacked, but would have been
            self._pressure.lacked(size_class, -missing * span)
        if self._free.room(size_class) < count:
            evicted += self._take_slabs(size_class, count, protected, at_any=True)
        return evicted

    def _evict_own(self, size_class: int, missing: int, protected: Set[Key]) -> Sequence[Key]:
        policy = self._policies.by_class[size_class]
        if len(policy) - len(self._held) - len(protected) < missing:
            missing = min(missing, self._evictable(size_class, protected))
        return self._evict(policy, missing, protected) if missing > 0 else ()

    def _evictable(self, size_class: int, protected: Set[Key]) -> int:
        """Costs O(chunks of the class), which are few where this is asked."""
        ready, held = self.ready, self._held
        return sum(
            ready.get(key) == slot and slot not in held and key not in protected
            for slab in self._free.oldest(size_class)
            for slot, key in slab.keys.items()
        )

    def _take_slabs(
        self, taker: int, count: int, protected: Set[Key], *, at_any: bool = False
    ) -> list[Key]:
        """Make slabs of others spare until ``count`` chunks fit, as far as pressure allows."""
        evicted: list[Key] = []
        busy = {taker}
        while self._free.room(taker) < count:
            owned = self._free.owned()
            may_give = {c for c, n in enumerate(owned) if n > self._free.floor} - busy
            giver = self._pressure.giver(taker, owned, may_give, at_any=at_any)
            if giver is None:
                break
            leaving = self._vacate(giver, protected, asked=None if at_any else _ASKED)
            if leaving is None:
                busy.add(giver)
            else:
                evicted += leaving
        return evicted

    def _vacate(self, giver: int, protected: Set[Key], asked: int | None) -> list[Key] | None:
        """Evict all chunks of one old slab, which is spare then; None if each one is in use."""
        found: list[list[Key]] = []
        for slab in self._free.oldest(giver, asked):
            chunks = self._chunks_of(slab, protected)
            if chunks is None:
                self._free.postpone(slab)
                continue
            found.append(chunks)
            if len(found) == _COMPARED:
                break
        if not found:
            return None
        leaving = min(found, key=len)
        slots = [self.ready.pop(key) for key in leaving]
        self._policies.by_class[giver].remove(leaving)
        self._free.extend(slots)
        return leaving

    def _chunks_of(self, slab: Slab, protected: Set[Key]) -> list[Key] | None:
        """The ready chunks of a slab; None if one has to stay, or a slot is otherwise in use."""
        if not self._held.isdisjoint(slab.keys):
            return None
        there = {slot: key for slot, key in slab.keys.items() if self.ready.get(key) == slot}
        whole = self._free.chunks_per_slab[slab.size_class] == len(there) + len(slab.free)
        return list(there.values()) if whole and protected.isdisjoint(there.values()) else None
