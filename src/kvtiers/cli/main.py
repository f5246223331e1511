"""From the words of a call to an exit status: 0 done, 1 something is wrong, 2 a wrong call."""

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import NoReturn, TextIO

from kvtiers import __version__
from kvtiers.cli.output import Output, clean, sentence_of
from kvtiers.cli.table import COMMANDS, Command
from kvtiers.errors import Kind, KVTiersError
from kvtiers.options import nearest

_WRONG_CALL = 2
_STOPPED = 128 + signal.SIGINT
_NOBODY_READS = 128 + signal.SIGPIPE


class _Parser(argparse.ArgumentParser):
    """Refuses in one line."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and where to read what is right."""
        self.exit(_WRONG_CALL, f"{self.prog}: {clean(message)}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``kvtiers``; returns the exit status. Raises SystemExit for a call that is not one."""
    _replace_closed_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _parser(words)
    if not words:
        parser.print_help(sys.stderr)
        return _WRONG_CALL
    arguments = parser.parse_args(words)
    command: Command = arguments.command
    with _ending_on_sigterm():
        try:
            status = _run(command, arguments)
            sys.stdout.flush()
        except KeyboardInterrupt:
            status = _STOPPED
        except BrokenPipeError:
            _write_to_nobody()
            status = _NOBODY_READS
    return status


def _run(command: Command, arguments: argparse.Namespace) -> int:
    # What an engine would log of its tier, a tool has as a result and words itself.
    logging.getLogger("kvtiers").addHandler(logging.NullHandler())
    try:
        return command.run(arguments, Output(getattr(arguments, "json", False)))
    except (KeyboardInterrupt, BrokenPipeError):
        raise
    except KVTiersError as e:
        status, sentence = _WRONG_CALL if e.kind is Kind.CONFIG else 1, sentence_of(e)
        raised: Exception = e
    except Exception as e:
        # Whatever lies on a disk can make something fail that nobody thought of.
        status, sentence, raised = 1, f"{type(e).__name__}: {sentence_of(e)}", e
    if getattr(arguments, "debug", False):
        raise raised
    print(f"kvtiers {command.name}: {sentence}", file=sys.stderr)
    return status


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """All commands by name; only of the one that is asked for the module is imported."""
    asked = next((word for word in words if not word.startswith("-")), None)
    parser = _Parser(
        prog="kvtiers",
        description="Tiered KV-cache offloading for LLM engines: tools for operators.",
        epilog=f"for example: {COMMANDS[0].example}",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kvtiers {__version__}")
    known = [command.name for command in COMMANDS]
    if asked is not None and asked not in known:
        near = nearest(asked, known)
        hint = f"did you mean {near}?" if near else f"the commands are {', '.join(known)}"
        parser.error(f"there is no command {asked!a}: {hint}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        below = commands.add_parser(
            command.name,
            help=command.summary,
            description=f"{command.summary[0].upper()}{command.summary[1:]}.".replace("?.", "?"),
            epilog=f"for example: {command.example}",
            allow_abbrev=False,
        )
        below.set_defaults(command=command)
        if command.name == asked:
            command.add_arguments(below)
    return parser


def _replace_closed_streams() -> None:
    """What is written to a stream that the caller closed (``2>&-``) goes nowhere: Python has none.

    Its descriptor is taken too, so that no file of a tier becomes what others take for the stream.
    """
    if sys.stdout is None:
        sys.stdout = _nowhere()
    if sys.stderr is None:
        sys.stderr = _nowhere()


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8", errors="backslashreplace")


def _write_to_nobody() -> None:
    """Whatever is still buffered has no reader: let the interpreter's end not complain of it."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """SIGTERM ends a command as Ctrl-C does, so that it takes away what is half done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
