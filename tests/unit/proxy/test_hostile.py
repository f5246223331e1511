"""Bytes that no client and no worker should send."""

import asyncio
import gzip
import logging
from contextlib import asynccontextmanager

import pytest

from tests.unit.proxy.proxy_kit import (
    ANSWER,
    CHAT,
    Worker,
    error_of,
    front,
    on_a_loop,
    raw,
    until,
)

CLOSE = "Connection: close"
BODY = b'{"messages": []}'
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
WELL = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n"


async def said(client, data: bytes) -> bytes:
    """All that comes back until the connection ends."""
    reader, writer = await client.connect()
    writer.write(data)
    try:
        return await reader.read()
    finally:
        writer.close()


def chunked(body: bytes, *headers: str) -> bytes:
    lines = [f"POST {CHAT} HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


# -- clients --------------------------------------------------------------------------------------

MALFORMED = {
    "two lengths": raw(BODY, "Content-Length: 3"),
    "a length and chunks": raw(BODY, "Transfer-Encoding: chunked"),
    "a length with a sign": raw(BODY, length="+16"),
    "chunks of another encoding": chunked(b"0\r\n\r\n", "Transfer-Encoding: xchunked"),
    "an encoding after chunks": chunked(
        b"0\r\n\r\n", "Transfer-Encoding: chunked", "Transfer-Encoding: identity"
    ),
    "a header over two lines": raw(BODY, "X-A: a\r\n b"),
    "a header with a zero byte": raw(BODY, "X-A: a\0b"),
    "lines without returns": raw(BODY).replace(b"\r\n", b"\n"),
    "a header without end": raw(BODY, "X-A: " + "a" * 100_000),
    "headers without end": raw(BODY, *[f"X-{n}: a" for n in range(5000)]),
    "a chunk without a length": chunked(b"zz\r\n{}\r\n0\r\n\r\n", "Transfer-Encoding: chunked"),
}


@pytest.mark.parametrize("request_", MALFORMED.values(), ids=lambda r: None)
@on_a_loop
async def test_what_is_malformed_is_answered_400_and_fills_no_log(request_, caplog):
    worker = Worker()
    with caplog.at_level(logging.INFO):
        async with front(workers=[worker]) as client:
            answer = await said(client, request_ + HEALTH)
            assert answer.split()[1] == b"400"
            assert b"HTTP/1.1 200" not in answer, "what followed was taken for a request"
            assert (await client.chat())[0] == 200
    assert len(worker.asked) == 1
    assert not caplog.records


@on_a_loop
async def test_a_packed_body_is_bounded_by_what_it_holds(caplog):
    worker = Worker()
    bomb = gzip.compress(bytes(20 << 20))
    async with front(workers=[worker], max_body_bytes=1 << 20) as client:
        for body, status in ((bomb, b"413"), (b"no gzip", b"400")):
            answer = await said(client, raw(body, "Content-Encoding: gzip", CLOSE))
            assert answer.split()[1] == status
            error_of(answer.split(b"\r\n\r\n", 1)[1])
    assert not worker.asked
    assert not caplog.records


@on_a_loop
async def test_a_head_is_answered_without_a_body():
    """Else who reads the next answer on that connection reads what stands before it."""
    async with front(workers=[Worker()]) as client:
        for path, status in (("/v1/models", b"405"), ("/health", b"200"), ("/metrics", b"200")):
            head = f"HEAD {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
            answer = await said(client, head + HEALTH)
            first, second, rest = answer.split(b"\r\n\r\n")
            assert first.split()[1] == status
            assert second.startswith(WELL)
            assert rest == b""


@on_a_loop
async def test_a_connection_without_a_request_is_closed(monkeypatch):
    monkeypatch.setattr("kvtiers.proxy.run._IDLE_S", 0.2)
    async with front(workers=[Worker()]) as client:
        for half in (b"", raw(BODY)[:40], HEALTH.replace(b"close", b"keep-alive")):
            answer = await said(client, half)
            assert answer == b"" or answer.startswith(WELL)


@on_a_loop
async def test_a_client_may_leave_at_any_byte():
    worker = Worker()
    request = raw(b'{"messages": [], "stream": true}')
    async with front(workers=[worker]) as client:
        for end in range(0, len(request) + 1, 3):
            _, writer = await client.connect()
            writer.write(request[:end])
            await writer.drain()
            writer.transport.abort()
        for count in range(1, 400, 9):
            reader, writer = await client.connect()
            writer.write(request)
            await reader.readexactly(count)
            writer.transport.abort()
        await until(lambda: client.proxy.gate.inside == 0)
        assert (await client.chat())[0] == 200
    assert worker.running == 0


@on_a_loop
async def test_bytes_of_headers_that_are_no_utf8_harm_nobody():
    worker = Worker()
    async with front(workers=[worker]) as client:
        request = raw(BODY, CLOSE).replace(b"Host: x", b"Host: x\r\nX-A: \xff\xc3")
        assert (await said(client, request)).endswith(ANSWER)
    assert "X-A" in worker.headers[0]


# -- workers --------------------------------------------------------------------------------------


class Raw(Worker):
    """A worker that answers with these bytes and hangs up."""

    def __init__(self, answer: bytes) -> None:
        super().__init__()
        self.answer = answer

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *error):
        self._server.close()

    async def _serve(self, reader, writer):
        first = await reader.readuntil(b"\r\n\r\n")
        writer.write(self.answer if first.startswith(b"POST") else WELL + b"\r\n")
        await writer.drain()
        writer.close()


