"""``kvtiers migrate``: copy chunks from one tier to another, verified, and go on where it ended."""

import argparse
from collections.abc import Sequence

from kvtiers.chunks import PAGE_BYTES, Namespace
from kvtiers.cli.common import add_common, add_dry_run, add_namespace, chosen, refuse_owned, whole
from kvtiers.cli.output import Advance, Output, size
from kvtiers.cli.transfer import Moved, absent, look_again, write_all
from kvtiers.errors import ConfigError
from kvtiers.tiers.base import Entry
from kvtiers.tiers.parameters import with_capacity
from kvtiers.tiers.places import Place
from kvtiers.tiers.urls import open_place


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("source", metavar="FROM", help="URL of the tier that is copied")
    parser.add_argument("target", metavar="TO", help="URL of the tier that gets the chunks")
    add_namespace(parser)
    add_dry_run(parser)
    add_common(parser)


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Copy; 0 if every chunk is there at the end, 1 if any is damaged, failed, or left again."""
    source = open_place(arguments.source, output.warn)
    target = open_place(arguments.target, output.warn, make=True)
    _refuse_mixed(source, target)
    refuse_owned(target)
    found = whole(chosen(source, arguments.namespace), output, "no engine can use it")
    entries = {
        namespace.id: sorted(source.entries(namespace.id), key=lambda e: e.used_at)
        for _, namespace in found
    }
    total = sum(e.bytes for some in entries.values() for e in some)
    warn_if_small(target, [e for some in entries.values() for e in some], output)
    results = []
    with output.progress(total, "copying") as advance:
        for name, namespace in found:
            moved = Moved(name)
            results.append(moved)
            wanted = list(absent(target, name, entries[name], moved))
            advance(sum(e.bytes for e in entries[name]) - sum(e.bytes for e in wanted))
            if arguments.dry_run:
                moved.chunks, moved.bytes = len(wanted), sum(e.bytes for e in wanted)
            elif wanted:
                _copy(source, target, namespace, wanted, moved, advance)
    if not arguments.dry_run:
        target = open_place(arguments.target, output.warn, make=True)
        for moved in results:
            look_again(target, moved)
    say_moved(results, output, {"from": source.url, "to": target.url}, arguments.dry_run)
    return 0 if all(moved.arrived for moved in results) else 1


def _copy(
    source: Place,
    target: Place,
    namespace: Namespace,
    wanted: list[Entry],
    moved: Moved,
    advance: Advance,
) -> None:
    """Least recently used first, so that the order of use is the same there."""
    payloads = source.read(namespace.id, [e.key for e in wanted])
    write_all(target, namespace, wanted, payloads, moved, advance)


def _refuse_mixed(source: Place, target: Place) -> None:
    """Neither tier would count, nor ever evict, what lies inside the other."""
    one, other = source.site, target.site
    if one == other:
        raise ConfigError(f"FROM and TO are the same place: {source.url}")
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:
        inner, outer = ("TO", "FROM") if len(other) > len(one) else ("FROM", "TO")
        inside, around = (target, source) if len(other) > len(one) else (source, target)
        raise ConfigError(
            f"{inner} lies inside {outer}, {inside.url} in {around.url}: name a place beside it"
        )


def warn_if_small(target: Place, entries: Sequence[Entry], output: Output) -> None:
    """A bounded tier makes room by forgetting: better said before than found out after.

    Each chunk takes about a page besides its bytes, whatever the layout.
    """
    total = sum(e.bytes + PAGE_BYTES for e in entries)
    bound = target.bound()
    if bound is not None and total > bound:
        output.warn(
            f"{size(total)} are to go where there is room for {size(bound)}: what was not used for "
            f"longest will not stay; if it may be larger say so: {with_capacity(target.url)}"
        )


def say_moved(results: list[Moved], output: Output, places: dict[str, str], dry_run: bool) -> None:
    """The outcome by namespace."""

    def human() -> None:
        wrote = "WOULD WRITE" if dry_run else "WRITTEN"
        rows = [
            (m.namespace, str(m.chunks), size(m.bytes), str(m.present), str(len(m.failed)))
            for m in results
        ]
        columns = ("NAMESPACE", f">{wrote}", ">BYTES", ">THERE ALREADY", ">FAILED")
        output.table(columns, rows)
        for m in results:
            for _, problem in m.failed:
                output.line(problem)
        gone, meant = sum(m.gone for m in results), sum(m.chunks + m.present for m in results)
        if gone:
            output.line(
                f"{meant - gone} of {meant} chunks are there at the end: {gone} left again to make "
                f"room; if it may be larger say so: {with_capacity(places['to'])}"
            )

    namespaces = [m.document() for m in results]
    output.show({**places, "dry_run": dry_run, "namespaces": namespaces}, human)
