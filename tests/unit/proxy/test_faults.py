"""Every fault of a worker or a client, and what the others notice of it."""

import asyncio
import contextlib
import signal
import socket
import sys

import aiohttp
import pytest
from aiohttp import web

from tests.unit.cli.cli_kit import process
from tests.unit.proxy.proxy_kit import (
    ANSWER,
    CHAT,
    EVENTS,
    Worker,
    die_after_the_first_event,
    die_after_the_headers,
    die_at_once,
    error_of,
    front,
    hang,
    held,
    on_a_loop,
    raw,
    say,
    until,
)

WELL = (200, ANSWER)
FAULTS = {
    "dies at once": die_at_once,
    "dies after its headers": die_after_the_headers,
    "says 500": say(500),
    "says 503": say(503),
}
each_fault = pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)


def refusing():
    """A worker that is not there: nothing listens on its port."""

    class Absent(Worker):
        async def __aenter__(self):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self.port = free.getsockname()[1]
            return self

        async def __aexit__(self, *error):
            pass

    return Absent()


# -- prefill --------------------------------------------------------------------------------------


def waits_for_a_producer(worker, request, body):
    """As an engine that is told to pull what nobody computes."""
    return hang(worker, request, body) if body.get("kv_transfer_params") else no_wait()


async def no_wait():
    return None


@each_fault
@pytest.mark.parametrize("stream", [False, True])
@on_a_loop
async def test_prefill_fails_and_decode_computes_itself_at_once(fault, stream):
    prefill, decode = Worker(fault), Worker(waits_for_a_producer)
    async with front([prefill], [decode]) as client:
        status, text = await client.chat(stream=stream)
        counts = await client.counts()
    assert (status, text) == (200, b"".join(EVENTS) if stream else ANSWER)
    assert decode.params[-1] is None
    assert decode.cancelled.is_set() == (len(decode.asked) == 2)
    assert counts['prefills_total{ending="failed"}'] == 1


@on_a_loop
async def test_no_prefill_worker_is_there():
    decode = Worker(waits_for_a_producer)
    async with front([refusing()], [decode]) as client:
        for _ in range(4):
            assert await client.chat() == WELL
        counts = await client.counts()
    assert counts['worker_usable{worker="prefill-0"}'] == 0
    assert counts['prefills_total{ending="failed"}'] <= 3, "then it is left alone"


@on_a_loop
async def test_prefill_fails_after_decode_began_to_answer():
    """What was fetched is there, what was not is recomputed: that is the engine's to do."""
    dies, goes_on = asyncio.Event(), asyncio.Event()

    async def die_later(worker, request, body):
        await dies.wait()
        request.transport.abort()
        return web.Response()

    async def slow(worker, request, body):
        await prefill.arrived.wait()
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(EVENTS[0])
        await goes_on.wait()
        await response.write(EVENTS[1])
        return response

    prefill, decode = Worker(die_later), Worker(slow)
    async with (
        front([prefill], [decode]) as client,
        client.send(messages=[], stream=True) as response,
    ):
        assert await response.content.readexactly(len(EVENTS[0])) == EVENTS[0]
        dies.set()
        while (await client.counts())['prefills_total{ending="failed"}'] == 0:
            await asyncio.sleep(0.01)
        goes_on.set()
        assert await response.read() == EVENTS[1]
    assert len(decode.asked) == 1


# -- who answers ----------------------------------------------------------------------------------


@each_fault
@pytest.mark.parametrize("stream", [False, True])
@on_a_loop
async def test_a_worker_fails_before_the_first_byte_and_another_answers(fault, stream):
    bad, good = Worker(fault), Worker()
    async with front(workers=[bad, good]) as client:
        status, text = await client.chat(stream=stream)
        counts = await client.counts()
    assert (status, text) == (200, b"".join(EVENTS) if stream else ANSWER)
    assert (len(bad.asked), len(good.asked)) == (1, 1)
    assert counts["retries_total"] == 1