@asynccontextmanager
async def before(answer: bytes):
    async with front(workers=[Raw(answer)]) as client:
        yield client


def http(*lines: str, body: bytes = b"abc", status: str = "200 OK") -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode() + body


NONE = {
    "another protocol": http("Upgrade: x", "Connection: Upgrade", status="101 Switching Protocols"),
    "an announcement only": http(body=b"", status="100 Continue"),
    "a status that is none": http("Content-Length: 3", status="099 Odd"),
    "no length": http("Content-Length: x"),
    "a negative length": http("Content-Length: -1"),
    "a length and chunks": http("Content-Length: 3", "Transfer-Encoding: chunked"),
    "chunks that are none": http("Transfer-Encoding: chunked", body=b"zz\r\nabc\r\n0\r\n\r\n"),
    "more than its length": http("Content-Length: 3", body=b"abcd"),
    "a zero byte in a header": http("X-A: a\0b", "Content-Length: 3"),
    "a header without end": http("X-A: " + "a" * 100_000, "Content-Length: 3"),
    "nothing": b"",
    "noise": bytes(range(256)),
}


@pytest.mark.parametrize("answer", NONE.values(), ids=NONE)
@on_a_loop
async def test_an_answer_that_is_none_is_a_failure_of_the_worker(answer):
    async with before(answer) as client:
        got = await said(client, raw(BODY) + HEALTH)
        first, second = got.split(b"HTTP/1.1 ")[1:]
        assert first.startswith(b"502")
        error_of(first.split(b"\r\n\r\n")[1])
        assert second.startswith(b"200")


BREAKS_OFF = {
    "less than its length": http("Content-Length: 9"),
    "no last chunk": http("Transfer-Encoding: chunked", body=b"3\r\nabc\r\n"),
}


@pytest.mark.parametrize("answer", BREAKS_OFF.values(), ids=BREAKS_OFF)
@on_a_loop
async def test_an_answer_that_breaks_off_is_cut(answer):
    async with before(answer) as client:
        try:
            got = await said(client, raw(BODY) + HEALTH)
        except ConnectionResetError:
            got = b"HTTP/1.1 200 OK"
        assert got.count(b"HTTP/1.1") == 1
        assert not got.endswith(b"0\r\n\r\n")


@on_a_loop
async def test_an_answer_until_the_end_of_the_connection_is_whole():
    async with before(b"HTTP/1.0 200 OK\r\n\r\nuntil it ends") as client:
        assert b"until it ends" in await said(client, raw(BODY, CLOSE))
