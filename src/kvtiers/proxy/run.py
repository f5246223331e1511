"""A proxy from its start to its end."""

import asyncio
import logging
import secrets
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from kvtiers.errors import ConfigError
from kvtiers.proxy.counters import Counters
from kvtiers.proxy.front import Front
from kvtiers.proxy.gate import Gate
from kvtiers.proxy.lookup import IndexClient
from kvtiers.proxy.options import ProxyOptions
from kvtiers.proxy.router import Router
from kvtiers.proxy.serving import Serving
from kvtiers.proxy.upstream import Upstream, watch

_log = logging.getLogger("kvtiers.proxy")
_http_log = logging.getLogger("kvtiers.proxy.http")
"""What aiohttp has to say, but for what is wrong with a client's request: it is told so itself."""


def _is_ours(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError)


_http_log.addFilter(_is_ours)

_LINGERING_S = 1.0
"""How long the rest of a refused body is thrown away, so that its client sees the answer."""
_IDLE_S = 75.0
"""How long a connection may be open without a whole request head, the first or a later one."""


class Proxy:
    """The parts of a proxy, built on the loop that runs it."""

    def __init__(self, options: ProxyOptions) -> None:
        self.options = options
        self.router = Router(options, new_name=lambda: uuid.uuid4().hex)
        self.gate = Gate(options.max_in_flight, options.max_queued)
        self.upstream = Upstream(options, time.monotonic)
        counters = Counters(self.router.workers, self.gate)
        self.index = IndexClient(options, self.router.workers, counters, time.monotonic)
        serving = Serving(self.router, self.upstream, counters, self.index)
        seed = secrets.randbits(64)
        self.front = Front(options, self.router, serving, self.gate, counters, seed, time.monotonic)

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        self.router.check()
        self.gate.check()
        self.index.check()

    def __repr__(self) -> str:
        return f"<Proxy {self.gate} {self.router}>"


@asynccontextmanager
async def listening(proxy: Proxy) -> AsyncIterator[int]:
    """It answers on the port that this gives. At the end running requests get ``drain_s``.

    Raises ConfigError if it cannot listen there.
    """
    options = proxy.options
    runner = web.AppRunner(
        proxy.front.application(),
        access_log=None,
        logger=_http_log,
        keepalive_timeout=_IDLE_S,
        handler_cancellation=True,
        shutdown_timeout=options.drain_s,
        lingering_time=_LINGERING_S,
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(proxy.upstream.close)
        stack.push_async_callback(proxy.index.close)
        stack.push_async_callback(runner.cleanup)
        await runner.setup()
        site = web.TCPSite(runner, options.host, options.port, backlog=1024)
        try:
            await site.start()
        except OSError as e:
            raise ConfigError(
                f"--host {options.host} --port {options.port} cannot be listened on: "
                f"{e.strerror or e}: choose others"
            ) from e
        interval_s = options.health_interval_s
        watching = asyncio.create_task(watch(proxy.upstream, proxy.router.workers, interval_s))
        try:
            yield int(runner.addresses[0][1])
        finally:
            watching.cancel()
            proxy.front.ending = True


def run(options: ProxyOptions, started: Callable[[int], None]) -> None:
    """Serve until SIGTERM or Ctrl-C; ``started`` is told the port. A second signal ends it at once.

    Raises ConfigError, and KeyboardInterrupt after a second signal.
    """
    _log_to_stderr()
    try:
        asyncio.run(_run(options, started))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _run(options: ProxyOptions, started: Callable[[int], None]) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    this = asyncio.current_task()
    assert this is not None

    def end() -> None:
        if stop.is_set():
            this.cancel()
        stop.set()

    async with listening(Proxy(options)) as port:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, end)
        started(port)
        await stop.wait()
        _log.info("no new requests are taken; those that run have %g s", options.drain_s)


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("kvtiers proxy: %(message)s"))
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)
