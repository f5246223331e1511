import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.chunks import MAX_WASTE, PAGE_BYTES, ChunkLayout, GroupLayout, granule_of, make_key
from kvtiers.errors import ConfigError
from kvtiers.host.slabs import (
    MOST_SLABS,
    SizeClasses,
    floor_slabs,
    num_tokens,
    slab_bytes_for,
    slab_granules,
)

KIB, GIB = 1024, 1 << 30
MODELS = {
    "Qwen3-Next: states beside attention": [68 * KIB, 128 * KIB],
    "Gemma3: a group with fewer layers": [10 * 128 * KIB, 2 * 128 * KIB],
    "GLM-5.3: latents and an indexer": [61 * 64 * 1152, 61 * 64 * 132],
    "DeepSeek-V4: 4 to 256 tokens a block": [
        4 * 61 * 1168,
        8 * 30 * 584,
        64 * 61 * 584,
        128 * 31 * 132,
        256 * 30 * 584,
    ],
    "equal": [128 * KIB, 128 * KIB],
}


def layout_of(sizes: list[int], tokens: int = 16) -> ChunkLayout:
    rounded = [-(-size // PAGE_BYTES) * PAGE_BYTES for size in sizes]
    return ChunkLayout(tuple(GroupLayout(g, n, tokens) for g, n in enumerate(rounded)))


def lost(layout: ChunkLayout, slab_bytes: int, granule: int) -> float:
    """The largest share of a slab that is lost, whichever group's chunks are in it."""
    shares = []
    for group in layout.groups:
        place = -(-group.chunk_bytes // granule) * granule
        shares.append(1 - slab_bytes // place * group.chunk_bytes / slab_bytes)
    return max(shares)


@pytest.mark.parametrize("capacity", [GIB, 100 * GIB])
@pytest.mark.parametrize("model", MODELS)
def test_no_model_loses_more_than_a_tenth_of_host_memory(model, capacity):
    layout = layout_of(MODELS[model])
    granule = granule_of([g.chunk_bytes for g in layout.groups])
    slab = slab_bytes_for(capacity, SizeClasses.of(layout, granule), granule)
    assert lost(layout, slab, granule) <= MAX_WASTE
    num_slabs = capacity // slab
    assert num_slabs >= 16 * len(layout.groups)
    if model != "equal":
        assert num_slabs <= MOST_SLABS
        one_size = lost(layout, layout.slot_bytes, layout.slot_bytes)
        assert one_size > 0.4, "this is what it is for"


sizes = st.lists(st.integers(1, 300), min_size=1, max_size=5)


@given(sizes, st.integers(1, 10**7))
def test_no_sizes_lose_more_than_a_tenth(pages, granules):
    layout = layout_of([n * PAGE_BYTES for n in pages])
    granule = granule_of([g.chunk_bytes for g in layout.groups])
    spans = SizeClasses.of(layout, granule).spans
    slab = slab_granules(spans, granules)
    assert lost(layout, slab * granule, granule) <= MAX_WASTE + 1e-9
    assert slab >= max(spans)


@given(sizes)
def test_no_smaller_slab_would_do(pages):
    spans = sorted(set(pages))
    slab = slab_granules(spans, 1)
    smaller = range(max(spans), slab)
    assert not any(all(s % n <= MAX_WASTE * s for n in spans) for s in smaller)


def test_equal_chunks_are_a_slab_each_however_many():
    classes = SizeClasses.of(layout_of([8192, 8192]), 8192)
    assert classes.spans == (1,)
    assert slab_bytes_for(10**12, classes, 8192) == 8192


def test_keys_are_split_by_size_in_their_order():
    classes = SizeClasses.of(layout_of([8192, 4096, 8192]), 4096)
    assert classes.spans == (1, 2)
    keys = [make_key(bytes([n]), group) for n, group in enumerate([2, 1, 0, 1])]
    assert classes.split(keys) == {1: [keys[0], keys[2]], 0: [keys[1], keys[3]]}
    with pytest.raises(KeyError):
        classes.split([make_key(b"a", 3)])


def test_too_little_memory_is_refused_with_the_least_that_will_do():
    layout = layout_of(MODELS["Qwen3-Next: states beside attention"])
    classes = SizeClasses.of(layout, PAGE_BYTES)
    least = 2 * 34 * PAGE_BYTES
    assert slab_bytes_for(least, classes, PAGE_BYTES) * 2 == least
    with pytest.raises(ConfigError, match=f"2 sizes .* give it at least {least} bytes") as caught:
        slab_bytes_for(least - 1, classes, PAGE_BYTES)
    assert caught.value.context["key"] == "cpu_bytes_to_use"


@pytest.mark.parametrize(("slabs", "floor"), [(2, 1), (63, 1), (64, 2), (3200, 100)])
def test_floors_are_a_sixteenth_of_all_slabs_together(slabs, floor):
    assert floor_slabs(slabs, 2) == floor


def test_tokens_count_the_groups_that_keep_all_of_them():
    full, window = GroupLayout(0, 8192, 16), GroupLayout(1, 4096, 16, keeps_every_chunk=False)
    assert num_tokens(ChunkLayout((full, window)), 10, 4, 4096) == 10 * 2 * 16
    both = ChunkLayout((full, GroupLayout(1, 4096, 32)))
    # A token takes 1/32 of a slab of large chunks and 1/128 of one of small ones.
    assert num_tokens(both, 10, 4, 4096) == 10 * 128 // 5
    assert num_tokens(ChunkLayout((window,)), 100, 1, 4096) == 1600
