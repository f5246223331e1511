"""Reading from a log: neighbours on the disk by one call, each chunk verified."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

from kvtiers.chunks import Key
from kvtiers.errors import Kind, KVTiersError
from kvtiers.tiers.base import Item
from kvtiers.tiers.fs.log import format as fmt
from kvtiers.tiers.fs.log.core import LogCore
from kvtiers.tiers.fs.log.format import MAX_ROWS
from kvtiers.tiers.fs.log.index import Location
from kvtiers.tiers.fs.log.pool import RUN_PAGES
from kvtiers.tiers.fs.log.segment import is_odd, padded, pages

T = TypeVar("T")

_BRIDGE_PAGES = 4
"""A gap of so many pages - a head - is read along, rather than by two calls."""


def read_items(
    core: LogCore, items: Sequence[Item], found: Sequence[Location | None]
) -> list[KVTiersError | None]:
    """Fill each item's view from where it was found; its segment stays as it is meanwhile."""
    results: list[KVTiersError | None] = [None] * len(items)
    there = []
    for i, (item, at) in enumerate(zip(items, found, strict=True)):
        if at is None:
            results[i] = _vanished(item.key)
        elif at.pages != fmt.pages_of(item.view.nbytes):
            results[i] = _corrupt(f"it has {at.pages} pages", item.key)
        else:
            there.append((at, i))
    for run in runs(sorted(there)):
        _read_run(core, [(at, i, items[i]) for at, i in run], results)
    return results


def _read_run(
    core: LogCore, run: Sequence[tuple[Location, int, Item]], results: list[KVTiersError | None]
) -> None:
    number, page = run[0][0].segment, run[0][0].page
    filled: list[memoryview] = []
    buffers: list[memoryview] = []
    following = page
    for at, _, item in run:
        if at.page > following:
            buffers.append(pages(at.page - following))
        filled.append(padded(item.view))
        buffers.append(filled[-1])
        following = at.page + at.pages
    try:
        whole = core.files.read(number, page, buffers)
        problem = "its checksum differs" if whole else "its segment is short"
    except OSError as e:
        _fail_run(core, run, e, results)
        return
    core.complaints.worked("read")
    for (at, i, item), body in zip(run, filled, strict=True):
        if fmt.checksum(core.namespace, item.key, body) != at.checksum:
            results[i] = _corrupt(problem, item.key)
        elif body is not item.view:
            item.view[:] = body[: item.view.nbytes]


def _fail_run(
    core: LogCore,
    run: Sequence[tuple[Location, int, Item]],
    error: OSError,
    results: list[KVTiersError | None],
) -> None:
    failure = None if is_odd(error) else core.failed("read", run[0][0].segment, error)
    for _, i, item in run:
        results[i] = failure or _corrupt("its segment is no file", item.key)


def runs(there: Sequence[tuple[Location, T]]) -> Iterator[list[tuple[Location, T]]]:
    """Chunks that lie close behind each other, as many as one call reads."""
    run: list[tuple[Location, T]] = []
    for at, what in there:
        if run and not _near(run[-1][0], at, run[0][0], len(run)):
            yield run
            run = []
        run.append((at, what))
    if run:
        yield run


def _near(before: Location, at: Location, first: Location, count: int) -> bool:
    gap = at.page - before.page - before.pages
    return (
        at.segment == before.segment
        and 0 <= gap <= _BRIDGE_PAGES
        and count < MAX_ROWS
        and at.page + at.pages - first.page <= RUN_PAGES
    )


def forget_lost(
    core: LogCore,
    items: Sequence[Item],
    found: Sequence[Location | None],
    results: Sequence[KVTiersError | None],
) -> list[tuple[Key, KVTiersError]]:
    """Forget, for good, what ``read_items`` found gone or damaged; what of it is to be reported."""
    lost = []
    for item, at, error in zip(items, found, results, strict=True):
        if error is None or error.kind not in (Kind.VANISHED, Kind.CORRUPT):
            continue
        with core.lock:
            known = [] if at is None else core.index.drop_at(item.key, at)
            core.forget(known)
        went_with_all = at is not None and core.lost  # which was said
        unsaid = not went_with_all if error.kind is Kind.VANISHED else bool(known)
        if unsaid:
            lost.append((item.key, error))
    return lost


def _vanished(key: Key) -> KVTiersError:
    return KVTiersError(f"the chunk {key.hex()} is gone", kind=Kind.VANISHED, operation="read")


def _corrupt(what: str, key: Key) -> KVTiersError:
    return KVTiersError(
        f"the stored chunk {key.hex()} cannot be used: {what}", kind=Kind.CORRUPT, operation="read"
    )
