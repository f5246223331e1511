"""The command line: thin commands over the library. See ``table`` for what there is."""

from kvtiers.cli.main import main

__all__ = ["main"]
