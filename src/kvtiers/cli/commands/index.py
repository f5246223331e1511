"""``kvtiers index``: which engine, and which tier of it, holds how much of a prompt."""

import argparse
from dataclasses import fields
from typing import Any

from kvtiers.cli.output import Output
from kvtiers.cli.services import serve
from kvtiers.hashing import ALGORITHMS
from kvtiers.index.options import IndexOptions, flag, parse_engine
from kvtiers.tiers.parameters import parse_size

_HELP = {
    "host": "where to listen",
    "port": "where to listen",
    "max_blocks": "that are known; above it the longest unused leave",
    "max_body_bytes": "of one question, as in 8MiB",
    "body_timeout_s": "how long a client may take to send it",
    "replay_timeout_s": "how long an engine may take to say again what it said",
    "retry_s": "until it is asked again",
    "forget_after_s": "how long an engine may be away until it is forgotten",
    "snapshot_interval_s": "between two snapshots of an engine",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="NAME=ENDPOINT[,replay=ENDPOINT][,topic=TEXT][,model=NAME]",
        help="where its events are; once for each",
    )
    for field in fields(IndexOptions):
        if field.name in _HELP:
            kind = str if field.name.endswith("_bytes") else type(field.default)
            words = f"{_HELP[field.name]}; default {field.default}"
            parser.add_argument(flag(field.name), type=kind, default=field.default, help=words)
    parser.add_argument(
        "--hash",
        choices=ALGORITHMS,
        default="sha256",
        help="the engines' --prefix-caching-hash-algo",
    )
    parser.add_argument("--seed", metavar="TEXT", help="the engines' PYTHONHASHSEED, if it was set")
    parser.add_argument(
        "--snapshot-to", metavar="URL", help="redis://HOST:PORT, for replicas and restarts"
    )
    parser.add_argument("--debug", action="store_true", help="a traceback with errors")


def options_of(arguments: argparse.Namespace) -> IndexOptions:
    """What was asked for. Raises ConfigError."""
    others: dict[str, Any] = {name: getattr(arguments, name) for name in _HELP}
    size = others["max_body_bytes"]
    if isinstance(size, str):
        others["max_body_bytes"] = parse_size("--max-body-bytes", size)
    if arguments.seed is not None:
        others["seed"] = arguments.seed
    return IndexOptions(
        engines=tuple(map(parse_engine, arguments.engine)),
        hash=arguments.hash,
        snapshot_to=arguments.snapshot_to,
        **others,
    )


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Serve until it is told to end; 0 then."""
    return serve("index", options_of(arguments))
