import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvtiers.chunks import PAGE_BYTES, Key, make_key
from kvtiers.errors import Kind, KVTiersError
from kvtiers.tiers import record
from kvtiers.tiers.obj import packs
from kvtiers.tiers.obj.packs import Packed

NS = "00112233445566778899aabbccddeeff"
A, B = make_key(bytes(range(32)), 0), make_key(bytes(range(1, 33)), 7)
ENTRIES = packs.lay_out([A, B], [4096, 8192])

# Format 1, byte for byte. If this test fails, stored caches of users stop being read: count the
# version up and keep reading this one.
GOLDEN = bytes.fromhex(
    "4b56547061636b00"  # magic
    "0100" "0000" "02000000"  # version, entries
    "00112233445566778899aabbccddeeff"  # namespace
    "0060000000000000"  # length of the pack
    "0010000000000000" "0020000000000000" "2400"  # offset and length of a record, of its key
    "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f00000000"
    "0030000000000000" "0030000000000000" "2400"
    "0102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f2000000007"
)  # fmt: skip


def test_format_is_frozen():
    front = packs.pack_front(NS, ENTRIES)
    assert len(front) == PAGE_BYTES
    assert front[: len(GOLDEN)].hex() == GOLDEN.hex()
    assert front[len(GOLDEN) : -8] == bytes(PAGE_BYTES - 8 - len(GOLDEN))
    assert front[-8:] == struct.pack("<Q", xxh3_64_intdigest(front[:-8]))


keys = st.lists(st.binary(min_size=4, max_size=60).map(Key), unique=True, max_size=300)


@given(keys, st.data())
def test_a_front_says_where_everything_lies(found, data):
    sizes = data.draw(st.lists(st.integers(0, 1 << 30), min_size=len(found), max_size=len(found)))
    entries = packs.lay_out(found, sizes)
    front = packs.pack_front(NS, entries)
    assert packs.parse_front(front, NS) == entries
    assert len(front) == packs.front_pages(found) * PAGE_BYTES
    at = len(front)
    for entry, size in zip(entries, sizes, strict=True):
        assert (entry.offset, entry.payload_bytes) == (at, size)
        at += entry.length


def test_what_is_gone_has_no_length():
    front = packs.pack_front(NS, packs.gone([A, B]))
    assert packs.parse_front(front, NS) == [Packed(A, 0, 0), Packed(B, 0, 0)]


def problem(front, namespace=NS):
    error = packs.parse_front(front, namespace)
    assert isinstance(error, KVTiersError)
    assert error.kind is Kind.CORRUPT
    return str(error)


def test_every_flipped_byte_is_found():
    front = packs.pack_front(NS, ENTRIES)
    for at in range(len(front)):
        bad = bytearray(front)
        bad[at] ^= 1
        assert problem(bytes(bad))


@pytest.mark.parametrize("length", [0, 1, 40, PAGE_BYTES - 1, PAGE_BYTES + 1])
def test_a_short_front_is_found(length):
    assert "short" in problem(packs.pack_front(NS, ENTRIES).ljust(length, b"\0")[:length])


def test_a_foreign_one_is_found():
    assert "foreign namespace" in problem(packs.pack_front(NS, ENTRIES), "f" * 32)
    assert "no pack" in problem(bytes(PAGE_BYTES))


def test_another_version_says_what_to_do():
    front = bytearray(packs.pack_front(NS, ENTRIES))
    front[8] = 2
    assert "version 2, this kvtiers reads version 1: use the kvtiers" in problem(bytes(front))


@pytest.mark.parametrize(
    "entry",
    [
        Packed(A, 0, 8192),  # in the front
        Packed(A, PAGE_BYTES, 100),  # shorter than an identity page
    ],
)
def test_a_front_that_contradicts_itself_is_no_guide(entry):
    assert "contradicts itself" in problem(packs.pack_front(NS, [entry]))


def test_a_count_beyond_the_front_is_no_guide():
    front = bytearray(packs.pack_front(NS, ENTRIES))
    front[12:16] = struct.pack("<I", 10_000)
    front[-8:] = struct.pack("<Q", xxh3_64_intdigest(bytes(front[:-8])))
    assert "contradicts itself" in problem(bytes(front))


def test_a_key_without_room_is_refused():
    with pytest.raises(KVTiersError, match="cannot be stored") as caught:
        packs.pack_front(NS, packs.gone([Key(bytes(record.MAX_KEY_BYTES + 1))]))
    assert caught.value.kind is Kind.UNSUPPORTED
