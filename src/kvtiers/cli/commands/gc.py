"""``kvtiers gc``: what dead writers left goes, and what was not used for longest if asked to."""

import argparse
import re

from kvtiers.cli.common import add_dry_run, add_place, chosen, place_of, refuse_owned, whole
from kvtiers.cli.output import Output, size
from kvtiers.errors import ConfigError
from kvtiers.tiers.parameters import parse_size
from kvtiers.tiers.places import Aim, Report

_SPAN = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(s|min|m|h|d|w)")
_SECONDS = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add_place(parser)
    parser.add_argument("--max-bytes", metavar="SIZE", help="keep at most this much, e.g. 100GiB")
    parser.add_argument("--older-than", metavar="AGE", help="delete what was not used for, e.g. 7d")
    add_dry_run(parser)


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Delete; 0 when it is done, 1 if something would not go or be counted, or is in use."""
    max_bytes = older_than_s = None
    if arguments.max_bytes is not None:
        max_bytes = parse_size("--max-bytes", arguments.max_bytes)
    if arguments.older_than is not None:
        older_than_s = parse_age("--older-than", arguments.older_than)
    place = place_of(arguments, output)
    refuse_owned(place, "stop that engine, or lower its capacity_bytes")
    found = whole(
        chosen(place, arguments.namespace), output, "delete it yourself if nobody wants it"
    )
    named = None if arguments.namespace is None else next((name for name, _ in found), None)
    report = Report()
    if named is not None or arguments.namespace is None:
        if place.layout == "files" and not arguments.dry_run:  # a log has no engine now
            output.note("beside engines it waits 10 s before it deletes: they mark what they use")
        with output.progress(None, "deleting") as advance:
            aim = Aim(max_bytes, older_than_s, named)
            report = place.maintain(aim, dry_run=arguments.dry_run, advance=advance)
    after = report.before_bytes - report.bytes
    missed = max_bytes is not None and after > max_bytes and report.in_use > 0
    if missed:
        output.warn(f"more is left than --max-bytes: {report.in_use} chunks are in use by engines")
    _warn(report, output)
    document = {
        "url": place.url,
        "dry_run": arguments.dry_run,
        "chunks": report.by_namespace.total(),
        "bytes": report.bytes,
        "bytes_left": after,
        "by_namespace": dict(report.by_namespace),
        "temporary": len(report.temporary),
        "quarantined": len(report.quarantined),
        "segments": len(report.segments),
        "packs": len(report.packs),
        "empty_folders": len(report.empty_folders),
        "in_use": report.in_use,
        "failed": len(report.failed),
    }

    def human() -> None:
        did = "would delete" if arguments.dry_run else "deleted"
        for name, count in report.by_namespace.items():
            output.line(f"namespace {name}: {did} {count} chunks")
        for what, count in _besides(report):
            output.line(f"{did} {what}: {count}")
        output.line(
            f"{did} {report.by_namespace.total()} chunks, {size(report.bytes)} in all; "
            f"{size(after)} {'would be left' if arguments.dry_run else 'are left'}"
        )
        if max_bytes is not None and after > max_bytes and not missed:
            output.line("what is left above --max-bytes is no chunk: see kvtiers du")

    output.show(document, human)
    return 1 if report.failed or report.problems or missed else 0


def _warn(report: Report, output: Output) -> None:
    for name in report.failed:
        output.warn(f"{name} cannot be deleted")
    for problem in report.problems:
        output.warn(problem)


def _besides(report: Report) -> list[tuple[str, int]]:
    """What left and is no chunk."""
    counts = [
        ("segments", len(report.segments)),
        ("packs", len(report.packs)),
        ("temporary folders and files of dead writers", len(report.temporary)),
        ("damaged chunks that were put aside", len(report.quarantined)),
        ("empty folders", len(report.empty_folders)),
    ]
    return [(what, count) for what, count in counts if count]


def parse_age(key: str, text: str) -> float:
    """Seconds of ``90s``, ``30min``, ``12h``, ``7d``, ``2w``. Raises ConfigError naming ``key``."""
    match = _SPAN.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{key} is {text!a}: give an age like 90s, 30min, 12h, 7d or 2w")
    return float(match[1]) * _SECONDS[match[2]]
