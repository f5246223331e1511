"""``kvtiers top``: tiers, hit rates and flows of a running engine, from its ``/metrics``."""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.live import Live

from kvtiers.cli.output import Output, sentence_of
from kvtiers.cli.scraping import URL, Endpoint
from kvtiers.cli.topview import nothing_at, render
from kvtiers.errors import ConfigError, Kind, KVTiersError
from kvtiers.observe.board import Board, board
from kvtiers.observe.exposition import Scrape

_NO_WRAP = 1 << 14
_SHORTEST_S = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("--url", default=URL, help=f"of vLLM, or of its observer; default {URL}")
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="S", help="between two looks; default 2"
    )
    parser.add_argument("--once", action="store_true", help="look twice, print that, and end")
    parser.add_argument("--json", action="store_true", help="one JSON document; goes with --once")
    parser.add_argument("--debug", action="store_true", help="a traceback with errors")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Show it until Ctrl-C, or once. Raises KVTiersError if the first look fails.

    Raises it, too, if nothing is exported there that could be shown once.
    """
    if not arguments.interval >= _SHORTEST_S:
        raise ConfigError(f"--interval is {arguments.interval}: give at least {_SHORTEST_S}")
    if not arguments.once and (arguments.json or not sys.stdout.isatty()):
        raise ConfigError("a live view needs a terminal: give --once")
    looks = Looks(Endpoint(arguments.url).scrape, arguments.interval)
    if arguments.once:
        seen = looks.next()
        if seen.empty:
            raise KVTiersError(nothing_at(arguments.url), kind=Kind.IO, operation="top")
        output.show(_document(arguments.url, seen), lambda: _print(seen, arguments.url))
    else:
        live(looks, arguments.url, Console())
    return 0


class Looks:
    """Boards, one an interval; the first scrape is made at once."""

    def __init__(
        self,
        scrape: Callable[[], Scrape],
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._scrape = scrape
        self._interval_s = interval_s
        self._clock = clock
        self._sleep = sleep
        self._last = scrape()
        self._last_at = clock()

    def __repr__(self) -> str:
        return f"<Looks every {self._interval_s} s, last at {self._last_at:.1f}>"

    def next(self) -> Board:
        """Wait for the interval, then look. Raises KVTiersError; the next look is after it."""
        self._sleep(self._interval_s)
        scrape, now = self._scrape(), self._clock()
        seen = board(self._last, scrape, max(now - self._last_at, 1e-9))
        self._last, self._last_at = scrape, now
        return seen


def live(looks: Looks, url: str, console: Console) -> None:
    """Draw one board after the other, also while the engine is silent; ends by an exception."""
    seen = looks.next()
    silent_since: str | None = None
    with Live(render(seen, url), console=console, screen=True, auto_refresh=False) as shown:
        while True:
            problem = None
            try:
                seen = looks.next()
                silent_since = None
            except KVTiersError as e:
                silent_since = silent_since or time.strftime("%H:%M:%S")
                problem = f"no answer since {silent_since}: {sentence_of(e)}"
            shown.update(render(seen, url, problem), refresh=True)


def _print(seen: Board, url: str) -> None:
    width = None if sys.stdout.isatty() else _NO_WRAP
    console = Console(file=sys.stdout, width=width, highlight=False)
    with console.capture() as lines:
        console.print(render(seen, url))
    print(*(line.rstrip() for line in lines.get().splitlines()), sep="\n")


def _document(url: str, seen: Board) -> dict[str, Any]:
    return {"url": url, **dataclasses.asdict(seen)}
