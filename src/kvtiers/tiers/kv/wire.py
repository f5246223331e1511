"""Values between a socket and host memory, without a copy in between.

redis-py opens connections, logs in, speaks TLS and keeps pools. Its way to receive a value copies
it about four times; here the bytes that the caller waits for go from the socket into his memory.
What is sent is given as pieces, of which none is joined with another. RESP2, whose grammar is in
https://redis.io/docs/latest/develop/reference/protocol-spec/.
"""

import socket
import ssl
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Protocol
from weakref import WeakSet

from redis._parsers import _RESP2Parser
from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.exceptions import ConnectionError as Disconnected
from redis.exceptions import InvalidResponse
from redis.sentinel import SentinelManagedConnection, SentinelManagedSSLConnection

from kvtiers.tiers.kv.commands import Piece

_AHEAD = 16 << 10
"""Bytes to ask for when a line is waited for: what follows it comes along, and is copied."""
_TOGETHER_BYTES, _TOGETHER = 1 << 19, 256
"""So many bytes, or pieces, go with one system call, or one piece that is larger."""
_CLOSED = "the tier was closed"
_WASTE = 1 << 16
"""Bytes of an unwanted value that are in memory at a time."""
MAX_VALUE_BYTES = 512 << 20
"""No server takes a longer value, unless it was told to; no chunk is longer, and no reply."""
_MAX_PLACELESS_BYTES = 64 << 20
"""Of a value that no place is meant for, such as names and figures."""
_MAX_LINE_BYTES = 64 << 10
_NO_RESP = (ValueError, IndexError, OverflowError, RecursionError)
"""What redis-py's parser makes of words that are none, numbers that are none, and lists in lists
without an end."""


class Length(int):
    """The reply in place of a value that had a place: no number that a server said."""


class _Buffer:
    """What redis-py's parser reads from: bytes that came along, and the socket behind them."""

    def __init__(self, sock: socket.socket, timeout_s: float | None) -> None:
        self._sock = sock
        self._timeout_s = timeout_s
        self._ahead = bytearray(_AHEAD)
        self._start = 0
        self._end = 0
        self.targets: list[memoryview] | None = None
        """Where the next value goes, if it is as long as these together."""

    def readline(self, timeout: object = None) -> bytes:
        """The next line without its end. The socket's own timeout rules, whatever ``timeout``."""
        line = b""
        while True:
            at = self._ahead.find(b"\n", self._start, self._end)
            stop = self._end if at < 0 else at + 1
            line += self._ahead[self._start : stop]
            self._start = stop
            if at >= 0 and line.endswith(b"\r\n"):
                return line[:-2]
            if len(line) > _MAX_LINE_BYTES:
                raise InvalidResponse(f"a line of more than {_MAX_LINE_BYTES} bytes")
            if at < 0:
                self._start = 0
                self._end = self._receive(memoryview(self._ahead))

    def read(self, length: int, timeout: object = None) -> bytes | Length:
        """The next value: its bytes, or its length if there is a place that was meant for it.

        A value of another length than its place is thrown away as it comes. Raises InvalidResponse
        for a length that no value has, and for a value that does not end where it says.
        """
        targets, self.targets = self.targets, None
        most = _MAX_PLACELESS_BYTES if targets is None else MAX_VALUE_BYTES
        if not 0 <= length <= most:
            raise InvalidResponse(f"a value of {length} bytes, where up to {most} make sense")
        reply: bytes | Length = Length(length)
        if targets is None:
            reply = self._bytes(length)
        elif length == sum(map(len, targets)):
            for target in targets:
                self._fill(target)
        else:
            self._skip(length)
        if self._bytes(2) != b"\r\n":
            raise InvalidResponse("a value does not end where it says")
        return reply

    def _bytes(self, length: int) -> bytes:
        value = bytearray(length)
        self._fill(memoryview(value))
        return bytes(value)

    def _fill(self, target: memoryview) -> None:
        came = min(len(target), self._end - self._start)
        target[:came] = memoryview(self._ahead)[self._start : self._start + came]
        self._start += came
        while came < len(target):
            came += self._receive(target[came:])

    def _skip(self, length: int) -> None:
        waste = memoryview(bytearray(min(length, _WASTE)))
        while length:
            part = waste[: min(length, len(waste))]
            self._fill(part)
            length -= len(part)

    def _receive(self, into: memoryview) -> int:
        came = self._sock.recv_into(into)
        if not came:
            raise Disconnected("the server closed the connection")
        return came

    def can_read(self, timeout: float = 0) -> bool:
        """Whether anything is there that nobody asked for, the end of the connection included."""
        if self._start < self._end:
            return True
        self._sock.settimeout(timeout)
        try:
            self._start, self._end = 0, self._receive(memoryview(self._ahead))
        except (BlockingIOError, TimeoutError, ssl.SSLWantReadError):
            return False
        finally:
            self._sock.settimeout(self._timeout_s)
        return True

    def get_pos(self) -> int:
        """Of no use: a connection on which reading failed is not read from again."""
        return 0

    def rewind(self, pos: int) -> None:
        """As ``get_pos``."""

    def purge(self) -> None:
        """What was read is forgotten already."""

    def close(self) -> None:
        """Let go of the socket, and of the caller's memory."""
        self.targets = None