@on_a_loop
async def test_decode_is_retried_with_the_same_producer():
    prefill, bad, good = Worker(), Worker(die_at_once), Worker()
    async with front([prefill], [bad, good]) as client:
        prefill.behave = held(good.arrived)
        assert await client.chat() == WELL
    assert bad.params == good.params
    assert good.params[0]["remote_prefiller"]["kv_request_id"]
    assert len(prefill.asked) == 1


@on_a_loop
async def test_a_worker_that_is_not_there():
    async with front(workers=[refusing(), Worker()]) as client:
        for _ in range(6):
            assert await client.chat() == WELL
        counts = await client.counts()
    assert counts["retries_total"] <= 3, "after three failures it is left alone"
    assert counts['worker_usable{worker="worker-0"}'] == 0


@on_a_loop
async def test_of_a_row_of_failures_the_first_is_logged_and_the_last(caplog):
    bad = Worker(die_at_once)
    async with front(workers=[bad, Worker()]) as client:
        while len(bad.asked) < 3:
            await client.chat()
    first, last = (r.message for r in caplog.records if "worker-0 at" in r.message)
    assert first.startswith(f"worker-0 at http://127.0.0.1:{bad.port} failed: ")
    assert last.startswith(f"worker-0 at http://127.0.0.1:{bad.port} is left alone: ")


@on_a_loop
async def test_at_most_three_are_tried():
    workers = [Worker(die_at_once) for _ in range(5)]
    async with front(workers=workers) as client:
        status, text = await client.chat()
    assert (status, error_of(text)["type"]) == (502, "upstream_error")
    assert sum(len(w.asked) for w in workers) == 3


@on_a_loop
async def test_what_the_last_one_says_is_passed_on():
    async with front(workers=[Worker(say(500)), Worker(say(500))]) as client:
        assert await client.chat() == (500, b'{"error": "says 500"}')


@on_a_loop
async def test_a_client_cannot_put_workers_out_of_use():
    """A 500 may be the request's own fault: only its health speaks against a worker then."""
    async with front(workers=[Worker(say(500))]) as client:
        for _ in range(5):
            assert (await client.chat())[0] == 500
        assert (await client.counts())['worker_usable{worker="worker-0"}'] == 1


@pytest.mark.parametrize("status", [400, 404, 422, 429])
@on_a_loop
async def test_a_refusal_is_an_answer(status):
    workers = [Worker(say(status)), Worker()]
    async with front(workers=workers) as client:
        assert (await client.chat())[0] == status
    assert len(workers[1].asked) == 0


@on_a_loop
async def test_all_are_gone():
    async with front(workers=[refusing()]) as client:
        while client.proxy.router.workers[0].usable:
            assert (await client.chat())[0] == 502
        async with client.send(messages=[]) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "5")
            assert error_of(await response.read())["type"] == "overloaded_error"
        for path in ("/health", "/v1/models"):
            async with client.session.get(client.url + path) as response:
                assert response.status == 503


@pytest.mark.parametrize("stream", [False, True])
@on_a_loop
async def test_a_worker_dies_after_the_first_byte_and_the_client_is_told_by_a_cut(stream):
    bad, good = Worker(die_after_the_first_event), Worker()
    async with front(workers=[bad, good]) as client:
        async with client.send(messages=[], stream=stream) as response:
            assert await response.content.readexactly(len(EVENTS[0])) == EVENTS[0]
            with pytest.raises(aiohttp.ClientError):
                await response.read()
        counts = await client.counts()
    assert len(good.asked) == 0, "it is never sent anew"
    assert counts['requests_total{ending="broken"}'] == 1
    assert counts["retries_total"] == 0


@on_a_loop
async def test_a_worker_that_says_nothing_is_given_up():
    async with front(workers=[Worker(hang), Worker()], idle_timeout_s=0.1) as client:
        assert await client.chat() == WELL


