"""``kvtiers why`` before a real observer, and before what is none."""

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvtiers.errors import ConfigError, Kind, KVTiersError
from kvtiers.observe import ObserverClient, why
from tests.unit.cli.cli_kit import KEYS, TOKENS, Ran, Tier, good, kvtiers
from tests.unit.observe.observer_kit import World, world


@pytest.fixture
def live(tmp_path: Path) -> Iterator[World]:
    root = tmp_path / "kv"
    Tier(root).fill(KEYS[:2])
    with world(tmp_path, root) as made:
        made.ask("cmpl-1-0-abcd", KEYS[:3], tokens=70)
        yield made


@pytest.fixture
def answering() -> Iterator[Any]:
    """``answering(body, status)``: the URL of a server that says this to everything."""
    servers = []

    def start(body: bytes, status: int = 200) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"] or 0))
                self.do_GET()

            def do_GET(self) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def bad(ran: Ran, status: int) -> str:
    """What a call that ends with this status says, in one line."""
    assert (ran.status, ran.out) == (status, ""), ran.out
    assert ran.err.count("\n") == 1
    return ran.err


def test_a_request_in_a_table_and_as_a_document(live: World) -> None:
    shown = good(kvtiers("why", "cmpl-1", "--at", live.url)).out
    assert "32 of 64 tokens were loaded (32 from 1:fs)" in shown
    assert re.search(r"GROUP +CHUNKS +TOKENS +0:primary +1:fs +FIRST KEY", shown)
    assert re.search(rf"0 +0-1 +0-31 +absent +hit +{KEYS[0].hex()[:16]}", shown)
    assert re.search(rf"0 +2 +32-47 +absent +absent +{KEYS[2].hex()[:16]}", shown)
    document = good(kvtiers("why", "cmpl-1", "--at", live.url, "--json")).json
    assert document["tokens"]["by_source"] == {"1:fs": 32}
    assert document["why"] == why("cmpl-1", at=live.url)["why"]


def test_one_that_nobody_remembers_is_an_error(live: World) -> None:
    ran = kvtiers("why", "nobody", "--at", live.url)
    assert ran.status == 1
    assert "no request is remembered whose id begins with 'nobody'" in ran.err


def test_a_prompt_by_its_tokens(live: World, tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps(TOKENS))
    shown = good(kvtiers("why", "--tokens", file, "--at", live.url)).out
    assert "an engine would load 32 of 64 tokens, if it asked now" in shown
    assert re.search(r"0 +0-1 +0-31 +hit +hit", shown)
    assert re.search(r"0 +2-3 +32-63 +absent +absent", shown)
    document = good(kvtiers("why", "--tokens", file, "--at", live.url, "--json")).json
    assert (document["loadable_tokens"], document["chunks"]) == (32, 4)
    assert document["keys"] == [key.hex() for key in KEYS]


def test_a_prompt_by_its_text(live: World, tmp_path: Path, answering: Any) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("four chunks of text")
    engine = answering(json.dumps({"tokens": TOKENS}).encode())
    words = ["why", "--prompt", file, "--at", live.url, "--engine"]
    assert "load 32 of 64 tokens" in good(kvtiers(*words, engine)).out
    for other, fault in (
        (answering(b"{}"), "answers POST /tokenize without a list of tokens"),
        (answering(b'{"tokens": "ab"}'), "without a list of tokens"),
        (answering(b"no", 404), "answers 404 to POST /tokenize"),
        (answering(json.dumps({"tokens": TOKENS}).encode(), 500), "answers 500 to"),
        ("http://127.0.0.1:1", "does not answer: "),
    ):
        said = bad(kvtiers(*words, other), 1)
        assert f"{other} does not cut the prompt into tokens, for it" in said
        assert fault in said
        assert "--engine has to be a vLLM server" in said
    assert "--engine is" in bad(kvtiers(*words, "ftp://x"), 2)


def test_a_prompt_of_less_than_a_chunk_is_refused(live: World, tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    file.write_text("[1, 2]")
    said = bad(kvtiers("why", "--tokens", file, "--at", live.url), 2)
    assert "2 tokens are less than a chunk (16 tokens)" in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "one of them"),
        (["r", "--tokens", "x"], "one of them"),
        (["r", "--at", "9810"], "is no URL of an observer"),
        (["r", "--at", "http://a:b"], "is no URL of an observer"),
        (["r", "--at", "http://u@127.0.0.1"], "is no URL of an observer"),
        (["--tokens", "/nowhere"], "cannot be read"),
        (["--prompt", "/nowhere"], "cannot be read"),
    ],
)
def test_wrong_calls(words: list[str], sentence: str) -> None:
    assert sentence in bad(kvtiers("why", *words), 2)


def test_no_observer_and_what_is_none(answering: Any) -> None:
    assert "set observe in the engine's" in bad(
        kvtiers("why", "r", "--at", "http://127.0.0.1:1"), 1
    )
    for body in (b"<html>", b"[]", b"\xff"):
        assert "is no observer of kvtiers" in bad(kvtiers("why", "r", "--at", answering(body)), 1)


def test_what_is_nearly_an_observer_is_none_in_a_sentence(answering: Any, tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps(TOKENS))
    for body in (b"{}", b'{"request_id": 1, "waited_s": "x"}'):
        for words in (("r",), ("--tokens", file)):
            ran = kvtiers("why", *words, "--at", answering(body))
            assert ran.status == 1
            assert "answers what no observer of this version says" in ran.err


def test_an_answer_that_never_ends_is_not_waited_for() -> None:
    ended = threading.Event()

    def drip(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection, suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            while not ended.wait(0.01):
                connection.sendall(b" ")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=drip, args=(listening,))
        thread.start()
        client = ObserverClient(f"http://127.0.0.1:{listening.getsockname()[1]}", timeout_s=0.2)
        with pytest.raises(KVTiersError, match="no whole answer within"):
            client.state()
        ended.set()
        thread.join()


def test_the_library_says_kinds_of_errors(live: World) -> None:
    client = ObserverClient(live.url)
    assert [r["request_id"] for r in client.requests()] == ["cmpl-1-0-abcd"]
    assert client.state()["engine"]["model"] == "m"
    with pytest.raises(KVTiersError) as raised:
        client.request("../state")
    assert raised.value.kind is Kind.VANISHED
    with pytest.raises(ConfigError):
        ObserverClient("nonsense")
