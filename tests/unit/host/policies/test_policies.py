import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.chunks import make_key
from kvtiers.config import BUILTIN_POLICIES
from kvtiers.errors import ConfigError
from kvtiers.host.policies import BUILT_IN, ARCPolicy, LRUPolicy, find_policy, load_policy
from tests.unit.host.policies.policy_oracles import NaiveARC, NaiveLRU

KEYS = [make_key(bytes([i]) * 32, 0) for i in range(24)]
A, B, C, D = KEYS[:4]
ORACLES = {"lru": NaiveLRU, "arc": NaiveARC}

key_lists = st.lists(st.sampled_from(KEYS), max_size=8, unique=True)
operations = st.one_of(
    st.tuples(st.just("bring"), key_lists, st.frozensets(st.sampled_from(KEYS), max_size=6)),
    st.tuples(st.just("touch"), key_lists, st.just(frozenset())),
    st.tuples(st.just("remove"), key_lists, st.just(frozenset())),
    st.tuples(st.just("clear"), st.just([]), st.just(frozenset())),
)


def anything(keys):
    return ()


def all_but(*free):
    return lambda keys: {k for k in keys if k not in free}


@pytest.fixture(params=sorted(BUILT_IN))
def policy(request):
    return load_policy(request.param, capacity=4)


def bring(policy, oracle, capacity, keys, pinned):
    """Make room as the index does, then insert what fits; the victims must be the oracle's."""
    resident = oracle.resident()
    new = [k for k in keys if k not in resident]
    spare = capacity - len(resident)
    evictable = [k for k in resident if k not in pinned]
    count = min(max(0, len(new) - spare), len(evictable))
    expected = oracle.evict(count, pinned)
    assert policy.evict(count, frozenset(pinned).intersection) == expected
    fits = new[: spare + count]
    policy.insert(fits)
    for key in fits:
        oracle.insert(key)


@pytest.mark.parametrize("name", sorted(BUILT_IN))
@given(capacity=st.integers(1, 9), steps=st.lists(operations, max_size=40))
def test_it_evicts_what_a_naive_oracle_evicts(name, capacity, steps):
    policy, oracle = load_policy(name, capacity=capacity), ORACLES[name](capacity)
    for operation, keys, pinned in steps:
        if operation == "bring":
            bring(policy, oracle, capacity, keys, pinned)
        elif operation == "clear":
            policy.clear()
            oracle.clear()
        else:
            getattr(policy, operation)(keys)
            for key in keys:
                getattr(oracle, operation)(key)
        policy.check()
        assert len(policy) == len(oracle.resident())
    assert policy.evict(len(policy), anything) == oracle.evict(len(oracle.resident()), frozenset())


@given(steps=st.lists(st.tuples(key_lists, key_lists), max_size=30), capacity=st.integers(1, 9))
def test_arc_follows_the_paper_where_nothing_is_pinned(steps, capacity):
    policy, oracle = ARCPolicy(capacity), NaiveARC(capacity)
    for wanted, touched in steps:
        bring(policy, oracle, capacity, wanted, frozenset())
        policy.touch(touched)
        for key in touched:
            oracle.touch(key)
        for mine, theirs in zip(
            (policy._t1, policy._t2, policy._b1, policy._b2),
            (oracle.t1, oracle.t2, oracle.b1, oracle.b2),
            strict=True,
        ):
            assert list(mine) == theirs
        assert policy._p == oracle.p


def test_lru_evicts_the_oldest_and_a_touch_makes_young():
    policy = LRUPolicy(capacity=3)
    policy.insert([A, B, C])
    policy.touch([A, D])
    assert policy.evict(2, anything) == [B, C]
    assert len(policy) == 1


def test_lru_asks_about_pinned_keys_seldom_not_at_every_eviction():
    policy = LRUPolicy(capacity=1000)
    keys = [make_key(i.to_bytes(32, "big"), 0) for i in range(1000)]
    policy.insert(keys)
    pinned, asked = set(keys[:500]), []

    def staying(candidates):
        asked.extend(candidates)
        return pinned.intersection(candidates)

    for i in range(500):
        assert policy.evict(1, staying) == [keys[500 + i]]
    assert len(asked) < 2 * 1000


def test_arc_keeps_what_is_used_twice_through_a_scan():
    policy = ARCPolicy(capacity=4)
    policy.insert([A, B])
    policy.touch([A, B])
    for key in KEYS[4:]:
        if len(policy) == 4:
            assert not {A, B} & set(policy.evict(1, anything))
        policy.insert([key])
    assert len(policy) == 4


def test_arc_gives_recency_more_room_when_recent_keys_come_back():
    policy = ARCPolicy(capacity=4)
    policy.insert([A, B])
    policy.touch([A, B])
    policy.insert([C, D])
    assert policy.evict(1, anything) == [C]
    policy.insert([C])  # remembered: it was evicted too early, so p grows to 1
    assert policy.evict(1, anything) == [A], "D is all that T1 has, and p says it may keep one"


def test_nothing_evictable_loses_nothing(policy):
    policy.insert([A, B, C])
    policy.touch([A])
    assert policy.evict(2, all_but()) == []
    assert len(policy) == 3
    assert sorted(policy.evict(3, anything)) == sorted([A, B, C])


