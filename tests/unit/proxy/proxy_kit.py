"""Workers that fail as told, a proxy before them, and clients, all on one loop."""

import asyncio
import functools
import json
from contextlib import AsyncExitStack, asynccontextmanager

from aiohttp import ClientSession, TCPConnector, web

from kvtiers.proxy.options import Address, ProxyOptions
from kvtiers.proxy.run import Proxy, listening

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
JSON = {"Content-Type": "application/json"}
LIMIT_S = 30
EVENTS = [f'data: {{"choices":[{{"delta":{{"content":"t{n}"}}}}]}}\n\n'.encode() for n in range(5)]
EVENTS.append(b"data: [DONE]\n\n")
ANSWER = b'{"object": "chat.completion",  "choices":[{"message":{"content":"all"}}]}'


def on_a_loop(test):
    """An async test, which has to end within LIMIT_S."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), LIMIT_S))

    return run


class Worker:
    """A server that answers as an engine does, or as ``behave(worker, request, body)`` does."""

    def __init__(self, behave=None):
        self.behave = behave
        self.asked = []
        """Bodies of requests, in order."""
        self.headers = []
        self.health = 200
        self.tokens = None
        """What ``/tokenize`` says; None: it is not served."""
        self.tokenized = []
        """Bodies of requests to it."""
        self.running = 0
        self.cancelled = asyncio.Event()
        self.arrived = asyncio.Event()
        self.port = 0

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    @property
    def address(self):
        return Address(self.url, "127.0.0.1", self.port + 1)

    @property
    def params(self):
        return [body.get("kv_transfer_params") for body in self.asked]

    async def __aenter__(self):
        application = web.Application(client_max_size=1 << 30)
        for path in (CHAT, COMPLETIONS):
            application.router.add_post(path, self._answer)
        application.router.add_get("/v1/models", self._models)
        application.router.add_get("/health", self._health)
        application.router.add_post("/tokenize", self._tokenize)
        self._runner = web.AppRunner(
            application, access_log=None, handler_cancellation=True, shutdown_timeout=0.1
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *error):
        await self._runner.cleanup()

    async def _models(self, request):
        return web.json_response({"object": "list", "data": [{"id": "m"}]})

    async def _health(self, request):
        return web.Response(status=self.health)

    async def _tokenize(self, request):
        self.tokenized.append(await request.json())
        if self.tokens is None:
            raise web.HTTPNotFound
        return web.json_response({"count": len(self.tokens), "tokens": self.tokens})

    async def _answer(self, request):
        body = await request.json()
        self.asked.append(body)
        self.headers.append(request.headers.copy())
        self.arrived.set()
        self.running += 1
        try:
            if self.behave is not None:
                answer = await self.behave(self, request, body)
                if answer is not None:
                    return answer
            return await answer_well(request, body)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            self.running -= 1


async def answer_well(request, body):
    if not body.get("stream"):
        return web.Response(body=ANSWER, content_type="application/json")
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in EVENTS:
        await response.write(event)
    return response


# -- behaviours -----------------------------------------------------------------------------------


async def die_at_once(worker, request, body):
    request.transport.abort()
    return web.Response()


async def die_after_the_headers(worker, request, body):
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    request.transport.abort()
    return response


async def die_after_the_first_event(worker, request, body):
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(EVENTS[0])
    request.transport.close()  # what was written arrives
    return response


async def hang(worker, request, body):
    await asyncio.Event().wait()


def say(status):
    async def behave(worker, request, body):
        return web.json_response({"error": f"says {status}"}, status=status)

    return behave


def held(gate):
    """Answers once ``gate`` is set."""

    async def behave(worker, request, body):
        await gate.wait()

    return behave


# -- the proxy, and clients -----------------------------------------------------------------------


class Client:
    """Talks to one proxy."""

    def __init__(self, proxy, port, session):
        self.proxy = proxy
        self.url = f"http://127.0.0.1:{port}"
        self.port = port
        self.session = session

    def send(self, path=CHAT, headers=None, **body):
        """A request, as a context of its response."""
        return self.session.post(self.url + path, json=body, headers=headers)

    async def ask(self, path=CHAT, headers=None, **body):
        """Status and bytes of the answer."""
        async with self.send(path, headers, **body) as response:
            return response.status, await response.read()

    async def chat(self, text="hello", **body):
        return await self.ask(messages=[{"role": "user", "content": text}], **body)

    def send_raw(self, data, headers=JSON):
        """A request of these bytes, as a context of its response."""
        return self.session.post(self.url + CHAT, data=data, headers=headers)

    async def connect(self):
        """A bare connection: reader and writer."""
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def counts(self):
        """Samples of /metrics."""
        async with self.session.get(self.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name.removeprefix("kvtiers_proxy_"): float(value) for name, value in samples}


def urls(workers):
    return tuple(worker.address for worker in workers)


@asynccontextmanager
async def front(prefill=(), decode=(), workers=(), **options):
    """A client of a proxy before these workers; at the end nothing is left in flight."""
    options = {"drain_s": 5.0, "health_interval_s": 60.0, **options}
    async with AsyncExitStack() as stack:
        for worker in (*prefill, *decode, *workers):
            await stack.enter_async_context(worker)
        proxy = Proxy(
            ProxyOptions(
                prefill=urls(prefill),
                decode=urls(decode),
                workers=urls(workers),
                port=0,
                **options,
            )
        )
        port = await stack.enter_async_context(listening(proxy))
        connector = TCPConnector(limit=0, force_close=True)
        session = await stack.enter_async_context(ClientSession(connector=connector))
        yield Client(proxy, port, session)
        await until(lambda: proxy.gate.inside == 0)
        proxy.check()
        assert [w.in_flight for w in proxy.router.workers] == [0] * len(proxy.router.workers)


def raw(body=b'{"messages": []}', *headers, version="1.1", length=None):
    """A request as bytes."""
    lines = [f"POST {CHAT} HTTP/{version}", "Host: x", "Content-Type: application/json", *headers]
    lines += [f"Content-Length: {len(body) if length is None else length}", "", ""]
    return "\r\n".join(lines).encode() + body


async def until(holds):
    """Until ``holds()``; LIMIT_S ends it otherwise."""
    while not holds():
        await asyncio.sleep(0.005)


def error_of(text):
    """The error in the shape of OpenAI's, which is one sentence."""
    error = json.loads(text)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].count("\n") == 0
    assert error["message"].endswith(".")
    return error
