"""Asking one HTTP server, from tools: an engine's, or its observer.

No redirect is followed and no proxy used: an engine is asked, and nobody else.
"""

import socket
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection

from kvtiers.errors import ConfigError


class Server:
    """Whoever answers at a URL. Each question has a connection of its own."""

    def __init__(self, url: str, complaint: str, example: str, timeout_s: float) -> None:
        """Raises ConfigError, which begins with ``complaint``, for a URL that is none."""
        try:
            parts = urllib.parse.urlsplit(url)
            self._port = parts.port
        except ValueError as e:
            raise ConfigError(f"{complaint}: {e}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
            raise ConfigError(f"{complaint}: give one like {example}")
        self._host = parts.hostname
        self._kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._timeout_s = timeout_s
        self.path = parts.path
        self.query = parts.query

    def ask(
        self, method: str, target: str, max_bytes: int, json: bytes | None = None
    ) -> tuple[int, bytes]:
        """Status and body; of a body of more than ``max_bytes`` one byte more than that.

        ``target`` is the whole path, with its query. Raises OSError where there is no answer, also
        where it is not whole after twice the timeout: of a socket that begins anew with each byte.
        """
        connection = self._kind(self._host, self._port, timeout=self._timeout_s)
        headers = {} if json is None else {"Content-Type": "application/json"}
        try:
            connection.connect()
            with _ended_after(2 * self._timeout_s, connection.sock):
                connection.request(method, target, json, headers)
                response = connection.getresponse()
                return response.status, response.read(max_bytes + 1)
        except HTTPException as e:
            raise OSError(str(e) or type(e).__name__) from e
        finally:
            connection.close()

    def __repr__(self) -> str:
        return f"<Server {self._host}:{self._port}{self.path}>"


@contextmanager
def _ended_after(seconds: float, sock: socket.socket) -> Iterator[None]:
    """Raises TimeoutError, whatever was read by then: it may look whole."""
    late = threading.Event()

    def end() -> None:
        late.set()
        with suppress(OSError):  # it has ended by itself
            sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, HTTPException):
        if not late.is_set():
            raise
    finally:
        timer.cancel()
    if late.is_set():
        raise TimeoutError(f"no whole answer within {seconds:g} s")


def words_of(error: OSError) -> str:
    """Why there is no answer."""
    return error.strerror or str(error) or type(error).__name__
