"""The command line: thin commands over the library."""

import argparse
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``kvtiers``; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="kvtiers", description="Tiered KV-cache offloading for LLM engines."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_demo(commands)
    arguments = parser.parse_args(argv)
    status: int = arguments.run(arguments)
    return status


def _add_demo(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from kvtiers.demo.main import add_arguments, run

    parser = commands.add_parser("demo", help="a real model with and without tiers, measured")
    add_arguments(parser)
    parser.set_defaults(run=run)


if __name__ == "__main__":
    sys.exit(main())
