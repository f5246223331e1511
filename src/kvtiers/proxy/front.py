"""What clients meet: the routes, the bounds, and answers passed on byte for byte."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web
from multidict import CIMultiDict

from kvtiers.proxy import replies
from kvtiers.proxy.asked import CHAT, COMPLETIONS, LIST_MODELS, MODELS, Asked, read
from kvtiers.proxy.counters import Counters, Ending
from kvtiers.proxy.gate import Gate
from kvtiers.proxy.headers import to_client, to_worker
from kvtiers.proxy.options import Clock, ProxyOptions
from kvtiers.proxy.replies import Refusal
from kvtiers.proxy.router import Router
from kvtiers.proxy.serving import Serving
from kvtiers.proxy.upstream import Broken, Opened

_log = logging.getLogger("kvtiers.proxy")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Front:
    """The web application of a proxy."""

    def __init__(
        self,
        options: ProxyOptions,
        router: Router,
        serving: Serving,
        gate: Gate,
        counters: Counters,
        seed: int,
        clock: Clock,
    ) -> None:
        self._options = options
        self._router = router
        self._serving = serving
        self._gate = gate
        self._counters = counters
        self._seed = seed
        self._clock = clock
        self.ending = False
        """Set once no new requests are taken."""

    def application(self) -> web.Application:
        """Its routes."""
        application = web.Application(
            client_max_size=self._options.max_body_bytes, middlewares=[self._errors]
        )
        application.router.add_post(CHAT, self._complete)
        application.router.add_post(COMPLETIONS, self._complete)
        # A HEAD would be given the worker's body, too.
        application.router.add_get(MODELS, self._models, allow_head=False)
        application.router.add_get("/health", self._health)
        application.router.add_get("/metrics", self._metrics)
        return application

    # -- routes ----------------------------------------------------------------------------------

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        with self._gate.entered() as room:
            if not room:
                return self._refuse(replies.FULL)
            asked = await self._read(request)
            if isinstance(asked, Refusal):
                return self._refuse(asked)
            return await self._in_turn(request, asked)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        with self._gate.entered() as room:
            return await self._in_turn(request, LIST_MODELS) if room else self._refuse(replies.FULL)

    async def _health(self, request: web.Request) -> web.StreamResponse:
        if self.ending:
            return _said(replies.ENDING)
        usable = any(worker.usable for worker in self._router.pool.workers)
        return web.Response() if usable else _said(replies.NO_WORKER)

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=self._counters.text(), content_type="text/plain", charset="utf-8")

    # -- a request -------------------------------------------------------------------------------

    async def _read(self, request: web.Request) -> Asked | Refusal:
        options = self._options
        if request.content_type != "application/json":
            return replies.NOT_JSON
        if (request.content_length or 0) > options.max_body_bytes:
            return replies.too_large(options.max_body_bytes)
        try:
            async with asyncio.timeout(options.body_timeout_s):
                raw = await request.read()
        except TimeoutError:
            return replies.SLOW_BODY
        except web.RequestPayloadError:
            return replies.BROKEN_BODY
        return read(request.path, raw, self._seed, pass_params=options.pass_kv_transfer_params)

    async def _in_turn(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        async with self._gate.turn(self._options.queue_timeout_s) as turn:
            if not turn:
                return self._refuse(replies.NO_TURN)
            began = self._clock()
            async with self._serving.answer(asked, to_worker(request.headers.items())) as got:
                if isinstance(got, Refusal):
                    return self._refuse(got)
                self._counters.first_byte(self._clock() - began)
                return await self._relay(request, got)

    async def _relay(self, request: web.Request, opened: Opened) -> web.StreamResponse:
        """Pass an answer on. One that breaks off breaks off for the client too."""
        there = opened.response
        headers = CIMultiDict(to_client(there.headers.items()))
        answer = web.StreamResponse(status=there.status, reason=there.reason, headers=headers)
        ending = Ending.ANSWERED
        try:
            await answer.prepare(request)
            await self._write(answer, opened.first)
            async for some in opened.rest():
                await self._write(answer, some)
            await answer.write_eof()
        except Broken:
            ending = Ending.BROKEN
        except (ConnectionError, TimeoutError):
            ending = Ending.LEFT
        self._counters.ended(ending)
        if ending is not Ending.ANSWERED and request.transport is not None:
            request.transport.abort()
        return answer

    async def _write(self, answer: web.StreamResponse, some: bytes) -> None:
        """Raises TimeoutError if the client takes nothing for too long."""
        if some:
            async with asyncio.timeout(self._options.idle_timeout_s):
                await answer.write(some)

    # -- refusals --------------------------------------------------------------------------------

    def _refuse(self, refusal: Refusal) -> web.Response:
        self._counters.ended(Ending.REFUSED)
        return _said(refusal)

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Whatever aiohttp says itself, or nobody foresaw, in the same shape."""
        if self.ending and request.path.startswith("/v1/"):
            return self._refuse(replies.ENDING)
        try:
            return await handler(request)
        except asyncio.CancelledError:
            self._counters.ended(Ending.LEFT)
            raise
        except web.HTTPRequestEntityTooLarge:
            return self._refuse(replies.too_large(self._options.max_body_bytes))
        except web.HTTPException as e:
            what = f"{request.method} {request.rel_url.raw_path}"
            words = f"{what} is not served here: see docs/proxy.md."
            return self._refuse(Refusal(e.status, words))
        except Exception:
            _log.exception("a request failed for a reason that nobody foresaw")
            return self._refuse(Refusal(500, "The proxy failed: its log says why."))


def _said(refusal: Refusal) -> web.Response:
    answer = web.Response(
        status=refusal.status,
        body=refusal.body(),
        content_type="application/json",
        headers=refusal.headers(),
    )
    if refusal.status in (408, 413, 415) or refusal in (replies.ENDING, replies.BROKEN_BODY):
        answer.force_close()  # what is left of the body is not read
    return answer
