"""The prefix planner and the vLLM installed here: who reads what, and how much can be loaded."""

import random
from types import SimpleNamespace

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    GroupOffloadConfig,
    OffloadingConnectorScheduler,
    RequestGroupState,
    get_sliding_window_size_in_chunks,
)
from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    FullAttentionManager,
    MambaManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import LookupResult

from kvtiers.chunks import Lookup, key_group, make_key
from kvtiers.core.prefix import Attention, AttentionGroup, longest_prefix, most_tokens

HEADS = {"num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
MANAGERS = {
    Attention.FULL: FullAttentionManager,
    Attention.SLIDING: SlidingWindowManager,
    Attention.CHUNKED_LOCAL: ChunkedLocalAttentionManager,
    Attention.STATE: MambaManager,
}


def full(group, chunk):
    return AttentionGroup(group, chunk)


def sliding(group, chunk, window):
    return AttentionGroup(group, chunk, Attention.SLIDING, window)


def local(group, chunk, window):
    return AttentionGroup(group, chunk, Attention.CHUNKED_LOCAL, window)


def state(group, chunk):
    return AttentionGroup(group, chunk, Attention.STATE)


def spec_of(group):
    """As vLLM describes such a group, with a block for each chunk."""
    block, window = group.tokens_per_chunk, group.window_tokens
    match group.attention:
        case Attention.FULL:
            return FullAttentionSpec(block_size=block, **HEADS)
        case Attention.SLIDING:
            return SlidingWindowSpec(block_size=block, sliding_window=window, **HEADS)
        case Attention.CHUNKED_LOCAL:
            return ChunkedLocalAttentionSpec(block_size=block, attention_chunk_size=window, **HEADS)
        case Attention.STATE:
            return MambaSpec(
                block_size=block,
                shapes=((8,),),
                dtypes=(torch.float32,),
                mamba_cache_mode="align",
            )


ALL_KINDS = [
    full(0, 16),
    sliding(0, 16, 1),
    sliding(0, 16, 17),
    sliding(0, 16, 128),
    local(0, 16, 64),
    state(0, 16),
]


@pytest.mark.parametrize("group", ALL_KINDS, ids=lambda g: f"{g.attention.value}-{g.window_tokens}")
def test_blocks_that_vllm_keeps_are_those_that_are_read(group):
    """It skips whole blocks: a null block stands for them, and none is loaded."""
    manager = MANAGERS[group.attention].__new__(MANAGERS[group.attention])
    manager.sliding_window = manager.attention_chunk_size = group.window_tokens
    manager.extra_retained_tokens = 0
    step = 16 if group.attention is Attention.STATE else 1
    for tokens in range(step, 300, step):
        skipped = manager.get_num_skipped_tokens(tokens)
        kept = {token // 16 for token in range(skipped, tokens)}
        assert set(group.chunks(tokens)) == kept


def scheduler_of(groups, ask, cls=OffloadingConnectorScheduler):
    """The scheduler's side of the offloading connector, as far as its lookup goes."""
    configs = tuple(
        GroupOffloadConfig(
            group_idx=g.group,
            tokens_per_block=g.tokens_per_chunk,
            tokens_per_chunk=g.tokens_per_chunk,
            hashes_per_chunk=1,
            kv_event_group_spec=None,
            sliding_window_size_in_chunks=get_sliding_window_size_in_chunks(
                spec_of(g), g.tokens_per_chunk
            ),
            kv_cache_spec=spec_of(g),
            manager_cls=MANAGERS[g.attention],
        )
        for g in groups
    )
    windows = [i for i, c in enumerate(configs) if c.sliding_window_size_in_chunks is not None]
    windows.sort(key=lambda i: -configs[i].sliding_window_size_in_chunks)
    scheduler = cls.__new__(cls)
    scheduler.config = SimpleNamespace(kv_group_configs=configs)
    scheduler._sliding_window_groups = tuple(windows)
    whole = tuple(i for i in range(len(configs)) if i not in windows)
    scheduler._lookup_groups = whole + scheduler._sliding_window_groups
    aligned = [g.tokens_per_chunk for g in groups if g.attention is Attention.STATE]
    scheduler._mamba_align_size = aligned[0] if aligned else None
    scheduler._chunks_being_loaded = None
    scheduler._events_tracker = SimpleNamespace(record_lookup=lambda *arguments: None)
    scheduler.manager = SimpleNamespace(lookup=lambda key, context: ask(key))
    return scheduler


def request_of(groups, tokens):
    states = [
        RequestGroupState(
            offload_keys=[
                make_key(chunk.to_bytes(4, "big"), g.group)
                for chunk in range(tokens // g.tokens_per_chunk)
            ]
        )
        for g in groups
    ]
    return SimpleNamespace(
        req=SimpleNamespace(num_tokens=tokens, request_id="r"),
        req_context=None,
        num_locally_computed_tokens=0,
        max_load_tokens=None,
        group_states=states,
    )


def vllms_answer(groups, tokens, there):
    def ask(key):
        found = int.from_bytes(key[:4], "big") in there[key_group(key)]
        return LookupResult.HIT if found else LookupResult.MISS

    return scheduler_of(groups, ask)._lookup_complete_chunks(request_of(groups, tokens))


def planned(groups, tokens, there):
    def ask(group, chunk):
        return Lookup.HIT if chunk in there[group] else Lookup.MISS

    return longest_prefix(groups, most_tokens(groups, tokens), ask, granularity=1)


MODELS = {
    "full": [full(0, 16)],
    "mistral": [sliding(0, 16, 64)],
    "gemma3": [sliding(0, 16, 64), sliding(1, 16, 64), full(2, 16)],
    "gpt-oss": [full(0, 16), sliding(1, 16, 128)],
    "qwen3-next": [state(0, 32), state(1, 32), full(2, 32)],
    "deepseek-v4": [full(0, 64), sliding(1, 16, 32), sliding(2, 4, 8), sliding(3, 8, 32)],
}


def stored_at_random(groups, tokens, dice):
    """Chunks of each group, with holes."""
    there = {}
    for g in groups:
        chunks = range(tokens // g.tokens_per_chunk)
        first, end = sorted(dice.randint(0, len(chunks)) for _ in "ab")
        kept = chunks if g.attention is Attention.FULL else chunks[first:]
        holes = {dice.choice(chunks) for _ in range(dice.randint(0, 2))} if chunks else set()
        there[g.group] = set(kept[: dice.choice((end, None))]) - holes
    return there


@pytest.mark.parametrize("model", MODELS)
def test_vllm_loads_as_much_as_is_planned(model):
    """Over prompts with holes in what is stored of them, of every length."""
    groups, dice = MODELS[model], random.Random(model)
    loaded = 0
    for _ in range(1000):
        tokens = dice.randint(1, 400)
        there = stored_at_random(groups, tokens, dice)
        plan = planned(groups, tokens, there)
        assert vllms_answer(groups, tokens, there) == plan.tokens, (tokens, there)
        loaded += plan.tokens > 0
    assert loaded > 100


def test_where_vllm_asks_for_more_than_is_read():
    """As the docstring of the planner has it."""
    groups = [full(0, 16), sliding(1, 16, 33)]
    there = {0: {0, 1, 2, 3}, 1: {2, 3}}
    assert (planned(groups, 65, there).tokens, vllms_answer(groups, 65, there)) == (64, 0)
    there[1].add(1)
    assert (planned(groups, 65, there).tokens, vllms_answer(groups, 65, there)) == (64, 64)
    groups = [full(0, 16), local(1, 16, 32)]
    there = {0: {0, 1, 2, 3}, 1: set()}
    assert (planned(groups, 65, there).tokens, vllms_answer(groups, 65, there)) == (64, 0)
    groups = [full(0, 16), sliding(1, 64, 32)]
    there = {0: {0, 1, 2}, 1: {0}}
    assert (planned(groups, 65, there).tokens, vllms_answer(groups, 65, there)) == (48, 0)
