"""What commands say: tables and bars for people, one JSON document for programs.

Results go to stdout; progress, warnings and errors to stderr. Whatever came from a disk, such as
names and manifests, may hold anything: control characters are shown, never sent to a terminal.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

Advance = Callable[[int], None]
"""Told how much more of the work is done."""


class Unit(Enum):
    """What a bar counts."""

    BYTES = "bytes"
    CHUNKS = "chunks"
    FILES = "files"


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_AGES = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))
_NO_WRAP = 1 << 14
"""Columns of what is no terminal: lines there are not broken."""


class Output:
    """The output of one command."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.warnings: list[str] = []

    def warn(self, sentence: str) -> None:
        """Say, once, what is no error of the command; it is part of the document too."""
        if sentence in self.warnings:
            return
        self.warnings.append(sentence)
        print(f"kvtiers: warning: {clean(sentence)}", file=sys.stderr)

    def note(self, sentence: str) -> None:
        """Say on stderr, to who sits before it, what may seem to hang."""
        if sys.stderr.isatty():
            print(f"kvtiers: {clean(sentence)}", file=sys.stderr)

    def show(self, document: dict[str, Any], human: Callable[[], None]) -> None:
        """The result, once: ``document`` as JSON, or whatever ``human`` prints."""
        if self.as_json:
            print(json.dumps({**document, "warnings": self.warnings}, indent=2))
        else:
            human()

    def line(self, text: str = "") -> None:
        """A line for people."""
        print(clean(text))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table for people; columns named ``>NAME`` are numbers, at the right."""
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        made = Table(box=None, pad_edge=False, header_style="bold")
        for column in columns:
            right = column.startswith(">")
            made.add_column(
                Text(column.lstrip(">")), justify="right" if right else "left", overflow="fold"
            )
        for row in rows:
            made.add_row(*(Text(clean(cell)) for cell in row))
        width = None if sys.stdout.isatty() else _NO_WRAP
        console = Console(file=sys.stdout, width=width, highlight=False)
        with console.capture() as lines:
            console.print(made)
        print(*(line.rstrip() for line in lines.get().splitlines()), sep="\n")

    @contextmanager
    def progress(self, total: int | None, doing: str, unit: Unit = Unit.BYTES) -> Iterator[Advance]:
        """A bar on stderr, if that is a terminal; ``total``: None if nobody knows."""
        if not sys.stderr.isatty():
            yield lambda done: None
            return
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, TextColumn
        from rich.progress import TimeRemainingColumn as Remaining
        from rich.progress import TransferSpeedColumn as Speed

        columns: list[ProgressColumn] = [TextColumn("{task.description}"), BarColumn()]
        if unit is Unit.BYTES:
            columns += [DownloadColumn(True), Speed()]
        else:
            columns.append(TextColumn(f"{{task.completed:,}} {unit.value}"))
        columns.append(Remaining())
        console = Console(file=sys.stderr)
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(doing, total=total)
            yield lambda done: bar.advance(task, done)


def clean(text: str) -> str:
    """``text`` in printable characters of one line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def size(count: int) -> str:
    """Bytes for people: ``1.5 GiB``."""
    value, unit = float(count), 0
    while value >= 1023.95 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{count} B"


def rate(bytes_per_s: float) -> str:
    """Bytes per second for people, in powers of ten as disks are sold: ``1.50 GB/s``."""
    return f"{bytes_per_s / 1e9:.2f} GB/s"


def age(seconds: float) -> str:
    """A span of time for people: ``3 min``, ``2.5 d``."""
    for unit, name in _AGES:
        if seconds >= unit:
            return f"{seconds / unit:.1f}".removesuffix(".0") + f" {name}"
    return f"{max(0.0, seconds):.0f} s"


def sentence_of(error: BaseException) -> str:
    """What an error says, on one line."""
    text = " ".join(str(error).split())
    return clean(text) or type(error).__name__
