"""The bytes of a segment: a header page, runs of chunks, and once it is full a table. Pure.

Little-endian, in pages of ``PAGE_BYTES``; what is not said is zero::

    page 0          header: magic "KVTsegmt", version, sequence number, length, time, namespace
    page 1 ..       runs, one after the other, each written by one call: a head, then the payloads
                    in its order, each up to whole pages
    .. last but one if the segment is sealed: the table, the rows of all runs
    last page       if the segment is sealed: trailer, magic "KVTtable"

Head and table are lists of rows - key, page of the payload, bytes, checksum - under a magic, the
sequence number and the XXH3-64 of the rows. No bytes: the chunk was deleted, and in the place of
the checksum stands the last position that is meant: what was written later counts. The checksum is
the XXH3-64 of the payload's pages, seeded with that of namespace and key: bytes of another chunk
never pass for this one. The sequence number grows with every use of a segment, so that what an
earlier use left behind is never taken for a part of this one.
"""

import math
import struct
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

from xxhash import xxh3_64_intdigest

from kvtiers.chunks import PAGE_BYTES, Key
from kvtiers.tiers.record import MAX_KEY_BYTES

VERSION = 1
FIRST_PAGE = 1
MAX_SEGMENT_PAGES = 1 << 19
"""2 GiB: a location in the index stays a small number."""
MAX_CHUNK_PAGES = (1 << 18) - 1
"""A page less than 1 GiB, for the same reason."""
_MAX_SEQUENCE = 1 << 44
"""No log comes near it: a larger one is forged, and would leave no number for the next use."""
MAX_ROWS = 256
"""Of a run: so many payloads go into one vectored call."""

_HEADER = struct.Struct("<8sHHIQQd16s")
_LIST = struct.Struct("<8sHHIQQQ16s")
_CHECKSUM = struct.Struct("<Q")
_SECTION = struct.Struct("<HI")
_ROW_BYTES = 16
_HEADER_MAGIC, _HEAD_MAGIC, _TRAILER_MAGIC = b"KVTsegmt", b"KVTrunhd", b"KVTtable"


class Header(NamedTuple):
    """What a segment says of itself."""

    sequence: int
    segment_bytes: int
    created_at: float
    """Wall-clock seconds at which this use of the segment began."""
    namespace_id: str


Row = tuple[Key, int, int, int]
"""Key, page of the payload, its bytes, its checksum.

No bytes: the chunk was deleted as far as it lay at the position that stands for the checksum, or
before it. A plain tuple, as ``struct`` makes them: a million are read when a log is opened.
"""


