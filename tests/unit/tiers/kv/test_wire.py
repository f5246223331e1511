"""Bytes from the socket into the caller's memory, however they come."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.exceptions import ConnectionError as Disconnected
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as TimedOut

from kvtiers.tiers.kv import commands, wire


class Scripted:
    """A connection whose other end says what a test wants, in pieces of a given length."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.wire = wire.TcpWire(
            host="127.0.0.1",
            port=self._listener.getsockname()[1],
            protocol=2,
            parser_class=wire.PARSER,
            life=wire.Life(),
            driver_info=None,
            socket_timeout=10,
        )
        self.wire.connect()
        self.far, _ = self._listener.accept()

    def say(self, text: bytes, lengths: list[int]) -> None:
        """Say it on a thread: a socket holds only so much."""

        def run() -> None:
            at = 0
            with contextlib.suppress(OSError):  # the test is over
                for length in [*lengths, len(text)]:
                    self.far.sendall(text[at : at + length])
                    at += length

        threading.Thread(target=run, daemon=True).start()

    def close(self) -> None:
        self.wire.disconnect()
        self.far.close()
        self._listener.close()


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    made = Scripted()
    yield made
    made.close()


@given(
    sizes=st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 60000)), min_size=1, max_size=6),
    lengths=st.lists(st.integers(0, 40000), max_size=8),
)
@settings(max_examples=60)
def test_values_fill_their_places_and_nothing_else(
    sizes: list[tuple[int, int]], lengths: list[int]
) -> None:
    made = Scripted()
    values = [bytes([65 + n]) * a + bytes([97 + n]) * b for n, (a, b) in enumerate(sizes)]
    made.say(b"".join(b"$%d\r\n%b\r\n" % (len(v), v) for v in values) + b":7\r\n", lengths)
    for value, (a, b) in zip(values, sizes, strict=True):
        memory = bytearray(1 + a + 1 + b + 1)
        view = memoryview(memory)
        assert made.wire.receive([view[1 : 1 + a], view[2 + a : 2 + a + b]]) == a + b
        assert memory == b"\0" + value[:a] + b"\0" + value[a:] + b"\0"
    assert made.wire.receive(None) == 7
    made.close()


@pytest.mark.parametrize("length", [0, 1, 9, 11, 70000, 3_000_000])
def test_a_value_of_another_length_is_thrown_away(scripted: Scripted, length: int) -> None:
    scripted.say(b"$%d\r\n%b\r\n+OK\r\n" % (length, b"x" * length), [])
    memory = bytearray(10)
    assert scripted.wire.receive([memoryview(memory)]) == length
    assert memory == bytes(10)
    assert scripted.wire.receive(None) == b"OK"


def test_other_replies_leave_the_place_alone(scripted: Scripted) -> None:
    scripted.say(b"$-1\r\n-WRONGTYPE no\r\n*2\r\n$1\r\n0\r\n*1\r\n$3\r\na\r\n\r\n$2\r\nab\r\n", [])
    memory = memoryview(bytearray(b"...."))
    assert scripted.wire.receive([memory]) is None
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        scripted.wire.receive([memory])
    assert scripted.wire.receive(None) == [b"0", [b"a\r\n"]]
    assert scripted.wire.receive(None) == b"ab"  # the place of the failed call is forgotten
    assert memory == b"...."
    memory.release()


def test_a_server_that_goes_or_stalls_in_the_middle_of_a_value(scripted: Scripted) -> None:
    scripted.say(b"$100\r\nabc", [])
    scripted.wire.socket_timeout = 0.05
    scripted.wire._sock.settimeout(0.05)
    with pytest.raises(TimedOut):
        scripted.wire.receive([memoryview(bytearray(100))])
    scripted.wire.connect()
    far, _ = scripted._listener.accept()
    far.sendall(b"$100\r\nabc")
    far.close()
    with pytest.raises(Disconnected, match="closed"):
        scripted.wire.receive([memoryview(bytearray(100))])


def test_what_nobody_asked_for_is_noticed(scripted: Scripted) -> None:
    assert not scripted.wire.can_read()
    scripted.far.sendall(b"+x\r\n")
    assert scripted.wire.can_read(timeout=10)
    scripted.far.close()
    assert scripted.wire.receive(None) == b"x"
    with pytest.raises(Disconnected):
        scripted.wire.receive(None)


def test_commands_as_they_are_sent() -> None:
    assert commands.command(b"GET", b"a\r\nb") == b"*2\r\n$3\r\nGET\r\n$4\r\na\r\nb\r\n"
    memory = memoryview(b"payload")
    pieces = commands.command_with_value([b"SET", b"k"], [b"head", memory], [b"EX", b"9"])
    assert pieces[1] is memory
    assert b"".join(pieces) == commands.command(b"SET", b"k", b"headpayload", b"EX", b"9")
