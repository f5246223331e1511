"""What is damaged in the segments of a log besides chunks: headers, tables, heads of runs.

Nothing is served from damaged ones: a segment without a sound header holds nothing, one without a
sound table is looked through page by page. But that costs chunks, or time, and says that the disk
is at fault.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace

from kvtiers.chunks import PAGE_BYTES
from kvtiers.errors import map_errors
from kvtiers.tiers.fs.log import format as fmt
from kvtiers.tiers.fs.log import recovery
from kvtiers.tiers.fs.log.core import write_table
from kvtiers.tiers.fs.log.format import Header
from kvtiers.tiers.fs.log.looking import Complain
from kvtiers.tiers.fs.log.ownership import Ownership
from kvtiers.tiers.fs.log.segment import SegmentFiles
from kvtiers.tiers.places import Fault

_REMOVED, _WRITTEN, _LENGTHENED = "removed", "written anew", "given its length again"


def faults(files: SegmentFiles, complain: Complain) -> Iterator[tuple[int, Fault]]:
    """Number of the segment and what is damaged in it, of all namespaces and of none.

    What is no more so at a second look was being written at the first.
    """
    try:
        numbers = sorted(files.numbers().items())
    except OSError:
        return  # whoever lists the segments says so
    for number, nbytes in numbers:
        try:
            seen = _look(files, number, nbytes)
            if seen:
                again = _look(files, number, nbytes)
                yield from ((number, fault) for fault in again if fault in seen)
        except FileNotFoundError:
            continue  # it left meanwhile
        except OSError as e:
            complain(f"{files.path(number)} cannot be read: {e.strerror}")


def _look(files: SegmentFiles, number: int, nbytes: int) -> list[Fault]:
    if nbytes < PAGE_BYTES:
        return []  # it is being made, or of no use: it holds nothing
    path = files.path(number)
    first = files.read_pages(number, 0, 1)
    if first is None or not any(first):
        return []
    header = fmt.parse_header(first)
    if header is None:
        return [_of_header(path, first)]
    if recovery.header_of(files, number, nbytes) is None:
        return [_of_length(path, nbytes, header)]
    return list(_of_the_rest(files, number, header))


def _of_header(path: str, first: memoryview) -> Fault:
    version = fmt.header_version(first)
    if version is not None:
        return Fault("", f"{path} is of version {version} of the log, not {fmt.VERSION}")
    return Fault("", f"{path}: the header is damaged, so what it held is lost", _REMOVED)


def _of_length(path: str, nbytes: int, header: Header) -> Fault:
    said, name = header.segment_bytes, header.namespace_id
    if said % PAGE_BYTES or not PAGE_BYTES < said <= fmt.MAX_SEGMENT_PAGES * PAGE_BYTES:
        return Fault(name, f"{path} says that it has {said} bytes, as no segment has", _REMOVED)
    problem = f"{path} is {nbytes} bytes long and should be {said}, so it counts as empty"
    return Fault(name, problem, _LENGTHENED)


def _of_the_rest(files: SegmentFiles, number: int, header: Header) -> Iterator[Fault]:
    path, name = files.path(number), header.namespace_id
    last = files.read_pages(number, recovery.pages_in(header) - 1, 1)
    if last is None:
        return
    table = recovery.read_table(files, number, header)
    sealed = fmt.parse_trailer(last, header.sequence) is not None
    damaged = sealed if table is None else False
    if damaged or (any(last) and not fmt.is_trailer(last)):
        problem = f"{path}: the table is damaged, so its chunks are found by looking at every page"
        yield Fault(name, problem, _WRITTEN)
    if table is None:
        looked = recovery.heads(files, number, header)
        bad = sum(fmt.damaged_head(first, header.sequence) for first, _ in looked)
        if bad:
            yield Fault(name, f"{path}: {bad} heads of runs are damaged, so their chunks are lost")
        return
    missing = set(table)
    for _, rows in recovery.heads(files, number, header, frozenset(table)):
        missing.difference_update(rows or ())
    if missing:
        problem = f"{path}: the heads of {len(missing)} chunks are damaged; the table has them"
        yield Fault(name, problem)


def mend(root: str, files: SegmentFiles, known: Sequence[Fault], complain: Complain) -> list[Fault]:
    """``known``, with what became of each. What is not so any more is left as it is.

    Raises ConfigError if somebody owns the log.
    """
    outcomes = {fault: replace(fault, outcome="gone by now") for fault in known}
    with map_errors("mend", files.folder), closing(Ownership(root)):
        for number, fault in list(faults(files, complain)):
            if fault in outcomes:
                outcomes[fault] = replace(fault, outcome=_mend(files, number, fault))
    return list(outcomes.values())


def _mend(files: SegmentFiles, number: int, fault: Fault) -> str:
    try:
        header = files.header(number)
        if fault.repair == _REMOVED:
            files.remove(number)
        elif fault.repair == _LENGTHENED and header is not None:
            os.truncate(files.path(number), header.segment_bytes)
        elif fault.repair == _WRITTEN and header is not None:
            rows = recovery.scan_segment(files, number, header)
            write_table(files, number, header.segment_bytes, header.sequence, rows)
    except OSError as e:
        return f"cannot be mended: {e.strerror}"
    return fault.repair or fault.outcome
