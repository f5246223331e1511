"""The index beside a naive model of it, checked after every step."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvtiers.chunks import Lookup, make_key
from kvtiers.host.index import HostIndex
from kvtiers.host.policies import load_policy

KEYS = [make_key(bytes([i]) * 32, 0) for i in range(20)]


class Model(RuleBasedStateMachine):
    """The index beside dictionaries of what must be true; every slot's users are written down."""

    writers = Bundle("writers")
    readers = Bundle("readers")
    policy_name = "lru"
    size = 5

    def __init__(self):
        super().__init__()
        self.index = HostIndex(self.size, load_policy(self.policy_name, capacity=self.size))
        self.state = {}  # key -> "ready" or "filling"
        self.at = {}  # key -> slot
        self.users = Counter()  # slot -> holds

    def unheld(self):
        return {k for k, s in self.state.items() if s == "ready" and not self.users[self.at[k]]}

    def owned(self):
        return {s for s, n in self.users.items() if n} | set(self.at.values())

    def forget(self, keys):
        for key in keys:
            del self.state[key], self.at[key]

    @rule(
        target=writers,
        keys=st.lists(st.sampled_from(KEYS), unique=True, max_size=7),
        protected=st.frozensets(st.sampled_from(KEYS), max_size=5),
        fetched=st.booleans(),
    )
    def reserve(self, keys, protected, fetched):
        keys = [k for k in keys if k not in self.state]
        can_go = self.unheld() - protected
        free = self.size - len(self.owned())
        reserved = self.index.reserve(keys, protected, fetched=fetched)
        assert reserved.keys == tuple(keys[: free + len(can_go)])
        assert len(reserved.evicted) == max(0, len(reserved.keys) - free)
        assert len(set(reserved.evicted) & can_go) == len(reserved.evicted)
        self.forget(reserved.evicted)
        assert not set(reserved.slots) & self.owned()
        assert len(set(reserved.slots)) == len(reserved.slots)
        for key, slot in zip(reserved.keys, reserved.slots, strict=True):
            self.state[key], self.at[key] = "filling", slot
            self.users[slot] = 1
        return reserved, fetched

    @rule(written=consumes(writers), failed=st.frozensets(st.sampled_from(KEYS)))
    def end_of_writing(self, written, failed):
        reserved, fetched = written
        pairs = list(zip(reserved.keys, reserved.slots, strict=True))
        expected = []
        in_place = [(k, s) for k, s in pairs if self.at.get(k) == s]
        for key, slot in zip(reserved.keys, reserved.slots, strict=True):
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

    @rule(target=readers, keys=st.lists(st.sampled_from(KEYS), max_size=4))
    def hold(self, keys):
        if any(self.state.get(k) != "ready" for k in keys):
            with pytest.raises(KeyError):
                self.index.hold(keys)
            keys = [k for k in keys if self.state.get(k) == "ready"]
        slots = self.index.hold(keys)
        assert slots == [self.at[k] for k in keys]
        self.users.update(slots)
        return slots

    @rule(slots=consumes(readers))
    def release(self, slots):
        self.index.release(slots)
        self.users.subtract(slots)

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=5))
    def drop(self, keys):
        there = {k for k in keys if k in self.state}
        dropped = self.index.drop(keys)
        assert len(dropped) == len(there)
        assert set(dropped) == there
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
        held = {s for s, n in self.users.items() if n}
        assert self.index.held == len(held)
        assert self.index.orphaned == len(held - set(self.at.values()))
        assert self.index.free == self.size - len(self.owned())
        assert {**self.index.ready, **self.index.filling, **self.index.fetching} == self.at


class ModelWithARC(Model):
    policy_name = "arc"


TestModelWithLRU = Model.TestCase
TestModelWithARC = ModelWithARC.TestCase
TestModelWithLRU.settings = TestModelWithARC.settings = settings(
    max_examples=60, stateful_step_count=40
)
