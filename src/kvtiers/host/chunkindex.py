"""Which chunk is in which slot of host memory: decisions only, on one thread.

The index maps keys to slots and counts who uses them; it touches no bytes. A slot is always in one
of four places, and moves between them so::

    free      nobody's                             reserve -> filling
    filling   under a key, held by its writer      commit, settle -> ready, or free if it failed
                                                   drop -> orphaned
    ready     under a key, held by readers         evict, drop -> free, or orphaned if it is held
    orphaned  under no key, but still touched      the last release -> free

Each place is a container, and what is not in it cannot leave it. Callers name a key once per call.
Everything but ``clear`` and ``check`` costs the same however much is stored, and nearly all of it
is spent in operations on whole sets: at this rate of calls a Python statement per chunk is what a
chunk costs (decision 0012).

This is what all indexes have in common. How slots are given out depends on whether all are of one
size: :mod:`kvtiers.host.index` if they are, :mod:`kvtiers.host.sized` if not.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Sequence, Set

from kvtiers.chunks import Key, Lookup
from kvtiers.errors import Kind, KVTiersError
from kvtiers.host.parts import FreeSlots, HostUse, KeyOrder, Reservation
from kvtiers.host.policies.asking import broken_policy, victims_of
from kvtiers.host.policies.base import EvictionPolicy

# Bound once: looking an enum member up costs as much as looking a key up.
_HIT, _HIT_PENDING, _MISS = Lookup.HIT, Lookup.HIT_PENDING, Lookup.MISS

_NOWHERE = -1


class ChunkIndex(ABC):
    """Key -> slot, with pins, states and eviction.

    A writer reserves slots, and ends by ``commit`` if it is the accelerator, by ``settle`` if it is
    a tier. Readers hold slots and release them. A key can be dropped at any time: the slot of one
    that is held comes free only with its last holder.

    Callers pass keys in prefix order. The policy is told the other way round, so that a prefix
    loses its end first: without its beginning the rest of it can never be a hit.
    """

    num_slots: int
    """Where slots are counted to: of one size their number, else granules."""
    widest = 1
    """What the largest chunk takes of them."""
    _free: FreeSlots

    def __init__(self, policy: KeyOrder) -> None:
        self.policy = policy
        self.ready: dict[Key, int] = {}
        """Slots of chunks whose bytes are whole. For reading only, by callers in a hurry."""
        self.filling: dict[Key, int] = {}
        """Slots that the accelerator writes. For reading only, by callers in a hurry."""
        self.fetching: dict[Key, int] = {}
        """Slots that a tier writes. For reading only, by callers in a hurry."""
        self._held: set[int] = set()
        """Ready slots that somebody reads."""
        self._held_again: Counter[int] = Counter()
        """How many readers more than one those slots have."""
        self._orphans: Counter[int] = Counter()
        """Slots under no key, by the number of those that may still touch them."""

    @abstractmethod
    def reserve(
        self, keys: Sequence[Key], protected: Set[Key] = frozenset(), *, fetched: bool = False
    ) -> Reservation:
        """Give slots to as many of ``keys`` as fit, and evict what that takes.

        Of chunks of one size those that come first get theirs. Caller guarantees: the keys are
        distinct, and absent. Neither held nor ``protected`` keys are evicted. Each slot is held by
        its writer until ``commit``, or ``settle`` if ``fetched``.
        Raises ``Kind.BROKEN``, with nothing reserved, if a caller or the policy breaks its word.
        """

    @abstractmethod
    def weigh(self, slots: Collection[int]) -> int:
        """What these take of ``num_slots``."""

    @property
    @abstractmethod
    def use(self) -> HostUse:
        """What host memory is doing now."""

    def knows_none(self, keys: Sequence[Key]) -> bool:
        """Whether each of these is absent: a MISS."""
        # The views walk ``keys``; ``set(keys).isdisjoint(index)`` would walk the whole index.
        return (
            self.ready.keys().isdisjoint(keys)
            and self.filling.keys().isdisjoint(keys)
            and (not self.fetching or self.fetching.keys().isdisjoint(keys))
        )

    def lookup(self, key: Key) -> Lookup:
        """HIT if the bytes are whole, HIT_PENDING if they are on the way, else MISS."""
        if key in self.ready:
            return _HIT
        return _HIT_PENDING if key in self.filling or key in self.fetching else _MISS

    def commit(self, keys: Sequence[Key], failed: Iterable[Key] = ()) -> list[Key]:
        """The accelerator wrote these, or did not if ``failed``; returns those that are ready now.

        A key that failed loses its slot. One that was dropped since ``reserve`` is ignored: its
        slot is the business of whoever dropped it. Caller guarantees: a writer whose key was
        dropped does not commit it, for it may have been reserved anew.
        """
        filling = self.filling
        before = len(filling)
        slots = [filling.pop(key, _NOWHERE) for key in keys]
        written = list(keys)
        if failed or len(filling) != before - len(written):
            failed = frozenset(failed)
            known = [(k, s) for k, s in zip(keys, slots, strict=True) if s != _NOWHERE]
            self._free.extend(slot for key, slot in reversed(known) if key in failed)
            written = [key for key, _ in known if key not in failed]
            slots = [slot for key, slot in known if key not in failed]
        self._now_ready(written, slots)
        return written

    def settle(
        self, keys: Sequence[Key], slots: Sequence[int], failed: Iterable[Key] = ()
    ) -> list[Key]:
        """A tier wrote these slots, or did not if ``failed``; returns the keys that are ready now.

        A key that failed loses its slot. One that was dropped since ``reserve`` stays absent (or
        stays where it was reserved anew), and its old slot comes free.
        """
        fetching, failed = self.fetching, frozenset(failed)
        given = list(zip(keys, slots, strict=True))
        ours = [(key, slot) for key, slot in given if fetching.get(key) == slot]
        self.release([slot for key, slot in given if fetching.get(key) != slot])
        for key, _ in ours:
            del fetching[key]
        self._free.extend(slot for key, slot in reversed(ours) if key in failed)
        whole = [(key, slot) for key, slot in ours if key not in failed]
        written = [key for key, _ in whole]
        self._now_ready(written, [slot for _, slot in whole])
        return written

    def hold(self, keys: Sequence[Key]) -> list[int]:
        """Pin ready keys, once for each time they are named; returns their slots, in order.

        Raises KeyError, with nothing pinned, if one is not ready.
        """
        ready, held = self.ready, self._held
        slots = [ready[key] for key in keys]
        fresh = set(slots)
        if len(fresh) == len(slots) and held.isdisjoint(fresh):
            held |= fresh
            return slots
        for slot in slots:
            if slot in held:
                self._held_again[slot] += 1
            held.add(slot)
        return slots

    def release(self, slots: Sequence[int]) -> None:
        """Undo one ``hold`` of each slot; an orphaned slot comes free with its last one.

        Raises ``Kind.BROKEN``, with nothing released, for a slot that is not held that often.
        """
        held, again = self._held, self._held_again
        last = set(slots)
        if len(last) == len(slots) and last <= held and again.keys().isdisjoint(last):
            held -= last
            return
        self._refuse_unheld(slots)
        for slot in slots:
            if slot in self._orphans:
                if not _one_fewer(self._orphans, slot):
                    self._free.append(slot)
            elif slot in again:
                _one_fewer(again, slot)
            else:
                held.remove(slot)

    def drop(self, keys: Sequence[Key]) -> list[Key]:
        """Take keys out of the index, ready or filling; returns those that were there."""
        in_ready = [key for key in dict.fromkeys(keys) if key in self.ready]
        slots = [self.ready.pop(key) for key in in_ready]
        held = [slot for slot in slots if slot in self._held]
        self._free.extend(slot for slot in slots if slot not in self._held)
        for slot in held:
            self._held.remove(slot)
            self._orphans[slot] = 1 + self._held_again.pop(slot, 0)
        if in_ready:
            self.policy.remove(in_ready)
        for filling in (self.filling, self.fetching):
            unfinished = [key for key in dict.fromkeys(keys) if key in filling]
            self._orphans.update(map(filling.pop, unfinished))
            in_ready += unfinished
        return in_ready

    def touch(self, keys: Sequence[Key]) -> None:
        """These keys were used; unknown ones are ignored."""
        self.policy.touch(keys[::-1])

    def clear(self) -> list[Key]:
        """Drop everything, and the policy's history; returns what was there."""
        dropped = self.drop([*self.ready, *self.filling, *self.fetching])
        self.policy.clear()
        return dropped

    @property
    def free(self) -> int:
        """How many of ``num_slots`` are nobody's."""
        return len(self._free)

    @property
    def resident(self) -> int:
        """Chunks whose bytes are whole."""
        return len(self.ready)

    @property
    def filling_count(self) -> int:
        """Chunks being written."""
        return len(self.filling) + len(self.fetching)

    @property
    def held(self) -> int:
        """Slots that somebody, reader or writer, may touch."""
        return self.filling_count + len(self._held) + len(self._orphans)

    @property
    def orphaned(self) -> int:
        """Slots under no key that somebody may still touch."""
        return len(self._orphans)

    def hold_counts(self) -> dict[int, int]:
        """How often each held slot is held, its writer included. Costs O(held slots)."""
        counts = Counter([*self.filling.values(), *self.fetching.values(), *self._held])
        return dict(counts + self._held_again + self._orphans)

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant, if any. Costs O(slots)."""
        for what, is_whole in self._invariants().items():
            if not is_whole:
                raise AssertionError(f"{self!r}: {what}")
        self.policy.check()

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.num_slots} slots: {self.free} free, "
            f"{self.resident} ready, "
            f"{self.filling_count} filling, {self.orphaned} orphaned; {self.held} held>"
        )

    def _refuse_known(self, keys: Sequence[Key]) -> None:
        if len(set(keys)) < len(keys) or not self.knows_none(keys):
            raise _bug("a chunk was to be reserved twice", "reserve")

    def _refuse_unheld(self, slots: Sequence[int]) -> None:
        for slot, times in Counter(slots).items():
            readers = 1 + self._held_again[slot] if slot in self._held else self._orphans[slot]
            if readers < times:
                raise _bug(f"slot {slot} was to be released more often than held", "release")

    def _now_ready(self, keys: list[Key], slots: list[int]) -> None:
        self.ready.update(zip(keys, slots, strict=True))
        if keys:
            self.policy.insert(keys[::-1])

    def _evict(self, policy: EvictionPolicy, count: int, protected: Set[Key]) -> Sequence[Key]:
        """Caller guarantees: so many of the policy's keys are neither held nor ``protected``."""
        ready, held = self.ready, self._held

        def staying(keys: Sequence[Key]) -> Collection[Key]:
            slots = [ready[key] for key in keys]
            if held.isdisjoint(slots) and protected.isdisjoint(keys):
                return ()
            used = {key for key, slot in zip(keys, slots, strict=True) if slot in held}
            return used.union(key for key in keys if key in protected)

        victims = victims_of(policy, count, staying)
        before = len(ready)
        slots = [ready.pop(key, _NOWHERE) for key in victims]
        all_there = len(ready) == before - len(victims)
        if not (all_there and held.isdisjoint(slots) and protected.isdisjoint(victims)):
            ready.update(p for p in zip(victims, slots, strict=True) if p[1] != _NOWHERE)
            raise broken_policy(policy, "chose a chunk that is in use, absent or chosen twice")
        # The last key given comes off the free list first: keys evicted from the end of a prefix
        # leave a run of slots that the next prefix fills in ascending order.
        self._free.extend(slots)
        return victims

    @abstractmethod
    def _all_slots(self) -> list[int]:
        """Ascending. Costs O(slots)."""

    def _invariants(self) -> dict[str, bool]:
        ready, filling = self.ready.values(), [*self.filling.values(), *self.fetching.values()]
        keys = [*self.ready, *self.filling, *self.fetching]
        owned = [*self._free, *ready, *filling, *self._orphans]
        counts = [*self._held_again.values(), *self._orphans.values()]
        return {
            "a slot has no owner, or two": sorted(owned) == self._all_slots(),
            "a key has two slots": len(set(keys)) == len(keys),
            "a slot is read that is not ready": self._held <= set(ready),
            "a slot is held again that is not held": self._held_again.keys() <= self._held,
            "a slot is counted that nobody holds": all(count > 0 for count in counts),
            "the policy and the index differ on what is ready": len(self.policy) == len(ready),
        }


def _one_fewer(counts: Counter[int], slot: int) -> bool:
    """Count ``slot`` down; whether anything is left of it."""
    counts[slot] -= 1
    if counts[slot]:
        return True
    del counts[slot]
    return False


def _bug(what: str, operation: str) -> KVTiersError:
    return KVTiersError(
        f"{what}: this is a bug in kvtiers, please report it", kind=Kind.BROKEN, operation=operation
    )
