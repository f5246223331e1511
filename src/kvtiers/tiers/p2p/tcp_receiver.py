"""The consumer's end of a TCP data connection."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from xxhash import xxh3_64

from kvtiers.tiers.p2p.frames import GREETING, HEADER, TURN_BYTES
from kvtiers.tiers.p2p.loop import Loop
from kvtiers.tiers.p2p.transport import Delivered
from kvtiers.tiers.p2p.wire import ProtocolError

_PIECE_BYTES = 512 << 10
"""Received and summed at once: it still lies in the processor's cache then."""
_NOWHERE = memoryview(b"")


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
        self._header = bytearray(HEADER.size)
        self._header_at = 0
        self._scrap = bytearray(_PIECE_BYTES)
        self._greeting = GREETING + token
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

    @property
    def has_room(self) -> bool:
        """Always: it lets nothing land that nobody waits for."""
        return True

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
        budget = TURN_BYTES
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
            if self._header_at == HEADER.size:
                self._header_at = 0
                self._landing = self._announced(*HEADER.unpack(self._header))
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
        if self._header_at == HEADER.size and self._socket is not None:
            self._header_at = 0
            self._landing = self._announced(*HEADER.unpack(self._header))
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
