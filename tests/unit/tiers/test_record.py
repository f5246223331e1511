import struct

import pytest

from kvtiers.chunks import PAGE_BYTES, Key
from kvtiers.errors import Kind, KVTiersError
from kvtiers.tiers import record

NS = "00112233445566778899aabbccddeeff"
KEY = Key(bytes(range(32)) + b"\0\0\0\7")
PAYLOAD = bytes(range(256)) * 32

# Format 1, byte for byte. If this test fails, stored caches of users stop being read: count the
# version up and keep reading this one.
GOLDEN = bytes.fromhex(
    "4b56546368756e6b"  # magic
    "0100"
    "2400"
    "00000000"  # version, length of the key
    "0020000000000000"  # length of the payload
    "072f061518a52d19"  # checksum of the payload
    "00112233445566778899aabbccddeeff"  # namespace
    "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f00000007"  # key
)
GOLDEN_CHECKSUM = "2f3d50540f7ebc90"


def test_format_is_frozen() -> None:
    page = record.pack(KEY, NS, PAYLOAD)
    assert len(page) == PAGE_BYTES
    assert page[: len(GOLDEN)].hex() == GOLDEN.hex()
    assert page[len(GOLDEN) : -8] == bytes(PAGE_BYTES - 8 - len(GOLDEN))
    assert page[-8:].hex() == GOLDEN_CHECKSUM


def test_intact_record_passes() -> None:
    assert record.verify(record.pack(KEY, NS, PAYLOAD), KEY, NS, PAYLOAD) is None


def problem(header: bytes, key: Key = KEY, ns: str = NS, payload: bytes = PAYLOAD) -> str:
    error = record.verify(header, key, ns, payload)
    assert error is not None
    assert error.kind is Kind.CORRUPT
    return str(error)


def test_every_flipped_header_byte_is_found() -> None:
    page = record.pack(KEY, NS, PAYLOAD)
    for at in range(PAGE_BYTES):
        bad = bytearray(page)
        bad[at] ^= 1
        assert problem(bytes(bad))


@pytest.mark.parametrize("at", [0, 1, 4095, 4096, len(PAYLOAD) - 1])
def test_flipped_payload_byte_is_found(at: int) -> None:
    bad = bytearray(PAYLOAD)
    bad[at] ^= 128
    assert "payload is damaged" in problem(record.pack(KEY, NS, PAYLOAD), payload=bytes(bad))


def test_each_field_is_named() -> None:
    page = record.pack(KEY, NS, PAYLOAD)
    assert "header is short: 100" in problem(page[:100])
    assert "no kvtiers chunk" in problem(bytes(PAGE_BYTES))
    assert "foreign key" in problem(page, key=Key(b"x" * 36))
    assert "foreign namespace" in problem(page, ns="f" * 32)
    more = problem(record.pack(KEY, NS, PAYLOAD[:4096]))
    assert f"the stored payload is long: {len(PAYLOAD)} bytes instead of 4096" in more
    less = problem(page, payload=PAYLOAD[:904])
    assert f"the stored payload is short: 904 bytes instead of {len(PAYLOAD)}" in less


def test_unknown_version_is_refused_in_plain_words() -> None:
    page = bytearray(record.pack(KEY, NS, PAYLOAD))
    struct.pack_into("<H", page, 8, 2)
    assert "format version 2, this kvtiers reads version 1" in problem(bytes(page))


def test_parse_names_what_is_stored() -> None:
    found = record.parse(record.pack(KEY, NS, PAYLOAD))
    assert isinstance(found, record.Record)
    assert (found.key, found.namespace_id, found.payload_bytes) == (KEY, NS, len(PAYLOAD))


def test_key_that_does_not_fit_is_refused() -> None:
    with pytest.raises(KVTiersError, match="513 bytes"):
        record.pack(Key(b"k" * 513), NS, PAYLOAD)
