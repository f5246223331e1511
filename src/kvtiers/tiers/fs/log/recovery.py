"""What a segment holds: from its table if it was sealed, else by looking at every page.

Used by the owner when it opens a log and by tools beside it: nothing is written here.
"""

from collections.abc import Iterator

from xxhash import xxh3_64_intdigest

from kvtiers.chunks import PAGE_BYTES
from kvtiers.tiers import record
from kvtiers.tiers.fs.log import format as fmt
from kvtiers.tiers.fs.log.format import FIRST_PAGE, Header, Row
from kvtiers.tiers.fs.log.segment import SegmentFiles, pages
from kvtiers.tiers.record import Record

_WINDOW_PAGES = 2048
"""8 MiB are read at a time."""


def read_table(files: SegmentFiles, number: int, header: Header) -> list[Row] | None:
    """The rows of a sealed segment; None if it is not sealed, or its table is damaged."""
    end = header.segment_bytes // PAGE_BYTES
    last = files.read_pages(number, end - 1, 1)
    found = None if last is None else fmt.parse_trailer(last, header.sequence)
    if found is None:
        return None
    length, digest = found
    count = fmt.pages_of(length)
    if not 0 <= count < end - 1:
        return None
    table = files.read_pages(number, end - 1 - count, count) if count else memoryview(b"")
    return None if table is None else fmt.parse_table(table[:length], digest)


def scan_segment(files: SegmentFiles, number: int, header: Header) -> list[Row]:
    """The whole, undamaged records of this use of the segment, in the order of their pages.

    A write that was under way when its process died leaves a gap; what lies behind it counts.
    """
    tag = fmt.tag(header.sequence)
    rows: list[Row] = []
    window = _Window(files, number, header.segment_bytes // PAGE_BYTES)
    page = FIRST_PAGE
    while (data := window.at(page, 1)) is not None:
        found = _record(data, header.namespace_id, tag)
        payload = None if found is None else window.at(page + 1, fmt.pages_of(found.payload_bytes))
        if found is None or payload is None or not _whole(found, payload):
            page += 1
            continue
        rows.append(Row(found.key, page, fmt.pages_of(found.payload_bytes)))
        page += 1 + rows[-1].pages
    return rows


def _record(page: memoryview, namespace_id: str, tag: int) -> Record | None:
    """What an identity page of this use says; None if the page is none."""
    if page[:8] != record.MAGIC:
        return None
    found = record.parse(bytes(page))
    if not isinstance(found, Record) or found.tag != tag or found.namespace_id != namespace_id:
        return None
    return found


def _whole(found: Record, payload: memoryview) -> bool:
    return bool(xxh3_64_intdigest(payload[: found.payload_bytes]) == found.payload_xxh3)


class _Window:
    """Pages of one segment, read ahead."""

    def __init__(self, files: SegmentFiles, number: int, end: int) -> None:
        self._files, self._number, self._end = files, number, end
        self._first, self._data = 0, memoryview(b"")

    def at(self, page: int, count: int) -> memoryview | None:
        """``count`` pages from ``page`` on; None beyond the end."""
        if count < 0 or page + count > self._end:
            return None
        start = (page - self._first) * PAGE_BYTES
        if start < 0 or start + count * PAGE_BYTES > len(self._data):
            length = min(self._end - page, max(count, _WINDOW_PAGES))
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
        header = files.header(number) if nbytes >= PAGE_BYTES else None
        if header is not None and header.segment_bytes != nbytes:
            header = None
        yield number, nbytes, header