@on_a_loop
async def test_a_worker_that_stops_in_the_middle_is_given_up():
    async def stop(worker, request, body):
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(EVENTS[0])
        await asyncio.Event().wait()

    async with (
        front(workers=[Worker(stop)], idle_timeout_s=0.1) as client,
        client.send(messages=[], stream=True) as response,
    ):
        with pytest.raises(aiohttp.ClientError):
            await response.read()


@on_a_loop
async def test_what_is_no_http_is_a_failure():
    async def babble(reader, writer):
        writer.write(b"\x00\xffnonsense\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(babble, "127.0.0.1", 0)
    odd = refusing()
    async with server, front(workers=[odd, Worker()]) as client:
        port = server.sockets[0].getsockname()[1]
        there = client.proxy.router.workers[0]
        there.address = there.address.__class__(f"http://127.0.0.1:{port}", "127.0.0.1", 1)
        assert await client.chat() == WELL


@on_a_loop
async def test_a_redirect_is_not_followed():
    async def elsewhere(worker, request, body):
        raise web.HTTPTemporaryRedirect("http://127.0.0.1:1/")

    async with (
        front(workers=[Worker(elsewhere)]) as client,
        client.session.post(
            client.url + CHAT, json={"messages": []}, allow_redirects=False
        ) as response,
    ):
        assert response.status == 307


# -- health ---------------------------------------------------------------------------------------


@on_a_loop
async def test_a_worker_that_is_unwell_gets_nothing_until_it_is_well():
    bad, good = Worker(), Worker()
    async with front(workers=[bad, good]) as client:
        there = client.proxy.router.workers[0]
        bad.health = 503
        for _ in range(3):
            await client.proxy.upstream.look(there)
        assert not there.usable
        for _ in range(4):
            assert await client.chat() == WELL
        assert (len(bad.asked), len(good.asked)) == (0, 4)
        bad.health = 200
        await client.proxy.upstream.look(there)
        assert not there.usable, "its time is not over"
        client.proxy.upstream._clock = lambda: float("inf")
        await client.proxy.upstream.look(there)
        assert there.usable
        async with client.session.get(client.url + "/health") as response:
            assert (response.status, await response.read()) == (200, b"")


@on_a_loop
async def test_workers_are_looked_at_without_being_asked():
    bad = Worker()
    bad.health = 500
    async with front(workers=[bad, Worker()], health_interval_s=0.01) as client:
        await until(lambda: not client.proxy.router.workers[0].usable)
        assert client.proxy.router.workers[1].usable


# -- clients --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@on_a_loop
async def test_a_client_that_goes_away_cancels_prefill_and_decode(stream):
    prefill, decode = Worker(hang), Worker(hang)
    async with front([prefill], [decode]) as client:
        asking = asyncio.create_task(client.chat(stream=stream))
        await prefill.arrived.wait()
        await decode.arrived.wait()
        asking.cancel()
        await prefill.cancelled.wait()
        await decode.cancelled.wait()
        await until(lambda: client.proxy.gate.inside == 0)
        assert (await client.counts())['requests_total{ending="left"}'] == 1


@on_a_loop
async def test_a_client_that_goes_away_in_the_middle_cancels():
    async def endless(worker, request, body):
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(EVENTS[0])
            await asyncio.sleep(0.001)

    worker = Worker(endless)
    async with front(workers=[worker]) as client:
        async with client.send(messages=[], stream=True) as response:
            await response.content.readexactly(100)
        await worker.cancelled.wait()
        await until(lambda: client.proxy.gate.inside == 0)
        counts = await client.counts()
    assert counts['requests_total{ending="left"}'] == 1
    assert counts['worker_usable{worker="worker-0"}'] == 1, "it is not the worker's fault"


@on_a_loop
async def test_a_client_that_waits_for_a_place_may_go_away():
    gate = asyncio.Event()
    worker = Worker(held(gate))
    async with front(workers=[worker], max_in_flight=1) as client:
        first = asyncio.create_task(client.chat())
        await worker.arrived.wait()
        second = asyncio.create_task(client.chat())
        await until(lambda: client.proxy.gate.queued == 1)
        second.cancel()
        await until(lambda: client.proxy.gate.queued == 0)
        gate.set()
        assert await first == WELL
        assert await client.chat() == WELL
    assert len(worker.asked) == 2


@on_a_loop
async def test_a_client_that_takes_nothing_is_let_go():
    async def flood(worker, request, body):
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * 65536)

    worker = Worker(flood)
    async with front(workers=[worker], idle_timeout_s=0.2) as client:
        _, writer = await client.connect()
        writer.write(raw())
        await worker.cancelled.wait()
        await until(lambda: client.proxy.gate.inside == 0)
        writer.close()


