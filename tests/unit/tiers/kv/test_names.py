from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from kvtiers.chunks import make_key
from kvtiers.tiers.kv.names import Names

NAMES = Names("p", "0" * 32)


@given(st.binary(max_size=64), st.integers(0, (1 << 32) - 1))
def test_a_name_says_which_chunk_it_is(digest: bytes, group: int) -> None:
    key = make_key(digest, group)
    assert NAMES.key(NAMES.of(key)) == key


def test_other_names_are_of_no_chunk() -> None:
    start = b"p:" + b"0" * 32 + b":"
    for rest in (
        b"manifest",
        b"",
        b"ab",
        b"abc-g1",
        b"AB-g1",
        b"ab-g01",
        b"ab-g1 ",
        b"ab-g9999999999",
    ):
        assert NAMES.key(start + rest) is None
    assert NAMES.key(b"q" + start[1:] + b"ab-g1") is None
    assert NAMES.key(start + b"ab-g1") == make_key(b"\xab", 1)


def test_chunks_of_a_namespace_spread_over_the_slots_of_a_cluster() -> None:
    slots = {key_slot(NAMES.of(make_key(n.to_bytes(32, "big"), 0))) for n in range(200)}
    assert len(slots) > 190
