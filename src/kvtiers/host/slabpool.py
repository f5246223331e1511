"""Which slab belongs to which size class, and which of its slots are free.

A slab is spare or a class's. A class takes spare ones as it needs slots, and a slab of which no
slot is in use is spare again at once. A class that has fewer than its floor always finds the rest
of it spare: the others leave that many.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from kvtiers.chunks import Key


class Slab:
    """Where one class keeps chunks now."""

    __slots__ = ("free", "keys", "number", "size_class")

    def __init__(self, number: int, size_class: int, free: list[int]) -> None:
        self.number = number
        self.size_class = size_class
        self.free = free
        """Slots that are nobody's, the next one last."""
        self.keys: dict[int, Key] = {}
        """The chunk for which each slot was given out last, whatever has become of it."""

    def __repr__(self) -> str:
        return f"<Slab {self.number} of class {self.size_class}: {len(self.free)} free>"


class SlabPool:
    """All slabs of a host memory. A slot is named by its first granule."""

    def __init__(
        self, num_slabs: int, slab_granules: int, spans: Sequence[int], floor: int
    ) -> None:
        """``spans``: granules of a chunk of each class. ``floor``: slabs that a class never lacks.

        Caller guarantees: there are ``floor`` slabs for each class, and a chunk fits a slab.
        """
        self.num_granules = num_slabs * slab_granules
        self.spans = tuple(spans)
        self.chunks_per_slab = tuple(slab_granules // span for span in spans)
        self.floor = floor
        self._slab_granules = slab_granules
        self._spare = list(range(num_slabs - 1, -1, -1))
        self._slabs: dict[int, Slab] = {}
        self._by_age: tuple[OrderedDict[int, Slab], ...] = tuple(OrderedDict() for _ in spans)
        """The slabs of each class, the one not used for longest first."""
        self._open: tuple[dict[int, Slab], ...] = tuple({} for _ in spans)
        """Those that have free slots."""
        self._free = [0 for _ in spans]
        """How many these are, by class."""

    def owned(self) -> list[int]:
        """How many slabs each class has."""
        return [len(slabs) for slabs in self._by_age]

    def room(self, size_class: int) -> int:
        """How many chunks of this class can be taken in now."""
        to_come = max(0, len(self._spare) - self._kept_for_others(size_class))
        return self._free[size_class] + to_come * self.chunks_per_slab[size_class]

    def take(self, size_class: int, keys: Sequence[Key]) -> list[int]:
        """Slots for as many of ``keys`` as there is room for, from the front."""
        slots: list[int] = []
        opened = self._open[size_class]
        count = min(len(keys), self.room(size_class))
        while len(slots) < count:
            slab = next(iter(opened.values()), None) or self._take_spare(size_class)
            some = slab.free[: len(slots) - count - 1 : -1]
            del slab.free[len(slab.free) - len(some) :]
            slab.keys.update(zip(some, keys[len(slots) :], strict=False))
            slots += some
            if not slab.free:
                del opened[slab.number]
        self._free[size_class] -= len(slots)
        self.used(slots)
        return slots

    def append(self, slot: int) -> None:
        """One came free."""
        self.extend((slot,))

    def extend(self, slots: Iterable[int]) -> None:
        """Some came free."""
        slabs, granules, whole = self._slabs, self._slab_granules, self.chunks_per_slab
        for slot in slots:
            slab = slabs[slot // granules]
            size_class = slab.size_class
            slab.free.append(slot)
            self._free[size_class] += 1
            if len(slab.free) == 1:
                self._open[size_class][slab.number] = slab
            if len(slab.free) == whole[size_class]:
                self._give_back(slab)

    def used(self, slots: Sequence[int]) -> None:
        """Somebody uses these, in prefix order: a prefix is to lose the slabs of its end first."""
        for number in dict.fromkeys(slot // self._slab_granules for slot in reversed(slots)):
            self._by_age[self._slabs[number].size_class].move_to_end(number)

    def oldest(self, size_class: int, count: int | None = None) -> list[Slab]:
        """Slabs of this class, the one not used for longest first; up to ``count``, or all."""
        return list(islice(self._by_age[size_class].values(), count))

    def postpone(self, slab: Slab) -> None:
        """It cannot be given away now: do not ask about it again soon."""
        self._by_age[slab.size_class].move_to_end(slab.number)

    def weigh(self, slots: Iterable[int]) -> int:
        """How many granules these have."""
        slabs, granules, spans = self._slabs, self._slab_granules, self.spans
        return sum([spans[slabs[slot // granules].size_class] for slot in slots])

    def class_of(self, slot: int) -> int:
        """The class whose slot it is."""
        return self._slabs[slot // self._slab_granules].size_class

    def all_slots(self) -> list[int]:
        """Every slot of every slab that is not spare, ascending."""
        return sorted(
            slot for slab in self._slabs.values() for slot in self._slots_of(slab.number, slab)
        )

    def __len__(self) -> int:
        free = sum(n * span for n, span in zip(self._free, self.spans, strict=True))
        return len(self._spare) * self._slab_granules + free

    def __iter__(self) -> Iterator[int]:
        return (slot for slab in self._slabs.values() for slot in slab.free)

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant, if any. Costs O(slots)."""
        for what, is_whole in self._invariants():
            if not is_whole:
                raise AssertionError(f"{self!r}: {what}")

    def __repr__(self) -> str:
        return f"<SlabPool {len(self._spare)} spare, {self.owned()} taken by class>"

    def _invariants(self) -> Iterator[tuple[str, bool]]:
        every = list(range(self.num_granules // self._slab_granules))
        numbers = sorted([*self._spare, *self._slabs])
        yield "a slab is lost, or there twice", numbers == every
        yield "a floor is not kept", len(self._spare) >= self._kept_for_others(None)
        for size_class, slabs in enumerate(self._by_age):
            own = {n: s for n, s in self._slabs.items() if s.size_class == size_class}
            opened = {n: s for n, s in own.items() if s.free}
            free = sum(len(slab.free) for slab in own.values())
            yield f"class {size_class} has other slabs than it should", slabs == own
            yield "a free slot cannot be found", self._open[size_class] == opened
            yield "free slots do not add up", self._free[size_class] == free
        for number, slab in self._slabs.items():
            once = len(set(slab.free)) == len(slab.free)
            own_slots = set(slab.free) < set(self._slots_of(number, slab))
            yield f"{slab!r} should be spare, or a slot is free twice", once and own_slots

    def _kept_for_others(self, size_class: int | None) -> int:
        return sum(
            max(0, self.floor - len(slabs))
            for other, slabs in enumerate(self._by_age)
            if other != size_class
        )

    def _slots_of(self, number: int, slab: Slab) -> range:
        start, span = number * self._slab_granules, self.spans[slab.size_class]
        return range(start, start + self.chunks_per_slab[slab.size_class] * span, span)

    def _take_spare(self, size_class: int) -> Slab:
        slab = Slab(self._spare.pop(), size_class, [])
        slab.free.extend(reversed(self._slots_of(slab.number, slab)))
        self._slabs[slab.number] = slab
        self._by_age[size_class][slab.number] = self._open[size_class][slab.number] = slab
        self._free[size_class] += len(slab.free)
        return slab

    def _give_back(self, slab: Slab) -> None:
        del self._slabs[slab.number]
        del self._by_age[slab.size_class][slab.number]
        del self._open[slab.size_class][slab.number]
        self._free[slab.size_class] -= len(slab.free)
        self._spare.append(slab.number)