class _Parser(_RESP2Parser):
    def on_connect(self, connection: Any) -> None:
        super().on_connect(connection)  # type: ignore[no-untyped-call]
        self._buffer = _Buffer(connection._sock, connection.socket_timeout)


class Wire(Protocol):
    """A connection of redis-py as it is used here."""

    def send(self, pieces: Iterable[Piece]) -> None:
        """Send all pieces. Raises errors of redis-py, and OSError."""

    def receive(self, targets: list[memoryview] | None) -> Any:
        """The next reply: None, an int, bytes or a list.

        A value goes into ``targets``, and the reply is its :class:`Length`; unless that is the
        length of the targets together, nothing was written. Raises errors of redis-py,
        InvalidResponse for what is no RESP; after any but a ResponseError the connection is of no
        use.
        """

    def disconnect(self) -> None:
        """Close it; it connects again when it is used."""


def _send_all(sock: socket.socket, pieces: list[Piece]) -> None:
    views = [memoryview(piece) for piece in pieces if piece]
    while views:
        sent = sock.sendmsg(views)
        while views and sent >= len(views[0]):
            sent -= len(views.pop(0))
        if sent:
            views[0] = views[0][sent:]


class Life:
    """Whether those who share it may still connect. Any thread."""

    def __init__(self) -> None:
        self.over = False
        self._lock = threading.Lock()
        self._connections: WeakSet[_Receiving] = WeakSet()

    def join(self, connection: "_Receiving") -> None:
        """It is interrupted when the life ends."""
        with self._lock:
            self._connections.add(connection)

    def end(self) -> None:
        """Whoever is inside finds his connection closed, and closes it: it is his to close, for
        the number of a descriptor that another closes may be somebody else's a moment later.
        """
        self.over = True
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.interrupt()


class _Receiving:
    """What is added to each kind of connection."""

    _parser: Any
    _sock: Any
    _gathers = True
    """Whether several pieces can be sent by one system call."""

    def __init__(self, *, life: Life, **keywords: Any) -> None:
        self._life = life
        super().__init__(**keywords)
        life.join(self)

    def interrupt(self) -> None:
        """Whoever sends or receives gets an error, from another thread too."""
        sock = self._sock
        if sock is not None:
            with suppress(OSError):  # the other end was faster
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # TLS keeps its state

    def connect_check_health(self, *args: Any, **keywords: Any) -> None:
        """Connect, unless its life is over: a lane that is inside must not, after ``close``."""
        self._refuse_if_over()
        super().connect_check_health(*args, **keywords)  # type: ignore[misc]
        self._refuse_if_over()

    def _refuse_if_over(self) -> None:
        if self._life.over:
            self.disconnect()  # type: ignore[attr-defined]
            raise Disconnected(_CLOSED)

    def send(self, pieces: Iterable[Piece]) -> None:
        if not self._gathers:
            self.send_packed_command(pieces)  # type: ignore[attr-defined]
            return
        sock = self._sock
        if sock is None:
            raise Disconnected(_CLOSED)
        together: list[Piece] = []
        size = 0
        for piece in pieces:
            together.append(piece)
            size += len(piece)
            if size >= _TOGETHER_BYTES or len(together) == _TOGETHER:
                _send_all(sock, together)
                together, size = [], 0
        _send_all(sock, together)

    def receive(self, targets: list[memoryview] | None) -> Any:
        buffer = self._parser._buffer
        if buffer is None:
            raise Disconnected(_CLOSED)
        buffer.targets = targets
        try:
            return self.read_response(disable_decoding=True)  # type: ignore[attr-defined]
        except _NO_RESP as e:
            raise InvalidResponse(f"this is no RESP: {e}") from None
        finally:
            buffer.targets = None
            if self._life.over:  # nobody else would close it
                self.disconnect()  # type: ignore[attr-defined]


class TcpWire(_Receiving, Connection):
    """Over TCP."""


class TlsWire(_Receiving, SSLConnection):
    """Over TLS."""

    _gathers = False


class UnixWire(_Receiving, UnixDomainSocketConnection):
    """Through a socket of this machine."""


class SentinelWire(_Receiving, SentinelManagedConnection):
    """Over TCP, to whomever Sentinel names."""


class SentinelTlsWire(_Receiving, SentinelManagedSSLConnection):
    """Over TLS, to whomever Sentinel names."""

    _gathers = False


PARSER = _Parser
