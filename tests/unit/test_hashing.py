import hashlib
import pickle
import sys
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.chunks import key_digest, key_group, make_key
from kvtiers.errors import Kind, KVTiersError
from kvtiers.hashing import (
    ALGORITHMS,
    block_hashes,
    chunk_keys,
    event_hash,
    none_hash,
    request_extra_keys,
)

# Computed by vLLM 0.32 with PYTHONHASHSEED unset, or set to 42 where the name says so.
NONE = {
    "sha256": "066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198",
    "sha256_cbor": "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0",
}
NONE_42 = {
    "sha256": "c0bc02c9fc92a4944335649961b9e55cc41b194bece4801e8c6ef0f0f3f5884a",
    "sha256_cbor": "9fa6eb003f14425eb9c8e6baacfbcaab26257357b829c7bfa74ffcc4f31c1780",
}
FIRST_42 = {
    "sha256": "8ad1c350703c26ebac1f40b4ddf827396658d0724afbf69e0902fcecc2422367",
    "sha256_cbor": "0a99040f25d8a5f22275b867f403918da98c9d140eaea10f5319d4d1d84429df",
}
EIGHT_TOKENS = {
    "sha256": [
        "52a7f141c60918f65779927090482b5a24adbe68c8613a211a1eb4e3edd9361a",
        "bee96bce54f5fcaba04c4a3fc2491b30b48e29dbbd38a327d41bc1f76b956dde",
    ],
    "sha256_cbor": [
        "58d0879dff3800f65f8c5fd449d73048c0f7699dd238a03b84b146b151d55111",
        "e1bc29393a2da9fd798f35ff04d215f846aee6df4b803ce3d43b57df56b58fb1",
    ],
}
SALTED = {
    "sha256": "212c5a48b6305994093ea27595471850f18a87464e7fd5d5757baaa7745b5639",
    "sha256_cbor": "6b34eefae052446391748e3de039648a84a16ca73963c333b538b6b0f92cc3f8",
}
ADAPTER_AND_IMAGE = "53f268d3bc5c45ef76aeff917832142cd42fd98ef1c9f0423409c162fd8cbea6"
SIXTY_FOUR_TOKENS = {
    "sha256": [
        "9d9c413731095d0ee811a14814414907cafccd751ce2052f659e8e1f547aeb68",
        "6eab5151ee783ec014728198ae09f5b0c20f18673ff098bcec4f29beb1e71e61",
        "caf3fc6b0a70cebaaae638e8451ab3a5afb03fba4ab9ed391dcf2e6ca4dadf06",
        "dcecb26759fe58a7e6db684cb3a4ae1c25b7b8dbff751c6aaa6d61563c41d31d",
    ],
    "sha256_cbor": [
        "15528b726efb88cb4d9efc583657a821bceb1f67307c6e813417567050a24fdc",
        "b057b31190789434ae1b5f233801e9a318f5a49e9baf90762102e4d3c29c9005",
        "4556726f5ac9636556c58b01b840d90a19e6de63d7361b063fbfcc18764d8f2f",
        "d1872d6100e1c1ff861552bc4efceaf7f53da12555de6e2c0cfcb56d48b26249",
    ],
}
SHA = ("sha256", "sha256_cbor")


def hexes(hashes) -> list[str]:
    return [h.hex() for h in hashes]


@pytest.mark.parametrize("algorithm", SHA)
class TestVectors:
    def test_none_hash(self, algorithm) -> None:
        assert none_hash(algorithm).hex() == NONE[algorithm]
        assert none_hash(algorithm, "42").hex() == NONE_42[algorithm]

    def test_a_chain(self, algorithm) -> None:
        hashes = block_hashes(range(1, 9), 4, algorithm)
        assert hexes(hashes) == EIGHT_TOKENS[algorithm]

    def test_a_longer_chain(self, algorithm) -> None:
        hashes = block_hashes(range(1000, 1064), 16, algorithm)
        assert hexes(hashes) == SIXTY_FOUR_TOKENS[algorithm]

    def test_a_seed(self, algorithm) -> None:
        assert hexes(block_hashes([1, 2, 3, 4], 4, algorithm, "42")) == [FIRST_42[algorithm]]

    def test_a_salt(self, algorithm) -> None:
        extra = request_extra_keys(cache_salt="s1")
        hashes = block_hashes([1, 2, 3, 4], 4, algorithm, extra_keys=extra)
        assert hexes(hashes) == [SALTED[algorithm]]


