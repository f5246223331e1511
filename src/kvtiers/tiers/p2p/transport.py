"""The contract of a data transport: it moves chunks from the producer's memory to the consumer's.

All calls are made on the I/O thread and must not block; what happens is told by calling back on the
same thread. A transport is either side's; of one session the producer has a ``Sender`` and the
consumer a ``Receiver``. Bytes may land only in what a ``Receiver`` was told to expect, and only
until it was told to stop.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Delivered:
    """What a ``Receiver`` calls back with."""

    arrived: Callable[[int, int, bool], None]
    """Transfer, place, whether its bytes are whole: this chunk's memory is written no more."""
    broken: Callable[[str, bool], None]
    """The connection is of no use any more: why, and whether the peer broke its word."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What a ``Sender`` calls back with."""

    sent: Callable[[int, int, bool], None]
    """Transfer, place, whether it went out: this chunk's memory is read no more."""
    broken: Callable[[str], None]
    """The connection is of no use any more. What was not sent is not read any more."""


class Receiver(Protocol):
    """The consumer's end of a session's data connection."""

    def expect(self, transfer: int, views: Sequence[memoryview]) -> bytes:
        """Let the chunks of ``transfer`` land in these views; what to tell the producer of them."""

    def stop(self, transfer: int) -> bool:
        """Let nothing of ``transfer`` land any more. False: only the producer can stop."""

    def forget(self, transfer: int) -> None:
        """All chunks of ``transfer`` arrived, or will not come: none may come from now on."""

    def close(self) -> None:
        """Let nothing land any more, give everything back. Calls nothing back. Twice is fine."""


class Sender(Protocol):
    """The producer's end of a session's data connection."""

    offer: bytes
    """What the consumer needs to know to connect."""

    def push(self, transfer: int, chunks: Sequence[tuple[int, memoryview]]) -> None:
        """Bring these chunks (place, bytes) of ``transfer``; ``sent`` is called for each."""

    def drop(self, transfer: int) -> None:
        """Bring no chunk of ``transfer`` that was not begun; ``sent`` is called for each."""

    def close(self) -> None:
        """Read nothing any more, give everything back. Calls nothing back. Twice is fine."""


class Transport(Protocol):
    """Both ends of one kind, for one engine."""

    name: bytes

    def send_to(self, calls: Sent) -> Sender:
        """The producer's end of a new session."""

    def receive_from(self, host: str, offer: bytes, calls: Delivered) -> Receiver:
        """The consumer's end; ``host`` is numeric. Raises ProtocolError for a bad offer."""

    def close(self) -> None:
        """Take no connection any more."""
