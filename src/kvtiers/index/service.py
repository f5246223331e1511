"""What clients meet: the routes of the index, and its bounds."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from ipaddress import ip_address
from typing import Any

from aiohttp import web
from yarl import URL

from kvtiers.index import questions
from kvtiers.index.counters import Counters
from kvtiers.index.follower import Follower
from kvtiers.index.options import Clock, IndexOptions
from kvtiers.index.presence import Presence
from kvtiers.index.questions import Question, Refused
from kvtiers.index.reach import reach

_log = logging.getLogger("kvtiers.index")

_MAX_AT_ONCE = 64
"""Questions that are read or answered; those above are answered 429."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Service:
    """The web application of an index."""

    def __init__(
        self,
        options: IndexOptions,
        presence: Presence,
        followers: Sequence[Follower],
        counters: Counters,
        clock: Clock,
    ) -> None:
        self._options = options
        self._presence = presence
        self._followers = followers
        self._counters = counters
        self._clock = clock
        self._inside = 0

    def application(self) -> web.Application:
        """Its routes."""
        application = web.Application(
            client_max_size=self._options.max_body_bytes, middlewares=[self._errors]
        )
        application.router.add_post("/lookup", self._lookup)
        application.router.add_get("/pods", self._pods)
        application.router.add_get("/healthz", self._health)
        application.router.add_get("/metrics", self._metrics)
        return application

    async def _lookup(self, request: web.Request) -> web.StreamResponse:
        if self._inside >= _MAX_AT_ONCE:
            return _refusal(429, "There are too many questions at once: ask again later.")
        self._inside += 1
        try:
            return _said(200, await self._answer(await self._read(request)))
        except Refused as e:
            self._counters.refused()
            return _refusal(400, str(e))
        finally:
            self._inside -= 1

    async def _read(self, request: web.Request) -> Question:
        if request.content_type != "application/json":
            raise Refused("The body is not application/json: send it with that content type.")
        try:
            async with asyncio.timeout(self._options.body_timeout_s):
                raw = await request.read()
        except TimeoutError:
            raise Refused("The body did not come in time: send it at once.") from None
        return await asyncio.to_thread(questions.read, raw)

    async def _answer(self, question: Question) -> dict[str, Any]:
        options, presence = self._options, self._presence
        pods = questions.comparable(question, presence.pods.values())
        size = questions.block_size_of(question, pods)
        hashes = await asyncio.to_thread(question.chain, size, options.hash, options.seed)
        began = self._clock()
        found = reach(presence, hashes, size, pods)
        self._counters.answered(bool(found), self._clock() - began)
        connected = {f.engine.name for f in self._followers if f.connected}
        return questions.answer(question, hashes, size, found, connected)

    async def _pods(self, request: web.Request) -> web.StreamResponse:
        told = [
            questions.describe(follower.pod)
            | {"connected": follower.connected, "next": follower.course.next}
            | asdict(follower.counts)
            for follower in self._followers
        ]
        return _said(200, {"pods": told})

    async def _health(self, request: web.Request) -> web.StreamResponse:
        connected = sum(follower.connected for follower in self._followers)
        return _said(200, {"pods": len(self._followers), "connected": connected})

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=self._counters.text(), content_type="text/plain", charset="utf-8")

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Whatever aiohttp says itself, or nobody foresaw, in the same shape."""
        if _is_loopback(self._options.host) and not _is_loopback(_host_of(request)):
            # A web page may have given a name of its own to this machine's address.
            return _refusal(403, "This index answers this machine only: ask for 127.0.0.1.")
        try:
            return await handler(request)
        except web.HTTPException as e:
            words = f"{request.method} {request.path} is not served here"
            if e.status == 413:
                words = f"A body may have {self._options.max_body_bytes} bytes"
            return _refusal(e.status, f"{words}: see docs/index-service.md.")
        except Exception:
            _log.exception("a question failed for a reason that nobody foresaw")
            return _refusal(500, "The index failed: its log says why.")

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        assert 0 <= self._inside <= _MAX_AT_ONCE, "more questions at once than may be"

    def __repr__(self) -> str:
        return f"<Service {self._inside} questions, {self._presence}>"


def _host_of(request: web.Request) -> str:
    try:
        return URL(f"//{request.host}").host or ""
    except ValueError:
        return ""


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _said(status: int, what: Any) -> web.Response:
    body = json.dumps(what).encode()
    return web.Response(status=status, body=body, content_type="application/json")


def _refusal(status: int, words: str) -> web.Response:
    answer = _said(status, {"error": {"message": words}})
    if status in (400, 413, 429):
        answer.force_close()  # what is left of the body is not read
    return answer