def test_one_evictable_key_is_found_wherever_it_is(policy):
    policy.insert([A, B, C, D])
    policy.touch([B, C])
    for key in (C, D, A, B):
        assert policy.evict(1, all_but(key)) == [key]
    assert len(policy) == 0


def test_clear_forgets_the_history():
    policy = ARCPolicy(capacity=1)
    policy.insert([A])
    policy.evict(1, anything)
    policy.clear()
    policy.insert([A])
    assert "T1 1, T2 0, B1 0, B2 0" in repr(policy)


def test_check_finds_too_many_keys(policy):
    policy.insert(KEYS[:5])
    with pytest.raises(AssertionError, match="capacity"):
        policy.check()


def test_the_repr_has_counts(policy):
    policy.insert([A, B])
    assert "2/4" in repr(policy)


@pytest.mark.parametrize(("wrong", "near"), [("lur", "lru"), ("ARC", "arc"), ("lru2", "lru")])
def test_an_unknown_name_gets_the_nearest_one(wrong, near):
    with pytest.raises(ConfigError, match=f"eviction_policy '{wrong}'.*did you mean '{near}'"):
        load_policy(wrong, capacity=4)


def test_the_names_that_the_configuration_accepts_are_the_policies_there_are():
    assert tuple(BUILT_IN) == BUILTIN_POLICIES


def test_a_policy_can_be_looked_for_before_there_is_a_capacity(plugin):
    module = plugin(
        "from kvtiers.host.policies import LRUPolicy\n"
        "class Mine(LRUPolicy):\n"
        "    def __init__(self, capacity): raise AssertionError('built')\n"
    )
    assert find_policy("Mine", module).__name__ == "Mine"
    assert find_policy("arc") is ARCPolicy
    with pytest.raises(ConfigError, match='"Yours" is not a class'):
        find_policy("Yours", module)


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Write the text as a module that can be imported; returns its name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text):
        (tmp_path / "kvtiers_test_plugin.py").write_text(text)
        monkeypatch.delitem(sys.modules, "kvtiers_test_plugin", raising=False)
        return "kvtiers_test_plugin"

    yield write
    sys.modules.pop("kvtiers_test_plugin", None)


def test_a_policy_of_ones_own_by_module_path(plugin):
    module = plugin(
        "from kvtiers.host.policies import LRUPolicy\n"
        "class Newest(LRUPolicy):\n"
        "    def evict(self, count, staying):\n"
        "        picked = [k for k in reversed(self._order) if not staying([k])][:count]\n"
        "        self.remove(picked)\n"
        "        return picked\n"
    )
    policy = load_policy("Newest", module, capacity=7)
    policy.insert([A, B, C])
    assert policy.capacity == 7
    assert policy.evict(1, anything) == [C]


def test_a_built_in_name_wins_over_a_module_path():
    assert type(load_policy("lru", "no.such.module", capacity=1)) is LRUPolicy


def test_a_missing_module_names_the_key():
    with pytest.raises(ConfigError, match=r'cache_policy_module_path "no_such_module".*install'):
        load_policy("Mine", "no_such_module", capacity=4)


def test_a_module_that_fails_to_import_says_why(plugin):
    module = plugin("raise RuntimeError('needs a licence')")
    with pytest.raises(ConfigError, match=r"cache_policy_module_path.*needs a licence"):
        load_policy("Mine", module, capacity=4)


@pytest.mark.parametrize("name", ["Absent", "NUMBER"])
def test_what_is_no_class_of_the_module_is_refused(plugin, name):
    module = plugin("NUMBER = 3")
    with pytest.raises(ConfigError, match=f'eviction_policy "{name}" is not a class'):
        load_policy(name, module, capacity=4)


def test_missing_methods_are_listed(plugin):
    module = plugin(
        "class Half:\n"
        "    insert = touch = clear = check = lambda self: None\n"
        "    evict = None\n"
        "    def __init__(self, capacity): pass\n"
    )
    with pytest.raises(ConfigError, match="lacks evict, remove, __len__:"):
        load_policy("Half", module, capacity=4)


def test_a_constructor_that_refuses_is_reported(plugin):
    module = plugin(
        "from kvtiers.host.policies import LRUPolicy\n"
        "class Picky(LRUPolicy):\n"
        "    def __init__(self, *, size): pass\n"
    )
    with pytest.raises(ConfigError, match=r'"Picky".*capacity=4'):
        load_policy("Picky", module, capacity=4)


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_a_whole_row_that_stays_is_asked_about_in_few_calls(name):
    policy = load_policy(name, capacity=20_000)
    keys = [make_key(i.to_bytes(32, "big"), 0) for i in range(20_000)]
    policy.insert(keys)
    pinned, calls = set(keys[:-1]), []

    def staying(candidates):
        calls.append(len(candidates))
        return pinned.intersection(candidates)

    assert policy.evict(1, staying) == [keys[-1]]
    assert len(calls) < 20
    assert 0 not in calls


def test_keys_that_left_out_of_turn_are_skipped_without_a_question():
    policy = ARCPolicy(capacity=5000)
    keys = [make_key(i.to_bytes(32, "big"), 0) for i in range(5000)]
    policy.insert(keys)
    policy.touch(keys[:2400])
    asked = []

    def staying(candidates):
        asked.append(list(candidates))
        return ()

    assert policy.evict(1, staying) == [keys[2400]]
    assert asked == [[keys[2400]]]
