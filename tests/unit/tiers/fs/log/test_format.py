"""The bytes of a segment: what was packed is parsed; what is damaged is nothing."""

import pytest

from kvtiers.chunks import PAGE_BYTES
from kvtiers.tiers.fs.log import format as fmt
from kvtiers.tiers.fs.log.format import Header
from tests.unit.tiers.tier_kit import key

NAMESPACE = "00112233445566778899aabbccddeeff"
HEADER = Header(7, 1 << 20, 1_700_000_000.5, NAMESPACE)
ROWS = [(key(1), 3, 8192, 1 << 63), (key(2)[:9], 5, 1, 5), (key(3), 6, 0, 0)]


def flips(data: bytes, step: int):
    for at in range(0, len(data), step):
        yield data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_a_header_says_what_it_was_given():
    assert fmt.parse_header(fmt.pack_header(HEADER)) == HEADER


def test_no_bit_of_a_header_may_change():
    page = fmt.pack_header(HEADER)
    assert all(fmt.parse_header(damaged) is None for damaged in flips(page, 37))
    assert fmt.parse_header(bytes(PAGE_BYTES)) is None
    assert fmt.parse_header(page[:-1]) is None


def test_a_head_says_what_it_was_given():
    head = fmt.pack_head(ROWS, 7)
    assert fmt.parse_head_start(head[:PAGE_BYTES], 7) == len(head) // PAGE_BYTES == 1
    assert sorted(fmt.parse_head(head)) == sorted(ROWS)


def test_a_long_head_has_the_pages_that_were_foreseen():
    rows = [(key(n), n, 4096, n) for n in range(fmt.MAX_ROWS)]
    head = fmt.pack_head(rows, 1)
    rows_bytes = len(rows) * fmt.row_bytes(len(key(0)))
    assert len(head) // PAGE_BYTES == fmt.head_pages(rows_bytes, 1) > 1
    assert fmt.parse_head(head) == rows


def test_a_head_of_another_use_is_none():
    assert fmt.parse_head_start(fmt.pack_head(ROWS, 7)[:PAGE_BYTES], 8) is None


def test_a_damaged_head_is_none():
    head = fmt.pack_head(ROWS, 7)
    used = 8 + 56 + 8 + 3 * 40
    for damaged in flips(head[:used] + head[used:], 11):
        if damaged[:used] != head[:used]:
            sound = fmt.parse_head_start(damaged[:PAGE_BYTES], 7) is not None
            assert not sound or fmt.parse_head(damaged) is None


def test_a_table_says_what_it_was_given_and_ends_with_the_trailer():
    table = fmt.pack_table(ROWS, 7)
    length, digest = fmt.parse_trailer(table[-PAGE_BYTES:], 7)
    assert sorted(fmt.parse_table(table[:length], digest)) == sorted(ROWS)
    assert fmt.parse_table(table[: length - 1] + b"x", digest) is None
    assert fmt.parse_trailer(table[-PAGE_BYTES:], 8) is None
    assert fmt.parse_table(b"", fmt.parse_trailer(fmt.pack_table([], 7)[-PAGE_BYTES:], 7)[1]) == []


def test_deletions_stay_behind_what_they_delete():
    rows = [(key(1), 3, 8192, 5), (key(1), 9, 0, 0), (key(1), 12, 8192, 6)]
    table = fmt.pack_table(rows, 1)
    length, digest = fmt.parse_trailer(table[-PAGE_BYTES:], 1)
    assert fmt.parse_table(table[:length], digest) == rows


@pytest.mark.parametrize("other", ["namespace", "key", "bytes"])
def test_a_checksum_is_of_one_chunk_alone(other):
    namespace, name, data = bytes(16), key(1), bytes(4096)
    changed = {
        "namespace": (b"\1" + namespace[1:], name, data),
        "key": (namespace, key(2), data),
        "bytes": (namespace, name, b"\1" + data[1:]),
    }[other]
    assert fmt.checksum(namespace, name, data) != fmt.checksum(*changed)
