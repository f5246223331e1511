"""``kvtiers demo``: it has its own output, for people only."""

import argparse

from kvtiers.cli.output import Output
from kvtiers.demo.main import add_arguments
from kvtiers.demo.main import run as run_demo

__all__ = ["add_arguments", "run"]


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Run the demo; 0 if it showed what it claims, 1 if not."""
    return run_demo(arguments)
