"""Requests to workers. A failure before the first byte is a value; later ones are raised."""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

from aiohttp import (
    ClientError,
    ClientPayloadError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    DummyCookieJar,
    TCPConnector,
)

from kvtiers.proxy.headers import Pairs
from kvtiers.proxy.options import Clock, ProxyOptions
from kvtiers.proxy.router import Call
from kvtiers.proxy.workers import Worker

_log = logging.getLogger("kvtiers.proxy")

_UNWELL = {502, 503, 504}
"""Statuses that speak against the worker. A 500 may be the request's own fault: it is tried
elsewhere, but a client that can provoke it must not be able to put all workers out of use."""
_FIRST_FINAL = 200
"""Lower ones announce another answer, or another protocol."""
_FAILURES = (ClientError, TimeoutError, OSError)


class Broken(Exception):
    """The worker failed after the first byte."""


@dataclass(slots=True, eq=False)
class Opened:
    """An answer whose first bytes are there. Whoever has it closes it."""

    call: Call
    response: ClientResponse
    first: bytes
    upstream: "Upstream"

    @property
    def failed(self) -> bool:
        """Whether another worker may do better."""
        return self.response.status >= 500

    async def rest(self) -> AsyncIterator[bytes]:
        """What follows the first bytes, as it comes. Raises Broken."""
        try:
            async for some in self.response.content.iter_any():
                yield some
        except _FAILURES as e:
            self.upstream.failed(self.call.worker, e)
            raise Broken from e

    def close(self) -> None:
        """Nothing more of it is wanted; what is under way is cancelled there."""
        self.response.close()
        self.call.worker.end()


class Upstream:
    """Sends calls to workers and tells their breakers how that went."""

    def __init__(self, options: ProxyOptions, clock: Clock) -> None:
        """Call it on the loop that it is used on; close it there."""
        self._clock = clock
        # A connection is used once: of one that waits nobody knows whether its server closed it,
        # and a request that was lost that way could not be told from one that failed.
        self._session = ClientSession(
            connector=TCPConnector(limit=0, force_close=True),
            timeout=ClientTimeout(
                total=None,
                sock_connect=options.connect_timeout_s,
                sock_read=options.idle_timeout_s,
            ),
            cookie_jar=DummyCookieJar(),
            auto_decompress=False,
        )
        self._look_timeout = ClientTimeout(total=options.health_interval_s)

    async def open(self, call: Call, headers: Pairs) -> Opened | None:
        """The answer to a call once its first bytes are there; None: the worker failed before.

        The caller closes it.
        """
        worker = call.worker
        worker.begin()
        response: ClientResponse | None = None
        try:
            response = await self._send(call, headers)
            if response.status < _FIRST_FINAL:
                raise ClientPayloadError(f"it answers {response.status}, which is no answer")
            first = await response.content.readany()
        except _FAILURES as e:
            self._drop(worker, response)
            self.failed(worker, e)
            return None
        except BaseException:
            self._drop(worker, response)
            raise
        if response.status in _UNWELL:
            self.failed(worker, f"it answers {response.status}")
        else:
            worker.breaker.succeeded()
        return Opened(call, response, first, self)

    async def _send(self, call: Call, headers: Pairs) -> ClientResponse:
        own = [*headers, ("Content-Type", "application/json")] if call.body else headers
        return await self._session.request(
            "GET" if call.body is None else "POST",
            call.worker.address.url + call.path,
            data=call.body,
            headers=own,
            allow_redirects=False,
            skip_auto_headers=("User-Agent", "Accept-Encoding", "Accept"),
        )

    @staticmethod
    def _drop(worker: Worker, response: ClientResponse | None) -> None:
        worker.end()
        if response is not None:
            response.close()

    async def finish(self, call: Call, headers: Pairs) -> bool:
        """Send a call whose answer nobody reads; whether it went well."""
        opened = await self.open(call, headers)
        if opened is None:
            return False
        try:
            async for _ in opened.rest():
                pass
        except Broken:
            return False
        finally:
            opened.close()
        return opened.response.status == 200

    async def look(self, worker: Worker) -> None:
        """Ask a worker for its health; one that was left alone is used again if it is well."""
        if not worker.usable and not worker.breaker.admit(self._clock()):
            return
        try:
            async with self._session.get(
                f"{worker.address.url}/health", timeout=self._look_timeout, allow_redirects=False
            ) as response:
                well = response.status == 200
                why: object = f"its health is {response.status}"
        except Exception as e:  # whatever it is, the worker's trial has to end
            well, why = False, e
        if not well:
            self.failed(worker, why)
        elif not worker.usable and worker.breaker.succeeded():
            _log.info("%s is used again", worker.name)

    def failed(self, worker: Worker, why: object) -> None:
        """Hold it against the worker. Of a row of failures the first is logged, and the last."""
        if self._session.closed:
            return  # whatever was under way was ended here
        first = not worker.breaker.failing
        alone = worker.breaker.failed(self._clock())
        if alone or first:
            what = "is left alone" if alone else "failed"
            words = str(why) or type(why).__name__
            _log.warning("%s at %s %s: %s", worker.name, worker.address.url, what, words)

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()


async def watch(upstream: Upstream, workers: list[Worker], interval_s: float) -> None:
    """Look at all workers again and again."""
    while True:
        await asyncio.gather(*(upstream.look(worker) for worker in workers))
        await asyncio.sleep(interval_s)
