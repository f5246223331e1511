"""The prefix planner against an oracle that tries every prefix and looks at every token read."""

import math
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers.chunks import Lookup
from kvtiers.core.prefix import (
    Attention,
    AttentionGroup,
    Prefix,
    longest_prefix,
    most_tokens,
)

Chunks = dict[int, set[int]]
"""By group."""


def full(group: int, chunk: int) -> AttentionGroup:
    return AttentionGroup(group, chunk)


def sliding(group: int, chunk: int, window: int) -> AttentionGroup:
    return AttentionGroup(group, chunk, Attention.SLIDING, window)


def local(group: int, chunk: int, window: int) -> AttentionGroup:
    return AttentionGroup(group, chunk, Attention.CHUNKED_LOCAL, window)


def state(group: int, chunk: int) -> AttentionGroup:
    return AttentionGroup(group, chunk, Attention.STATE)


class Store:
    """Verdicts, and which chunks were asked for: none twice."""

    def __init__(self, there: Chunks, pending: Chunks | None = None) -> None:
        self.there, self.pending = there, pending or {}
        self.asked: set[tuple[int, int]] = set()

    def __call__(self, group: int, chunk: int) -> Lookup:
        assert (group, chunk) not in self.asked
        self.asked.add((group, chunk))
        if chunk in self.pending.get(group, ()):
            return Lookup.RETRY if chunk % 2 else Lookup.HIT_PENDING
        return Lookup.HIT if chunk in self.there.get(group, ()) else Lookup.MISS


