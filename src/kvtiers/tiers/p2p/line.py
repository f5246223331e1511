"""The control channel of the one who dials: a DEALER per session, and what libzmq says of it.

A session has a socket of its own, so that nothing of an earlier one can come in. libzmq tells of a
connection that failed on a second socket, the monitor; it must be switched off before the first one
is closed, else libzmq's thread may wait for ever for somebody to read it.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from kvtiers.tiers.options import bad_option
from kvtiers.tiers.p2p.loop import Loop
from kvtiers.tiers.p2p.names import Names, is_loopback
from kvtiers.tiers.p2p.protocol import MAX_MESSAGE_BYTES
from kvtiers.tiers.p2p.security import Security

_MONITORED = {
    zmq.EVENT_CONNECT_RETRIED: "the connection is refused",
    zmq.EVENT_DISCONNECTED: "it closed the connection",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it closed the connection during the handshake",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it does not speak ZeroMQ, or has another CURVE key",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it does not let our key in: list it in its allowed_peers",
}
_TO_SEND, _TO_READ = 10_000, 100
"""Messages that may wait for one connection; what comes may be large, and is a stranger's."""
_numbers = itertools.count()


def at(address: str, port: int) -> str:
    """``address`` as libzmq wants it."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def bounded(socket: "zmq.Socket[bytes]") -> None:
    """Let nobody fill our memory, nor make a close wait."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.SNDHWM, _TO_SEND)
    socket.setsockopt(zmq.RCVHWM, _TO_READ)
    socket.setsockopt(zmq.IPV6, 1)


def listening(
    context: "zmq.Context[zmq.Socket[bytes]]", address: str, port: int, security: Security | None
) -> "zmq.Socket[bytes]":
    """A ROUTER bound to this address; port 0: any. Raises ConfigError."""
    router = context.socket(zmq.ROUTER)
    bounded(router)
    if security is not None:
        router.curve_server = True
        router.curve_secretkey = security.own.secret
        router.curve_publickey = security.own.public
    try:
        router.bind(at(address, port))
    except zmq.ZMQError as e:
        raise bad_option("port", f"is {port}, which cannot be bound: {e}") from e
    return router


class Line:
    """One control connection."""

    def __init__(
        self,
        loop: Loop,
        socket: "zmq.Socket[bytes]",
        heard: Callable[[bytes], None],
        broken: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._socket: zmq.Socket[bytes] | None = socket
        self._heard = heard
        self._broken = broken
        self._monitor = socket.get_monitor_socket(
            sum(_MONITORED), f"inproc://kvtiers-p2p-monitor-{next(_numbers)}"
        )
        loop.attach(socket, self._received)
        loop.attach(self._monitor, self._monitored)

    def send(self, data: bytes) -> None:
        """Send one message; a line that takes none is broken."""
        if self._socket is not None and not self._loop.send(self._socket, [data]):
            self._loop.at(self._loop.clock(), lambda: self._tell("it takes no messages"))

    def close(self) -> None:
        """Hear and tell nothing any more."""
        socket, self._socket = self._socket, None
        if socket is None:
            return
        self._loop.detach(socket)
        self._loop.detach(self._monitor)
        socket.disable_monitor()
        socket.close(0)
        self._monitor.close(0)

    def _received(self, parts: list[bytes]) -> None:
        if self._socket is not None:
            self._heard(parts[0] if len(parts) == 1 else b"")

    def _monitored(self, parts: list[bytes]) -> None:
        event = int.from_bytes(parts[0][:2], "little")
        self._tell(_MONITORED.get(zmq.Event(event), "its connection failed"))

    def _tell(self, why: str) -> None:
        if self._socket is not None:
            self._broken(why)

    def __repr__(self) -> str:
        return f"<Line {'closed' if self._socket is None else 'open'}>"


@dataclass(frozen=True, slots=True)
class Lines:
    """Makes them."""

    context: "zmq.Context[zmq.Socket[bytes]]"
    loop: Loop
    names: Names
    security: Security | None
    plaintext_data: bool

    def resolve(self, host: str, resolved: Callable[[str | None], None]) -> None:
        """Call ``resolved`` on the I/O thread, soon."""
        self.names.resolve(host, lambda address: self.loop.call(lambda: resolved(address)))

    def refusal(self, address: str, host: str, port: int) -> str | None:
        """Why this peer may not be dialled, if that is so."""
        if self.security is not None:
            if self.security.key_of(host, port) is None:
                return "its public key is not known: list it in allowed_peers with its address"
            if not self.plaintext_data and not is_loopback(address):
                return "chunks would travel unencrypted: see plaintext_data"
        elif not is_loopback(address):
            return "it is not on this machine, and there are no keys: see the option keys"
        return None

    def dial(
        self,
        address: str,
        host: str,
        port: int,
        heard: Callable[[bytes], None],
        broken: Callable[[str], None],
    ) -> Line:
        """Begin to connect. Whatever comes of it is told. Raises OSError, with nothing left."""
        try:
            socket = self.context.socket(zmq.DEALER)
        except zmq.ZMQError as e:
            raise OSError(e.errno, str(e)) from e
        try:
            self._prepare(socket, host, port)
            line = Line(self.loop, socket, heard, broken)
        except zmq.ZMQError as e:
            socket.close(0)
            raise OSError(e.errno, str(e)) from e
        try:
            socket.connect(at(address, port))
        except zmq.ZMQError as e:
            line.close()
            raise OSError(e.errno, str(e)) from e
        return line

    def _prepare(self, socket: "zmq.Socket[bytes]", host: str, port: int) -> None:
        bounded(socket)
        if self.security is not None:
            key = self.security.key_of(host, port)
            assert key is not None, "a peer without a key was dialled"
            socket.curve_serverkey = key
            socket.curve_publickey = self.security.own.public
            socket.curve_secretkey = self.security.own.secret