def test_adapter_and_image_vector() -> None:
    extra = (("lora", "ad", "/p/ad"), ("mm", "abc", 2))
    hashes = block_hashes([1, 2, 3, 4], 4, "sha256_cbor", extra_keys=lambda block: extra)
    assert hexes(hashes) == [ADAPTER_AND_IMAGE]


def test_default_algorithm_is_sha256() -> None:
    assert hexes(block_hashes(range(1, 9), 4)) == EIGHT_TOKENS["sha256"]


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [("sha256", 1882140585328457242), ("sha256_cbor", 9561501211280363793)],
)
def test_the_event_hash_of_a_first_block(algorithm, expected) -> None:
    (digest,) = block_hashes([1, 2, 3, 4], 4, algorithm)
    assert event_hash(digest) == expected


def test_the_cbor_preimage_of_a_first_block() -> None:
    """Spelt out, so that it can be written again in any language: [parent, [1, 2, 3, 4], null]."""
    preimage = bytes.fromhex(f"835820{NONE['sha256_cbor']}8401020304f6")
    assert hashlib.sha256(preimage).hexdigest() == EIGHT_TOKENS["sha256_cbor"][0]


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=40),
    st.integers(1, 9),
    st.sampled_from(SHA),
    st.text(max_size=5),
)
def test_any_text_hashes_as_a_plain_reading_of_the_definition(tokens, size, algorithm, seed):
    encode = {"sha256": partial(pickle.dumps, protocol=5), "sha256_cbor": plain_cbor}[algorithm]
    parent = hashlib.sha256(encode(seed)).digest()
    expected = []
    for start in range(0, len(tokens) - size + 1, size):
        block = (parent, tuple(tokens[start : start + size]), None)
        parent = hashlib.sha256(encode(block)).digest()
        expected.append(parent)
    assert block_hashes(tokens, size, algorithm, seed) == expected


def plain_cbor(value) -> bytes:
    """RFC 8949, of what a hash is made of: shortest heads, definite lengths."""
    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        return head(0, value)
    if isinstance(value, bytes):
        return head(2, len(value)) + value
    if isinstance(value, str):
        return head(3, len(value.encode())) + value.encode()
    return head(4, len(value)) + b"".join(map(plain_cbor, value))


def head(major: int, count: int) -> bytes:
    if count < 24:
        return bytes([major << 5 | count])
    width = next(w for w in (1, 2, 4, 8) if count < 256**w)
    return bytes([major << 5 | 23 + width.bit_length()]) + count.to_bytes(width, "big")


def test_event_hashes_are_the_last_eight_bytes() -> None:
    hashes = block_hashes(range(1000, 1064), 16)
    assert [event_hash(h) for h in hashes] == [
        7322446309363477352,
        17027874615116373601,
        2147986591436168966,
        12280578781915239197,
    ]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_partial_last_block_has_no_hash(algorithm) -> None:
    assert block_hashes([1, 2, 3], 4, algorithm) == []
    assert block_hashes(range(7), 4, algorithm) == block_hashes(range(4), 4, algorithm)


@pytest.mark.parametrize(
    ("algorithm", "size"),
    [("sha256", 32), ("sha256_cbor", 32), ("xxhash", 16), ("xxhash_cbor", 16)],
)
def test_digest_sizes(algorithm, size) -> None:
    assert len(none_hash(algorithm)) == size
    assert {len(h) for h in block_hashes(range(8), 4, algorithm)} == {size}


