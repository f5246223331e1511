"""``kvtiers top``: what it prints of an engine, and what it says of one that is silent."""

import io
import json
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from rich.console import Console

from kvtiers.cli import main
from kvtiers.cli.commands.top import Looks, live
from kvtiers.cli.scraping import Endpoint
from kvtiers.errors import ConfigError, Kind, KVTiersError
from kvtiers.observe.exposition import Scrape, parse
from tests.unit.observe.test_board import AFTER, BEFORE


@contextmanager
def engine(*answers: tuple[int, str]) -> Iterator[str]:
    """An HTTP server on loopback that gives these answers, the last one for ever."""
    left = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(status if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def once(url: str, *more: str) -> int:
    return main(["top", "--once", "--interval", "0.1", "--url", url, *more])


def test_once_prints_a_frame_and_ends(capsys):
    with engine((200, BEFORE), (200, AFTER)) as url:
        assert once(url) == 0
    out = capsys.readouterr().out
    held, moved, *missed = (re.split(r"  +", line) for line in out.splitlines() if "1:fs" in line)
    assert held[:3] == ["1:fs", "80 %", "80 %"]
    assert held[4:] == ["300 B", "400 B", "75 %", "left alone"]
    assert moved[2:4] == ["66.7 ms", "100.0 ms"]
    assert ["1:fs", "absent"] in [cells[:2] for cells in missed]
    assert "unlimited capacity, empty at the start, would have hit 80 %" in out
    assert "ASKED, HIT and MISSED count lookups of chunks, of peers too" in out


def test_every_line_fits_a_small_terminal(capsys):
    with engine((200, BEFORE), (200, AFTER)) as url:
        once(url)
        lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines) <= 80


def test_once_as_json(capsys):
    with engine((200, BEFORE), (200, AFTER)) as url:
        assert once(url + "/metrics", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert [tier["label"] for tier in document["tiers"]] == ["device", "0:primary", "1:fs"]
    assert document["ceiling"] == 0.8


def test_what_a_server_sends_is_shown_and_not_obeyed(capsys):
    evil = 'vllm:kvtiers_lookup_misses_total{tier="\x1b[2J[red]",reason="<b>"} 1'
    text = AFTER + evil
    with engine((200, text)) as url:
        once(url)
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "[red]" in out


def test_an_engine_that_exports_nothing_is_said(capsys):
    with engine((200, "up 1")) as url:
        assert once(url) == 1
    seen = capsys.readouterr()
    assert seen.out == ""
    assert f"{url} exports no metric of vLLM or kvtiers" in seen.err
    assert "--url" in seen.err


def test_an_engine_that_exports_nothing_yet_is_looked_at_again():
    frames = watch("up 1", "up 1", AFTER).split("http://engine  over")
    assert "exports no metric" in frames[1]
    assert "1:fs" in frames[-1]


@pytest.mark.parametrize("status", [404, 500])
def test_another_answer_is_one_sentence(capsys, status):
    with engine((status, "no")) as url:
        assert once(url) == 1
    error = capsys.readouterr().err
    assert f"answers {status}" in error
    assert error.count("\n") == 1


def test_nobody_there_is_one_sentence(capsys):
    with engine((200, "")) as url:
        pass
    assert once(url) == 1
    assert "does not answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    "url", ["", "localhost", "ftp://h", "http://", "http://u:p@h", "http://h:x"]
)
def test_urls_that_are_none(url):
    with pytest.raises(ConfigError, match="--url"):
        Endpoint(url)


@pytest.mark.parametrize("words", [["--interval", "0"], ["--interval", "nan"], ["--json"], []])
def test_calls_that_are_none(capsys, words):
    assert main(["top", *words]) == 2  # stdout is no terminal here
    assert capsys.readouterr().err.count("\n") == 1


class Scripted:
    """Scrapes in turn; an exception is raised."""

    def __init__(self, *script: str | BaseException) -> None:
        self.script = list(script)

    def __call__(self) -> Scrape:
        next_ = self.script.pop(0)
        if isinstance(next_, BaseException):
            raise next_
        return parse(next_)


def watch(*script: str | BaseException) -> str:
    """What a terminal gets until Ctrl-C; an hour lies between two looks."""
    times = iter(range(0, 3600 * len(script), 3600))
    slept: list[float] = []
    looks = Looks(Scripted(*script, KeyboardInterrupt()), 3600, lambda: next(times), slept.append)
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=100, height=40)
    with pytest.raises(KeyboardInterrupt):
        live(looks, "http://engine", console)
    assert set(slept) == {3600}
    return written.getvalue()


def test_a_silent_engine_leaves_its_last_board_and_is_said_to_be_silent():
    silence = KVTiersError("engine does not answer", kind=Kind.IO)
    text = watch(BEFORE, AFTER, silence, silence)
    assert "no answer since" in text
    assert text.rindex("no answer since") < text.rindex("1:fs")


def test_an_engine_that_comes_back_is_seen_again():
    frames = watch(BEFORE, AFTER, KVTiersError("gone", kind=Kind.IO), AFTER).split("http://engine")
    assert "no answer" in frames[-2]
    assert "no answer" not in frames[-1]


def lengths(looks: Looks, count: int) -> Sequence[float]:
    return [looks.next().seconds for _ in range(count)]


def test_rates_are_over_the_time_that_passed_and_not_the_one_asked_for():
    times = iter([10.0, 13.0, 14.5])
    looks = Looks(Scripted("n 1", "n 2", "n 3"), 1.0, lambda: next(times), lambda s: None)
    assert lengths(looks, 2) == [3.0, 1.5]
