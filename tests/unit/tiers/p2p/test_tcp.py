"""A TCP data connection without its loop, and with time by hand."""

import errno
import os
import socket
from types import SimpleNamespace

import pytest

from kvtiers.tiers.p2p.frames import HEADER
from kvtiers.tiers.p2p.tcp import TcpTransport
from kvtiers.tiers.p2p.tcp_sender import Patience, TcpSender
from kvtiers.tiers.p2p.transport import Sent
from tests.unit.tiers.p2p.test_peer import Time

CHUNK = 1 << 20


class Hand(Time):
    """A loop whose descriptors a test looks after."""

    def __init__(self) -> None:
        super().__init__()
        self.watched: dict[int, tuple] = {}

    def watch(self, fd, readable, writable=None) -> None:
        self.watched[fd] = (readable, writable)

    def forget(self, fd) -> None:
        self.watched.pop(fd, None)

    def write(self) -> bool:
        """Let whoever wants to write do so."""
        writers = [writable for _, writable in self.watched.values() if writable]
        for writable in writers:
            writable()
        return bool(writers)


class Bench:
    def __init__(self) -> None:
        self.loop = Hand()
        self.sent: list[tuple[int, int, bool]] = []
        self.broken: list[str] = []
        calls = Sent(lambda *sent: self.sent.append(sent), lambda *_: None, self.broken.append)
        patience = Patience(stall_s=10.0, longest_s=60.0)
        self.sender = TcpSender(self.loop, calls, b"", patience, lambda: None)

    def push(self, transfer: int, count: int) -> None:
        chunk = memoryview(bytes(CHUNK))
        self.sender.push(transfer, [(place, chunk) for place in range(count)])
        self.sender.check()

    def connect(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self.sender.connected(ours)
        return theirs


@pytest.fixture
def bench():
    return Bench()


def test_who_does_not_come_for_its_chunks_is_let_go(bench):
    bench.push(1, 2)
    bench.loop.go(9.9)
    assert not bench.broken
    bench.loop.go(0.2)
    assert "does not come" in bench.broken[0]
    bench.sender.check()


def test_who_takes_its_chunks_little_by_little_is_let_go(bench):
    """Some bytes each time, so that it never stalls: a few chunks would last for hours."""
    bench.push(1, 16)
    with bench.connect() as theirs:
        for _ in range(7):
            bench.loop.write()
            assert not bench.broken
            theirs.recv(256 << 10)
            bench.loop.go(9.0)
        assert "too slowly" in bench.broken[0]
    assert len(bench.sent) < 16


def test_who_has_nothing_to_take_is_waited_for(bench):
    with bench.connect():
        bench.loop.go(1000.0)
        bench.push(1, 1)
        bench.sender.drop(1)
        bench.sender.check()
        bench.loop.go(1000.0)
        assert not bench.broken


def test_what_is_dropped_costs_the_frames_of_others_nothing(bench):
    for transfer in range(300):
        bench.push(transfer, 100)
    for transfer in range(299):
        looked_at = len(bench.sender._queue)
        bench.sender.drop(transfer)
        bench.sender.drop(transfer)
        bench.sender.check()
        live = 100 * (299 - transfer)
        assert looked_at <= 2 * (live + 100) + 1, "what was dropped piles up"
    assert bench.sent == [(t, place, False) for t in range(299) for place in range(100)]
    bench.sent.clear()
    with bench.connect() as theirs:
        while bench.loop.write():
            theirs.recv(CHUNK)
    assert bench.sent == [(299, place, True) for place in range(100)]


def test_frames_of_a_dropped_transfer_between_others_do_not_go_out(bench):
    for transfer in (1, 2, 3, 4):
        bench.push(transfer, 1)
    bench.sender.drop(2)
    got = bytearray()
    with bench.connect() as theirs:
        theirs.setblocking(False)
        while bench.loop.write() or len(got) < 3 * (HEADER.size + CHUNK):
            got += theirs.recv(4 * CHUNK)
    step = HEADER.size + CHUNK
    assert [HEADER.unpack_from(got, n * step)[0] for n in range(3)] == [1, 3, 4]
    bench.sender.check()


def test_a_listener_without_descriptors_rests_instead_of_spinning():
    loop = Hand()
    transport = TcpTransport(loop, "127.0.0.1", 0, Patience(10.0, 60.0))
    listener, fd = transport._listener, transport._listener.fileno()
    full = OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def accept():
        raise full

    transport._listener = SimpleNamespace(accept=accept, fileno=lambda: fd, close=listener.close)
    loop.watched[fd][0]()
    assert fd not in loop.watched
    loop.go(0.3)
    assert fd in loop.watched
    loop.watched[fd][0]()
    transport.close()
    loop.go(1.0)
    assert fd not in loop.watched
