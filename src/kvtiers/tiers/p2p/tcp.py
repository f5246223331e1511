"""Bulk data over plain TCP: the transport that is always there.

The consumer connects to the port and shows the token of the session, both of which it learnt on the
control channel; a token is good for one connection. The producer then sends frames: a header of 32
bytes, little-endian, and the bytes of one chunk::

    0   8  transfer                 16  8  bytes of the chunk
    8   4  place of the chunk in it 24  8  XXH3-64 of the bytes
    12  4  zero

Bytes go from the producer's memory into the consumer's slot; the kernel's buffers are all that lies
between. A frame for a transfer that was stopped is read and thrown away, each chunk once; any other
frame that was not asked for ends the session. Nothing here is encrypted, and XXH3 is no signature:
see decision 0022 for what that means beyond loopback.
"""

import secrets
import socket
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from xxhash import xxh3_64, xxh3_64_intdigest

from kvtiers.tiers.p2p.loop import Loop, Timer
from kvtiers.tiers.p2p.transport import Delivered, Sent
from kvtiers.tiers.p2p.wire import ProtocolError

_GREETING = b"KVTD"
_TOKEN_BYTES = 16
_OFFER = struct.Struct(f"<H{_TOKEN_BYTES}s")
_HEADER = struct.Struct("<QIIQQ")

_TURN_BYTES = 8 << 20
"""Moved for one connection before others have their turn."""
_PIECE_BYTES = 512 << 10
"""Sent, received or summed at once: it still lies in the processor's cache then."""
_MAX_STRANGERS = 64
"""Connections that have not shown a token yet."""
_GREETING_DEADLINE_S = 5.0
_BACKLOG = 128


@dataclass(slots=True, eq=False)
class _Frame:
    transfer: int
    place: int
    view: memoryview


