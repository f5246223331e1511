from types import SimpleNamespace

from kvtiers.chunks import make_key
from kvtiers.engines.vllm import offers


def group(index=0, window=None, cow=False, tokens=16):
    return SimpleNamespace(
        group_idx=index,
        sliding_window_size_in_chunks=window,
        requires_cow_source=cow,
        tokens_per_chunk=tokens,
    )


def state(blocks, next_chunk=0):
    return SimpleNamespace(block_ids=list(blocks), next_stored_chunk_idx=next_chunk)


def test_offered_blocks_of_windows_are_forgotten_those_of_full_attention_are_not():
    configs = [group(0), group(1, window=2)]
    states = [state([1, 2, 3, 4], 2), state([5, 6, 7, 8], 2)]
    offers.forget_below_next(configs, states, per_chunk=1)
    assert states[0].block_ids == [1, 2, 3, 4]
    assert states[1].block_ids == [0, 0, 7, 8]


def test_forgetting_never_goes_beyond_the_blocks_there_are():
    states = [state([5, 6], 9)]
    offers.forget_below_next([group(window=2)], states, per_chunk=4)
    assert states[0].block_ids == [0, 0]


def test_a_window_chunk_that_lost_a_block_is_marked_by_its_last_block():
    s = state([1, 2, 0, 4, 5, 6, 7, 8])
    offers.mark_partial_chunks(group(window=2), s, per_chunk=4, end_chunk=2)
    assert s.block_ids == [1, 2, 0, 0, 5, 6, 7, 8]


def test_whole_chunks_single_blocks_full_attention_and_state_are_left_alone():
    for config, per_chunk in (
        (group(), 4),
        (group(window=1, cow=True), 4),
        (group(window=2), 1),
    ):
        s = state([0, 2, 3, 4])
        offers.mark_partial_chunks(config, s, per_chunk, end_chunk=4)
        assert s.block_ids == [0, 2, 3, 4]


def test_the_first_declined_chunk_of_each_group():
    configs = [group(0), group(1, tokens=32)]
    ends = {make_key(b"a", 0): 48, make_key(b"b", 0): 32, make_key(b"c", 1): 64}
    keys = [*ends, make_key(b"unknown", 0), make_key(b"other group", 7)]
    assert offers.first_chunks(configs, keys, ends.get) == {0: 1, 1: 1}


def test_rewinding_goes_back_only_and_only_in_the_groups_that_are_meant():
    configs = [group(0), group(1, window=2), group(2)]
    states = [state([], 5), state([], 5), state([], 5)]
    offers.rewind(configs, states, {0: 3, 1: 2, 2: 9}, windows=False)
    assert [s.next_stored_chunk_idx for s in states] == [3, 5, 5]
    offers.rewind(configs, states, {0: 0, 1: 2}, windows=True)
    assert [s.next_stored_chunk_idx for s in states] == [3, 2, 5]


def test_declined_chunks_are_offered_ever_more_rarely():
    declined = offers.Declined({0: 1}, epoch=10)
    offered_at = []
    for epoch in range(10, 1000):
        if declined.due(epoch):
            offered_at.append(epoch)
            declined.again({0: 1}, epoch)
    assert offered_at == [11, 13, 17, 25, 41, 73, 137, 265, 521]
