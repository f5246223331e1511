"""Names of our own for chunks: one chain for every engine of a model, and tools know it too."""

from types import SimpleNamespace

import pytest
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_offload.base import ReqContext, RequestOffloadingContext
from vllm.v1.request import Request

from kvtiers.engines.vllm.ownkeys import OwnKeyedState, tokens_per_link
from kvtiers.hashing import OWN_ALGORITHM, chunk_keys, request_extra_keys
from tests.vllm.offloading import chunks_in, disk, offload, settle


def group(index, tokens_per_chunk, hashes_per_chunk=1):
    return SimpleNamespace(
        group_idx=index, tokens_per_chunk=tokens_per_chunk, hashes_per_chunk=hashes_per_chunk
    )


def request_of(tokens, **more):
    return Request(
        request_id="r",
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=64),
        pooling_params=None,
        block_hasher=None,
        **more,
    )


def state_of(request, *groups, faults=None):
    config = SimpleNamespace(kv_group_configs=groups)
    return OwnKeyedState(
        config=config,
        req=request,
        req_context=ReqContext("r"),
        offloading_context=RequestOffloadingContext(),
        tokens_per_link=tokens_per_link(g.tokens_per_chunk for g in groups),
        on_fault=(faults if faults is not None else []).append,
    )


def names(request, *groups):
    state = state_of(request, *groups)
    state.update_offload_keys()
    return [s.offload_keys for s in state.group_states]


def by_tools(tokens, group, span, link, extra=lambda block: None):
    return chunk_keys(tokens, group, span, link, OWN_ALGORITHM, extra_keys=extra)


TOKENS = list(range(1000, 1150))


def test_tools_compute_the_same_names():
    assert names(request_of(TOKENS), group(0, 64), group(3, 64)) == [
        by_tools(TOKENS, 0, 64, 64),
        by_tools(TOKENS, 3, 64, 64),
    ]
    assert names(request_of(TOKENS), group(0, 64), group(1, 16)) == [
        by_tools(TOKENS, 0, 64, 16),
        by_tools(TOKENS, 1, 16, 16),
    ]


def test_salt_and_adapter_are_part_of_them():
    adapter = LoRARequest("sql", 1, "/adapters/sql")
    salted = request_of(TOKENS, cache_salt="mine", lora_request=adapter)
    extra = request_extra_keys(("sql", "/adapters/sql"), "mine")
    assert names(salted, group(0, 64)) == [by_tools(TOKENS, 0, 64, 64, extra)]


def test_so_are_pictures_and_where_they_lie():
    def with_picture(name, offset):
        place = PlaceholderRange(offset=offset, length=20)
        picture = MultiModalFeatureSpec(
            data=None, modality="image", identifier=name, mm_position=place
        )
        return names(request_of(TOKENS, mm_features=[picture]), group(0, 64))[0]

    plain = names(request_of(TOKENS), group(0, 64))[0]
    cat, dog, moved = with_picture("cat", 70), with_picture("dog", 70), with_picture("cat", 71)
    assert cat[0] == dog[0] == moved[0] == plain[0]  # it comes after the first chunk
    assert len({cat[1], dog[1], moved[1], plain[1]}) == 4


def test_names_come_as_tokens_do_and_never_change():
    request = request_of(TOKENS[:100])
    state = state_of(request, group(0, 32))
    state.update_offload_keys()
    first = list(state.group_states[0].offload_keys)
    assert len(first) == 3
    for token in TOKENS[100:]:
        request.append_output_token_ids(token)
        state.update_offload_keys()
    assert state.group_states[0].offload_keys == by_tools(TOKENS, 0, 32, 32)
    assert state.group_states[0].offload_keys[:3] == first
    ends = [state.req_context.get_offload_key_position(k) for k in first]
    assert ends == [32, 64, 96]


def test_a_fault_of_ours_leaves_vllms_names():
    faults = []
    request = request_of(TOKENS)
    request.block_hashes = [bytes([i]) * 32 for i in range(9)]
    state = state_of(request, group(0, 16), faults=faults)
    state.chain = None
    state.update_offload_keys()
    assert faults == ["update_offload_keys"]
    assert len(state.group_states[0].offload_keys) == 9


@pytest.mark.timeout(240)
def test_engines_share_chunks_whatever_their_hashes(engine, prompt, tmp_path):
    """The xxhash algorithms draw a seed in every process: nobody finds their names again."""
    asked = prompt(700, seed=3)
    config = offload(secondary_tiers=[disk(tmp_path)], chunk_keys="own")
    with engine("llama", kv_transfer_config=config) as e:
        e.ask(asked, max_tokens=4)
        settle(e)
        e.forget_device()
        (expected,) = e.ask(asked, max_tokens=4)
        cached = e.cached
        settle(e)
    stored = chunks_in(tmp_path)
    assert stored == 700 // 128
    with engine("llama", kv_transfer_config=config, prefix_caching_hash_algo="xxhash") as e:
        (answer,) = e.ask(asked, max_tokens=4)
        assert e.cached == cached == [stored * 128]
        assert answer.tokens == expected.tokens
        assert answer.distance(expected) == 0
        settle(e)
    assert chunks_in(tmp_path) == stored
