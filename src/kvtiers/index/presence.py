"""What each pod holds, as it says itself. Pure: neither clock nor threads.

A block is known by 64 bits, the last eight bytes of its hash; for each there is one integer with a
bit for every place (pod, tier, group) that holds it. Presence is counted: it takes as many
removals as there were stores.

The number of blocks is bounded. Above the bound those leave that nobody told or asked of for
longest, and each pod that had one is no longer ``complete``: of it the index may know too little,
never too much.
"""

from array import array
from collections.abc import Iterable, Sequence

from kvtiers.index.blocks import Blocks
from kvtiers.index.places import MAX_NAME, MAX_PLACES, Group, Place, Pod, Tier, tier_of
from kvtiers.index.snapshot import Snapshot
from kvtiers.kvevents.messages import AllBlocksCleared, BlockStored, KVEvent, hash_number

_MEMO = 1 << 16
_AT_ONCE = 4096
"""After so many blocks room is made."""


class Presence:
    """Pods, and which blocks their tiers hold."""

    def __init__(self, max_blocks: int) -> None:
        self.pods: dict[str, Pod] = {}
        self.blocks = Blocks(max_blocks)
        self._max_more = max_blocks
        self.evicted = 0
        """How many blocks left for want of room."""
        self.unplaced = 0
        """How many stores were left out: their pod has too many places, or names them too long."""
        self._more: dict[tuple[int, int], int] = {}
        """By bit and block, how often it is held there, beyond once."""
        self._free: list[int] = []
        self._bits = 0
        """How many bits were ever given, to places and groups."""
        self._of_bit: dict[int, tuple[Place, Group]] = {}
        self._owners: dict[int, int] = {}
        """From the integer of a block to the bits of the groups that hold it anywhere: a memo."""

    def pod(self, name: str, model: str = "") -> Pod:
        """A pod, known from now on."""
        pod = self.pods.get(name)
        if pod is None:
            pod = self.pods[name] = Pod(name, model)
        return pod

    def apply(self, name: str, event: KVEvent) -> None:
        """Take in what a pod says."""
        if isinstance(event, AllBlocksCleared):
            self.clear(name, complete=True)
            return
        pod, group = self.pod(name), event.group_idx or 0
        blocks = list(map(hash_number, event.block_hashes))
        if isinstance(event, BlockStored):
            place = self._place(pod, tier_of(event), group, event)
            if place is None:
                self.unplaced += 1
                pod.complete = False
            elif blocks:
                parent = event.parent_block_hash
                self._add(pod, place, blocks, None if parent is None else hash_number(parent))
        elif (place := pod.places.get((tier_of(event), group))) is not None:
            self._remove(place, blocks)

    def clear(self, name: str, *, complete: bool) -> None:
        """The pod holds nothing, as far as is known; ``complete``: as is known for certain."""
        pod = self.pod(name)
        self._forget_blocks(pod)
        pod.complete = complete

    def drop(self, name: str) -> None:
        """There is no such pod any more."""
        pod = self.pods.pop(name, None)
        if pod is None:
            return
        self._forget_blocks(pod)
        for place in pod.places.values():
            del self._of_bit[place.bit]
        self._free += [place.bit for place in pod.places.values()]
        self._free += [group.bit for group in pod.groups.values()]
        self._owners.clear()

    def snapshot(self, name: str, seq: int, digest: int) -> Snapshot:
        """All that is known of a pod, once its batch ``seq`` is applied."""
        pod = self.pods[name]
        places = list(pod.places.values())
        more = [
            (n, block, count)
            for n, place in enumerate(places if self._more else ())
            for (bit, block), count in self._more.items()
            if bit == place.bit
        ]
        return Snapshot(
            seq,
            digest,
            pod.complete,
            [(n, g.kind, g.block_size, g.window) for n, g in pod.groups.items()],
            [(*p.tier, p.group, array("Q", self.blocks.holding(p.bit)).tobytes()) for p in places],
            more,
        )

    def restore(self, name: str, snapshot: Snapshot) -> None:
        """What was known then is known now, and nothing else."""
        self.clear(name, complete=snapshot.complete)
        pod = self.pod(name)
        sizes = {group[0]: group[1:] for group in snapshot.groups}
        for medium, locality, ownership, index, packed in snapshot.places:
            kind, size, window = sizes.get(index, ("", 0, 0))
            learnt = BlockStored(
                (),
                None,
                (),
                size,
                kv_cache_spec_kind=kind,
                kv_cache_spec_sliding_window=window,
            )
            place = self._place(pod, Tier(medium, locality, ownership), index, learnt)
            blocks = array("Q", packed)
            if place is not None and blocks:
                place.last = None
                self._add(pod, place, blocks, None)
        places = list(pod.places.values())
        for n, block, count in snapshot.more:
            bit = places[n].bit if n < len(places) else 0
            if self.blocks.get(block) & bit:
                self._more[bit, block] = count

    def _add(self, pod: Pod, place: Place, blocks: Sequence[int], parent: int | None) -> None:
        # Blocks that come one by one, without a parent, mostly follow what came before.
        after = place.last if parent is None else parent
        for at in range(0, len(blocks), _AT_ONCE):
            some = blocks[at : at + _AT_ONCE]
            twice = self.blocks.add(some, place.bit, after)
            place.blocks += len(some) - len(twice)
            place.last = after = some[-1]
            for block in twice:
                self._once_more(pod, (place.bit, block))
            self._forget(self.blocks.make_room())

    def _once_more(self, pod: Pod, held: tuple[int, int]) -> None:
        more = self._more.get(held, 0)
        if more or len(self._more) < self._max_more:
            self._more[held] = more + 1
        else:
            pod.complete = False  # the next removal takes it out, though it may be the first of two

    def _remove(self, place: Place, blocks: Iterable[int]) -> None:
        for block in blocks:
            more = self._more.pop((place.bit, block), 0)
            if more > 1:
                self._more[place.bit, block] = more - 1
            elif not more and self.blocks.remove(block, place.bit):
                place.blocks -= 1

    def _forget_blocks(self, pod: Pod) -> None:
        if any(place.blocks for place in pod.places.values()):
            self.blocks.remove_everywhere(pod.bits)
        if self._more:
            self._more = {k: n for k, n in self._more.items() if not k[0] & pod.bits}
        for place in pod.places.values():
            place.blocks = 0

    def _forget(self, left: Sequence[tuple[int, int]]) -> None:
        lost = 0
        for block, mask in left:
            lost |= mask
            for bit in bits_of(mask):
                self._of_bit[bit][0].blocks -= 1
                if self._more:
                    self._more.pop((bit, block), None)
        self.evicted += len(left)
        for pod in self.pods.values() if lost else ():
            if pod.bits & lost:
                pod.complete = False

    # -- places ----------------------------------------------------------------------------------

    def _place(self, pod: Pod, tier: Tier, index: int, event: BlockStored) -> Place | None:
        place = pod.places.get((tier, index))
        if place is None:
            if len(pod.places) >= MAX_PLACES or max(map(len, tier)) > MAX_NAME:
                return None
            place = pod.places[tier, index] = Place(tier, index, self._bit())
            if index not in pod.groups:
                pod.groups[index] = Group(self._bit())
            pod.bits |= place.bit
            self._of_bit[place.bit] = place, pod.groups[index]
            self._owners.clear()
        pod.groups[index].learn(event)
        return place

    def _bit(self) -> int:
        if self._free:
            return self._free.pop()
        self._bits += 1
        return 1 << self._bits - 1

    def owners(self, mask: int) -> int:
        """The bits of the groups that hold a block in any of their tiers."""
        found = self._owners.get(mask)
        if found is None:
            if len(self._owners) >= _MEMO:
                self._owners.clear()
            found = 0
            for bit in bits_of(mask):
                found |= self._of_bit[bit][1].bit
            self._owners[mask] = found
        return found

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        self.blocks.check()
        places = [place for pod in self.pods.values() for place in pod.places.values()]
        everything = sum(place.bit for place in places)
        assert {p.bit for p in places} == self._of_bit.keys(), "a place has no bit of its own"
        assert all(mask == mask & everything for _, mask in self.blocks), "held by nobody known"
        for place in places:
            found = sum(1 for _, mask in self.blocks if mask & place.bit)
            assert found == place.blocks, f"{place} has {found} blocks"
        assert len(self._more) <= self._max_more, "more is counted than may be"
        for (bit, block), more in self._more.items():
            assert more > 0, "held less than once more"
            assert self.blocks.get(block) & bit, "counted where it is not held"

    def __repr__(self) -> str:
        incomplete = sum(not pod.complete for pod in self.pods.values())
        return f"<Presence {self.blocks}, {len(self.pods)} pods, {incomplete} incomplete>"


def bits_of(mask: int) -> Iterable[int]:
    """Its powers of two."""
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
