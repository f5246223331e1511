"""Bulk data over plain TCP: the transport that is always there. ``frames.py`` has what it sends."""

import secrets
import socket
import struct
from functools import partial

from kvtiers.tiers.p2p.frames import GREETING, TOKEN_BYTES
from kvtiers.tiers.p2p.loop import Loop, Timer
from kvtiers.tiers.p2p.tcp_receiver import TcpReceiver
from kvtiers.tiers.p2p.tcp_sender import Patience, TcpSender
from kvtiers.tiers.p2p.transport import Delivered, Sent
from kvtiers.tiers.p2p.wire import ProtocolError

_OFFER = struct.Struct(f"<H{TOKEN_BYTES}s")
_MAX_STRANGERS = 64
"""Connections that have not shown a token yet."""
_GREETING_DEADLINE_S = 5.0
_BACKLOG = 128
_PAUSE_S = 0.2
"""Between two tries to take a connection, when there is no room for one."""


class TcpTransport:
    """A listening socket, and the tokens of sessions whose consumer has not come yet."""

    name = b"tcp"

    def __init__(self, loop: Loop, host: str, port: int, patience: Patience) -> None:
        """Raises OSError if the address cannot be had; port 0: any."""
        self._loop = loop
        self._patience = patience
        self._awaited: dict[bytes, TcpSender] = {}
        self._strangers: dict[socket.socket, tuple[Timer, bytearray]] = {}
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind((host, port))
            self._listener.listen(_BACKLOG)
        except OSError:
            self._listener.close()
            raise
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._pause: Timer | None = None
        self._listen()

    @property
    def has_room(self) -> bool:
        """Always: it lets nothing land that nobody waits for."""
        return True

    def send_to(self, calls: Sent) -> TcpSender:
        """A sender that waits for the one who shows its token."""
        token = secrets.token_bytes(TOKEN_BYTES)
        offer, withdraw = _OFFER.pack(self.port, token), partial(self._withdraw, token)
        sender = TcpSender(self._loop, calls, offer, self._patience, withdraw)
        self._awaited[token] = sender
        return sender

    def receive_from(self, host: str, offer: bytes, calls: Delivered) -> TcpReceiver:
        """Connect to the port that the offer names. Raises ProtocolError, or OSError."""
        if len(offer) != _OFFER.size:
            raise ProtocolError("its offer of a TCP connection is none")
        port, token = _OFFER.unpack(offer)
        return TcpReceiver(self._loop, (host, port), token, calls)

    def _withdraw(self, token: bytes) -> None:
        self._awaited.pop(token, None)

    def close(self) -> None:
        """Stop listening."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.forget(self._listener.fileno())
        self._listener.close()
        for stranger in list(self._strangers):
            self._send_away(stranger)

    def _listen(self) -> None:
        self._loop.watch(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # it went away
        except OSError:  # no descriptor is left: who waits will wait a little longer
            self._loop.forget(self._listener.fileno())
            self._pause = self._loop.at(self._loop.clock() + _PAUSE_S, self._listen)
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self._strangers) >= _MAX_STRANGERS:
            self._send_away(next(iter(self._strangers)))
        until = self._loop.clock() + _GREETING_DEADLINE_S
        timer = self._loop.at(until, partial(self._send_away, connection))
        self._strangers[connection] = (timer, bytearray())
        self._loop.watch(connection.fileno(), partial(self._hear, connection))

    def _hear(self, connection: socket.socket) -> None:
        timer, said = self._strangers[connection]
        try:
            more = connection.recv(len(GREETING) + TOKEN_BYTES - len(said))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        said += more
        if more and len(said) < len(GREETING) + TOKEN_BYTES:
            return
        sender = self._awaited.pop(bytes(said[len(GREETING) :]), None)
        if not more or not said.startswith(GREETING) or sender is None:
            self._send_away(connection)
            return
        timer.cancel()
        del self._strangers[connection]
        sender.connected(connection)

    def _send_away(self, connection: socket.socket) -> None:
        timer, _ = self._strangers.pop(connection)
        timer.cancel()
        self._loop.forget(connection.fileno())
        connection.close()

    def check(self) -> None:
        """Raise AssertionError if more strangers are borne than the bound."""
        assert len(self._strangers) <= _MAX_STRANGERS, "too many strangers"

    def __repr__(self) -> str:
        return f"<TcpTransport port {self.port}: {len(self._awaited)} awaited>"
