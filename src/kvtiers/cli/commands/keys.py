"""``kvtiers keys new``: a CURVE key pair, by which engines that exchange chunks know each other."""

import argparse
import os

from kvtiers.cli.common import add_common
from kvtiers.cli.output import Output
from kvtiers.errors import ConfigError, Kind, KVTiersError, map_errors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("what", choices=["new"], help="what is done")
    parser.add_argument("file", metavar="FILE", help="where to write the pair; it must not exist")
    add_common(parser)


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Write the pair; 0 when it is there."""
    try:
        from kvtiers.tiers.p2p.security import new_keys
    except ImportError as e:
        raise KVTiersError(
            "keys are made by ZeroMQ, which is not installed: pip install kvtiers[p2p]",
            kind=Kind.UNSUPPORTED,
        ) from e
    file = arguments.file
    if os.path.lexists(file):
        raise ConfigError(f"{file} exists: name a new file, or delete it yourself")
    if not os.path.isdir(os.path.dirname(os.path.abspath(file))):
        raise ConfigError(f"{file} is in no folder: make it first")
    with map_errors("writing keys to", file):
        public = new_keys(file).decode()

    def human() -> None:
        output.line(f"{file} holds a new key pair, for the option keys of the p2p tier: keep it")
        output.line("secret. Its public key, for allowed_peers of others, is")
        output.line(public)

    output.show({"file": file, "public": public}, human)
    return 0
