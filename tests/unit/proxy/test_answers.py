"""What clients get when all goes well, and what workers get of them."""

import asyncio
import gzip
import json

import pytest
from aiohttp import web

from tests.unit.proxy.proxy_kit import (
    ANSWER,
    COMPLETIONS,
    EVENTS,
    JSON,
    Worker,
    front,
    held,
    on_a_loop,
    raw,
    until,
)

LONG = "all human beings are born free and equal in dignity and rights " * 20


@on_a_loop
async def test_answers_are_those_of_the_worker_byte_for_byte():
    async with front(workers=[Worker()]) as client:
        assert await client.chat() == (200, ANSWER)
        assert await client.chat(stream=True) == (200, b"".join(EVENTS))
        assert await client.ask(COMPLETIONS, prompt="x") == (200, ANSWER)
        async with client.session.get(client.url + "/v1/models") as response:
            assert (await response.json())["data"] == [{"id": "m"}]
        counts = await client.counts()
    assert counts['requests_total{ending="answered"}'] == 4
    assert counts['requests_total{ending="refused"}'] == 0
    assert counts["first_byte_seconds_count"] == 4
    assert counts['worker_usable{worker="worker-0"}'] == 1


@on_a_loop
async def test_events_arrive_when_they_are_sent():
    gates = [asyncio.Event() for _ in EVENTS]

    async def slow(worker, request, body):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for gate, event in zip(gates, EVENTS, strict=True):
            await gate.wait()
            await response.write(event)
        return response

    async with front(workers=[Worker(slow)]) as client:
        gates[0].set()
        async with client.send(messages=[], stream=True) as response:
            assert response.headers["Content-Type"] == "text/event-stream"
            for gate, event in zip([*gates[1:], gates[0]], EVENTS, strict=True):
                assert await response.content.readexactly(len(event)) == event
                gate.set()
            assert await response.read() == b""


@on_a_loop
async def test_headers_travel_end_to_end():
    async def answer(worker, request, body):
        headers = {"X-Theirs": "1", "Keep-Alive": "timeout=9", "Content-Encoding": "gzip"}
        return web.Response(body=gzip.compress(ANSWER), headers=headers)

    worker = Worker(answer)
    async with front(workers=[worker]) as client:
        mine = {"Authorization": "Bearer x", "X-Request-Id": "r", "Connection": "X-Hop, close"}
        mine |= {"X-Hop": "1", "Accept-Encoding": "gzip"}
        async with client.send(headers=mine, messages=[]) as response:
            assert await response.read() == ANSWER
            assert response.headers["X-Theirs"] == "1"
            assert "Keep-Alive" not in response.headers
            assert int(response.headers["Content-Length"]) == len(gzip.compress(ANSWER))
    (got,) = worker.headers
    assert (got["Authorization"], got["X-Request-Id"]) == ("Bearer x", "r")
    assert got["Accept-Encoding"] == "gzip"
    assert "X-Hop" not in got
    assert got["Host"] == f"127.0.0.1:{worker.port}"
    assert "User-Agent" in got, "the client's own"


@on_a_loop
async def test_a_body_that_was_packed_arrives_unpacked():
    worker = Worker()
    body = gzip.compress(json.dumps({"messages": [], "mine": "ä"}).encode())
    packed = {**JSON, "Content-Encoding": "gzip"}
    async with front(workers=[worker]) as client, client.send_raw(body, packed) as response:
        assert response.status == 200
    assert worker.asked == [{"messages": [], "mine": "ä"}]


@on_a_loop
async def test_prefill_and_decode_run_at_the_same_time():
    begun = asyncio.Event()
    prefill, decode = Worker(held(begun)), Worker()

    async def answer(worker, request, body):
        await prefill.arrived.wait()  # it is asked while prefill still runs
        begun.set()

    decode.behave = answer
    async with front([prefill], [decode]) as client:
        text = await client.chat(stream=True, max_tokens=7)
        counts = await client.counts()
    assert text == (200, b"".join(EVENTS))
    (produced,), (pulled,) = prefill.params, decode.params
    name = produced["remote_decoder"]["kv_request_id"]
    assert pulled == {
        "remote_prefiller": {
            "kv_request_id": name,
            "remote_host": "127.0.0.1",
            "remote_port": prefill.port + 1,
        }
    }
    (first,), (second,) = prefill.asked, decode.asked
    assert (first["max_tokens"], first["stream"]) == (1, False)
    assert (second["max_tokens"], second["stream"]) == (7, True)
    assert first["messages"] == second["messages"]
    assert sum(counts[f'prefills_total{{ending="{e}"}}'] for e in ("done", "cancelled")) == 1


