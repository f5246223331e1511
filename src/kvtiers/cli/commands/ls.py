"""``kvtiers ls``: namespaces, or the chunks in them."""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvtiers.cli.common import Pair, about, add_place, chosen, last_used, place_of, walked
from kvtiers.cli.output import Advance, Output, Unit, age, size
from kvtiers.errors import ConfigError
from kvtiers.tiers.base import Entry
from kvtiers.tiers.places import Found, Place

_MANY = 100
"""Rows that a table has, unless it is asked for more or fewer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add_place(parser)
    parser.add_argument("--chunks", action="store_true", help="each chunk, last used first")
    parser.add_argument(
        "--limit",
        type=int,
        help=f"chunks shown; {_MANY} of a table and all with --json if not given",
    )


def run(arguments: argparse.Namespace, output: Output) -> int:
    """List; 0 however much is there."""
    limit = arguments.limit
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit is {limit}: give 1 or more")
    place = place_of(arguments, output)
    found = chosen(place, arguments.namespace)
    if arguments.chunks:
        if limit is None and not output.as_json:
            limit = _MANY
        _show_chunks(place, found, limit, output)
    else:
        _show_namespaces(place, found, output)
    return 0


@dataclass(slots=True)
class NamespaceSum:
    """What is stored in one, added up."""

    chunks: int = 0
    bytes: int = 0
    oldest: float | None = None
    newest: float | None = None

    def add(self, entry: Entry) -> None:
        """One more chunk."""
        self.chunks += 1
        self.bytes += entry.bytes
        self.oldest = min(entry.used_at, self.oldest or entry.used_at)
        self.newest = max(entry.used_at, self.newest or entry.used_at)


def _show_namespaces(place: Place, found: list[Found], output: Output) -> None:
    now = time.time()
    sums = {each.id: NamespaceSum() for each in found}
    with output.progress(None, "looking", Unit.CHUNKS) as advance:
        for each in found:
            for entry in walked(place.entries(each.id), advance):
                sums[each.id].add(entry)

    def human() -> None:
        rows = [
            (each.id, str(s.chunks), size(s.bytes), *_ages(s, now), _words(each))
            for each, s in ((each, sums[each.id]) for each in found)
        ]
        if rows:
            columns = ("NAMESPACE", ">CHUNKS", ">BYTES", ">LAST USE", ">OLDEST", "ABOUT")
            output.table(columns, rows)
        else:
            output.line(f"{place.url}: no namespaces")

    document = {
        "url": place.url,
        "layout": place.layout,
        "namespaces": [_described(each, sums[each.id]) for each in found],
    }
    output.show(document, human)


def _ages(s: NamespaceSum, now: float) -> tuple[str, str]:
    if s.newest is None or s.oldest is None:
        return "-", "-"
    return age(now - s.newest), age(now - s.oldest)


def _words(each: Found) -> str:
    return each.problem if each.namespace is None else about(each.namespace)


def _described(each: Found, s: NamespaceSum) -> dict[str, Any]:
    return {
        "namespace": each.id,
        "chunks": s.chunks,
        "bytes": s.bytes,
        "last_used": s.newest,
        "oldest": s.oldest,
        "manifest": None if each.namespace is None else dict(each.namespace.fields),
        "problem": each.problem or None,
    }


def _show_chunks(place: Place, found: list[Found], limit: int | None, output: Output) -> None:
    """Those used last, ``limit`` of them; None: all."""
    now, count = time.time(), 0

    def pairs(advance: Advance) -> Iterator[Pair]:
        nonlocal count
        for each in found:
            for entry in walked(place.entries(each.id), advance):
                count += 1
                yield each.id, entry

    with output.progress(None, "looking", Unit.CHUNKS) as advance:
        shown = last_used(pairs(advance), limit)

    def human() -> None:
        rows = [(n, e.key.hex(), size(e.bytes), age(now - e.used_at)) for n, e in shown]
        output.table(("NAMESPACE", "KEY", ">BYTES", ">LAST USE"), rows)
        if count > len(shown):
            output.line(f"{count - len(shown)} more: --limit N shows them")

    document = {
        "url": place.url,
        "chunks": [
            {"namespace": n, "key": e.key.hex(), "bytes": e.bytes, "last_used": e.used_at}
            for n, e in shown
        ],
        "left_out": count - len(shown),
    }
    output.show(document, human)
