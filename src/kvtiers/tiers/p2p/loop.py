"""The I/O thread's loop: sockets of both kinds, timers, and calls from other threads.

It blocks until something can be read or written, a timer is due, or somebody calls; so an idle
engine costs nothing. Everything that is registered here is called on the one thread that ``run``
has. A handler that raises is a bug of ours: it is logged, and the loop goes on.
"""

import heapq
import itertools
import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import zmq

_log = logging.getLogger("kvtiers")

Handler = Callable[[], None]
Received = Callable[[list[bytes]], None]

_READ = select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR
_MESSAGES_AT_ONCE = 64
"""Of one socket, before others have their turn."""
_PARTS_AT_ONCE = 4096
"""Of those messages."""
_MAX_PARTS = 10
"""More than any message has that is meant; libzmq knows no bound."""


def _descriptor(socket: "zmq.Socket[bytes]") -> int:
    return int(socket.getsockopt(zmq.FD))


def _has_messages(socket: "zmq.Socket[bytes]") -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def _receive(socket: Any, parts: list[bytes], most: int) -> tuple[int, bool]:
    """Read up to ``most`` parts, to the end of a message: how many are left, and whether it is
    there. Ten of them are kept.
    """
    for left in range(most - 1, -1, -1):
        try:
            part = socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return left, False
        if len(parts) < _MAX_PARTS:
            parts.append(part)
        if not socket.getsockopt(zmq.RCVMORE):
            return left, True
    return 0, False


class Timer:
    """A call at a time; ``cancel`` takes it back."""

    __slots__ = ("call",)

    def __init__(self, call: Handler) -> None:
        self.call: Handler | None = call

    def cancel(self) -> None:
        """It will not be called."""
        self.call = None


class Loop:
    """Calls handlers when what they wait for happens."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._epoll = select.epoll()
        self._handlers: dict[int, tuple[Handler | None, Handler | None]] = {}
        self._sockets: dict[int, tuple[Any, Received]] = {}
        self._unread: set[int] = set()
        """Sockets of ZeroMQ that may have messages: their descriptor tells only of a change."""
        self._begun: dict[int, list[bytes]] = {}
        """The first parts of messages that were not read to their end."""
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._calls: deque[Handler] = deque()
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._running = True
        self._open = threading.Lock()
        """Held while another thread wakes the loop, and while what wakes it is closed."""
        self._closed = False
        self.watch(self._woken, self._wake)

    # -- from any thread -------------------------------------------------------------------------

    def call(self, handler: Handler) -> None:
        """Have ``handler`` called on the loop's thread, soon; never, once it is closed."""
        with self._open:
            if self._closed:  # the descriptor may be somebody else's
                return
            self._calls.append(handler)
            os.eventfd_write(self._woken, 1)

    # -- on the loop's thread --------------------------------------------------------------------

    def watch(self, fd: int, readable: Handler | None, writable: Handler | None = None) -> None:
        """Call these whenever ``fd`` can be read, or written. Replaces what was said before."""
        mask = (_READ if readable else 0) | (select.EPOLLOUT if writable else 0)
        if fd in self._handlers:
            self._epoll.modify(fd, mask)
        else:
            self._epoll.register(fd, mask)
        self._handlers[fd] = (readable, writable)

    def forget(self, fd: int) -> None:
        """Call nothing more for ``fd``, which is about to be closed."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def attach(self, socket: "zmq.Socket[bytes]", received: Received) -> None:
        """Call ``received`` with the parts of each message that comes, the first ten of them."""
        fd = _descriptor(socket)
        self._sockets[fd] = (socket, received)
        self._unread.add(fd)
        self.watch(fd, lambda: self._unread.add(fd))

    def detach(self, socket: "zmq.Socket[bytes]") -> None:
        """Call nothing more for ``socket``, which is about to be closed."""
        fd = _descriptor(socket)
        self.forget(fd)
        self._sockets.pop(fd, None)
        self._begun.pop(fd, None)
        self._unread.discard(fd)

    def send(self, socket: "zmq.Socket[bytes]", parts: list[bytes]) -> bool:
        """Send without waiting; False if there is no room. What came meanwhile is read, too."""
        self._unread.add(_descriptor(socket))
        try:
            socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def at(self, when: float, handler: Handler) -> Timer:
        """Have ``handler`` called at ``when``, monotonic seconds."""
        timer = Timer(handler)
        heapq.heappush(self._timers, (when, next(self._order), timer))
        return timer

    def stop(self) -> None:
        """Let ``run`` return."""
        self._running = False

    def run(self) -> None:
        """Call handlers until ``stop``, then ``close``."""
        while self._running:
            for fd, mask in self._epoll.poll(self._patience()):
                self._ready(fd, mask)
            for fd in list(self._unread):
                self._read(fd)
            self._ring()
        self.close()

    def close(self) -> None:
        """Give everything of the loop's own back. Caller guarantees: it does not run."""
        with self._open:
            self._closed = True
            self._epoll.close()
            os.close(self._woken)
            self._calls.clear()

    def _patience(self) -> float:
        """How long there is nothing to do: -1 for as long as nothing happens."""
        if self._unread or self._calls:
            return 0
        while self._timers and self._timers[0][2].call is None:
            heapq.heappop(self._timers)
        return max(0.0, self._timers[0][0] - self.clock()) if self._timers else -1

    def _ready(self, fd: int, mask: int) -> None:
        readable, writable = self._handlers.get(fd, (None, None))
        if readable is not None and mask & _READ:
            self._guarded(readable)
        if mask & (select.EPOLLOUT | select.EPOLLERR | select.EPOLLHUP):
            writable = self._handlers.get(fd, (None, None))[1]
            if writable is not None:
                self._guarded(writable)

    def _read(self, fd: int) -> None:
        left = _PARTS_AT_ONCE
        for _ in range(_MESSAGES_AT_ONCE):
            socket, received = self._sockets.get(fd, (None, None))
            if socket is None or received is None:
                return
            if not _has_messages(socket):
                self._unread.discard(fd)
                return
            parts = self._begun.setdefault(fd, [])
            left, whole = _receive(socket, parts, left)
            if not whole:
                return
            del self._begun[fd]
            self._guarded(partial(received, parts))

    def _ring(self) -> None:
        now = self.clock()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            if timer.call is not None:
                self._guarded(timer.call)

    def _wake(self) -> None:
        os.eventfd_read(self._woken)
        for _ in range(len(self._calls)):
            self._guarded(self._calls.popleft())

    def _guarded(self, handler: Handler) -> None:
        try:
            handler()
        except Exception:
            _log.exception("p2p: a bug in kvtiers: please report the traceback")

    def __repr__(self) -> str:
        return (
            f"<Loop {len(self._handlers)} descriptors, {len(self._sockets)} sockets, "
            f"{len(self._timers)} timers>"
        )
