"""The index of several sizes beside a naive model of it, checked after every step."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvtiers.chunks import PAGE_BYTES, ChunkLayout, GroupLayout, Lookup, key_group, make_key
from kvtiers.host.policies import load_policy
from kvtiers.host.sized import SizedIndex
from kvtiers.host.slabs import SizeClasses, floor_slabs

SLABS, SLAB = 5, 6
SPANS = {0: 2, 1: 3, 2: 2, 3: 5}
"""Granules of a chunk by group: of groups 0 and 2 chunks are equal."""
LAYOUT = ChunkLayout(tuple(GroupLayout(g, n * PAGE_BYTES, 16) for g, n in SPANS.items()))
KEYS = [make_key(bytes([n]) * 8, n % 4) for n in range(24)]
PER_SLAB = {span: SLAB // span for span in SPANS.values()}


def span(key):
    return SPANS[key_group(key)]


class Model(RuleBasedStateMachine):
    """The index beside dictionaries of what must be true; every slot's users are written down."""

    writers = Bundle("writers")
    readers = Bundle("readers")
    policy_name = "lru"

    def __init__(self):
        super().__init__()
        classes = SizeClasses.of(LAYOUT, PAGE_BYTES)
        self.index = SizedIndex(
            SLABS, SLAB, classes, lambda n: load_policy(self.policy_name, capacity=n)
        )
        self.floor = floor_slabs(SLABS, 3)
        self.state = {}  # key -> "ready" or "filling"
        self.at = {}  # key -> slot
        self.users = Counter()  # slot -> holds
        self.span_at = {}  # slot -> granules of what was put there last

    def touched(self):
        """Slots that somebody may touch."""
        return {s for s, n in self.users.items() if n}

    def owned(self):
        return self.touched() | set(self.at.values())

    def forget(self, keys):
        for key in keys:
            del self.state[key], self.at[key]

    def slabs(self, slots):
        """Slabs in which these lie, with the granules of a chunk there."""
        return dict({s // SLAB: self.span_at[s] for s in slots})

    def at_least(self, size, protected):
        """Chunks of a size for which there has to be room, however clever one is about it.

        Its own slabs and what is neither used nor kept for others: where nothing has to stay.
        """
        stay = self.touched() | {self.at[k] for k in protected & self.at.keys()}
        kept = sum(
            max(self.floor, sum(n == other for n in self.slabs(stay).values()))
            for other in PER_SLAB
            if other != size
        )
        mine = sum(self.span_at[s] == size for s in stay)
        return max(0, min(SLABS - kept, SLABS) * PER_SLAB[size] - mine)

    @rule(
        target=writers,
        keys=st.permutations(KEYS).flatmap(lambda keys: st.integers(1, 24).map(lambda n: keys[:n])),
        protected=st.frozensets(st.sampled_from(KEYS), max_size=5),
        fetched=st.booleans(),
        only=st.sampled_from([None, *PER_SLAB]),
    )
    def reserve(self, keys, protected, fetched, only):
        keys = [k for k in keys if k not in self.state and only in (None, span(k))][:9]
        before = {k for k, s in self.state.items() if s == "ready"}
        can_go = {k for k in before if not self.users[self.at[k]]} - protected
        sizes = {span(k) for k in keys}
        room = {size: self.at_least(size, protected) for size in sizes}
        reserved = self.index.reserve(keys, protected, fetched=fetched)
        assert len(set(reserved.evicted)) == len(reserved.evicted)
        assert set(reserved.evicted) <= can_go
        assert list(reserved.keys) == [k for k in keys if k in set(reserved.keys)]
        for size in sizes:
            wanted = [k for k in keys if span(k) == size]
            taken = [k for k in reserved.keys if span(k) == size]
            assert taken == wanted[: len(taken)], "of one size the first ones fit"
            if len(sizes) == 1:
                assert len(taken) == min(len(wanted), room[size]), "there was room"
        self.forget(reserved.evicted)
        for key, slot in zip(reserved.keys, reserved.slots, strict=True):
            assert slot % SLAB + span(key) <= SLAB, "a chunk leaves its slab"
            assert not self.users[slot]
            self.state[key], self.at[key] = "filling", slot
            self.users[slot] = 1
            self.span_at[slot] = span(key)
        return reserved, fetched

    @rule(written=consumes(writers), failed=st.frozensets(st.sampled_from(KEYS)))
    def end_of_writing(self, written, failed):
        reserved, fetched = written
        pairs = list(zip(reserved.keys, reserved.slots, strict=True))
        expected = []
        in_place = [(k, s) for k, s in pairs if self.at.get(k) == s]
        for key, slot in pairs:
            self.users[slot] -= 1
            if self.state.get(key) == "filling" and self.at[key] == slot:
                if key in failed:
                    self.forget([key])
                else:
                    self.state[key] = "ready"
                    expected.append(key)
        if fetched:
            assert self.index.settle(reserved.keys, reserved.slots, failed) == expected
        else:  # the accelerator's slots are released by whoever dropped their keys
            assert self.index.commit([k for k, _ in in_place], failed) == expected
            self.index.release([pair[1] for pair in pairs if pair not in in_place])

    @rule(target=readers, data=st.data())
    def hold(self, data):
        ready = [k for k, s in self.state.items() if s == "ready"]
        keys = data.draw(st.lists(st.sampled_from(ready), max_size=5)) if ready else []
        slots = self.index.hold(keys)
        assert slots == [self.at[k] for k in keys]
        self.users.update(slots)
        return slots

    @rule(slots=consumes(readers))
    def release(self, slots):
        self.index.release(slots)
        self.users.subtract(slots)

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=3))
    def drop(self, keys):
        there = {k for k in keys if k in self.state}
        assert set(self.index.drop(keys)) == there
        self.forget(there)

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=5))
    def touch(self, keys):
        self.index.touch(keys)

    @rule()
    def clear(self):
        assert set(self.index.clear()) == set(self.state)
        self.forget(list(self.state))

    @invariant()
    def agrees(self):
        self.index.check()
        verdicts = {"ready": Lookup.HIT, "filling": Lookup.HIT_PENDING, None: Lookup.MISS}
        for key in KEYS:
            assert self.index.lookup(key) is verdicts[self.state.get(key)]
        assert {**self.index.ready, **self.index.filling, **self.index.fetching} == self.at
        held = self.touched()
        assert self.index.held == len(held)
        assert self.index.weigh(held) == sum(self.span_at[s] for s in held)

    @invariant()
    def no_two_chunks_overlap(self):
        taken = Counter(s + n for s in self.owned() for n in range(self.span_at[s]))
        assert not taken or max(taken.values()) == 1

    @invariant()
    def every_size_finds_its_floor(self):
        slabs = Counter(self.slabs(self.owned()).values())
        assert sum(max(self.floor, slabs[size]) for size in PER_SLAB) <= SLABS

    @invariant()
    def use_adds_up(self):
        use, filling = self.index.use, [k for k, s in self.state.items() if s == "filling"]
        orphaned = self.touched() - set(self.at.values())
        assert use.slots == self.index.num_slots == SLABS * SLAB
        assert use.resident == sum(span(k) for k, s in self.state.items() if s == "ready")
        assert use.filling == sum(span(k) for k in filling)
        assert use.orphaned == sum(self.span_at[s] for s in orphaned)
        held = self.touched() & {self.at[k] for k, s in self.state.items() if s == "ready"}
        assert use.pinned == sum(self.span_at[s] for s in held)
        gone_at_ends = SLABS * max(SLAB % n for n in PER_SLAB)
        lost = SLABS * SLAB - self.index.free - sum(self.span_at[s] for s in self.owned())
        assert 0 <= lost <= gone_at_ends


class ModelWithARC(Model):
    policy_name = "arc"


TestModelWithLRU = Model.TestCase
TestModelWithARC = ModelWithARC.TestCase
TestModelWithLRU.settings = TestModelWithARC.settings = settings(
    max_examples=60, stateful_step_count=40
)
