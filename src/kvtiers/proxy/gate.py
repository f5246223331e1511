"""How many requests there may be: so many with workers, so many that wait. Asyncio, no clock."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager


class Gate:
    """Lets requests in, in the order in which they came."""

    def __init__(self, max_in_flight: int, max_queued: int) -> None:
        self._max_in_flight = max_in_flight
        self._max_inside = max_in_flight + max_queued
        self._places = asyncio.Semaphore(max_in_flight)
        self.inside = 0
        """Those that were let in, whether they wait or not."""
        self.in_flight = 0

    @property
    def queued(self) -> int:
        """Those that wait."""
        return self.inside - self.in_flight

    @contextmanager
    def entered(self) -> Iterator[bool]:
        """Whether there is room to wait, for as long as this lasts."""
        if self.inside >= self._max_inside:
            yield False
            return
        self.inside += 1
        try:
            yield True
        finally:
            self.inside -= 1

    @asynccontextmanager
    async def turn(self, timeout_s: float) -> AsyncIterator[bool]:
        """Whether one of the places came free in time, for as long as this lasts."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._places.acquire()
        except TimeoutError:
            yield False
            return
        self.in_flight += 1
        try:
            yield True
        finally:
            self.in_flight -= 1
            self._places.release()

    def check(self) -> None:
        """Raise AssertionError if there are more than may be."""
        assert 0 <= self.in_flight <= self._max_in_flight, "more in flight than may be"
        assert self.in_flight <= self.inside <= self._max_inside, "more wait than may"

    def __repr__(self) -> str:
        return f"<Gate {self.in_flight}/{self._max_in_flight} in flight, {self.queued} wait>"