@on_a_loop
async def test_each_request_has_a_name_of_its_own():
    prefill = Worker()
    async with front([prefill], [Worker()]) as client:
        for _ in range(3):
            await client.chat()
    names = {p["remote_decoder"]["kv_request_id"] for p in prefill.params}
    assert len(names) == 3


@on_a_loop
async def test_several_prompts_are_computed_where_they_are_answered():
    prefill, decode = Worker(), Worker()
    async with front([prefill], [decode]) as client:
        assert (await client.ask(COMPLETIONS, prompt=["a", "b"]))[0] == 200
    assert prefill.asked == []
    assert decode.params == [None]


@on_a_loop
async def test_a_prefill_that_decode_does_not_wait_for_is_cancelled():
    prefill = Worker(held(asyncio.Event()))
    decode = Worker()

    async def answer(worker, request, body):
        await prefill.arrived.wait()

    decode.behave = answer
    async with front([prefill], [decode]) as client:
        assert await client.chat() == (200, ANSWER)
        await prefill.cancelled.wait()
        assert (await client.counts())['prefills_total{ending="cancelled"}'] == 1


@on_a_loop
async def test_a_conversation_stays_and_when_it_moves_it_names_where_it_was():
    busy = asyncio.Event()
    one, other = Worker(), Worker()
    async with front(workers=[one, other], slack=0) as client:
        await client.chat(LONG)
        await client.chat(LONG)
        assert (len(one.asked), len(other.asked)) == (2, 0)
        one.behave = held(busy)
        one.arrived.clear()
        waits = asyncio.create_task(client.chat(LONG))
        await one.arrived.wait()
        await client.chat(LONG)
        busy.set()
        assert await waits == (200, ANSWER)
        assert (await client.counts())["sources_named_total"] == 1
    assert one.params == [None] * 3
    (source,) = other.params
    peer = source["remote_kv_source"]
    assert (peer["remote_host"], peer["remote_port"]) == ("127.0.0.1", one.port + 1)
    assert peer["kv_request_id"]


@on_a_loop
async def test_two_hundred_at_once():
    prefill, decode = [Worker(), Worker()], [Worker(), Worker()]
    async with front(prefill, decode, max_in_flight=20, max_queued=180) as client:
        answers = await asyncio.gather(*(client.chat(str(n), stream=True) for n in range(200)))
        counts = await client.counts()
    assert answers == [(200, b"".join(EVENTS))] * 200
    assert [len(w.asked) for w in decode] == [100, 100]
    assert counts['requests_total{ending="answered"}'] == 200
    assert counts["retries_total"] == 0
    contents = sorted(int(b["messages"][0]["content"]) for w in decode for b in w.asked)
    assert contents == list(range(200))


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@on_a_loop
async def test_clients_that_speak_plainly(version):
    async with front(workers=[Worker()]) as client:
        reader, writer = await client.connect()
        body = b'{"messages": [], "stream": true}'
        writer.write(raw(body, "Connection: close", version=version))
        answer = await reader.read()
        writer.close()
    assert answer.startswith(f"HTTP/{version} 200 OK\r\n".encode())
    assert EVENTS[0] in answer
    chunked = b"chunked" in answer.partition(b"\r\n\r\n")[0].lower()
    assert chunked == (version == "1.1")


@on_a_loop
async def test_many_turns_on_one_connection():
    async with front(workers=[Worker()]) as client:
        reader, writer = await client.connect()
        for _ in range(3):
            writer.write(raw())
            await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(len(ANSWER)) == ANSWER
        writer.close()
        await until(lambda: client.proxy.gate.inside == 0)