# -- bounds ---------------------------------------------------------------------------------------


@on_a_loop
async def test_those_above_the_bounds_are_told_to_come_back():
    gate = asyncio.Event()
    worker = Worker(held(gate))
    async with front(workers=[worker], max_in_flight=2, max_queued=3) as client:
        asking = [asyncio.create_task(client.chat(str(n))) for n in range(5)]
        await until(lambda: client.proxy.gate.queued == 3 and worker.running == 2)
        counts = await client.counts()
        assert (counts["in_flight"], counts["queued"]) == (2, 3)
        async with client.send(messages=[]) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "1")
            assert error_of(await response.read())["type"] == "rate_limit_error"
        gate.set()
        assert await asyncio.gather(*asking) == [WELL] * 5
        assert (await client.counts())['requests_total{ending="refused"}'] == 1


@on_a_loop
async def test_a_place_that_does_not_come_free_in_time():
    gate = asyncio.Event()
    worker = Worker(held(gate))
    async with front(workers=[worker], max_in_flight=1, queue_timeout_s=0.05) as client:
        first = asyncio.create_task(client.chat())
        await worker.arrived.wait()
        status, text = await client.chat()
        assert (status, error_of(text)["message"][:9]) == (503, "No worker")
        gate.set()
        assert await first == WELL


async def declared(client, length):
    """What who announces a body of this length is answered, before it is sent."""
    reader, writer = await client.connect()
    writer.write(raw(b"", length=length))
    head = await reader.readuntil(b"\r\n\r\n")
    text = await reader.read()
    writer.close()
    return int(head.split()[1]), text


@on_a_loop
async def test_a_body_above_the_bound_is_refused_before_it_is_read():
    async with front(workers=[Worker()], max_body_bytes=1000) as client:
        status, text = await declared(client, 1 << 40)
        assert (status, error_of(text)["type"]) == (413, "invalid_request_error")


@on_a_loop
async def test_a_body_that_does_not_say_its_length_is_bounded_too():
    async def endless():
        while True:
            yield b" " * 65536

    async with front(workers=[Worker()], max_body_bytes=100_000) as client:
        try:
            async with client.send_raw(endless()) as response:
                assert response.status == 413
                error_of(await response.read())
        except aiohttp.ClientConnectionError:
            pass  # the proxy closed while the client still sent
        assert (await client.counts())['requests_total{ending="refused"}'] == 1
        assert await client.chat() == WELL


@on_a_loop
async def test_a_body_that_does_not_come_is_not_waited_for():
    async with front(workers=[Worker()], body_timeout_s=0.05) as client:
        status, text = await declared(client, 10)
        assert (status, error_of(text)["type"]) == (408, "timeout_error")


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"messages": 1}', b"\xff", b"[" * 99999])
@on_a_loop
async def test_what_is_no_request_is_refused_in_one_sentence(body):
    worker = Worker()
    async with (
        front(workers=[worker]) as client,
        client.send_raw(body) as response,
    ):
        assert response.status == 400
        assert response.content_type == "application/json"
        assert error_of(await response.read())["type"] == "invalid_request_error"
    assert worker.asked == []


