"""The table of commands: one module each, imported when it is asked for."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from keyword import iskeyword

from kvtiers.cli.output import Output


@dataclass(frozen=True, slots=True)
class Command:
    """A command. Its module has ``add_arguments(parser)`` and ``run(arguments, output)``."""

    name: str
    summary: str
    example: str
    module: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare what the command takes."""
        import_module(self.module).add_arguments(parser)

    def run(self, arguments: argparse.Namespace, output: Output) -> int:
        """Do it; returns the exit status. Raises KVTiersError."""
        run: Callable[[argparse.Namespace, Output], int] = import_module(self.module).run
        return run(arguments, output)


def _command(name: str, summary: str, example: str) -> Command:
    return Command(
        name, summary, f"kvtiers {name} {example}", f"kvtiers.cli.commands.{_module(name)}"
    )


def _module(name: str) -> str:
    return f"{name}_" if iskeyword(name) else name


_URL = "fs:///var/cache/kvtiers"

COMMANDS = (
    _command("ls", "namespaces and chunks: how many, how large, how old", _URL),
    _command("stat", "what is stored of a chunk, or of a prompt", f"{_URL} --tokens prompt.json"),
    _command("du", "bytes on disk, by namespace and by what they are for", _URL),
    _command("verify", "read everything and report what is damaged", f"{_URL} --repair"),
    _command("gc", "delete what was not used for longest", f"{_URL} --max-bytes 100GiB --dry-run"),
    _command("export", "write chunks to a portable archive", f"{_URL} chunks.tar"),
    _command("import", "take the chunks of an archive in", f"chunks.tar {_URL}"),
    _command("migrate", "copy chunks from one tier to another", f"{_URL} fs:///mnt/new"),
    _command("warm", "write a hot list of prefixes", f"{_URL} --from-recent 1000 -o hot.json"),
    _command("doctor", "will this configuration work on this machine?", f"{_URL} --config kv.json"),
    _command(
        "bench",
        "how fast a tier is here, beside the disk alone",
        f"tier {_URL} --chunk-bytes 2MiB --total-bytes 1GiB",
    ),
    _command(
        "keys", "a key pair for engines that exchange chunks", "new ~/.config/kvtiers-p2p.key"
    ),
    _command("why", "why did this request miss?", "cmpl-4f1c --at http://127.0.0.1:9810"),
    _command(
        "proxy",
        "a front for engines that run prefill and decode apart, or share prefixes",
        "--prefill http://127.0.0.1:8001 --decode http://127.0.0.1:8002",
    ),
    _command(
        "index",
        "which engine, and which tier of it, holds how much of a prompt",
        "--engine a=tcp://127.0.0.1:5557,replay=tcp://127.0.0.1:5558",
    ),
    _command("top", "tiers, hit rates and flows of a running engine, live", "--once"),
    _command("dashboard", "a Grafana dashboard, and what provisions it", "--output grafana"),
    _command("demo", "a real model with and without tiers, measured", "--output demo-results"),
)