def pages_of(nbytes: int) -> int:
    """Pages that ``nbytes`` take."""
    return -(-nbytes // PAGE_BYTES)


def position(sequence: int, page: int) -> int:
    """Where a payload lies in the order in which the log was given out: later is larger."""
    return sequence * MAX_SEGMENT_PAGES + page


def checksum(namespace: bytes, key: Key, pages: memoryview | bytes) -> int:
    """What vouches for ``pages`` as the chunk ``key`` of ``namespace`` (16 bytes)."""
    return int(xxh3_64_intdigest(pages, seed=xxh3_64_intdigest(namespace + key)))


def pack_header(header: Header) -> bytes:
    """The first page."""
    fields = header.sequence, header.segment_bytes, header.created_at
    namespace = bytes.fromhex(header.namespace_id)
    return _sealed(_HEADER.pack(_HEADER_MAGIC, VERSION, 0, 0, *fields, namespace))


def parse_header(page: bytes | memoryview) -> Header | None:
    """What the first page says; None if it is damaged, unwritten or of another version.

    Nor is it one if it claims what no segment is: its file would be made as long as it says.
    """
    if not _intact(page):
        return None
    magic, version, _, _, sequence, length, created_at, namespace = _HEADER.unpack_from(page)
    if magic != _HEADER_MAGIC or version != VERSION:
        return None
    pages, odd = divmod(length, PAGE_BYTES)
    if odd or not FIRST_PAGE < pages <= MAX_SEGMENT_PAGES or sequence >= _MAX_SEQUENCE:
        return None
    if not math.isfinite(created_at):
        return None
    return Header(sequence, length, created_at, namespace.hex())


def header_version(page: bytes | memoryview) -> int | None:
    """The version of the log that wrote this first page; None if it is no sound one."""
    magic, version = _HEADER.unpack_from(page)[:2]
    return int(version) if _intact(page) and magic == _HEADER_MAGIC else None


def row_bytes(key_bytes: int) -> int:
    """Bytes of the row of a key of this length."""
    return _ROW_BYTES + key_bytes


def head_pages(rows_bytes: int, lengths: int) -> int:
    """Pages of a head with so many bytes of rows, whose keys are of so many lengths."""
    return pages_of(_LIST.size + _CHECKSUM.size + rows_bytes + lengths * _SECTION.size)


def table_pages(rows_bytes: int, lengths: int) -> int:
    """Pages of a table, and its trailer, with so many bytes of rows and lengths of keys."""
    return pages_of(rows_bytes + lengths * _SECTION.size) + 1


def pack_head(rows: Sequence[Row], sequence: int) -> bytes:
    """The head of a run: whole pages."""
    packed = _pack_rows(rows)
    start = _pack_list(_HEAD_MAGIC, len(rows), sequence, packed)
    head = start + _CHECKSUM.pack(xxh3_64_intdigest(start)) + packed
    return head.ljust(pages_of(len(head)) * PAGE_BYTES, b"\0")


def parse_head_start(page: bytes | memoryview, sequence: int) -> int | None:
    """Pages of the head that begins with ``page``; None if no head of this use does."""
    if page[:8] != _HEAD_MAGIC:
        return None
    end = _LIST.size
    (expected,) = _CHECKSUM.unpack_from(page, end)
    if xxh3_64_intdigest(page[:end]) != expected:
        return None
    _, version, _, _, found, length, _, _ = _LIST.unpack_from(page)
    return head_pages(length, 0) if version == VERSION and found == sequence else None


def parse_head(head: bytes | memoryview) -> list[Row] | None:
    """The rows of a head whose first page is sound; None if they are damaged."""
    length, digest = _LIST.unpack_from(head)[5:7]
    start = _LIST.size + _CHECKSUM.size
    return _parse_rows(head[start : start + length], digest)


def damaged_head(page: bytes | memoryview, sequence: int) -> bool:
    """Whether a head of this use began here and is one no more.

    Pages are written whole, so a write that was cut off leaves no such one. It does of a head of
    several pages, which is therefore never called damaged for what is behind its first.
    """
    if page[:8] != _HEAD_MAGIC:
        return False
    (expected,) = _CHECKSUM.unpack_from(page, _LIST.size)
    if xxh3_64_intdigest(page[: _LIST.size]) != expected:
        return True
    one = parse_head_start(page, sequence) == 1
    return one and parse_head(page) is None


def pack_table(rows: Iterable[Row], sequence: int) -> bytes:
    """Table and trailer: what the last pages of the segment hold once it is sealed."""
    rows = list(rows)
    table = _pack_rows(rows)
    trailer = _sealed(_pack_list(_TRAILER_MAGIC, len(rows), sequence, table))
    return table.ljust(pages_of(len(table)) * PAGE_BYTES, b"\0") + trailer


def parse_trailer(page: bytes | memoryview, sequence: int) -> tuple[int, int] | None:
    """Bytes of the table and its XXH3-64; None if this use of the segment was not sealed."""
    if not _intact(page):
        return None
    magic, version, _, _, found, length, digest, _ = _LIST.unpack_from(page)
    if magic != _TRAILER_MAGIC or version != VERSION or found != sequence:
        return None
    return length, digest


def is_trailer(page: bytes | memoryview) -> bool:
    """Whether this last page is sound, of whatever use of the segment."""
    return _intact(page) and page[:8] == _TRAILER_MAGIC


def parse_table(table: bytes | memoryview, digest: int) -> list[Row] | None:
    """The rows; None if the table is damaged. Deletions come after what they delete."""
    return _parse_rows(table, digest)


def _pack_list(magic: bytes, count: int, sequence: int, rows: bytes) -> bytes:
    digest = xxh3_64_intdigest(rows)
    return _LIST.pack(magic, VERSION, 0, count, sequence, len(rows), digest, bytes(16))


def _pack_rows(rows: Iterable[Row]) -> bytes:
    """Rows of one length of key stand together, so that they are read at one go."""
    sections: defaultdict[int, list[Row]] = defaultdict(list)
    for row in rows:
        sections[len(row[0])].append(row)
    parts = []
    for length, members in sections.items():
        pack = _row(length).pack
        parts.append(_SECTION.pack(length, len(members)))
        parts += [pack(*row) for row in members]
    return b"".join(parts)


def _parse_rows(packed: bytes | memoryview, digest: int) -> list[Row] | None:
    if xxh3_64_intdigest(packed) != digest:
        return None
    rows: list[Row] = []
    at, end = 0, len(packed)
    while at < end:
        if end - at < _SECTION.size:
            return None
        length, count = _SECTION.unpack_from(packed, at)
        row = _row(length)
        at += _SECTION.size
        if length > MAX_KEY_BYTES or row.size * count > end - at:
            return None  # it is as it was written, by nobody of ours
        rows += cast("Iterable[Row]", row.iter_unpack(packed[at : at + row.size * count]))
        at += row.size * count
    return rows


def end_of(rows: Iterable[Row]) -> int:
    """The page behind the last payload."""
    ends = (page + (nbytes + PAGE_BYTES - 1) // PAGE_BYTES for _, page, nbytes, _ in rows)
    return max(ends, default=FIRST_PAGE)


def fits(chunk_pages: int, chunks: int) -> int:
    """Bytes of the smallest segment that holds so many chunks, whatever their keys."""
    rows = row_bytes(MAX_KEY_BYTES)
    head, table = head_pages(rows, 1), table_pages(rows * chunks, chunks)
    return (FIRST_PAGE + chunks * (head + chunk_pages) + table) * PAGE_BYTES


def _row(key_bytes: int) -> struct.Struct:
    return struct.Struct(f"<{key_bytes}sIIQ")


def _sealed(start: bytes) -> bytes:
    body = start.ljust(PAGE_BYTES - _CHECKSUM.size, b"\0")
    return body + _CHECKSUM.pack(xxh3_64_intdigest(body))


def _intact(page: bytes | memoryview) -> bool:
    if len(page) != PAGE_BYTES:
        return False
    (expected,) = _CHECKSUM.unpack_from(page, PAGE_BYTES - _CHECKSUM.size)
    return bool(xxh3_64_intdigest(page[: PAGE_BYTES - _CHECKSUM.size]) == expected)