def test_the_algorithms_disagree() -> None:
    assert len({block_hashes(range(4), 4, algorithm)[0] for algorithm in ALGORITHMS}) == 4


def test_other_integer_types_hash_like_ints() -> None:
    class Token:
        def __init__(self, value: int) -> None:
            self.value = value

        def __index__(self) -> int:
            return self.value

    tokens = [Token(t) for t in range(1, 9)]
    assert hexes(block_hashes(tokens, 4)) == EIGHT_TOKENS["sha256"]


def test_a_token_that_is_no_integer_is_refused() -> None:
    with pytest.raises(TypeError):
        block_hashes([1.0, 2.0], 2)


def test_later_blocks_inherit_the_salt_through_their_parent() -> None:
    extra = request_extra_keys(cache_salt="s1")
    assert extra(0) == (("cache_salt", "s1"),)
    assert extra(1) is None
    salted = block_hashes(range(8), 4, extra_keys=extra)
    assert salted[1] != block_hashes(range(8), 4)[1]


def test_an_adapter_names_every_block_and_comes_before_the_salt() -> None:
    extra = request_extra_keys(lora=("ad", "/p/ad"), cache_salt="s1")
    assert extra(0) == (("lora", "ad", "/p/ad"), ("cache_salt", "s1"))
    assert extra(1) == (("lora", "ad", "/p/ad"),)


class TestChunkKeys:
    def test_a_chunk_is_named_by_its_last_hash_and_the_group(self) -> None:
        keys = chunk_keys(range(1000, 1064), 3, tokens_per_chunk=32, tokens_per_hash=16)
        digests = [bytes.fromhex(h) for h in SIXTY_FOUR_TOKENS["sha256"]]
        assert keys == [make_key(digests[1], 3), make_key(digests[3], 3)]
        assert [key_group(k) for k in keys] == [3, 3]
        assert [key_digest(k) for k in keys] == [digests[1], digests[3]]

    def test_one_hash_per_chunk(self) -> None:
        keys = chunk_keys(range(1000, 1064), 0, 16, 16, "sha256_cbor")
        assert [key_digest(k).hex() for k in keys] == SIXTY_FOUR_TOKENS["sha256_cbor"]

    def test_only_full_chunks_have_keys(self) -> None:
        assert len(chunk_keys(range(63), 0, 32, 16)) == 1
        assert chunk_keys(range(31), 0, 32, 16) == []

    def test_seed_and_extra_keys_reach_the_hashes(self) -> None:
        extra = request_extra_keys(cache_salt="s1")
        salted = chunk_keys([1, 2, 3, 4], 0, 4, 4, "sha256", extra_keys=extra)
        assert key_digest(salted[0]).hex() == SALTED["sha256"]
        seeded = chunk_keys([1, 2, 3, 4], 0, 4, 4, "sha256", "42")
        assert key_digest(seeded[0]).hex() == FIRST_42["sha256"]

    @pytest.mark.parametrize(("chunk", "per_hash"), [(24, 16), (8, 16), (0, 16)])
    def test_a_chunk_is_a_whole_number_of_hashes(self, chunk, per_hash) -> None:
        with pytest.raises(ValueError, match="multiple"):
            chunk_keys(range(64), 0, chunk, per_hash)


def test_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(KVTiersError, match="unknown hash algorithm 'md5'; use one of sha256") as e:
        none_hash("md5")
    assert e.value.kind is Kind.UNSUPPORTED


@pytest.mark.parametrize(("algorithm", "package"), [("sha256_cbor", "cbor2"), ("xxhash", "xxhash")])
def test_a_missing_package_is_named(algorithm, package, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # makes `import` fail
    with pytest.raises(KVTiersError, match=f"needs the Python package {package}") as caught:
        none_hash(algorithm)
    assert caught.value.kind is Kind.UNSUPPORTED
