"""The observer over real sockets: what it answers, and what hostile or broken clients get."""

import asyncio
import json
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvtiers.config import parse_config
from kvtiers.errors import ConfigError
from kvtiers.events import PRIMARY
from kvtiers.observe.http import MAX_BODY, MAX_HEAD, Answer, Asked, said
from kvtiers.observe.pages import read_pages
from kvtiers.observe.routes import KEY_BYTES, MAX_KEYS
from kvtiers.observe.server import Limits, Observer
from tests.unit.cli.cli_kit import KEYS, NAMESPACE, Tier
from tests.unit.observe.observer_kit import World, get, parsed, raw, rest, world

PATIENT = Limits(connections=2, read_s=60.0)
"""A machine that is busy makes no client a slow one."""


def echo(asked: Asked) -> Answer:
    return said(200, {"path": asked.path, "body": asked.body.decode()})


@pytest.fixture
def live(tmp_path: Path) -> Iterator[World]:
    root = tmp_path / "kv"
    Tier(root).fill(KEYS[:2])
    with world(tmp_path, root) as made:
        yield made


@pytest.fixture
def server() -> Iterator[Observer]:
    made = Observer(echo, "127.0.0.1", 0, limits=PATIENT)
    assert made.start()
    yield made
    made.check()
    made.close()


@contextmanager
def serving(answer: Callable[[Asked], Answer], limits: Limits | None = None) -> Iterator[int]:
    """The port of an observer that answers so."""
    made = Observer(answer, "127.0.0.1", 0, limits=limits)
    assert made.start()
    try:
        yield made.port
    finally:
        made.close()


# -- documents -------------------------------------------------------------------------------------


def test_a_request_from_its_beginning_to_its_record(live: World) -> None:
    port = live.observer.port
    live.ask("cmpl-1-0-abcd", KEYS[:3], tokens=70)
    status, record = get(port, "/requests/cmpl-1")
    assert status == 200
    assert record["request_id"] == "cmpl-1-0-abcd"
    assert record["tokens"] == {
        "prompt": 70,
        "asked": 64,
        "by_source": {"1:fs": 32},
        "missed": 32,
    }
    assert [(r["first"], r["count"], r["key"]) for r in record["runs"]] == [
        (0, 2, KEYS[0].hex()),
        (2, 1, KEYS[2].hex()),
    ]
    assert "1:fs does not have it" in record["why"]
    _, listed = get(port, "/requests?limit=1")
    assert [each["request_id"] for each in listed["requests"]] == ["cmpl-1-0-abcd"]


def test_the_state_of_engine_and_tiers(live: World) -> None:
    live.ask("r", KEYS[:2])
    status, state = get(live.observer.port, "/state")
    assert status == 200
    engine = state["engine"]
    assert (engine["model"], engine["namespace"], engine["replica"]) == ("m", NAMESPACE.id, 0)
    assert engine["started_at"] <= engine["now"]
    host, fs = state["tiers"]
    assert (host["label"], host["state"]) == (PRIMARY, "in use")
    assert (fs["label"], fs["medium"], fs["state"]) == ("1:fs", "STORAGE", "in use")
    assert host["resident_bytes"] == 2 * host["capacity_bytes"] / 16
    counted = {(c["name"], *c["labels"]): c["value"] for c in state["counters"]}
    assert counted["lookup_misses", PRIMARY, "absent"] == 2
    assert counted["loaded_tokens", "1:fs"] == 32
    assert state["active"] == []


def test_metrics_health_and_manifest(live: World) -> None:
    port = live.observer.port
    live.ask("r", KEYS[:2])
    assert get(port, "/healthz") == (200, {"ok": True})
    assert get(port, "/namespace")[1]["fields"] == dict(NAMESPACE.fields)
    status, text = get(port, "/metrics")
    assert status == 200
    assert b'chunk_queries_total{engine="0",model_name="m",tier="1:fs"} 2.0' in text


def test_where_chunks_are_now(live: World) -> None:
    port = live.observer.port
    live.ask("r", KEYS[:1])
    status, told = get(port, f"/explain?keys={','.join(key.hex() for key in KEYS)}")
    assert status == 200
    assert told["chunks"] == 4
    host, fs = told["tiers"]
    assert (host["tier"], host["there"], host["first_missing"]) == (PRIMARY, 1, 1)
    assert [(r["count"], r["state"], r["reason"]) for r in fs["runs"]] == [
        (2, "there", None),
        (2, "missing", "absent"),
    ]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/requests/nobody", 404),
        ("/requests/", 404),
        ("/requests?limit=x", 400),
        ("/requests?limit=" + "9" * 30, 400),
        ("/explain", 400),
        ("/explain?keys=xyz", 400),
        ("/explain?keys=00", 400),
        ("/nothing", 404),
        ("/../pyproject.toml", 404),
        ("/%2e%2e/%2e%2e/pyproject.toml", 404),
        ("/page/index.html", 404),
        ("/__init__.py", 404),
        ("//etc/passwd", 404),
    ],
)
def test_what_is_not_there_is_refused_in_a_sentence(live: World, path: str, status: int) -> None:
    got, document = get(live.observer.port, path)
    assert got == status
    assert document["error"]


