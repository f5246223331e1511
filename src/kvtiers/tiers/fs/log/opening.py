"""Opening a log: how long its segments are, what they hold, and where it goes on."""

import contextlib
from collections.abc import Iterable, Sequence

from kvtiers.chunks import PAGE_BYTES
from kvtiers.errors import KVTiersError
from kvtiers.tiers.base import StoreContext
from kvtiers.tiers.fs.capacity import key_of, resolve
from kvtiers.tiers.fs.folders import unusable
from kvtiers.tiers.fs.log import format as fmt
from kvtiers.tiers.fs.log import ownership, recovery
from kvtiers.tiers.fs.log.core import LogCore
from kvtiers.tiers.fs.log.format import Header, Row
from kvtiers.tiers.fs.log.pool import Pool, Segment
from kvtiers.tiers.fs.log.roller import Roller
from kvtiers.tiers.fs.log.segment import SegmentFiles, pages
from kvtiers.tiers.options import require

LEAST_SEGMENTS = 4
LEAST_CHUNKS = 4
"""Chunks of the largest kind that a segment holds at least."""
_SEGMENTS, _MAX_SEGMENTS = 64, 4096
_MOST_SEGMENT_BYTES = 256 << 20


def segment_bytes_for(capacity_bytes: int, chunk_bytes: int) -> int:
    """The length of segments that suits a capacity: 1/64 of it, 256 MiB at most.

    Longer where there would be above 4096, or a segment held fewer than four chunks.
    """
    least = least_segment_bytes(chunk_bytes)
    fit = max(least, min(capacity_bytes // _SEGMENTS, _MOST_SEGMENT_BYTES))
    fit = min(max(fit, capacity_bytes // _MAX_SEGMENTS), fmt.MAX_SEGMENT_PAGES * PAGE_BYTES)
    return fit // PAGE_BYTES * PAGE_BYTES


def least_segment_bytes(chunk_bytes: int) -> int:
    """The shortest segment that there is for such chunks: four of them, or as many as go in."""
    least = fmt.fits(fmt.pages_of(chunk_bytes), LEAST_CHUNKS)
    return min(least, fmt.MAX_SEGMENT_PAGES * PAGE_BYTES)


def bound_of_log(
    context: StoreContext, root: str, capacity_bytes: int | None, capacity_fraction: float | None
) -> int:
    """The bound in bytes of a root of layout ``log``, which need not be there yet.

    Raises ConfigError, naming the option, if a log needs more or the disk has less.
    """
    bound = resolve(context, root, capacity_bytes, capacity_fraction)
    try:
        others = ownership.other_bytes(root, context.namespace)
    except OSError as e:
        raise unusable(root, e) from e
    _refuse_too_little(key_of(capacity_fraction), bound, others, context.layout.slot_bytes)
    return bound


def _refuse_too_little(stated: str, capacity_bytes: int, others: int, chunk_bytes: int) -> None:
    largest = Pool(0, fmt.MAX_SEGMENT_PAGES * PAGE_BYTES).largest
    require(
        chunk_bytes <= largest,
        "layout",
        f'is "log", which takes no chunks above {largest} bytes, and they have up to '
        f"{chunk_bytes}: use layout files, or smaller chunks",
    )
    needed = LEAST_SEGMENTS * least_segment_bytes(chunk_bytes) + others
    require(
        capacity_bytes >= needed,
        stated,
        f"gives the log {capacity_bytes} bytes, too little for {LEAST_SEGMENTS} segments of "
        f"{LEAST_CHUNKS} chunks and {others} bytes beside them: give at least {needed} bytes",
    )


def _sized(room: int, chunk_bytes: int, lengths: Iterable[int]) -> Pool:
    """A pool of segments as long as those that are there, if they suit; ``room`` in bytes."""
    least = least_segment_bytes(chunk_bytes)
    few, many = room // LEAST_SEGMENTS, max(least, room // _MAX_SEGMENTS)
    suit = [n for n in lengths if many <= n <= few and n % PAGE_BYTES == 0]
    return Pool(room, max(suit, default=segment_bytes_for(room, chunk_bytes)))


def open_log(context: StoreContext, files: SegmentFiles, room: int) -> tuple[LogCore, Roller]:
    """What the segments hold, brought within ``room`` bytes, and ready to go on.

    The caller owns the folder. Raises OSError.
    """
    files.restore_lengths(room)
    found = list(recovery.headers(files))
    pool = _sized(room, context.layout.slot_bytes, [n for _, n, header in found if header])
    core = LogCore(context, files, pool)
    roller = Roller(core)
    try:
        _take_over(core, roller, found)
    finally:
        roller.report()
    return core, roller


def _take_over(
    core: LogCore, roller: Roller, found: Sequence[tuple[int, int, Header | None]]
) -> None:
    pool = core.pool
    own, rows = _find_segments(core, found), []
    for segment, header in own:
        rows = _take_in(core, segment, header)
    _shrink(pool, roller)
    if own and pool.last_sealed() is own[-1][0]:
        _resume(core, own[-1][0], rows)
    if not pool.segments:
        with contextlib.suppress(KVTiersError):  # a disk that is full now may have room later
            roller.prepare()
    for number in list(pool.segments)[:1]:
        core.files.header(number)  # which also tells whether O_DIRECT works here


def _find_segments(
    core: LogCore, found: Iterable[tuple[int, int, Header | None]]
) -> list[tuple[Segment, Header]]:
    """Count all; those of this namespace, the oldest first."""
    own = []
    for number, nbytes, header in found:
        segment = Segment(number, nbytes)
        if header is not None:
            segment.found(header.sequence, header.created_at)
            if header.namespace_id == core.context.namespace.id:
                own.append((segment, header))
        core.pool.found(segment)
    return sorted(own, key=lambda pair: pair[1].sequence)


def _take_in(core: LogCore, segment: Segment, header: Header) -> list[Row]:
    rows, sealed = recovery.rows_of(core.files, segment.number, header)
    segment.take_in(rows)
    core.index.put(segment.number, header.sequence, rows)
    if not sealed:
        with contextlib.suppress(OSError):  # then it is looked through again next time
            core.write_table(segment, rows)
    return rows


def _shrink(pool: Pool, roller: Roller) -> None:
    """Bring what was found within a capacity, and to a length, that may have changed."""
    roller.remove_misfits()
    while pool.used_bytes > pool.capacity_bytes and (victim := pool.victim()) is not None:
        roller.empty(victim)
        roller.remove_misfits()


def _resume(core: LogCore, last: Segment, rows: Sequence[Row]) -> None:
    """Go on where the last owner stopped: the table of the segment is not the last word."""
    end = fmt.pages_of(last.nbytes)
    core.files.write(last.number, end - 1, [pages(1)])
    last.resume(rows)
    core.pool.active = last
