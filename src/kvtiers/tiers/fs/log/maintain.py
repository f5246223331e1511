"""Making a log smaller: its oldest segments leave, with all that is in them.

Only the owner of a log may do that, so this is for logs that no engine has open; one that has it
open keeps it within its capacity itself.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext, suppress
from itertools import accumulate

from kvtiers.errors import map_errors
from kvtiers.tiers.fs import names, tree
from kvtiers.tiers.fs.log import looking, recovery
from kvtiers.tiers.fs.log.looking import Looked
from kvtiers.tiers.fs.log.ownership import LOCK, TEMP, Ownership
from kvtiers.tiers.fs.log.segment import SegmentFiles
from kvtiers.tiers.options import bad_option
from kvtiers.tiers.places import Aim, Report, unheard


def choose(found: Sequence[Looked], used: int, aim: Aim, now: float) -> list[Looked]:
    """Those that leave where ``used`` bytes lie: what holds nothing, as far as there is too much,
    then the oldest.

    Segments leave in the order in which they were begun, because later ones say what was deleted
    of earlier ones. So one is as old as the oldest that was begun after it: clocks are set back.
    """
    chosen: list[Looked] = []
    for looked, began in _in_order(found):
        old = aim.older_than_s is not None and began < now - aim.older_than_s
        above = aim.max_bytes is not None and used > aim.max_bytes
        if above or old:
            chosen.append(looked)
            used -= looked[1]
        elif looked[2] is not None:
            break  # the rest is younger, and fits
    return chosen


def _in_order(found: Sequence[Looked]) -> Iterator[tuple[Looked, float]]:
    """Each segment and when it was begun; one that holds nothing never was."""
    yield from ((looked, float("inf")) for looked in found if looked[2] is None)
    begun = sorted(
        (
            (header.sequence, header.created_at, number, nbytes, header)
            for number, nbytes, header in found
            if header is not None
        ),
    )
    latest = list(accumulate((created for _, created, *_ in reversed(begun)), min))
    for (_, _, number, nbytes, header), began in zip(begun, reversed(latest), strict=True):
        yield (number, nbytes, header), began


def maintain(
    root: str,
    files: SegmentFiles,
    aim: Aim,
    *,
    dry_run: bool = False,
    wall_clock: Callable[[], float] = time.time,
    advance: Callable[[int], None] = unheard,
) -> Report:
    """Make the log under ``root`` smaller, or one namespace of it, and say what left.

    ``aim.max_bytes`` bounds the lengths of segments and of what lies beside them; a chunk is as old
    as the beginning of its segment. Raises ConfigError for a wrong call or if somebody owns the
    log, KVTiersError.
    """
    aim.refuse_nonsense()
    with map_errors("maintain", files.folder):
        if aim.namespace is not None and aim.namespace not in names.namespaces(root):
            raise bad_option("namespace", f"is {aim.namespace!a}, which {root} does not hold")
        if not os.path.isdir(files.folder):
            return Report()
        with nullcontext() if dry_run else closing(Ownership(root)):
            return _pass(root, files, aim, dry_run, wall_clock(), advance)


def _pass(
    root: str,
    files: SegmentFiles,
    aim: Aim,
    dry_run: bool,
    now: float,
    advance: Callable[[int], None],
) -> Report:
    everything = list(recovery.headers(files))
    found = [
        looked
        for looked in everything
        if aim.namespace is None or (looked[2] and looked[2].namespace_id == aim.namespace)
    ]
    report = Report()
    used = sum(nbytes for _, nbytes, _ in found) + _bytes_beside(root, aim.namespace, report)
    if aim.namespace is None:
        _remove_temporary(files, dry_run, report)
    report.before_bytes = used + report.bytes
    leaving = choose(found, used, aim, now)
    counts = _chunks_in(files, found, {number for number, _, _ in leaving})
    for number, nbytes, header in leaving:
        name = f"{names.LOG}/{os.path.basename(files.path(number))}"
        try:
            if not dry_run:
                files.remove(number)
        except OSError:
            report.failed.append(name)
            break  # or what it says was deleted of an earlier one would be back
        report.segments.append((name, nbytes))
        if header is not None and counts.get(number):
            report.by_namespace[header.namespace_id] += counts[number]
        advance(nbytes)
    return report


def _bytes_beside(root: str, namespace: str | None, report: Report) -> int:
    """Of manifests, and of the lock unless it is about one namespace: a capacity counts them."""
    if namespace is not None:
        return tree.measure_for(report, root, [namespace])
    total = tree.measure_for(report, root, names.namespaces(root))
    with suppress(FileNotFoundError):
        total += os.lstat(os.path.join(root, names.LOG, LOCK)).st_size
    return total


def _remove_temporary(files: SegmentFiles, dry_run: bool, report: Report) -> None:
    path, name = os.path.join(files.folder, TEMP), f"{names.LOG}/{TEMP}"
    try:
        size = os.lstat(path).st_size
        if not dry_run:
            os.unlink(path)
    except FileNotFoundError:
        return
    except OSError:
        report.failed.append(name)
        return
    report.temporary.append((name, size))


def _chunks_in(files: SegmentFiles, found: Sequence[Looked], leaving: set[int]) -> dict[int, int]:
    """How many chunks lie in each of these segments, and nowhere later."""
    counts = dict.fromkeys(leaving, 0)
    owners = {h.namespace_id for number, _, h in found if h is not None and number in leaving}
    for owner in owners:
        for _, at in looking.look(files, found, owner, _unheard).index.items():
            if at.segment in counts:
                counts[at.segment] += 1
    return counts


def _unheard(sentence: str) -> None:
    """A segment that cannot be read holds nothing that could be counted."""
