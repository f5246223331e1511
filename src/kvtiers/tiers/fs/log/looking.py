"""What a log holds, for who does not own it: segments come, go and change meanwhile."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvtiers.chunks import PAGE_BYTES, Key
from kvtiers.tiers.base import Entry
from kvtiers.tiers.fs.log import recovery
from kvtiers.tiers.fs.log.format import Header
from kvtiers.tiers.fs.log.index import LogIndex
from kvtiers.tiers.fs.log.segment import SegmentFiles

Complain = Callable[[str], None]
Looked = tuple[int, int, Header | None]
"""Number, length and header of a segment; no header: it holds nothing."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A namespace as it was when it was looked at."""

    headers: Mapping[int, Header]
    """Of its segments, by number."""
    index: LogIndex

    def entry(self, key: Key) -> Entry | None:
        """The chunk; used when its segment was begun."""
        at = self.index.find(key)
        if at is None:
            return None
        return Entry(key, at.pages * PAGE_BYTES, self.headers[at.segment].created_at)


def headers(files: SegmentFiles, complain: Complain) -> list[Looked]:
    """Every segment that can be read."""
    try:
        numbers = sorted(files.numbers().items())
    except FileNotFoundError:
        return []
    except OSError as e:
        complain(f"{files.folder} cannot be listed: {e.strerror}")
        return []
    found: list[Looked] = []
    for number, nbytes in numbers:
        try:
            found.append((number, nbytes, recovery.header_of(files, number, nbytes)))
        except FileNotFoundError:
            continue  # it left meanwhile
        except OSError as e:
            complain(f"{files.path(number)} cannot be read: {e.strerror}")
    return found


def look(
    files: SegmentFiles, found: Sequence[Looked], namespace_id: str, complain: Complain
) -> Snapshot:
    """The chunks of a namespace, from the tables of its segments or by looking at every page."""
    index = LogIndex()
    ours = {
        number: header
        for number, _, header in found
        if header is not None and header.namespace_id == namespace_id
    }
    for number, header in sorted(ours.items(), key=lambda pair: pair[1].sequence):
        try:
            rows, _ = recovery.rows_of(files, number, header)
        except FileNotFoundError:
            continue
        except OSError as e:
            complain(f"{files.path(number)} cannot be read: {e.strerror}")
            continue
        index.put(number, header.sequence, rows)
    return Snapshot(ours, index)
