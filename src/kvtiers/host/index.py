"""Which chunk is in which slot of host memory: decisions only, on one thread.

The index maps keys to slots and counts who uses them; it touches no bytes. Everything but
``clear``, ``check`` and ``room`` with many protected keys costs the same however much is stored.
"""

from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass

from kvtiers.chunks import Key, Lookup
from kvtiers.errors import Kind, KVTiersError
from kvtiers.host.policies.base import EvictionPolicy
from kvtiers.host.slots import IllegalTransition, SlotEvent, SlotState, advance

# Bound once: looking an enum member up costs as much as looking a key up.
_HIT, _HIT_PENDING, _MISS = Lookup.HIT, Lookup.HIT_PENDING, Lookup.MISS
_ORPHANED = SlotState.ORPHANED.value


@dataclass(frozen=True, slots=True)
class Reservation:
    """``keys[i]`` is to be written into ``slots[i]``; the ``evicted`` keys made room for them."""

    keys: tuple[Key, ...]
    slots: tuple[int, ...]
    evicted: tuple[Key, ...]


class HostIndex:
    """Key -> slot, with pins, states and eviction.

    A writer reserves slots and settles them; readers hold slots and release them. A key can be
    dropped at any time: the slot of one that is held comes free only with its last holder.

    Callers pass keys in prefix order. The policy is told the other way round, so that a prefix
    loses its end first: without its beginning the rest of it can never be a hit.
    """

    def __init__(self, num_slots: int, policy: EvictionPolicy) -> None:
        self.num_slots = num_slots
        self.policy = policy
        self.ready: dict[Key, int] = {}
        """Slots of chunks whose bytes are whole. For reading only, by callers in a hurry."""
        self.filling: dict[Key, int] = {}
        """Slots of chunks being written. For reading only, by callers in a hurry."""
        self._free = list(range(num_slots - 1, -1, -1))
        self._states = bytearray(num_slots)
        self._holds = [0] * num_slots
        self._held_ready = 0
        self._orphaned = 0

    def lookup(self, key: Key) -> Lookup:
        """HIT if the bytes are whole, HIT_PENDING if they are on the way, else MISS."""
        if key in self.ready:
            return _HIT
        return _HIT_PENDING if key in self.filling else _MISS

    def slot(self, key: Key) -> int:
        """The slot of a ready or filling key. Raises KeyError if it has none."""
        slot = self.ready.get(key)
        return self.filling[key] if slot is None else slot

    def room(self, protected: Collection[Key] = ()) -> int:
        """How many slots could be reserved now, were the ``protected`` keys not to be evicted."""
        kept = sum(map(self._evictable, frozenset(protected)))
        return len(self._free) + len(self.ready) - self._held_ready - kept

    def reserve(self, keys: Sequence[Key], protected: Collection[Key] = ()) -> Reservation:
        """Give slots to as many of ``keys`` as fit, from the front, and evict what that takes.

        Caller guarantees: the keys are distinct and neither ready nor filling. Neither held nor
        ``protected`` keys are evicted. Each slot is held by its writer until ``settle``.
        Raises ``Kind.BROKEN``, with nothing reserved, if a caller or the policy breaks its word.
        """
        self._refuse_known(keys)
        missing = len(keys) - len(self._free)
        evicted = self._evict(missing, frozenset(protected)) if missing > 0 else []
        count = min(len(keys), len(self._free))
        taken = tuple(keys[:count])
        slots = self._free[-1 : -count - 1 : -1]
        advance(self._states, slots, SlotEvent.RESERVE)
        del self._free[len(self._free) - count :]
        self.filling.update(zip(taken, slots, strict=True))
        for slot in slots:
            self._holds[slot] = 1
        return Reservation(taken, tuple(slots), tuple(evicted))

    def settle(
        self, keys: Sequence[Key], slots: Sequence[int], failed: Container[Key] = ()
    ) -> list[Key]:
        """The writer of these reserved slots ended; returns the keys that are ready now.

        Keys in ``failed`` lose their slot. A key that was dropped since ``reserve`` stays absent
        (or stays where it was reserved anew), and its old slot comes free.
        """
        committed: list[Key] = []
        done: list[int] = []
        aborted: list[int] = []
        dropped: list[int] = []
        filling = self.filling
        for key, slot in zip(keys, slots, strict=True):
            if filling.get(key) != slot:
                dropped.append(slot)
                continue
            del filling[key]
            if key in failed:
                aborted.append(slot)
            else:
                committed.append(key)
                done.append(slot)
        self._end_writes(done, aborted)
        self.ready.update(zip(committed, done, strict=True))
        if dropped:
            self.release(dropped)
        if committed:
            self.policy.insert(committed[::-1])
        return committed

    def hold(self, keys: Sequence[Key]) -> list[int]:
        """Pin ready keys, once for each time they are named; returns their slots, in order.

        Raises KeyError, with nothing pinned, if one is not ready.
        """
        ready, holds = self.ready, self._holds
        slots = [ready[key] for key in keys]
        advance(self._states, slots, SlotEvent.HOLD)
        for slot in slots:
            if holds[slot] == 0:
                self._held_ready += 1
            holds[slot] += 1
        return slots

    def release(self, slots: Sequence[int]) -> None:
        """Undo one ``hold`` of each slot; an orphaned slot comes free with its last one.

        Raises IllegalTransition, with nothing released, for a slot that is not held that often.
        """
        states, holds = self._states, self._holds
        advance(states, slots, SlotEvent.RELEASE)
        last: list[int] = []
        for done, slot in enumerate(slots):
            if holds[slot] == 0:
                for undone in slots[:done]:
                    holds[undone] += 1
                raise IllegalTransition(slot, states[slot], SlotEvent.RELEASE)
            holds[slot] -= 1
            if holds[slot] == 0:
                last.append(slot)
        orphans = [slot for slot in last if states[slot] == _ORPHANED]
        advance(states, last, SlotEvent.RELEASE_LAST)
        self._held_ready -= len(last) - len(orphans)
        self._orphaned -= len(orphans)
        self._free.extend(reversed(orphans))

    def drop(self, keys: Sequence[Key]) -> list[Key]:
        """Take keys out of the index, ready or filling; returns those that were there."""
        in_ready = [key for key in dict.fromkeys(keys) if key in self.ready]
        in_filling = [key for key in dict.fromkeys(keys) if key in self.filling]
        self._forget(in_ready)
        writing = [self.filling.pop(key) for key in in_filling]
        advance(self._states, writing, SlotEvent.DROP_HELD)
        self._orphaned += len(writing)
        if in_ready:
            self.policy.remove(in_ready)
        return in_ready + in_filling

    def touch(self, keys: Sequence[Key]) -> None:
        """These keys were used; unknown ones are ignored."""
        self.policy.touch(keys[::-1])

    def clear(self) -> list[Key]:
        """Drop everything, and the policy's history; returns what was there."""
        dropped = self.drop([*self.ready, *self.filling])
        self.policy.clear()
        return dropped

    @property
    def free(self) -> int:
        """Slots that are nobody's."""
        return len(self._free)

    @property
    def resident(self) -> int:
        """Chunks whose bytes are whole."""
        return len(self.ready)

    @property
    def filling_count(self) -> int:
        """Chunks being written."""
        return len(self.filling)

    @property
    def held(self) -> int:
        """Slots that somebody, reader or writer, may touch."""
        return len(self.filling) + self._held_ready + self._orphaned

    @property
    def orphaned(self) -> int:
        """Slots under no key that somebody may still touch."""
        return self._orphaned

    def hold_counts(self) -> dict[int, int]:
        """How often each held slot is held, its writer included. Costs O(slots)."""
        return {slot: count for slot, count in enumerate(self._holds) if count}

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant, if any. Costs O(slots)."""
        for what, is_whole in self._invariants().items():
            if not is_whole:
                raise AssertionError(f"{self!r}: {what}")
        self.policy.check()

    def __repr__(self) -> str:
        return (
            f"<HostIndex {self.num_slots} slots: {self.free} free, {self.resident} ready, "
            f"{self.filling_count} filling, {self.orphaned} orphaned; {self.held} held>"
        )

    def _evictable(self, key: Key) -> bool:
        slot = self.ready.get(key)
        return slot is not None and self._holds[slot] == 0

    def _refuse_known(self, keys: Sequence[Key]) -> None:
        # The views walk the keys they are given; set.isdisjoint would walk the whole index.
        known, new = self.ready.keys(), self.filling.keys()
        if len(set(keys)) == len(keys) and known.isdisjoint(keys) and new.isdisjoint(keys):
            return
        raise KVTiersError(
            "a chunk was to be reserved twice: this is a bug in kvtiers, please report it",
            kind=Kind.BROKEN,
            operation="reserve",
        )

    def _evict(self, missing: int, protected: frozenset[Key]) -> list[Key]:
        count = min(missing, self.room(protected) - len(self._free))
        if count <= 0:
            return []
        ready, holds = self.ready, self._holds

        def evictable(key: Key) -> bool:
            return holds[ready[key]] == 0 and key not in protected

        victims = self.policy.evict(count, evictable)
        if len(set(victims)) != len(victims) or not all(
            key in ready and evictable(key) for key in victims
        ):
            raise KVTiersError(
                f"eviction policy {type(self.policy).__name__} chose a chunk that is in use, "
                'absent or chosen twice: correct it, or set eviction_policy to "lru"',
                kind=Kind.BROKEN,
                operation="evict",
            )
        self._forget(victims)
        return victims

    def _forget(self, keys: Sequence[Key]) -> None:
        """Take distinct ready keys out of the index; the policy is the caller's business."""
        slots = [self.ready.pop(key) for key in keys]
        holds = self._holds
        unheld = [slot for slot in slots if holds[slot] == 0]
        advance(self._states, unheld, SlotEvent.DROP)
        # The last key given comes off the free list first: keys evicted from the end of a prefix
        # leave a run of slots that the next prefix fills in ascending order.
        self._free.extend(unheld)
        if len(unheld) < len(slots):
            held = [slot for slot in slots if holds[slot] != 0]
            advance(self._states, held, SlotEvent.DROP_HELD)
            self._held_ready -= len(held)
            self._orphaned += len(held)

    def _end_writes(self, done: Sequence[int], aborted: Sequence[int]) -> None:
        advance(self._states, done, SlotEvent.COMMIT)
        for slot in done:
            self._holds[slot] = 0
        if aborted:
            advance(self._states, aborted, SlotEvent.ABORT)
            for slot in aborted:
                self._holds[slot] = 0
            self._free.extend(reversed(aborted))

    def _invariants(self) -> dict[str, bool]:
        states, holds = self._states, self._holds
        by_state: dict[int, set[int]] = {state: set() for state in SlotState}
        for slot, state in enumerate(states):
            by_state[state].add(slot)
        ready, filling, free = self.ready.values(), self.filling.values(), self._free
        orphans = by_state[SlotState.ORPHANED]
        owners = len(ready) + len(filling) + len(free) + len(orphans)
        return {
            "a slot has no owner, or two": owners == self.num_slots,
            "a key is both ready and filling": self.ready.keys().isdisjoint(self.filling),
            "ready keys and READY slots differ": set(ready) == by_state[SlotState.READY],
            "filling keys and FILLING slots differ": set(filling) == by_state[SlotState.FILLING],
            "the free list and FREE slots differ": set(free) == by_state[SlotState.FREE],
            "a filling slot is not held exactly by its writer": all(holds[s] == 1 for s in filling),
            "a free slot is held": not any(holds[s] for s in free),
            "an orphaned slot is not held": all(holds[s] > 0 for s in orphans),
            "the count of held ready slots is off": self._held_ready
            == sum(1 for s in ready if holds[s]),
            "the count of orphaned slots is off": self._orphaned == len(orphans),
            "the policy and the index differ on what is ready": len(self.policy) == len(ready),
        }