def everything(groups: list[AttentionGroup], tokens: int) -> Chunks:
    return {g.group: set(range(tokens // g.tokens_per_chunk)) for g in groups}


def as_lists(prefix: Prefix) -> dict[int, list[int]]:
    return {group: list(chunks) for group, chunks in prefix.chunks.items()}


# -- the oracle -----------------------------------------------------------------------------------

_LATER = 21
"""How many tokens after the prefix the oracle computes: more than any of its windows."""


def read_by(group: AttentionGroup, reader: int, tokens: int) -> Iterator[int]:
    """Those of the first ``tokens`` tokens whose keys and values the token ``reader`` reads."""
    for token in range(tokens):
        if (
            group.attention is Attention.FULL
            or (group.attention is Attention.SLIDING and reader - token < group.window_tokens)
            or (
                group.attention is Attention.CHUNKED_LOCAL
                and reader // group.window_tokens == token // group.window_tokens
            )
        ):
            yield token


def needed(group: AttentionGroup, tokens: int) -> set[int] | None:
    """The chunks that anybody reads after a prefix of ``tokens``; None if it cannot end there."""
    if group.attention is Attention.STATE:
        ends = [c for c in range(tokens + 1) if (c + 1) * group.tokens_per_chunk == tokens]
        return set(ends) if ends or not tokens else None
    read = {t for r in range(tokens, tokens + _LATER) for t in read_by(group, r, tokens)}
    return {t // group.tokens_per_chunk for t in read}


def oracle(
    groups: list[AttentionGroup], tokens: int, there: Chunks, granularity: int
) -> tuple[int, Chunks]:
    for end in range(tokens, 0, -1):
        needs = {g.group: needed(g, end) for g in groups}
        if end % granularity == 0 and all(
            need is not None and need <= there[group] for group, need in needs.items()
        ):
            return end, {group: need or set() for group, need in needs.items()}
    return 0, {g.group: set() for g in groups}


@st.composite
def any_group(draw: st.DrawFn, index: int) -> AttentionGroup:
    attention = draw(st.sampled_from(Attention))
    windowed = attention in (Attention.SLIDING, Attention.CHUNKED_LOCAL)
    window = draw(st.integers(1, 20)) if windowed else None
    return AttentionGroup(index, draw(st.sampled_from([1, 2, 3, 4, 6, 8])), attention, window)


@st.composite
def any_model(draw: st.DrawFn) -> tuple[list[AttentionGroup], int, Chunks, Chunks]:
    """Groups, a number of tokens, the chunks that are there, and those of them that are pending."""
    count = draw(st.integers(1, 4))
    groups = [draw(any_group(index)) for index in draw(st.permutations(range(count)))]
    tokens = draw(st.integers(0, 48))
    there, pending = {}, {}
    for group in groups:
        # One more than whole chunks: a prompt may be longer than what is asked for.
        chunks = range(tokens // group.tokens_per_chunk + 1)
        absent = draw(st.sets(st.sampled_from(chunks), max_size=4))
        if draw(st.integers(0, 9)) == 0:
            absent |= set(range(draw(st.integers(0, len(chunks))), len(chunks)))
        there[group.group] = set(chunks) - absent
        pending[group.group] = draw(st.sets(st.sampled_from(chunks), max_size=2)) - absent
    return groups, tokens, there, pending


@settings(max_examples=400)
@given(any_model(), st.sampled_from([None, 1, 2, 4, 5]))
def test_it_finds_what_trying_every_prefix_finds(model, granularity) -> None:
    groups, tokens, there, pending = model
    expected = granularity or math.lcm(*(g.tokens_per_chunk for g in groups))
    end, chunks = oracle(groups, tokens, there, expected)
    store = Store(there, pending)
    plan = longest_prefix(groups, tokens, store, granularity=granularity)
    assert plan.tokens == end
    assert {group: set(chunks) for group, chunks in plan.chunks.items()} == chunks
    waits = {(g, c) for g, needs in chunks.items() for c in needs & pending[g]}
    assert plan.waits_for == tuple(sorted(waits))
    assert {(g, c) for g, needs in chunks.items() for c in needs} <= store.asked


@given(any_model())
def test_an_answer_without_pending_chunks_is_final(model) -> None:
    """And one with them never promises less than what comes of it."""
    groups, tokens, there, pending = model
    hopeful = longest_prefix(groups, tokens, Store(there, pending))
    settled = {group: chunks - pending[group] for group, chunks in there.items()}
    final = longest_prefix(groups, tokens, Store(settled))
    assert final.waits_for == ()
    assert final.tokens <= hopeful.tokens
    if not hopeful.waits_for:
        assert final == hopeful


# -- models by hand -------------------------------------------------------------------------------


def test_a_window_reads_one_token_less_than_its_size() -> None:
    """The reading token is part of it: at 64 a window of 17 begins at 48, one of 18 at 47."""
    assert list(sliding(0, 16, 17).chunks(64)) == [3]
    assert list(sliding(0, 16, 18).chunks(64)) == [2, 3]
    assert list(sliding(0, 16, 1).chunks(64)) == []


def test_local_attention_reads_nothing_where_a_local_chunk_begins() -> None:
    group = local(0, 16, 64)
    assert list(group.chunks(112)) == [4, 5, 6]
    assert list(group.chunks(128)) == []
    plan = longest_prefix([full(1, 16), group], 130, Store({1: set(range(8))}))
    assert (plan.tokens, as_lists(plan)) == (128, {0: [], 1: list(range(8))})


def test_a_local_chunk_may_begin_inside_a_missing_chunk() -> None:
    """At 10 nothing is read, be chunk 1 (tokens 8 to 15) there or not; at 9 and 14 it is read."""
    groups = [local(0, 8, 5), sliding(1, 1, 3)]
    tokens = set(range(14))
    plan = longest_prefix(groups, 14, Store({0: {0}, 1: tokens}), granularity=1)
    assert (plan.tokens, as_lists(plan)) == (10, {0: [], 1: [8, 9]})
    plan = longest_prefix(groups, 14, Store({0: {0}, 1: tokens - {9}}), granularity=1)
    assert (plan.tokens, as_lists(plan)) == (8, {0: [0], 1: [6, 7]})


def test_gemma3_needs_the_tails_of_its_windows() -> None:
    """Five sliding layers to one of full attention: window 256, chunks of 128, as on CPUs."""
    groups = [sliding(0, 128, 256), sliding(1, 128, 256), full(2, 128)]
    there = {0: {9, 10}, 1: {8, 9, 10}, 2: set(range(11))}
    plan = longest_prefix(groups, 1499, Store(there))
    assert plan.tokens == 1408
    assert as_lists(plan) == {0: [9, 10], 1: [9, 10], 2: list(range(11))}
    there[0] = {4, 5, 10}
    plan = longest_prefix(groups, 1499, Store({**there, 1: {4, 5, 6}}))
    assert (plan.tokens, as_lists(plan)) == (768, {0: [4, 5], 1: [4, 5], 2: list(range(6))})


def test_gpt_oss_alternates_a_short_window_with_full_attention() -> None:
    groups = [full(0, 64), sliding(1, 16, 128)]
    there = {0: set(range(16)), 1: set(range(40, 64)) - {55}}
    plan = longest_prefix(groups, 1024, Store(there))
    assert (plan.tokens, plan.chunks[1]) == (1024, range(56, 64))
    there[1] -= {60}
    plan = longest_prefix(groups, 1024, Store(there))
    assert (plan.tokens, plan.chunks) == (832, {0: range(13), 1: range(44, 52)})


def test_a_prefix_may_end_inside_a_chunk_of_attention_where_the_engine_allows_it() -> None:
    groups = [full(0, 64), sliding(1, 16, 128)]
    there = {0: set(range(16)), 1: set(range(40, 55))}
    plan = longest_prefix(groups, 1023, Store(there), granularity=1)
    assert (plan.tokens, plan.chunks) == (880, {0: range(14), 1: range(47, 55)})
    plan = longest_prefix(groups, 1023, Store(everything(groups, 1024)), granularity=1)
    assert (plan.tokens, plan.chunks) == (1023, {0: range(16), 1: range(56, 64)})


def test_qwen3_next_needs_the_last_state_of_each_group_only() -> None:
    groups = [state(0, 256), state(1, 256), state(2, 256), full(3, 256)]
    there = {0: {1, 4}, 1: {1, 3, 4}, 2: {1, 3, 4}, 3: set(range(5))}
    plan = longest_prefix(groups, 1499, Store(there))
    assert (plan.tokens, as_lists(plan)) == (1280, {0: [4], 1: [4], 2: [4], 3: [0, 1, 2, 3, 4]})
    there[2] = {0, 1, 3}
    plan = longest_prefix(groups, 1499, Store(there), granularity=1)
    assert (plan.tokens, as_lists(plan)) == (512, {0: [1], 1: [1], 2: [1], 3: [0, 1]})


DEEPSEEK_V4 = [
    full(0, 256),
    sliding(1, 64, 128),
    sliding(2, 4, 8),
    sliding(3, 8, 128),
    full(4, 64),
]
"""Latents, a window, and the windows of what compresses them: chunks of 4 to 256 tokens."""


def test_deepseek_v4_ends_where_all_its_groups_end() -> None:
    there = everything(DEEPSEEK_V4, 2000)
    plan = longest_prefix(DEEPSEEK_V4, 2000, Store(there))
    assert plan.tokens == 1792
    assert plan.chunks == {
        0: range(7),
        1: range(26, 28),
        2: range(446, 448),
        3: range(208, 224),
        4: range(28),
    }
    there[2] -= {447}
    plan = longest_prefix(DEEPSEEK_V4, 2000, Store(there))
    assert plan.tokens == 1536
    assert plan.chunks[2] == range(382, 384)


def test_one_token_at_least_is_computed() -> None:
    """Full attention computes the last one again, over what was loaded."""
    assert most_tokens([full(0, 16), full(1, 64)], 64) == 64
    assert most_tokens([full(0, 16), sliding(1, 16, 32)], 64) == 63
    assert most_tokens([state(0, 16)], 64) == 63
    assert most_tokens([state(0, 16)], 0) == 0


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: sliding(0, 16, 0), "group 0: a size in tokens is less"),
        (lambda: full(3, 0), "group 3: a size in tokens is less"),
        (lambda: AttentionGroup(1, 16, Attention.SLIDING), "group 1: sliding needs window_tokens"),
        (lambda: AttentionGroup(1, 16, window_tokens=4), "group 1: full has no window_tokens"),
        (lambda: longest_prefix([], 16, Store({})), "one or more groups"),
        (lambda: longest_prefix([full(0, 1), state(0, 1)], 16, Store({})), "different index"),
        (lambda: longest_prefix([full(0, 1)], -1, Store({})), "too small"),
        (lambda: longest_prefix([full(0, 1)], 1, Store({}), granularity=0), "too small"),
    ],
)
def test_what_makes_no_sense_is_refused(make, why) -> None:
    with pytest.raises(ValueError, match=why):
        make()


# -- what it costs --------------------------------------------------------------------------------

TOKENS = 1 << 17
GEMMA3 = [sliding(0, 16, 1024), sliding(1, 16, 1024), full(2, 16)]
QWEN3_NEXT = [state(0, 256), state(1, 256), state(2, 256), full(3, 256)]


def asked(groups: list[AttentionGroup], there: Chunks) -> tuple[Prefix, int]:
    store = Store(there)
    return longest_prefix(groups, TOKENS, store), len(store.asked)


@pytest.mark.parametrize("groups", [GEMMA3, QWEN3_NEXT, DEEPSEEK_V4], ids=["g", "q", "d"])
def test_of_what_is_all_stored_it_asks_for_what_is_needed_and_no_more(groups) -> None:
    plan, count = asked(groups, everything(groups, TOKENS))
    assert plan.tokens == TOKENS
    assert count == sum(len(chunks) for chunks in plan.chunks.values())


@pytest.mark.parametrize("groups", [GEMMA3, QWEN3_NEXT, DEEPSEEK_V4], ids=["g", "q", "d"])
def test_of_an_unknown_prompt_it_asks_for_one_chunk(groups) -> None:
    there = everything(groups, TOKENS)
    for group in groups:
        if group.attention is Attention.FULL:
            there[group.group] = set()
    plan, count = asked(groups, there)
    assert (plan.tokens, count) == (0, 1)


def test_a_miss_skips_the_window() -> None:
    """Of 8192 chunks of a window that holds 64, one in 64 is asked for, and then those it needs."""
    groups = [sliding(0, 16, 1025)]
    plan, count = asked(groups, {0: set(range(64))})
    assert plan.tokens == 1024
    assert count <= 8192 // 64 + 64


def test_a_state_is_sought_from_the_right_before_any_window_is_read() -> None:
    groups = [sliding(0, 16, 1024), state(1, 256), full(2, 256)]
    plan, count = asked(groups, {**everything(groups, TOKENS), 1: {100}})
    assert plan.tokens == 101 * 256
    assert count == TOKENS // 256 + (TOKENS // 256 - 100) + 64


def test_holes_all_over_cost_no_more_than_every_chunk_once() -> None:
    """Each window has its holes where the other has none: they push each other to the left."""
    groups = [sliding(0, 16, 48), sliding(1, 16, 48), sliding(2, 16, 48)]
    chunks = range(TOKENS // 16)
    there = {group: {c for c in chunks if c % 3 != group} for group in range(3)}
    plan, count = asked(groups, there)
    assert plan.tokens == 0
    assert count <= 3 * len(chunks)