class TcpSender:
    """Frames of one session, in the order in which they were pushed."""

    def __init__(self, transport: "TcpTransport", calls: Sent, offer: bytes) -> None:
        self.offer = offer
        self._transport = transport
        self._loop = transport.loop
        self._calls = calls
        self._queue: deque[_Frame] = deque()
        self._begun: _Frame | None = None
        self._unsent: list[memoryview] = []
        """Of the frame that was begun."""
        self._socket: socket.socket | None = None
        self._stalled: Timer | None = None
        self._progress_at = 0.0
        self._watched = False
        self._closed = False

    def push(self, transfer: int, chunks: Sequence[tuple[int, memoryview]]) -> None:
        """Queue them, and send what the connection takes at once."""
        self._queue.extend(_Frame(transfer, place, view) for place, view in chunks)
        if self._socket is not None and not self._watched:
            self._watch(True)

    def taken(self, transfer: int, places: Sequence[int]) -> None:
        """Nobody reads another's memory here."""
        raise ProtocolError("nothing can be read over TCP")

    def drop(self, transfer: int) -> None:
        """Take out what was not begun."""
        out = [frame for frame in self._queue if frame.transfer == transfer]
        if out:
            self._queue = deque(f for f in self._queue if f.transfer != transfer)
        for frame in out:
            self._calls.sent(frame.transfer, frame.place, False)

    def connected(self, connection: socket.socket) -> None:
        """The consumer has shown the token."""
        self._socket = connection
        self._watch(bool(self._queue))

    def close(self) -> None:
        """End the connection."""
        self._closed = True
        self._transport.withdraw(self)
        if self._stalled is not None:
            self._stalled.cancel()
        self._queue.clear()
        self._unsent.clear()
        if self._socket is not None:
            self._loop.forget(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def _watch(self, to_write: bool) -> None:
        assert self._socket is not None
        if to_write and not self._watched:
            self._progress_at = self._loop.clock()
            self._keep_time()
        self._watched = to_write
        writable = self._write if to_write else None
        self._loop.watch(self._socket.fileno(), self._hear, writable)

    def _keep_time(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
        until = self._progress_at + self._transport.stall_deadline_s
        self._stalled = self._loop.at(until, self._look_after)

    def _look_after(self) -> None:
        """A consumer that takes nothing may not keep our memory for ever."""
        if not self._watched:
            return
        if self._loop.clock() < self._progress_at + self._transport.stall_deadline_s:
            self._keep_time()
        else:
            self._break("it takes no bytes")

    def _hear(self) -> None:
        """A consumer says nothing here: what can be read is the end, or a lie."""
        assert self._socket is not None
        try:
            said = self._socket.recv(16)
        except BlockingIOError:
            return
        except OSError as e:
            self._break(f"{e.strerror or e}")
            return
        self._break("it sent bytes where it has nothing to say" if said else "it went away")

    def _write(self) -> None:
        assert self._socket is not None
        budget = _TURN_BYTES
        try:
            while budget > 0 and (self._unsent or self._begin()):
                count = self._socket.sendmsg(self._unsent)
                budget -= count
                if not self._advance(count):
                    break
        except BlockingIOError:
            return
        except OSError as e:
            self._break(f"{e.strerror or e}")
            return
        if self._closed:  # one of those who were told of a chunk closed it
            return
        self._progress_at = self._loop.clock()
        if not (self._unsent or self._queue):
            self._watch(False)

    def _begin(self) -> bool:
        """Take up the next frame whose memory is still ours."""
        while self._queue:
            frame = self._queue.popleft()
            try:
                size = frame.view.nbytes
                header = _HEADER.pack(
                    frame.transfer, frame.place, 0, size, xxh3_64_intdigest(frame.view)
                )
                self._unsent = [memoryview(header), frame.view[:]]
            except ValueError:  # host memory was reset
                self._calls.sent(frame.transfer, frame.place, False)
                continue
            self._begun = frame
            return True
        return False

    def _advance(self, count: int) -> bool:
        """``count`` bytes went out; False if the connection takes no more for now."""
        while self._unsent and count >= self._unsent[0].nbytes:
            count -= self._unsent[0].nbytes
            self._unsent.pop(0).release()
        if self._unsent:
            rest = self._unsent[0][count:]
            self._unsent.pop(0).release()
            self._unsent.insert(0, rest)
            return False
        frame, self._begun = self._begun, None
        assert frame is not None
        self._calls.sent(frame.transfer, frame.place, True)
        return not self._closed

    def _break(self, why: str) -> None:
        self.close()
        self._calls.broken(f"the data connection broke: {why}")

    def check(self) -> None:
        """Raise AssertionError if something waits that nobody will send."""
        assert bool(self._unsent) == (self._begun is not None), "half a frame belongs to nobody"
        if self._socket is not None:
            waits = bool(self._unsent or self._queue)
            assert self._watched == waits, "frames wait, and nobody watches the connection"

    def __repr__(self) -> str:
        return f"<TcpSender {len(self._queue)} frames wait{', closed' if self._closed else ''}>"


@dataclass(slots=True, eq=False)
class _Expected:
    """Where the chunks of one transfer may land."""

    views: list[memoryview | None]
    """None: it landed."""
    sizes: list[int]
    stopped: bool = False


@dataclass(slots=True, eq=False)
class _Landing:
    """The chunk whose bytes come in now."""

    transfer: int
    place: int
    size: int
    checksum: int
    view: memoryview | None
    """None: it is thrown away."""
    at: int = 0
    sum: xxh3_64 = field(default_factory=xxh3_64)


class TcpReceiver:
    """Reads frames into slots."""

    def __init__(
        self, loop: Loop, address: tuple[str, int], token: bytes, calls: Delivered
    ) -> None:
        self._loop = loop
        self._calls = calls
        self._expected: dict[int, _Expected] = {}
        self._landing: _Landing | None = None
        self._header = bytearray(_HEADER.size)
        self._header_at = 0
        self._scrap = bytearray(_PIECE_BYTES)
        self._greeting = _GREETING + token
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._socket: socket.socket | None = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.connect_ex(address)  # how that ended is found out when it can be written
        self._loop.watch(self._socket.fileno(), None, self._greet)

    def expect(self, transfer: int, views: Sequence[memoryview]) -> None:
        """Frames say where they belong."""
        self._expected[transfer] = _Expected(list(views), [view.nbytes for view in views])

    def ready(self, transfer: int, chunks: Sequence[tuple[int, int, int]]) -> None:
        """Nobody reads another's memory here."""
        raise ProtocolError("it says that chunks can be read over TCP")

    def stop(self, transfer: int) -> bool:
        """At once, also in the middle of a chunk."""
        expected = self._expected.get(transfer)
        if expected is not None:
            expected.stopped = True
            expected.views = [None if view is None else _NOWHERE for view in expected.views]
        if self._landing is not None and self._landing.transfer == transfer:
            self._landing.view = None
        return True

    def forget(self, transfer: int) -> None:
        """A frame of it would be a lie from now on; one that comes in now is thrown away."""
        self._expected.pop(transfer, None)
        if self._landing is not None and self._landing.transfer == transfer:
            self._landing.view = None

    def close(self) -> None:
        """End the connection."""
        self._expected.clear()
        self._landing = None
        if self._socket is not None:
            self._loop.forget(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def _greet(self) -> None:
        assert self._socket is not None
        error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        try:
            if error:
                raise OSError(error, "")
            sent = self._socket.send(self._greeting)
        except BlockingIOError:
            return
        except OSError as e:
            self._break(f"cannot connect (error {e.errno})")
            return
        self._greeting = self._greeting[sent:]
        if not self._greeting:
            self._loop.watch(self._socket.fileno(), self._read)

    def _read(self) -> None:
        budget = _TURN_BYTES
        try:
            while budget > 0 and self._socket is not None:
                wanted, count = self._receive(self._socket)
                if not count:
                    self._break("it was closed")
                    return
                budget -= count
                if count < wanted:
                    return
        except BlockingIOError:
            pass
        except ProtocolError as e:
            self._break(str(e), lied=True)
        except OSError as e:
            self._break(f"{e.strerror or e}")

    def _receive(self, connection: socket.socket) -> tuple[int, int]:
        """Take in a piece of a chunk, or a header: how much was asked for, and came."""
        landing = self._landing
        if landing is None:
            into = memoryview(self._header)[self._header_at :]
            count = connection.recv_into(into)
            self._header_at += count
            if self._header_at == _HEADER.size:
                self._header_at = 0
                self._landing = self._announced(*_HEADER.unpack(self._header))
            return into.nbytes, count
        left = min(landing.size - landing.at, _PIECE_BYTES)
        header = memoryview(self._header)
        if landing.view is None:
            piece = memoryview(self._scrap)[:left]
        else:
            piece = landing.view[landing.at : landing.at + left]
        if landing.at + left == landing.size:
            count, *_ = connection.recvmsg_into((piece, header))
            wanted = left + header.nbytes
        else:
            count, wanted = connection.recv_into(piece), left
        landed = min(count, left)
        if landing.view is not None:
            landing.sum.update(piece[:landed])
        piece.release()
        landing.at += landed
        if landing.at == landing.size:
            self._header_at = count - landed
            self._landed(landing)
        if self._header_at == _HEADER.size and self._socket is not None:
            self._header_at = 0
            self._landing = self._announced(*_HEADER.unpack(self._header))
        return wanted, count

    def _announced(
        self, transfer: int, place: int, zero: int, size: int, checksum: int
    ) -> _Landing:
        """Where a chunk belongs. Raises ProtocolError if it was not asked for."""
        expected = self._expected.get(transfer)
        if expected is None or zero or place >= len(expected.views):
            raise ProtocolError("it sent a chunk that nobody asked for")
        view = expected.views[place]
        if view is None:
            raise ProtocolError("it sent a chunk twice")
        if size != expected.sizes[place]:
            raise ProtocolError(f"it sent a chunk of {size} bytes: it has {expected.sizes[place]}")
        expected.views[place] = None
        return _Landing(transfer, place, size, checksum, None if expected.stopped else view)

    def _landed(self, landing: _Landing) -> None:
        self._landing = None
        if landing.view is not None:
            whole = landing.sum.intdigest() == landing.checksum
            landing.view = None
            self._calls.arrived(landing.transfer, landing.place, whole)

    def _break(self, why: str, lied: bool = False) -> None:
        self.close()
        self._calls.broken(f"the data connection broke: {why}", lied)

    def check(self) -> None:
        """Raise AssertionError if bytes could land where nobody waits for them."""
        landing = self._landing
        if landing is not None:
            expected = self._expected.get(landing.transfer)
            ended = expected is None or expected.stopped
            assert not (ended and landing.view), "a chunk lands for a transfer that has ended"
            assert landing.at <= landing.size, "a chunk lands beyond its end"

    def __repr__(self) -> str:
        return f"<TcpReceiver {len(self._expected)} transfers>"


_NOWHERE = memoryview(b"")


class TcpTransport:
    """A listening socket, and the tokens of sessions whose consumer has not come yet."""

    name = b"tcp"

    def __init__(self, loop: Loop, host: str, port: int, stall_deadline_s: float) -> None:
        """Raises OSError if the address cannot be had; port 0: any."""
        self.loop = loop
        self.stall_deadline_s = stall_deadline_s
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
        loop.watch(self._listener.fileno(), self._accept)

    def send_to(self, calls: Sent) -> TcpSender:
        """A sender that waits for the one who shows its token."""
        token = secrets.token_bytes(_TOKEN_BYTES)
        sender = TcpSender(self, calls, _OFFER.pack(self.port, token))
        self._awaited[token] = sender
        return sender

    def receive_from(self, host: str, offer: bytes, calls: Delivered) -> TcpReceiver:
        """Connect to the port that the offer names. Raises ProtocolError, or OSError."""
        if len(offer) != _OFFER.size:
            raise ProtocolError("its offer of a TCP connection is none")
        port, token = _OFFER.unpack(offer)
        return TcpReceiver(self.loop, (host, port), token, calls)

    def withdraw(self, sender: TcpSender) -> None:
        """Its token is worth nothing from now on."""
        self._awaited.pop(_OFFER.unpack(sender.offer)[1], None)

    def close(self) -> None:
        """Stop listening."""
        self.loop.forget(self._listener.fileno())
        self._listener.close()
        for stranger in list(self._strangers):
            self._send_away(stranger)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self._strangers) >= _MAX_STRANGERS:
            self._send_away(next(iter(self._strangers)))
        until = self.loop.clock() + _GREETING_DEADLINE_S
        timer = self.loop.at(until, partial(self._send_away, connection))
        self._strangers[connection] = (timer, bytearray())
        self.loop.watch(connection.fileno(), partial(self._hear, connection))

    def _hear(self, connection: socket.socket) -> None:
        timer, said = self._strangers[connection]
        try:
            more = connection.recv(len(_GREETING) + _TOKEN_BYTES - len(said))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        said += more
        if more and len(said) < len(_GREETING) + _TOKEN_BYTES:
            return
        sender = self._awaited.pop(bytes(said[len(_GREETING) :]), None)
        if not more or not said.startswith(_GREETING) or sender is None:
            self._send_away(connection)
            return
        timer.cancel()
        del self._strangers[connection]
        sender.connected(connection)

    def _send_away(self, connection: socket.socket) -> None:
        timer, _ = self._strangers.pop(connection)
        timer.cancel()
        self.loop.forget(connection.fileno())
        connection.close()

    def check(self) -> None:
        """Raise AssertionError if more strangers are borne than the bound."""
        assert len(self._strangers) <= _MAX_STRANGERS, "too many strangers"

    def __repr__(self) -> str:
        return f"<TcpTransport port {self.port}: {len(self._awaited)} awaited>"
