"""The presence index against a model that is a bag of (pod, tier, group, block)."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers.chunks import Lookup
from kvtiers.core.prefix import Attention, AttentionGroup, longest_prefix
from kvtiers.hashing import block_hashes, event_hash
from kvtiers.index.places import MAX_NAME, MAX_PLACES, Tier
from kvtiers.index.presence import Presence
from kvtiers.index.reach import reach
from kvtiers.kvevents.messages import AllBlocksCleared, BlockRemoved, BlockStored
from tests.unit.test_checks import broken

GPU, CPU = Tier("GPU", "", ""), Tier("CPU", "LOCAL", "0:primary")
SIZE = 16


def stored(blocks, tier=GPU, group=None, parent=None, size=SIZE, **more):
    return BlockStored(
        blocks,
        parent,
        [],
        size,
        medium=tier.medium,
        group_idx=group,
        locality=tier.locality or None,
        ownership=tier.ownership or None,
        **more,
    )


def removed(blocks, tier=GPU, group=None):
    return BlockRemoved(blocks, tier.medium, group, tier.locality or None, tier.ownership or None)


def told(*says, max_blocks=1000):
    """An index that heard ``(pod, event)``, from pods that are complete at first."""
    presence = Presence(max_blocks)
    for pod, event in says:
        if pod not in presence.pods:
            presence.clear(pod, complete=True)
        presence.apply(pod, event)
    presence.check()
    return presence


def asked(presence, hashes, size=SIZE):
    """By pod: tokens, and tokens by tier."""
    found = reach(presence, hashes, size, presence.pods.values())
    return {one.pod: (one.tokens, dict(one.tiers)) for one in found}


def test_each_pod_is_told_with_its_longest_prefix_whole_and_by_tier():
    presence = told(
        ("a", stored([1, 2, 3, 4])),
        ("a", removed([1])),
        ("a", stored([1], CPU)),
        ("b", stored([2, 3, 4])),
        ("c", stored([1, 2])),
    )
    assert asked(presence, [1, 2, 3, 4, 5]) == {
        "a": (64, {CPU: 16}),
        "c": (32, {GPU: 32}),
    }
    assert asked(presence, [7, 1]) == {}
    assert asked(presence, []) == {}


def test_presence_is_counted():
    presence = told(("a", stored([1])), ("a", stored([1])), ("a", stored([1])))
    for left in (True, True, False):
        presence.apply("a", removed([1]))
        presence.check()
        assert bool(asked(presence, [1])) == left
    presence.apply("a", removed([1]))
    presence.apply("never heard of", removed([1]))
    presence.check()


def test_a_digest_is_known_by_its_last_eight_bytes():
    digests = block_hashes(range(48), SIZE)
    presence = told(("a", stored(digests)))
    assert asked(presence, [event_hash(d) for d in digests]) == {"a": (48, {GPU: 48})}
    presence.apply("a", removed(digests[2:]))
    assert asked(presence, [event_hash(d) for d in digests])["a"][0] == 32


def test_a_pod_that_forgets_everything_is_empty_and_complete():
    presence = told(("a", stored([1, 2])), ("a", stored([1])), ("b", stored([1, 2])))
    presence.pods["a"].complete = False
    presence.apply("a", AllBlocksCleared())
    presence.check()
    assert presence.pods["a"].complete
    assert asked(presence, [1, 2]) == {"b": (32, {GPU: 32})}
    presence.clear("b", complete=False)
    assert asked(presence, [1, 2]) == {}
    assert not presence.pods["b"].complete
    presence.apply("b", stored([1, 2]))
    assert asked(presence, [1, 2]) == {"b": (32, {GPU: 32})}


def test_a_pod_that_is_dropped_leaves_its_bits_to_others():
    presence = told(("a", stored([1, 2])), ("b", stored([1])))
    presence.drop("a")
    presence.drop("a")
    presence.check()
    assert asked(presence, [1, 2]) == {"b": (16, {GPU: 16})}
    presence.apply("c", stored([2], CPU))
    presence.check()
    assert asked(presence, [1, 2]) == {"b": (16, {GPU: 16})}


def test_above_the_bound_those_leave_that_nobody_told_or_asked_of_for_longest():
    presence = told(
        ("old", stored([1, 2], parent=0)),
        ("asked", stored([3, 4], parent=0)),
        ("new", stored([5, 6], parent=0)),
        max_blocks=6,
    )
    assert asked(presence, [3, 4])
    presence.apply("new", stored([7], parent=0))
    presence.check()
    assert (presence.evicted, len(presence.blocks)) == (2, 5)
    assert {name: pod.complete for name, pod in presence.pods.items()} == {
        "old": False,
        "asked": True,
        "new": True,
    }
    assert asked(presence, [1, 2]) == {}
    assert asked(presence, [3, 4]) == {"asked": (32, {GPU: 32})}
    presence.apply("old", removed([1, 2]))
    presence.check()
    presence.apply("old", AllBlocksCleared())
    assert presence.pods["old"].complete


def test_more_than_there_may_be_at_once_leave_at_once():
    presence = told(("a", stored(list(range(1, 1000)))), max_blocks=10)
    assert len(presence.blocks) <= 10
    assert not presence.pods["a"].complete


def test_places_of_one_pod_are_bounded():
    tiers = [Tier("STORAGE", "LOCAL", str(n)) for n in range(MAX_PLACES + 2)]
    presence = told(*[("a", stored([1], tier)) for tier in tiers])
    assert presence.unplaced == 2
    assert not presence.pods["a"].complete


def test_names_are_bounded():
    presence = told(
        ("a", stored([1], Tier("x" * (MAX_NAME + 1), "", ""))),
        ("a", stored([1], kv_cache_spec_kind="y" * (MAX_NAME + 1))),
    )
    assert presence.unplaced == 1
    assert list(presence.pods["a"].places) == [(GPU, 0)]
    assert presence.pods["a"].groups[0].kind == ""


def test_what_is_held_more_than_once_is_bounded_as_blocks_are():
    presence = told(
        ("a", stored([1, 2])), ("a", stored([1, 2])), ("a", stored([1, 2])), max_blocks=2
    )
    assert presence.pods["a"].complete
    presence.apply("a", stored([1], CPU))
    presence.apply("a", stored([1], CPU))
    presence.check()
    assert not presence.pods["a"].complete
    presence.apply("a", removed([1], CPU))
    assert asked(presence, [1]) == {"a": (16, {GPU: 16})}, "too little is known, not too much"


def test_all_groups_must_have_a_prefix():
    presence = told(
        ("a", stored([1, 2, 3], group=0)),
        ("a", stored([1, 2], group=1)),
        ("a", stored([1, 2, 3], CPU, group=0)),
    )
    assert asked(presence, [1, 2, 3]) == {"a": (32, {GPU: 32})}


def test_of_a_window_only_its_last_tokens_count():
    window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 17}
    full = {"kv_cache_spec_kind": "full_attention"}
    presence = told(
        ("a", stored([1, 2, 3, 4], group=0, **full)),
        ("a", stored([3], group=1, **window)),
    )
    assert asked(presence, [1, 2, 3, 4]) == {"a": (48, {GPU: 48})}
    presence.apply("a", removed([1], group=0))
    assert asked(presence, [1, 2, 3, 4]) == {}


def test_blocks_of_several_hashes_are_named_by_their_last():
    presence = told(("a", stored([2, 4], size=32)), ("b", stored([1, 2, 3])))
    assert asked(presence, [1, 2, 3, 4]) == {"a": (64, {GPU: 64}), "b": (48, {GPU: 48})}
    assert asked(presence, [1, 2, 3, 4], size=64) == {}, "no multiple of it"


def test_a_stream_that_tells_hashes_only_is_understood():
    says = [("a", stored([n], CPU, size=0)) for n in range(1, 400)]
    presence = told(*says)
    assert asked(presence, range(1, 401)) == {"a": (399 * SIZE, {CPU: 399 * SIZE})}
    assert "in 2 runs" in repr(presence.blocks)


PODS, TIERS, BLOCKS = ("a", "b", "c"), (GPU, CPU), range(1, 9)
SAYS = st.tuples(
    st.sampled_from(PODS),
    st.one_of(
        st.builds(
            stored,
            st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=5),
            st.sampled_from(TIERS),
            st.sampled_from((0, 1)),
            st.sampled_from((None, *BLOCKS)),
        ),
        st.builds(
            removed,
            st.lists(st.sampled_from(BLOCKS), max_size=5),
            st.sampled_from(TIERS),
            st.sampled_from((0, 1)),
        ),
        st.just(AllBlocksCleared()),
    ),
)


@settings(max_examples=150)
@given(st.lists(SAYS, max_size=25), st.lists(st.sampled_from(BLOCKS), max_size=8))
def test_it_is_a_bag_of_what_was_told(says, chain):
    presence, bag = told(), Counter()
    groups = {}
    for pod, event in says:
        presence.apply(pod, event)
        if isinstance(event, AllBlocksCleared):
            bag = Counter({k: n for k, n in bag.items() if k[0] != pod})
            continue
        tier = Tier(event.medium, event.locality or "", event.ownership or "")
        for block in event.block_hashes:
            bag[pod, tier, event.group_idx, block] += 1 if isinstance(event, BlockStored) else -1
            if isinstance(event, BlockStored):
                groups.setdefault(pod, set()).add(event.group_idx)
        bag = +bag
    presence.check()

    def tokens(pod, tiers):
        def ask(group, chunk):
            here = chunk < len(chain) and any(bag[pod, t, group, chain[chunk]] for t in tiers)
            return Lookup.HIT if here else Lookup.MISS

        plan = [AttentionGroup(g, SIZE, Attention.FULL) for g in groups.get(pod, ())]
        return longest_prefix(plan, len(chain) * SIZE, ask).tokens if plan else 0

    expected = {
        pod: (tokens(pod, TIERS), {t: tokens(pod, [t]) for t in TIERS if tokens(pod, [t])})
        for pod in PODS
        if tokens(pod, TIERS)
    }
    assert asked(presence, chain) == expected


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda p: p.pods["a"].places[GPU, 0].__setattr__("blocks", 9), "has 2 blocks"),
        (lambda p: p._more.update({(4, 9): 1}), "counted where it is not held"),
        (lambda p: p.pods["a"].places.clear(), "no bit of its own"),
        (lambda p: p.blocks.__setattr__("_max", 1), "more blocks than may be"),
        (lambda p: p.blocks._where.pop(1), "not in its run"),
    ],
)
def test_a_check_can_fail(change, why):
    presence = told(("a", stored([1, 2])))
    change(presence)
    with broken(why):
        presence.check()


def test_it_shows_itself():
    presence = told(("a", stored([1, 2])), max_blocks=10)
    assert repr(presence) == "<Presence <Blocks 2/10 in 1 runs>, 1 pods, 0 incomplete>"
