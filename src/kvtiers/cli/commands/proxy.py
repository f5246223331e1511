"""``kvtiers proxy``: an OpenAI-compatible front for engines that exchange chunks."""

import argparse
from dataclasses import fields
from typing import Any

from kvtiers.cli.output import Output
from kvtiers.cli.services import serve
from kvtiers.proxy.options import ProxyOptions, flag, parse_address, parse_index
from kvtiers.tiers.parameters import parse_size

_POOLS = {
    "prefill": "computes prompts; goes with --decode",
    "decode": "answers; goes with --prefill",
    "worker": "does both",
}
_HELP = {
    "host": "where to listen",
    "port": "where to listen",
    "max_in_flight": "requests that are with workers at once",
    "max_queued": "requests that wait; those above are answered 429",
    "queue_timeout_s": "how long they wait",
    "max_body_bytes": "of one request, as in 16MiB",
    "body_timeout_s": "how long a client may take to send it",
    "connect_timeout_s": "for a connection to a worker",
    "idle_timeout_s": "how long a worker may send nothing, or a client take nothing",
    "health_interval_s": "between two looks at a worker",
    "drain_s": "how long running requests have after SIGTERM",
    "index_timeout_s": "for the index's answer, and for tokens of a prompt",
    "slack": "how much busier than the idlest the worker with the prefix may be",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    for name, words in _POOLS.items():
        parser.add_argument(
            f"--{name}",
            action="append",
            default=[],
            metavar="URL[,p2p=HOST:PORT][,pod=NAME]",
            help=words,
        )
    for field in fields(ProxyOptions):
        if field.name in _HELP:
            kind = str if field.name.endswith("_bytes") else type(field.default)
            words = f"{_HELP[field.name]}; default {field.default}"
            parser.add_argument(flag(field.name), type=kind, default=field.default, help=words)
    parser.add_argument("--index", metavar="URL", help="a presence index, to ask who has a prefix")
    parser.add_argument(
        "--pass-kv-transfer-params",
        action="store_true",
        help="clients may name peers themselves: only for clients that you trust",
    )
    parser.add_argument("--debug", action="store_true", help="a traceback with errors")


def options_of(arguments: argparse.Namespace) -> ProxyOptions:
    """What was asked for. Raises ConfigError."""
    pools = {name: tuple(map(parse_address, getattr(arguments, name))) for name in _POOLS}
    others: dict[str, Any] = {name: getattr(arguments, name) for name in _HELP}
    size = others["max_body_bytes"]
    if isinstance(size, str):
        others["max_body_bytes"] = parse_size("--max-body-bytes", size)
    return ProxyOptions(
        prefill=pools["prefill"],
        decode=pools["decode"],
        workers=pools["worker"],
        index=None if arguments.index is None else parse_index(arguments.index),
        pass_kv_transfer_params=arguments.pass_kv_transfer_params,
        **others,
    )


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Serve until it is told to end; 0 then."""
    return serve("proxy", options_of(arguments))