@on_a_loop
async def test_what_a_browser_sends_for_any_web_page_is_refused():
    worker = Worker()
    async with front(workers=[worker]) as client:
        for kind in ("text/plain", "application/x-www-form-urlencoded"):
            body = b'{"messages": []}'
            async with client.send_raw(body, {"Content-Type": kind}) as response:
                assert response.status == 415
                assert error_of(await response.read())["type"] == "invalid_request_error"
    assert worker.asked == []


@on_a_loop
async def test_peers_named_by_a_client_reach_no_worker_unless_they_may():
    params = {"remote_kv_source": {"kv_request_id": "x", "remote_host": "h", "remote_port": 1}}
    worker = Worker()
    async with front(workers=[worker]) as client:
        status, text = await client.chat(kv_transfer_params=params)
        assert (status, error_of(text)["param"]) == (400, "kv_transfer_params")
    assert worker.asked == []
    prefill, decode = Worker(), Worker()
    async with front([prefill], [decode], pass_kv_transfer_params=True) as client:
        assert await client.chat(kv_transfer_params=params) == WELL
    assert (prefill.params, decode.params) == ([], [params])


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", CHAT, 405), ("POST", "/v1/embeddings", 404), ("GET", "/", 404)],
)
@on_a_loop
async def test_what_is_not_served(method, path, status):
    async with (
        front(workers=[Worker()]) as client,
        client.session.request(method, client.url + path) as response,
    ):
        assert response.status == status
        assert error_of(await response.read())["code"] == status


@on_a_loop
async def test_a_bug_of_ours_is_one_sentence_and_costs_one_request():
    async with front(workers=[Worker()]) as client:
        serve, client.proxy.router.serve = client.proxy.router.serve, None
        status, text = await client.chat()
        assert (status, error_of(text)["type"]) == (500, "server_error")
        client.proxy.router.serve = serve
        assert await client.chat() == WELL


# -- the end --------------------------------------------------------------------------------------


@on_a_loop
async def test_requests_that_run_are_finished_and_no_new_ones_are_taken():
    gate = asyncio.Event()
    worker = Worker(held(gate))
    async with front(workers=[worker]) as client:
        reader, writer = await client.connect()
        running = asyncio.create_task(client.chat())
        await worker.arrived.wait()
        client.proxy.front.ending = True
        writer.write(raw())
        assert b" 503 " in await reader.readline()
        answer = await reader.read()  # the connection is closed
        assert error_of(answer.partition(b"\r\n\r\n")[2])["code"] == 503
        async with client.session.get(client.url + "/health") as response:
            assert response.status == 503
        gate.set()
        assert await running == WELL
        writer.close()


async def started(*words):
    """The command as an operator runs it, and the port that it says."""
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "kvtiers.cli", "proxy", *words, "--port", "0"],
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    line = (await process.stdout.readline()).decode()
    assert line.startswith("kvtiers proxy listens on http://127.0.0.1:"), line
    return process, int(line.rsplit(":", 1)[1])


@on_a_loop
async def test_sigterm_drains_and_a_second_one_ends_it_at_once():
    gate = asyncio.Event()
    async with Worker(held(gate)) as worker, aiohttp.ClientSession() as session:
        for patient in (True, False):
            gate.clear()
            worker.arrived.clear()
            process, port = await started("--worker", worker.url)
            asking = asyncio.create_task(
                session.post(f"http://127.0.0.1:{port}{CHAT}", json={"messages": []})
            )
            await worker.arrived.wait()
            process.send_signal(signal.SIGTERM)
            line = await process.stderr.readline()
            assert line == b"kvtiers proxy: no new requests are taken; those that run have 30 s\n"
            if patient:
                gate.set()
                assert await (await asking).read() == ANSWER
                assert await process.wait() == 0
                continue
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(aiohttp.ClientError):
                assert (await asking).status == 502
            assert await process.wait() == 130
        assert await process.stderr.read() == b""


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = process("proxy", "--worker", "http://127.0.0.1:1", "--port", str(port))
    assert (ran.status, ran.out) == (2, "")
    assert f"--port {port} cannot be listened on" in ran.err
    assert ran.err.count("\n") == 1
