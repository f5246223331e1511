"""The bytes of a segment: a header page, records, and once it is full a table of them. Pure.

Little-endian, in pages of ``PAGE_BYTES``; what is not said is zero::

    page 0          header: magic "KVTsegmt", version, sequence number, length, time, namespace
    page 1 ..       records, one after the other: an identity page (tiers/record.py) whose tag is
                    the sequence number, and the payload up to whole pages; a record without
                    payload says that the chunk was deleted
    .. last but one the table, if the segment is sealed: key, page and pages of every record
    last page       trailer: magic "KVTtable", version, sequence number, length of the table, its
                    XXH3-64

Header and trailer end with the XXH3-64 of themselves. The sequence number grows with every use of
a segment, so that what an earlier use left behind is never taken for a record of this one.
"""

import struct
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kvtiers.chunks import PAGE_BYTES, Key

VERSION = 1
FIRST_PAGE = 1
MAX_SEGMENT_PAGES = 1 << 19
"""2 GiB: a place in the index stays a small number."""

_HEADER = struct.Struct("<8sHHIQQd16s")
_TRAILER = struct.Struct("<8sHHIQQQ")
_CHECKSUM = struct.Struct("<Q")
_SECTION = struct.Struct("<HI")
_HEADER_MAGIC, _TRAILER_MAGIC = b"KVTsegmt", b"KVTtable"
_ENTRY_BYTES = 8


class Header(NamedTuple):
    """What a segment says of itself."""

    sequence: int
    segment_bytes: int
    created_at: float
    """Wall-clock seconds at which this use of the segment began."""
    namespace_id: str


class Row(NamedTuple):
    """Where a record lies. ``pages`` are those of the payload; 0: the chunk was deleted."""

    key: Key
    page: int
    pages: int


def tag(sequence: int) -> int:
    """What records of the segment carry; never 0, which means a file of its own."""
    return sequence % 0xFFFFFFFF + 1


def pages_of(nbytes: int) -> int:
    """Pages that ``nbytes`` take."""
    return -(-nbytes // PAGE_BYTES)


def pack_header(header: Header) -> bytes:
    """The first page."""
    fields = header.sequence, header.segment_bytes, header.created_at
    namespace = bytes.fromhex(header.namespace_id)
    return _sealed(_HEADER.pack(_HEADER_MAGIC, VERSION, 0, 0, *fields, namespace))


def parse_header(page: bytes | memoryview) -> Header | None:
    """What the first page says; None if it is damaged, unwritten or of another version."""
    if not _intact(page):
        return None
    magic, version, _, _, sequence, length, created_at, namespace = _HEADER.unpack_from(page)
    if magic != _HEADER_MAGIC or version != VERSION:
        return None
    return Header(sequence, length, created_at, namespace.hex())


def table_pages(key_bytes: int, rows: int, lengths: int) -> int:
    """Pages of a table of ``rows`` records whose keys have ``key_bytes`` bytes in all.

    ``lengths``: how many lengths of keys there are.
    """
    return pages_of(key_bytes + rows * _ENTRY_BYTES + lengths * _SECTION.size)


def pack_table(rows: Iterable[Row], sequence: int) -> bytes:
    """Table and trailer: what the last pages of the segment hold once it is sealed.

    Rows of one length of key stand together, so that a table is read at one go.
    """
    sections: defaultdict[int, list[Row]] = defaultdict(list)
    for row in rows:
        sections[len(row.key)].append(row)
    parts = []
    for length, members in sections.items():
        entry = _entry(length)
        parts.append(_SECTION.pack(length, len(members)))
        parts += [entry.pack(page, pages, key) for key, page, pages in members]
    table = b"".join(parts)
    fields = sequence, len(table), xxh3_64_intdigest(table)
    trailer = _sealed(_TRAILER.pack(_TRAILER_MAGIC, VERSION, 0, 0, *fields))
    return bytes(pages_of(len(table)) * PAGE_BYTES - len(table)).join((table, trailer))


def parse_trailer(page: bytes | memoryview, sequence: int) -> tuple[int, int] | None:
    """Bytes of the table and its XXH3-64; None if this use of the segment was not sealed."""
    if not _intact(page):
        return None
    magic, version, _, _, found, length, digest = _TRAILER.unpack_from(page)
    if magic != _TRAILER_MAGIC or version != VERSION or found != sequence:
        return None
    return length, digest


def parse_table(table: bytes | memoryview, digest: int) -> list[Row] | None:
    """The rows; None if the table is damaged. Deletions come after what they delete."""
    if xxh3_64_intdigest(table) != digest:
        return None
    rows: list[Row] = []
    at, end = 0, len(table)
    while at < end:
        length, count = _SECTION.unpack_from(table, at)
        entry = _entry(length)
        at += _SECTION.size
        section = table[at : at + entry.size * count]
        rows += [Row(key, page, pages) for page, pages, key in entry.iter_unpack(section)]
        at += entry.size * count
    return rows


def fits(row_pages: Sequence[int]) -> int:
    """Bytes of the smallest segment that holds records of so many payload pages each."""
    records = sum(1 + pages for pages in row_pages)
    table = table_pages(len(row_pages) * 512, len(row_pages), len(row_pages))
    return (FIRST_PAGE + records + table + 1) * PAGE_BYTES


def _entry(key_bytes: int) -> struct.Struct:
    return struct.Struct(f"<II{key_bytes}s")


def _sealed(start: bytes) -> bytes:
    body = start.ljust(PAGE_BYTES - _CHECKSUM.size, b"\0")
    return body + _CHECKSUM.pack(xxh3_64_intdigest(body))


def _intact(page: bytes | memoryview) -> bool:
    if len(page) != PAGE_BYTES:
        return False
    (expected,) = _CHECKSUM.unpack_from(page, PAGE_BYTES - _CHECKSUM.size)
    return bool(xxh3_64_intdigest(page[: PAGE_BYTES - _CHECKSUM.size]) == expected)
