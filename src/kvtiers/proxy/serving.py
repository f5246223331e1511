"""The course of one request: prefill and decode at once, another worker before the first byte."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum

from kvtiers.proxy.asked import Asked
from kvtiers.proxy.counters import Counters, Prefilled
from kvtiers.proxy.headers import Pairs
from kvtiers.proxy.lookup import IndexClient
from kvtiers.proxy.replies import FAILED, NO_WORKER, Refusal
from kvtiers.proxy.router import Call, Router
from kvtiers.proxy.upstream import Opened, Upstream
from kvtiers.proxy.workers import Worker

_TRIES = 3
"""Workers that one request is sent to, at most."""


class _Prefill(Enum):
    FAILED = "failed"
    """Nothing will come of it: who waits for its chunks waits in vain."""


class Serving:
    """Gets answers from workers."""

    def __init__(
        self, router: Router, upstream: Upstream, counters: Counters, index: IndexClient
    ) -> None:
        self._index = index
        self._router = router
        self._upstream = upstream
        self._counters = counters

    @asynccontextmanager
    async def answer(self, asked: Asked, headers: Pairs) -> AsyncIterator[Opened | Refusal]:
        """An answer whose first bytes are there, or why there is none.

        When this is left, whatever is still under way at workers is cancelled.
        """
        asked = await self._index.asked(asked)
        prefill = self._router.prefill(asked)
        prefilling: asyncio.Task[bool] | None = None
        answer: Opened | Refusal | None = None
        if prefill is not None:
            prefilling = asyncio.create_task(self._prefill(asked, prefill, headers))
        try:
            answer = await self._first(asked, headers, prefill, prefilling)
            yield answer
        finally:
            if isinstance(answer, Opened):
                answer.close()
            if prefilling is not None:
                prefilling.cancel()
                await asyncio.wait((prefilling,))

    async def _prefill(self, asked: Asked, call: Call, headers: Pairs) -> bool:
        ending = Prefilled.CANCELLED
        try:
            done = await self._upstream.finish(call, headers)
            ending = Prefilled.DONE if done else Prefilled.FAILED
        finally:
            self._counters.prefilled(ending)
        if done:
            self._router.served(asked, call)
        return done

    async def _first(
        self,
        asked: Asked,
        headers: Pairs,
        prefill: Call | None,
        prefilling: asyncio.Task[bool] | None,
    ) -> Opened | Refusal:
        tried: list[Worker] = []
        again = False
        failed: Opened | None = None
        while True:
            call = self._router.serve(asked, prefill, tried) if len(tried) < _TRIES else None
            if call is None:
                return failed or (FAILED if tried else NO_WORKER)
            if failed is not None:
                failed.close()
                failed = None
            self._count(call, again)
            again = True
            opened = await self._open(call, headers, prefilling)
            if isinstance(opened, _Prefill):
                # Sent anew, without roles: it is computed where it is answered.
                prefill = prefilling = None
                continue
            tried.append(call.worker)
            if opened is None:
                continue
            if not opened.failed:
                if opened.response.status == 200:
                    self._router.served(asked, call)
                return opened
            failed = opened

    def _count(self, call: Call, again: bool) -> None:
        if again:
            self._counters.retried()
        if call.asks is not None:
            self._counters.named()

    async def _open(
        self, call: Call, headers: Pairs, prefilling: asyncio.Task[bool] | None
    ) -> Opened | _Prefill | None:
        """Open a call, unless the prefill that it waits for fails first."""
        if prefilling is None:
            return await self._upstream.open(call, headers)
        opening = asyncio.create_task(self._upstream.open(call, headers))
        taken = False
        try:
            await asyncio.wait((opening, prefilling), return_when=asyncio.FIRST_COMPLETED)
            if not opening.done() and not prefilling.result():
                return _Prefill.FAILED
            opened = await asyncio.shield(opening)
            taken = True
            return opened
        finally:
            if not taken:
                await _discard(opening)


async def _discard(opening: "asyncio.Task[Opened | None]") -> None:
    """End it, also if it was done at that very moment."""
    opening.cancel()
    await asyncio.wait((opening,))
    if not opening.cancelled() and opening.exception() is None:
        opened = opening.result()
        if opened is not None:
            opened.close()
