"""Asks the presence index who holds a prompt. It is an extra: late or failed is no answer."""

import asyncio
import dataclasses
import logging
from collections.abc import Sequence

from aiohttp import ClientError, ClientSession, DummyCookieJar, TCPConnector

from kvtiers.proxy.asked import Asked
from kvtiers.proxy.counters import Counters, Looked
from kvtiers.proxy.holders import holders_in, question, to_tokenize, tokens_in, tokens_of
from kvtiers.proxy.options import Clock, ProxyOptions
from kvtiers.proxy.workers import Holder, Worker
from kvtiers.tiers.breaker import Breaker, State

_log = logging.getLogger("kvtiers.proxy")

_JSON = {"Content-Type": "application/json"}
_MAX_ANSWER = 64 << 20
_FAILED = (ClientError, TimeoutError, OSError, ValueError)
_FAILURES, _COOLDOWN_S, _MAX_COOLDOWN_S = 3, 1.0, 30.0


class IndexClient:
    """One index, and workers that tokenize for it."""

    def __init__(
        self, options: ProxyOptions, workers: Sequence[Worker], counters: Counters, clock: Clock
    ) -> None:
        """Call it on the loop that it is used on; close it there."""
        self._url = options.index
        self._timeout_s = options.index_timeout_s
        self._workers = workers
        self._counters = counters
        self._clock = clock
        self.breaker = Breaker(_FAILURES, _COOLDOWN_S, _MAX_COOLDOWN_S)
        self._session = ClientSession(
            connector=TCPConnector(limit=0, force_close=True),
            cookie_jar=DummyCookieJar(),
            headers=_JSON,
        )

    async def asked(self, asked: Asked) -> Asked:
        """The same request, with those who hold its prompt if that could be told in time."""
        if self._url is None or not asked.roles or self.breaker.is_out(self._clock()):
            return asked
        try:
            async with asyncio.timeout(self._timeout_s):
                tokens = tokens_in(asked) or await self._tokenize(asked)
        except _FAILED:
            tokens = None
        if not tokens:
            self._counters.looked(Looked.UNTOKENIZED)
            return asked
        if not self.breaker.admit(self._clock()):
            return asked
        found = await self._holders(asked, tokens)
        return asked if found is None else dataclasses.replace(asked, holders=found)

    async def _holders(self, asked: Asked, tokens: Sequence[int]) -> Sequence[Holder] | None:
        """None: the index did not say it."""
        try:
            async with asyncio.timeout(self._timeout_s):
                raw = await self._post(f"{self._url}/lookup", question(asked, tokens))
            found = holders_in(raw)
        except asyncio.CancelledError:
            if self.breaker.state is State.TRIAL:
                self.breaker.failed(self._clock())  # it has to end
            raise
        except _FAILED as e:
            self._counters.looked(Looked.FAILED)
            if self.breaker.failed(self._clock()):
                _log.warning("the index is left alone: %s", str(e) or type(e).__name__)
            return None
        self.breaker.succeeded()
        self._counters.looked(Looked.FOUND if found else Looked.NOBODY)
        return found

    async def _tokenize(self, asked: Asked) -> Sequence[int] | None:
        usable = [worker for worker in self._workers if worker.usable]
        if not usable:
            return None
        idlest = min(usable, key=lambda worker: worker.in_flight)
        return tokens_of(await self._post(f"{idlest.address.url}/tokenize", to_tokenize(asked)))

    async def _post(self, url: str, body: bytes) -> bytes:
        async with self._session.post(url, data=body, allow_redirects=False) as response:
            raw = await response.content.read(_MAX_ANSWER)
            while not response.content.at_eof() and len(raw) < _MAX_ANSWER:
                raw += await response.content.read(_MAX_ANSWER - len(raw))
            if response.status != 200:
                raise ValueError(f"{url} answers {response.status}")
            return raw

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        self.breaker.check()

    def __repr__(self) -> str:
        return f"<IndexClient {self._url}: {self.breaker}>"
