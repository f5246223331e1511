import copy
import pickle

import pytest

from kvtiers.chunks import (
    ChunkLayout,
    GroupLayout,
    granule_of,
    group_suffix,
    key_digest,
    key_group,
    make_key,
)

LAYOUT = ChunkLayout((GroupLayout(0, 4096, 16), GroupLayout(300, 8192, 16)))


@pytest.mark.parametrize("group", [0, 1, 300, 2**32 - 1])
def test_a_key_is_the_digest_and_then_its_group(group):
    key = make_key(b"digest", group)
    assert key == b"digest" + group_suffix(group)
    assert (key_digest(key), key_group(key)) == (b"digest", group)


def test_sizes_are_those_of_the_keys_groups():
    small, large = make_key(b"a", 0), make_key(b"a", 300)
    assert LAYOUT.chunk_bytes(small) == 4096
    assert LAYOUT.chunk_bytes(large) == 8192
    assert LAYOUT.chunk_sizes([large, small, large]) == [8192, 4096, 8192]
    assert LAYOUT.chunk_sizes([]) == []
    assert LAYOUT.slot_bytes == 8192


def test_an_unknown_group_is_named():
    with pytest.raises(KeyError, match="no KV-cache group 7 in ChunkLayout"):
        LAYOUT.chunk_bytes(make_key(b"a", 7))
    with pytest.raises(KeyError, match="no KV-cache group 7"):
        LAYOUT.chunk_sizes([make_key(b"a", 0), make_key(b"a", 7)])


def test_a_layout_is_its_groups():
    assert ChunkLayout(LAYOUT.groups) == LAYOUT
    assert hash(ChunkLayout(LAYOUT.groups)) == hash(LAYOUT)
    assert "_sizes" not in repr(LAYOUT)
    for twin in (copy.deepcopy(LAYOUT), pickle.loads(pickle.dumps(LAYOUT))):
        assert twin == LAYOUT
        assert twin.chunk_bytes(make_key(b"a", 300)) == 8192


@pytest.mark.parametrize(
    ("sizes", "granule"),
    [
        ([8192], 8192),
        ([8192, 8192, 8192], 8192),
        ([90 * 4096, 100 * 4096], 100 * 4096),
        ([89 * 4096, 100 * 4096], 4096),
        ([68 * 1024, 128 * 1024], 4096),
        ([64 * 1024, 128 * 1024, 32 * 1024], 32 * 1024),
    ],
)
def test_slots_are_counted_in_chunks_if_these_are_equal_and_in_common_divisors_if_not(
    sizes, granule
):
    assert granule_of(sizes) == granule
