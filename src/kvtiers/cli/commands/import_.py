"""``kvtiers import``: the chunks of an archive into a tier, all of them intact or none."""

import argparse

from kvtiers.cli.archive import ArchiveReader, Member
from kvtiers.cli.commands.migrate import say_moved, warn_if_small
from kvtiers.cli.common import add_common, add_dry_run, refuse_owned
from kvtiers.cli.output import Output
from kvtiers.cli.transfer import Moved, absent, look_again, write_all
from kvtiers.errors import Kind, KVTiersError
from kvtiers.tiers.base import Entry
from kvtiers.tiers.places import Place
from kvtiers.tiers.urls import open_place


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("archive", metavar="ARCHIVE", help="a tar file that export wrote")
    parser.add_argument("url", metavar="URL", help="of the tier that gets the chunks")
    parser.add_argument(
        "--skip-damaged", action="store_true", help="import the intact chunks of a damaged archive"
    )
    add_dry_run(parser)
    add_common(parser)


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Verify all of it, then write; 0 if all of it is there at the end."""
    reader = ArchiveReader(arguments.archive)
    try:
        place = open_place(arguments.url, output.warn, make=True)
        refuse_owned(place)
        bad = _verify(reader, output)
        if bad and not arguments.skip_damaged:
            raise KVTiersError(
                f"nothing was imported, for {len(bad)} members of {arguments.archive!a} are "
                f"damaged or foreign, such as {next(iter(bad.values()))}; "
                "--skip-damaged imports the others",
                kind=Kind.CORRUPT,
            )
        for problem in bad.values():
            output.warn(f"left out: {problem}")
        good = [m for m in reader.members if (m.namespace_id, m.entry.key) not in bad]
        results = _import(reader, good, place, arguments.dry_run, output)
    finally:
        reader.close()
    if not arguments.dry_run:
        place = open_place(arguments.url, output.warn, make=True)
        for moved in results:
            look_again(place, moved)
    places = {"archive": arguments.archive, "to": place.url}
    say_moved(results, output, places, arguments.dry_run)
    return 0 if not bad and all(moved.arrived for moved in results) else 1


def _entries(members: list[Member], name: str) -> list[Entry]:
    return [m.entry for m in members if m.namespace_id == name]


def _verify(reader: ArchiveReader, output: Output) -> dict[object, str]:
    """What is wrong, by chunk or by what else it is."""
    bad: dict[object, str] = {problem: problem for problem in reader.strange}
    sizes = {(m.namespace_id, m.entry.key): m.entry.bytes for m in reader.members}
    with output.progress(sum(sizes.values()), "verifying") as advance:
        for name in reader.namespaces:
            keys = [e.key for e in _entries(reader.members, name)]
            for key, payload in reader.payloads(name, keys):
                advance(sizes[name, key])
                if isinstance(payload, KVTiersError):
                    bad[name, key] = str(payload)
    return bad


def _import(
    reader: ArchiveReader, good: list[Member], place: Place, dry_run: bool, output: Output
) -> list[Moved]:
    total = sum(m.entry.bytes for m in good)
    warn_if_small(place, [m.entry for m in good], output)
    results = []
    with output.progress(total, "writing") as advance:
        for name, namespace in reader.namespaces.items():
            moved = Moved(name)
            results.append(moved)
            wanted = list(absent(place, name, _entries(good, name), moved))
            if dry_run:
                moved.chunks, moved.bytes = len(wanted), sum(e.bytes for e in wanted)
            elif wanted:
                payloads = reader.payloads(name, [e.key for e in wanted])
                write_all(place, namespace, wanted, payloads, moved, advance)
    return results
