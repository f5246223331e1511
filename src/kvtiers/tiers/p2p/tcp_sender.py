"""The producer's end of a TCP data connection."""

import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from kvtiers.tiers.p2p.frames import HEADER, TURN_BYTES
from kvtiers.tiers.p2p.loop import Loop, Timer
from kvtiers.tiers.p2p.transport import Sent
from kvtiers.tiers.p2p.wire import ProtocolError


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a consumer is waited for, in seconds."""

    stall_s: float
    """While it takes no bytes, or does not come."""
    longest_s: float
    """From the time at which a chunk is to go out until it has."""


@dataclass(slots=True, eq=False)
class _Frame:
    transfer: int
    place: int
    view: memoryview
    until: float
    """When the consumer has long given it up."""
    dropped: bool = False


class TcpSender:
    """Frames of one session, in the order in which they were pushed."""

    def __init__(
        self,
        loop: Loop,
        calls: Sent,
        offer: bytes,
        patience: Patience,
        withdraw: Callable[[], None],
    ) -> None:
        """``withdraw`` makes its token worth nothing."""
        self.offer = offer
        self._loop = loop
        self._calls = calls
        self._patience = patience
        self._withdraw = withdraw
        self._queue: deque[_Frame] = deque()
        """Also of frames that were dropped, which are never the greater part."""
        self._waiting: dict[int, dict[int, _Frame]] = {}
        """Frames of the queue that were not dropped, by transfer and place."""
        self._dropped = 0
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
        until = self._loop.clock() + self._patience.longest_s
        waiting = self._waiting.setdefault(transfer, {})
        for place, view in chunks:
            waiting[place] = frame = _Frame(transfer, place, view, until)
            self._queue.append(frame)
        if not self._watched:
            self._watch(True)

    def taken(self, transfer: int, places: Sequence[int]) -> None:
        """Nobody reads another's memory here."""
        raise ProtocolError("nothing can be read over TCP")

    def drop(self, transfer: int) -> None:
        """Take out what was not begun."""
        out = self._waiting.pop(transfer, {})
        for frame in out.values():
            frame.dropped = True
        self._dropped += len(out)
        if self._dropped > len(self._queue) // 2:
            self._queue = deque(frame for frame in self._queue if not frame.dropped)
            self._dropped = 0
        if self._watched and not (self._unsent or self._queue):
            self._watch(False)
        for place in out:
            self._calls.sent(transfer, place, False)

    def connected(self, connection: socket.socket) -> None:
        """The consumer has shown the token."""
        self._socket = connection
        self._listen()

    def close(self) -> None:
        """End the connection."""
        self._closed = True
        self._withdraw()
        if self._stalled is not None:
            self._stalled.cancel()
        self._queue.clear()
        self._waiting.clear()
        self._dropped = 0
        self._unsent.clear()
        self._begun = None
        if self._socket is not None:
            self._loop.forget(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def _watch(self, to_write: bool) -> None:
        """Whether there is something to send, be there a connection or not."""
        if to_write and not self._watched:
            self._progress_at = self._loop.clock()
            self._keep_time()
        self._watched = to_write
        self._listen()

    def _listen(self) -> None:
        if self._socket is not None:
            writable = self._write if self._watched else None
            self._loop.watch(self._socket.fileno(), self._hear, writable)

    def _keep_time(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
        until = min(self._progress_at + self._patience.stall_s, self._oldest())
        self._stalled = self._loop.at(until, self._look_after)

    def _oldest(self) -> float:
        frame = self._begun or next((f for f in self._queue if not f.dropped), None)
        return float("inf") if frame is None else frame.until

    def _look_after(self) -> None:
        """A consumer that takes nothing, or little by little, may not keep our memory for ever."""
        if not self._watched:
            return
        now = self._loop.clock()
        if now >= self._oldest():
            self._break("it takes its chunks too slowly")
        elif now >= self._progress_at + self._patience.stall_s:
            self._break("it takes no bytes" if self._socket else "it does not come for its chunks")
        else:
            self._keep_time()

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
        budget = TURN_BYTES
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
            if frame.dropped:
                self._dropped -= 1
                continue
            self._forget(frame)
            try:
                size = frame.view.nbytes
                header = HEADER.pack(
                    frame.transfer, frame.place, 0, size, xxh3_64_intdigest(frame.view)
                )
                self._unsent = [memoryview(header), frame.view[:]]
            except ValueError:  # host memory was reset
                self._calls.sent(frame.transfer, frame.place, False)
                continue
            self._begun = frame
            return True
        return False

    def _forget(self, frame: _Frame) -> None:
        waiting = self._waiting[frame.transfer]
        del waiting[frame.place]
        if not waiting:
            del self._waiting[frame.transfer]

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
        live = sum(map(len, self._waiting.values()))
        assert len(self._queue) == live + self._dropped, "frames that wait do not add up"
        waits = bool(self._unsent or self._queue)
        assert self._watched == waits or self._closed, "frames wait, and nobody watches"

    def __repr__(self) -> str:
        live = len(self._queue) - self._dropped
        return f"<TcpSender {live} frames wait{', closed' if self._closed else ''}>"
