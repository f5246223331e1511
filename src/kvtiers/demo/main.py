"""``kvtiers demo``: four passes, a table, a picture, a verdict."""

import argparse
import secrets
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from kvtiers.demo.history import Request, build_history
from kvtiers.demo.passes import START_STEPS, Stage, restarts, run_pass
from kvtiers.demo.plan import Break, Mode, disk_tier, read_geometry
from kvtiers.demo.plot import plot_records
from kvtiers.demo.progress import Progress
from kvtiers.demo.records import Records
from kvtiers.demo.report import ROUNDING_NOTE, summary_table, turn_tables, write_json
from kvtiers.demo.sweep import run_sweep
from kvtiers.demo.tiers import tier_at
from kvtiers.demo.verdict import judge
from kvtiers.errors import ConfigError, KVTiersError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the demo."""
    parser.add_argument("--model", type=Path, default=Path(".models/SmolLM2-135M-Instruct"))
    parser.add_argument("--output", type=Path, default=Path("demo-results"))
    parser.add_argument(
        "--tier",
        metavar="URL",
        help="what stands behind host memory instead of a folder of the demo's own: "
        "redis://host:6379, or whatever the tools know; chunks lie below a name of this run's own",
    )
    parser.add_argument("--sweep", action="store_true", help="requests/s of growing pools instead")
    parser.add_argument(
        "--break",
        dest="broken",
        choices=[b.value for b in Break],
        help="spoil a tier on purpose: the demo must say RESULT failed",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; 0 if it showed what it claims, 1 if not.

    The last line on stdout is ``RESULT ok ...`` or ``RESULT failed ...``, whatever happens short of
    a signal. Of what nobody foresaw the traceback is kept in ``logs/demo.log``.
    """
    end_on_signal()
    try:
        return _run(arguments)
    except KVTiersError as e:
        sentence, _, details = str(e).partition("\n")
        if details:
            print(details, file=sys.stderr)
        print(f"RESULT failed {sentence.rstrip(':')}")
    except Exception as e:
        first, _, _ = str(e).partition("\n")
        kept = keep_traceback(e, arguments.output / "logs" / "demo.log")
        print(f"RESULT failed {type(e).__name__}: {first or 'it says no more'}; {kept}")
    return 1


def keep_traceback(error: Exception, log: Path) -> str:
    """Write the traceback to ``log``, or to stderr where that fails; says where it is."""
    text = "".join(traceback.format_exception(error))
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(text)
    except OSError:
        print(text, file=sys.stderr)
        return "the traceback is above"
    return f"the traceback is in {log}"


def _run(arguments: argparse.Namespace) -> int:
    output: Path = arguments.output
    if not (arguments.model / "config.json").exists():
        raise ConfigError(f"--model {arguments.model} holds no config.json: run make model first")
    broken = Break(arguments.broken) if arguments.broken else None
    logs = output / "logs"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    # Beside the results and not in /tmp, which may be memory.
    scratch = Path(tempfile.mkdtemp(dir=output, prefix=".disk-")).absolute()
    try:
        history = build_history()
        progress = Progress(_steps(history))
        tier = chosen_tier(arguments.tier, scratch, broken)
        geometry = read_geometry(arguments.model)
        stage = Stage(arguments.model, geometry, logs, scratch, tier, progress, broken)
        if arguments.sweep:
            return run_sweep(stage, output)
        records = _run_passes(history, stage)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if arguments.tier:
        print(f"Where it says disk below, read: a tier of type {tier['type']}.\n")
    return conclude(records, output)


def chosen_tier(url: str | None, scratch: Path, broken: Break | None) -> dict[str, Any]:
    """The entry of ``secondary_tiers`` behind host memory: that of ``url``, or a folder of ours.

    Raises ConfigError for a URL that is not understood.
    """
    if url is None:
        return disk_tier(scratch)
    if broken is Break.DISK:
        raise ConfigError("--break disk spoils files of the demo's own: leave out --tier")
    return tier_at(url, secrets.token_hex(4))


def _run_passes(history: Sequence[Request], stage: Stage) -> Records:
    try:
        return {mode: run_pass(mode, history, stage) for mode in Mode}
    finally:
        stage.progress.close()


def conclude(records: Records, output: Path) -> int:
    """Judge, write and print the records; the exit status."""
    verdict = judge(records)
    write_json(output / "demo.json", records, verdict)
    plot_records(output / "demo.png", records)
    print(turn_tables(records), "\n")
    print(summary_table(records), "\n")
    print(ROUNDING_NOTE, "\n")
    print(f"All numbers: {output / 'demo.json'}   picture: {output / 'demo.png'}")
    print(verdict)
    return 0 if verdict.ok else 1


def _steps(history: Sequence[Request]) -> int:
    return sum(restarts(mode) * START_STEPS + len(history) for mode in Mode)


def end_on_signal() -> None:
    """Make SIGTERM unwind the stack, so that servers are stopped as after Ctrl-C."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
