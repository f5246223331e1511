"""``kvtiers gc``: delete what was not used for longest."""

import argparse
import re
import time

from kvtiers.cli.collect import collect
from kvtiers.cli.common import add_dry_run, add_place, chosen, place_of, whole
from kvtiers.cli.output import Output, size
from kvtiers.errors import ConfigError
from kvtiers.tiers.urls import parse_size

_SPAN = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(s|min|m|h|d|w)")
_SECONDS = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add_place(parser)
    parser.add_argument("--max-bytes", metavar="SIZE", help="keep at most this much, e.g. 100GiB")
    parser.add_argument("--older-than", metavar="AGE", help="delete what was not used for, e.g. 7d")
    add_dry_run(parser)


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Delete; 0 when it is done, 1 if something would not go."""
    if arguments.max_bytes is None and arguments.older_than is None:
        raise ConfigError(
            "say what may leave: --max-bytes SIZE, --older-than AGE, or both "
            "(--max-bytes 0 deletes every chunk)"
        )
    max_bytes = None
    if arguments.max_bytes is not None:
        max_bytes = parse_size("--max-bytes", arguments.max_bytes)
    older_than = None
    if arguments.older_than is not None:
        older_than = time.time() - parse_age("--older-than", arguments.older_than)
    place = place_of(arguments, output)
    found = whole(
        chosen(place, arguments.namespace), output, "delete its folder yourself if nobody wants it"
    )
    namespaces = [namespace for _, namespace in found]
    with output.progress(None, "deleting") as advance:
        collected = collect(
            place,
            namespaces,
            max_bytes=max_bytes,
            older_than=older_than,
            dry_run=arguments.dry_run,
            advance=advance,
            complain=output.warn,
        )
    after = collected.before_bytes - collected.bytes
    document = {
        "url": place.url,
        "dry_run": arguments.dry_run,
        "chunks": collected.chunks,
        "bytes": collected.bytes,
        "failed": collected.failed,
        "bytes_left": after,
        "by_namespace": collected.by_namespace,
    }

    def human() -> None:
        did = "would delete" if arguments.dry_run else "deleted"
        for name, count in collected.by_namespace.items():
            output.line(f"namespace {name}: {did} {count} chunks")
        output.line(
            f"{did} {collected.chunks} chunks, {size(collected.bytes)}; {size(after)} "
            f"{'would be left' if arguments.dry_run else 'are left'}"
        )
        if max_bytes is not None and after > max_bytes:
            output.line("what is left above --max-bytes is no chunk: see kvtiers du")

    output.show(document, human)
    return 1 if collected.failed else 0


def parse_age(key: str, text: str) -> float:
    """Seconds of ``90s``, ``30min``, ``12h``, ``7d``, ``2w``. Raises ConfigError naming ``key``."""
    match = _SPAN.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{key} is {text!a}: give an age like 90s, 30min, 12h, 7d or 2w")
    return float(match[1]) * _SECONDS[match[2]]
