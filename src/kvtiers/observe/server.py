"""The observer's server: threads of its own in the engine's process, and none of them in its way.

Whatever happens here - no port, a broken client, a bug - the engine goes on. One thread waits for
all connections, of which there are few, each for one request and a short time; at most two others
make answers.
"""

import asyncio
import errno
import logging
import socket
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

from kvtiers.observe.http import MAX_HEAD, Answer, Asked, Refused, meant_for, read, said, written
from kvtiers.tiers.lanes import start_daemon

_log = logging.getLogger("kvtiers")

_WHO = "; observers of other engines and kvtiers index listen at such ports, too"
_CLOSE_S = 2.0
_LINGER_S = 0.2
_LINGER_BYTES = 1 << 16
_ANSWERING = 2


@dataclass(frozen=True, slots=True)
class Limits:
    """What clients may take."""

    connections: int = 32
    """That are answered; as many more are told that these are too many, and others nothing."""
    read_s: float = 5.0
    """For a whole request."""
    answer_s: float = 30.0
    write_s: float = 10.0


class Observer:
    """Serves ``answer`` at an address, from ``start`` to ``close``."""

    def __init__(
        self,
        answer: Callable[[Asked], Answer],
        host: str,
        port: int,
        names: Iterable[str] = (),
        limits: Limits | None = None,
    ) -> None:
        """``port`` 0: any; ``names`` are host names that clients may call it by, beside ``host``.

        ``answer`` is called on threads of the server and may raise ``Refused``.
        """
        self._answer = answer
        self._host = host
        self._port = port
        self._names = frozenset(name.lower() for name in (host, *names))
        self._limits = limits or Limits()
        self._open = 0
        self._complained = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._answering = asyncio.Semaphore(_ANSWERING)

    @property
    def port(self) -> int:
        """Where it listens, once it does."""
        return self._port

    def start(self) -> bool:
        """Listen. False, with a warning, if that cannot be."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            listening = socket.create_server((self._host, self._port), family=family, backlog=64)
        except (OSError, OverflowError) as e:
            _log.warning(
                "observe: nothing can listen on port %d of %s (%s%s), so this engine is not"
                " observed: set another port or host in observe of kv_connector_extra_config",
                self._port,
                self._host,
                e,
                _WHO if isinstance(e, OSError) and e.errno == errno.EADDRINUSE else "",
            )
            return False
        self._port = listening.getsockname()[1]
        ready = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(listening, ready), name="kvtiers-observe", daemon=True
        )
        self._thread.start()
        ready.wait(_CLOSE_S)
        host = f"[{self._host}]" if ":" in self._host else self._host
        _log.info("observe: http://%s:%d", host, self._port)
        return True

    def close(self) -> None:
        """Stop; what is being answered is not. Twice is fine."""
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None:
            with suppress(RuntimeError):  # it has ended
                loop.call_soon_threadsafe(stop.set)
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _run(self, listening: socket.socket, ready: threading.Event) -> None:
        try:
            asyncio.run(self._serve(listening, ready))
        except Exception:
            _log.exception("observe: the server ended; the engine goes on")
        finally:
            listening.close()
            ready.set()

    async def _serve(self, listening: socket.socket, ready: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._connected, sock=listening, limit=MAX_HEAD)
        ready.set()
        try:
            await self._stop.wait()
        finally:
            server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        writer.transport.set_write_buffer_limits(0)
        try:
            if self._open <= 2 * self._limits.connections:
                with suppress(OSError, TimeoutError):  # the client went away, or took nothing
                    await self._exchange(reader, writer)
        finally:
            self._open -= 1
            # ``close`` would keep what the client does not take, for as long as it likes.
            writer.transport.abort()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head_only, whole = False, False
        if self._open > self._limits.connections:
            answer = said(503, {"error": "too many connections at once: try again"})
        else:
            try:
                async with asyncio.timeout(self._limits.read_s):
                    asked = await read(reader)
                if asked is None:
                    return
                head_only, whole = asked.method == "HEAD", True
                answer = await self._answered(asked)
            except Refused as e:
                answer = e.answer
            except TimeoutError:
                answer = said(503 if whole else 408, {"error": "this takes too long"})
        writer.write(written(answer, head_only=head_only))
        async with asyncio.timeout(self._limits.write_s):
            await writer.drain()
        if not whole:
            await _linger(reader, writer)

    async def _answered(self, asked: Asked) -> Answer:
        if not meant_for(asked.headers, self._names):
            raise Refused(
                421,
                "this host name is not the observer's: use its address, or put the name into "
                "names of observe in kv_connector_extra_config",
            )
        try:
            async with asyncio.timeout(self._limits.answer_s):
                await self._answering.acquire()
                return await asyncio.wrap_future(self._begun(asked))
        except (Refused, TimeoutError):
            raise
        except Exception:
            if not self._complained:
                self._complained = True
                _log.exception("observe: %a failed, said once", asked.path)
            return said(500, {"error": "the observer failed: its engine's log says how"})

    def _begun(self, asked: Asked) -> "Future[Answer]":
        """An answer that is being made, by a thread that no end of the process waits for."""
        loop, made = asyncio.get_running_loop(), Future[Answer]()
        made.set_running_or_notify_cancel()  # who waits may give up, the thread goes on

        def work() -> None:
            try:
                made.set_result(self._answer(asked))
            except Exception as e:
                made.set_exception(e)
            finally:
                with suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(self._answering.release)

        try:
            start_daemon(work, "kvtiers-observe-answer")
        except RuntimeError:  # there are no more threads
            self._answering.release()
            raise
        return made

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        assert self._open >= 0, "more connections ended than began"

    def __repr__(self) -> str:
        return f"<Observer {self._host}:{self._port}, {self._open} connections>"


async def _linger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Take a little of what was not read: else the system drops the answer with it."""
    if writer.can_write_eof():
        writer.write_eof()
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            await reader.read(_LINGER_BYTES)