def test_a_post_is_for_keys_only_and_json(live: World) -> None:
    port = live.observer.port
    body = b'{"keys": ["%s"]}' % KEYS[0].hex().encode()
    head = f"POST /explain HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
    sent = head.encode() + b"Content-Type: application/json\r\n\r\n" + body
    assert parsed(raw(port, sent))[1]["chunks"] == 1
    assert parsed(raw(port, head.encode() + b"\r\n" + body))[0] == 415, "as a foreign form sends it"
    assert get(port, "/state", "POST")[0] == 405
    assert get(port, "/state", "DELETE")[0] == 405


def test_as_many_keys_as_may_be_fit_into_a_body():
    keys = ["ff" * KEY_BYTES[-1]] * MAX_KEYS
    assert len(json.dumps({"keys": keys})) <= MAX_BODY


def test_too_many_keys_are_refused(live: World) -> None:
    body = b'{"keys": [%s]}' % b",".join([b'"00"'] * (MAX_KEYS + 1))
    head = f"POST /explain HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
    sent = head.encode() + b"Content-Type: application/json\r\n\r\n" + body
    status, document = parsed(raw(live.observer.port, sent))
    assert (status, document["error"]) == (
        400,
        f"give keys: 1 to {MAX_KEYS} of them, in hexadecimal",
    )


def test_a_page_is_served_by_name_and_with_its_type() -> None:
    pages = read_pages()
    assert pages["/"] == pages["/index.html"]
    assert all(path.count("/") == 1 for path in pages)
    shown = {"/": Answer(200, b"<p>", "text/html; charset=utf-8")}

    def answer(asked: Asked) -> Answer:
        return shown[asked.path]

    with serving(answer) as port:
        whole = raw(port, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"Content-Type: text/html" in whole
        assert b"script-src 'self'" in whole
        assert b"X-Content-Type-Options: nosniff" in whole
        head = raw(port, b"HEAD / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert head.endswith(b"\r\n\r\n")
        assert b"Content-Length: 3" in head


# -- clients ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:9810", 200),
        ("localhost", 200),
        ("LOCALHOST:1", 200),
        ("[::1]:9810", 200),
        ("10.1.2.3:80", 200),
        ("evil.example", 421),
        ("localhost.evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("me@127.0.0.1", 421),
        ("127.0.0.1:port", 421),
        ("", 421),
    ],
)
def test_a_foreign_name_is_not_ours(server: Observer, host: str, status: int) -> None:
    assert get(server.port, "/state", Host=host)[0] == status


def test_a_name_can_be_made_ours() -> None:
    made = Observer(echo, "127.0.0.1", 0, names=["Engine-0.svc"])
    assert made.start()
    try:
        assert get(made.port, "/", Host="engine-0.svc:9810")[0] == 200
        assert get(made.port, "/", Host="engine-1.svc:9810")[0] == 421
    finally:
        made.close()


def test_another_origin_is_refused(server: Observer) -> None:
    host = f"127.0.0.1:{server.port}"
    assert get(server.port, "/", Origin="http://evil.example")[0] == 421
    assert get(server.port, "/", Origin=f"http://{host}")[0] == 200


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/2\r\n\r\n", 400),
        (b"GET http://127.0.0.1/ HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost : localhost\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n folded: yes\r\n\r\n", 400),
        (b"GET /?" + b"a=1&" * 33 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nOrigin: http://[\r\n\r\n", 421),
        (b"GET / HTTP/1.1\r\nHost: [\r\n\r\n", 421),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", 200),
        (b"GET / HTTP/1.1\r\n\r\n", 421),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * MAX_HEAD + b"\r\n\r\n", 431),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: " + str(MAX_BODY + 1).encode() + b"\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nContent-Length: " + b"9" * 400 + b"\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 501),
    ],
)
def test_what_is_no_request_is_refused(server: Observer, request_: bytes, status: int) -> None:
    assert parsed(raw(server.port, request_))[0] == status


def test_a_client_that_sends_too_slowly_is_let_go() -> None:
    with (
        serving(echo, Limits(read_s=0.1)) as port,
        socket.create_connection(("127.0.0.1", port), timeout=20) as connection,
    ):
        connection.sendall(b"GET / HTTP/1.1\r\nHost: loc")
        assert parsed(rest(connection))[0] == 408


