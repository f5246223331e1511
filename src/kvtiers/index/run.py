"""An index from its start to its end."""

import asyncio
import errno
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import zmq.asyncio
from aiohttp import web

from kvtiers.errors import ConfigError
from kvtiers.index.counters import Counters
from kvtiers.index.follower import Follower
from kvtiers.index.options import IndexOptions
from kvtiers.index.presence import Presence
from kvtiers.index.service import Service
from kvtiers.index.shared import Shared

_log = logging.getLogger("kvtiers.index")


class Index:
    """The parts of an index, built on the loop that runs it."""

    def __init__(self, options: IndexOptions) -> None:
        self.options = options
        self.context = zmq.asyncio.Context()
        self.presence = Presence(options.max_blocks)
        self.shared = None if options.snapshot_to is None else Shared(options.snapshot_to)
        self.followers = [
            Follower(engine, self.presence, options, self.context, time.monotonic, self.shared)
            for engine in options.engines
        ]
        counters = Counters(self.presence, self.followers, self.shared)
        self.service = Service(options, self.presence, self.followers, counters, time.monotonic)

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        self.presence.check()
        self.service.check()
        for follower in self.followers:
            follower.check()

    def __repr__(self) -> str:
        return f"<Index {self.presence} {' '.join(map(repr, self.followers))}>"


@asynccontextmanager
async def answering(index: Index) -> AsyncIterator[int]:
    """It follows its engines, and answers on the port that this gives.

    Raises ConfigError if it cannot listen there.
    """
    options = index.options
    runner = web.AppRunner(index.service.application(), access_log=None, shutdown_timeout=1.0)
    async with AsyncExitStack() as stack:
        stack.callback(index.context.destroy, linger=0)
        if index.shared is not None:
            stack.push_async_callback(index.shared.close)
        stack.push_async_callback(runner.cleanup)
        await runner.setup()
        site = web.TCPSite(runner, options.host, options.port)
        try:
            await site.start()
        except OSError as e:
            taken = e.errno == errno.EADDRINUSE
            who = "observers of engines and other indexes listen at such ports, too; "
            raise ConfigError(
                f"--host {options.host} --port {options.port} cannot be listened on: "
                f"{e.strerror or e}: {f'{who}give another --port' if taken else 'choose others'}"
            ) from e
        tasks = [asyncio.create_task(follower.run()) for follower in index.followers]
        if index.shared is not None:
            tasks.append(asyncio.create_task(index.shared.run()))
        stack.push_async_callback(_ended, tasks)
        yield int(runner.addresses[0][1])


async def _ended(tasks: "list[asyncio.Task[None]]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def run(options: IndexOptions, started: Callable[[int], None]) -> None:
    """Serve until SIGTERM or Ctrl-C; ``started`` is told the port. Raises ConfigError."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("kvtiers index: %(message)s"))
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    asyncio.run(_run(options, started))


async def _run(options: IndexOptions, started: Callable[[int], None]) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    async with answering(Index(options)) as port:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        started(port)
        await stop.wait()
