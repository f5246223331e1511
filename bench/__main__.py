"""All figures, or those of one part.

    python -m bench [--only import|manager|observe|index|copy|p2p|ttft|io|obj|kv|fs|log]
                    [--json FILE] [--root DIR] [--model DIR] [--tiny]

Each part runs in processes of its own, one after the other, and prints its lines as they come. At
the end stands every figure beside its goal. Exits with 0 unless a part could not be run: a missed
goal is marked, no more.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.lines import Figure, figures_in, is_ours, remarks_in, spreads_in, table
from bench.machine import describe

PATIENCE_S = 300.0
"""For one process."""

_NOISE = ("nanobind", " - ", "See https://nanobind")
"""What torch's libraries say at every exit."""

Commands = Callable[[argparse.Namespace], list[list[str]]]


def _tiny(given: argparse.Namespace) -> list[str]:
    return ["--tiny"] if given.tiny else []


def _manager(given: argparse.Namespace) -> list[list[str]]:
    return [["bench.manager", *_tiny(given)], ["bench.flat", *_tiny(given)]]


def _fs(given: argparse.Namespace) -> list[list[str]]:
    size = ["--what", "lookup", "--rounds", "2"] if given.tiny else []
    return [["bench.fs_files", *size, "--root", given.root]]


def _log(given: argparse.Namespace) -> list[list[str]]:
    size = ["--what", "index", "--chunks", "2000"] if given.tiny else []
    return [["bench.fs_log", *size, "--root", given.root]]


def _ttft(given: argparse.Namespace) -> list[list[str]]:
    model = ["--model", given.model] if given.model else []
    common = [*model, *_tiny(given), "--root", given.root]
    return [["bench.ttft", *common], ["bench.ttft", *common, "--layout", "log"]]


def _io(given: argparse.Namespace) -> list[list[str]]:
    common = [*_tiny(given), "--root", given.root]
    return [["bench.io_steps", *common], ["bench.io_steps", *common, "--layout", "log"]]


def _import(given: argparse.Namespace) -> list[list[str]]:
    return [["bench.imports", *(["--rounds", "1"] if given.tiny else [])]]


def _index(given: argparse.Namespace) -> list[list[str]]:
    return [["bench.index", *_tiny(given)]]


def _observe(given: argparse.Namespace) -> list[list[str]]:
    return [["bench.observe", *_tiny(given)], ["bench.observe_events", *_tiny(given)]]


def _copy(given: argparse.Namespace) -> list[list[str]]:
    return [["bench.copy", *_tiny(given)]]


def _obj(given: argparse.Namespace) -> list[list[str]]:
    return [["bench.obj", *_tiny(given), "--root", given.root]]


def _kv(given: argparse.Namespace) -> list[list[str]]:
    return [["bench.kv", *_tiny(given)]]


def _p2p(given: argparse.Namespace) -> list[list[str]]:
    model = ["--model", given.model] if given.model else []
    return [["bench.p2p", *_tiny(given)], ["bench.p2p_ttft", *model, *_tiny(given)]]


PARTS: dict[str, Commands] = {
    "import": _import,
    "manager": _manager,
    "observe": _observe,
    "index": _index,
    "copy": _copy,
    "p2p": _p2p,
    "ttft": _ttft,
    "io": _io,
    "obj": _obj,
    "kv": _kv,
    "fs": _fs,
    "log": _log,
}
"""``fs`` and ``log`` last: the gigabytes they write are written back in their own time."""


def run(command: Sequence[str]) -> tuple[list[str], int]:
    """The lines that a module prints, shown as they come, and its exit code.

    On failure its last errors go to stderr.
    """
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", *command], stdout=subprocess.PIPE, stderr=errors, text=True
        )
        watchdog = threading.Timer(PATIENCE_S, process.kill)
        watchdog.start()
        assert process.stdout is not None
        lines = []
        try:
            for line in process.stdout:
                if is_ours(line):
                    print(line, end="", flush=True)
                    lines.append(line)
            code = process.wait()
        finally:
            watchdog.cancel()
        if code:
            errors.seek(0)
            said = [line for line in errors if not line.startswith(_NOISE)]
            print(*said[-20:], sep="", file=sys.stderr)
    return lines, code


def as_json(
    machine: dict[str, Any], lines: Sequence[str], failed: Sequence[str], seconds: float
) -> dict[str, Any]:
    """What is written to a file."""
    spreads = spreads_in(lines)
    return {
        "machine": machine,
        "seconds": round(seconds, 1),
        "figures": [
            _entry(figure, spreads.get(f"{figure.kind} {figure.name}"))
            for figure in figures_in(lines)
        ],
        "remarks": [dict(zip(("kind", "name", "text"), r, strict=True)) for r in remarks_in(lines)],
        "failed": list(failed),
    }


def _entry(figure: Figure, spread: tuple[float, float] | None) -> dict[str, Any]:
    return {
        "kind": figure.kind,
        "name": figure.name,
        "value": figure.value,
        "quartiles": spread,
        "goal": figure.goal and " ".join(map(str, figure.goal)),
        "reached": figure.reached,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; the exit code."""
    parser = argparse.ArgumentParser(prog="bench", description="Figures; see docs/bench.md")
    parser.add_argument("--only", choices=PARTS, help="one part instead of all")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    parser.add_argument("--root", default=tempfile.gettempdir(), help="where files may be made")
    parser.add_argument("--model", help="folder of the checkpoint for ttft and p2p")
    parser.add_argument("--tiny", action="store_true", help="only to see that everything runs")
    given = parser.parse_args(arguments)
    machine, began = describe(given.root), time.monotonic()
    print(f"NOTE machine {json.dumps(machine)}", flush=True)
    lines: list[str] = []
    failed: list[str] = []
    for part in [given.only] if given.only else PARTS:
        for command in PARTS[part](given):
            printed, code = run(command)
            lines += printed
            if code:
                failed.append(f"{' '.join(command)} ended with {code}")
    seconds = time.monotonic() - began
    print(f"\n{table(figures_in(lines))}\n\n{seconds:.0f} s")
    for failure in failed:
        print(f"FAILED {failure}")
    if given.json:
        written = as_json(machine, lines, failed, seconds)
        given.json.write_text(json.dumps(written, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