def test_there_are_few_connections_and_room_again_after_them(server: Observer) -> None:
    idle = [socket.create_connection(("127.0.0.1", server.port), 20) for _ in range(2)]
    while server._open < 2:
        time.sleep(0.001)
    assert get(server.port, "/")[0] == 503
    for connection in idle:
        connection.close()
    while server._open:
        time.sleep(0.001)
    assert get(server.port, "/")[0] == 200


def test_beyond_twice_as_many_connections_are_closed_unanswered(server: Observer) -> None:
    with ExitStack() as idle:
        for count in range(1, 3):
            idle.enter_context(socket.create_connection(("127.0.0.1", server.port), 20))
            while server._open < count:
                time.sleep(0.001)
        server._open += 2  # others that are told that these are too many
        try:
            with pytest.raises((ConnectionError, IndexError)):
                get(server.port, "/")
        finally:
            server._open -= 2


def test_nothing_is_kept_for_a_client_that_takes_nothing() -> None:
    large = Answer(200, b"x" * (16 << 20))
    sent: list[asyncio.StreamWriter] = []

    class Watched(Observer):
        async def _exchange(
            self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            sent.append(writer)
            await super()._exchange(reader, writer)

    made = Watched(lambda asked: large, "127.0.0.1", 0, limits=Limits(write_s=0.1))
    assert made.start()
    try:
        with socket.create_connection(("127.0.0.1", made.port), timeout=20) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            while not sent or made._open:
                time.sleep(0.001)
            assert sent[0].transport.get_write_buffer_size() == 0
            assert len(rest(connection)) < 16 << 20
    finally:
        made.close()


def test_the_process_ends_while_an_answer_hangs() -> None:
    program = """
import socket, threading
from kvtiers.observe.server import Observer
asked = threading.Event()
def answer(request):
    asked.set()
    threading.Event().wait()
made = Observer(answer, "127.0.0.1", 0)
assert made.start()
client = socket.create_connection(("127.0.0.1", made.port))
client.sendall(b"GET / HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n")
asked.wait()
made.close()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_an_answer_that_hangs_or_fails_costs_only_itself(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()

    def answer(asked: Asked) -> Answer:
        if asked.path == "/hangs":
            release.wait(30)
        if asked.path == "/fails":
            raise RuntimeError("of mine")
        return echo(asked)

    with serving(answer, Limits(answer_s=0.1)) as port:
        assert get(port, "/hangs")[0] == 503
        release.set()
    with serving(answer) as port:
        with caplog.at_level(logging.ERROR, "kvtiers"):
            assert get(port, "/fails")[0] == get(port, "/fails")[0] == 500
        assert len(caplog.records) == 1
        assert get(port, "/")[0] == 200


# -- life ------------------------------------------------------------------------------------------


def test_a_port_that_is_taken_is_a_warning_that_names_the_option(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        made = Observer(echo, "127.0.0.1", taken.getsockname()[1])
        with caplog.at_level(logging.WARNING, "kvtiers"):
            assert not made.start()
    assert "set another port or host in observe of kv_connector_extra_config" in caplog.text
    made.close()
    assert "observers of other engines and kvtiers index listen at such ports" in caplog.text


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.1"])
def test_an_address_that_is_not_ours_is_a_warning(host: str) -> None:
    made = Observer(echo, host, 0)
    assert not made.start()
    made.close()


def test_it_ends_while_clients_hang_on(server: Observer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        while not server._open:
            time.sleep(0.001)
        server.close()
        assert server._thread is not None
        assert not server._thread.is_alive()
        assert rest(connection) == b""
    server.close()
    with pytest.raises(ConnectionError):
        get(server.port, "/")


def test_it_says_what_it_is(server: Observer) -> None:
    assert repr(server) == f"<Observer 127.0.0.1:{server.port}, 0 connections>"


def test_a_bug_of_the_observers_is_logged_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise RuntimeError("of mine")

    monkeypatch.setattr("kvtiers.observe.assemble.read_pages", broken)
    with pytest.raises(AssertionError), world(tmp_path):
        pass
    assert "the engine goes on without it" in caplog.text


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("observe", "sentence"),
    [
        ({}, "port is missing from observe"),
        ({"port": 70000}, "port in observe of kv_connector_extra_config must be a port number"),
        ({"port": 1, "prot": 2}, "did you mean 'port'"),
        ({"port": 1, "names": "a"}, "names in observe of kv_connector_extra_config must be a list"),
        (9810, "observe in kv_connector_extra_config must be a mapping"),
    ],
)
def test_wrong_options_are_named(observe: object, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse_config({"cpu_bytes_to_use": 1 << 20, "observe": observe})


def test_it_is_off_unless_it_is_asked_for() -> None:
    assert parse_config({"cpu_bytes_to_use": 1 << 20}).observe is None
