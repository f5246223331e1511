"""What was used of a segment that leaves: written again, into at most a quarter of another one.

This is the second chance of CLOCK (Corbato 1968), by the segment.
"""

from collections.abc import Sequence
from itertools import accumulate

from kvtiers.chunks import PAGE_BYTES, Key
from kvtiers.tiers.fs.log import format as fmt
from kvtiers.tiers.fs.log.core import LogCore
from kvtiers.tiers.fs.log.index import Location
from kvtiers.tiers.fs.log.pool import Segment
from kvtiers.tiers.fs.log.reading import runs
from kvtiers.tiers.fs.log.segment import pages

_SURVIVORS = 0.25
"""The part of a segment that may be written again when it leaves: the rest is room."""


def write_again(core: LogCore, victim: Segment) -> None:
    """Copy used chunks of ``victim`` to the active segment, as long as it has room."""
    room = int(fmt.pages_of(victim.nbytes) * _SURVIVORS)
    with core.lock:
        used = set(core.index.used_in(victim.number, victim.keys))  # keys may recur
    for run in runs(sorted(used)):
        sizes = accumulate(at.pages for at, _ in run)
        part = [chunk for chunk, size in zip(run, sizes, strict=True) if size <= room]
        room -= sum(at.pages for at, _ in part)
        if not part or not _copy(core, victim, part):
            break


def _copy(core: LogCore, victim: Segment, run: Sequence[tuple[Location, Key]]) -> bool:
    """Whether there was room for all. Damaged chunks are left behind."""
    first, last = run[0][0], run[-1][0]
    try:
        buffer = pages(last.page + last.pages - first.page)
        if not core.files.read(victim.number, first.page, [buffer]):
            return True
    except OSError:
        return True
    sound: list[tuple[Key, memoryview]] = []
    for at, key in run:
        start = (at.page - first.page) * PAGE_BYTES
        payload = buffer[start : start + at.pages * PAGE_BYTES]
        if fmt.checksum(core.namespace, key, payload) == at.checksum:
            sound.append((key, payload))
    whole: Sequence[tuple[Key, memoryview]] = sound
    while whole:
        whole, found = core.find_room_for_copies(whole)
        if found is None:
            return not whole
        segment, written = found
        part, whole = whole[: len(written.rows)], whole[len(written.rows) :]
        payloads = [payload for _, payload in part]
        if core.append(segment, written, payloads, moved=True) is not None:
            return False
    return True
