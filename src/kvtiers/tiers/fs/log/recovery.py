"""What a segment holds: from its table if it was sealed, else by looking at every page.

Used by the owner when it opens a log and by tools beside it: nothing is written here.
"""

from collections.abc import Container, Iterator

from kvtiers.chunks import PAGE_BYTES
from kvtiers.tiers.fs.log import format as fmt
from kvtiers.tiers.fs.log.format import (
    FIRST_PAGE,
    MAX_CHUNK_PAGES,
    MAX_SEGMENT_PAGES,
    Header,
    Row,
)
from kvtiers.tiers.fs.log.segment import SegmentFiles, pages

_WINDOW_PAGES = 2048
"""8 MiB are read at a time."""
_HEADS_WINDOW_PAGES = 64
"""Between two heads there may be 16 MiB that nobody wants."""


def read_table(files: SegmentFiles, number: int, header: Header) -> list[Row] | None:
    """The rows of a sealed segment; None if it is not sealed, or its table is damaged."""
    end = header.segment_bytes // PAGE_BYTES
    last = files.read_pages(number, end - 1, 1)
    found = None if last is None else fmt.parse_trailer(last, header.sequence)
    if found is None:
        return None
    length, digest = found
    count = fmt.pages_of(length)
    if count >= end - 1:
        return None
    table = files.read_pages(number, end - 1 - count, count) if count else memoryview(b"")
    rows = None if table is None else fmt.parse_table(table[:length], digest)
    return rows if rows is not None and _inside(rows, end) else None


def scan_segment(files: SegmentFiles, number: int, header: Header) -> list[Row]:
    """The whole, undamaged chunks of this use of the segment, in the order of their pages.

    A write that was under way when its process died leaves a gap; what lies behind it counts, and
    what the next owner put into it: so it goes on behind what is whole, not behind what is torn.
    """
    return [row for _, rows in heads(files, number, header) for row in rows or ()]


def heads(
    files: SegmentFiles, number: int, header: Header, table: Container[Row] | None = None
) -> Iterator[tuple[memoryview, list[Row] | None]]:
    """Each page where a head may begin, and the rows that count if one does.

    Those do that are in ``table``; without one those whose chunks are whole.
    """
    ahead = _WINDOW_PAGES if table is None else _HEADS_WINDOW_PAGES
    window, page = _Window(files, number, pages_in(header), ahead), FIRST_PAGE
    namespace = bytes.fromhex(header.namespace_id)
    while (first := window.at(page, 1)) is not None:
        rows = _head(window, page, first, header.sequence)
        if rows is not None and _inside(rows, pages_in(header)):
            rows = [
                row
                for row in rows
                if (_whole(window, row, namespace) if table is None else row in table)
            ]
            yield first, rows
            page = max(page + 1, fmt.end_of(rows))
        else:
            yield first, None
            page += 1


def pages_in(header: Header) -> int:
    """Pages of the segment."""
    return header.segment_bytes // PAGE_BYTES


def _head(window: "_Window", page: int, first: memoryview, sequence: int) -> list[Row] | None:
    count = fmt.parse_head_start(first, sequence)
    head = None if count is None else window.at(page, count)
    return None if head is None else fmt.parse_head(head)


def _whole(window: "_Window", row: Row, namespace: bytes) -> bool:
    key, page, nbytes, checksum = row
    payload = window.at(page, fmt.pages_of(nbytes))
    if payload is None:
        return False
    return not nbytes or fmt.checksum(namespace, key, payload) == checksum


def _inside(rows: list[Row], end: int) -> bool:
    """Whether all of it lies in the segment: rows may be forged, or of a future version."""
    first = min((page for _, page, _, _ in rows), default=FIRST_PAGE)
    longest = max((nbytes for _, _, nbytes, _ in rows), default=0)
    fits = fmt.pages_of(longest) <= MAX_CHUNK_PAGES
    return fits and first >= FIRST_PAGE and fmt.end_of(rows) < end


class _Window:
    """Pages of one segment, read ahead."""

    def __init__(self, files: SegmentFiles, number: int, end: int, ahead: int) -> None:
        self._files, self._number, self._end, self._ahead = files, number, end, ahead
        self._first, self._data = 0, memoryview(b"")

    def at(self, page: int, count: int) -> memoryview | None:
        """``count`` pages from ``page`` on; None beyond the end."""
        if page + count > self._end:
            return None
        start = (page - self._first) * PAGE_BYTES
        if start < 0 or start + count * PAGE_BYTES > len(self._data):
            length = min(self._end - page, max(count, self._ahead))
            data = pages(length) if length else memoryview(b"")
            if length and not self._files.read(self._number, page, [data]):
                return None
            self._first, self._data, start = page, data, 0
        return self._data[start : start + count * PAGE_BYTES]


def rows_of(files: SegmentFiles, number: int, header: Header) -> tuple[list[Row], bool]:
    """What the segment holds, and whether it is sealed."""
    rows = read_table(files, number, header)
    return (scan_segment(files, number, header), False) if rows is None else (rows, True)


def headers(files: SegmentFiles) -> Iterator[tuple[int, int, Header | None]]:
    """Number, length and header of every segment; no header: it holds nothing."""
    for number, nbytes in sorted(files.numbers().items()):
        yield number, nbytes, header_of(files, number, nbytes)


def header_of(files: SegmentFiles, number: int, nbytes: int) -> Header | None:
    """The header of a segment of this length; None if it holds nothing that could be used."""
    if not PAGE_BYTES <= nbytes <= MAX_SEGMENT_PAGES * PAGE_BYTES:
        return None
    header = files.header(number)
    return None if header is None or header.segment_bytes != nbytes else header
