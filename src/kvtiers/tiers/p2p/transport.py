"""The contract of a data transport: it moves chunks from the producer's memory to the consumer's.

All calls are made on the I/O thread and must not block; what happens is told by calling back on the
same thread. A transport is either side's; of one session the producer has a ``Sender`` and the
consumer a ``Receiver``. Nobody of ours writes into another's memory: either bytes come over a
connection and the consumer puts them where they belong, or it reads them out of the producer's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Delivered:
    """What a ``Receiver`` calls back with."""

    arrived: Callable[[int, int, bool], None]
    """Transfer, place, whether its bytes are whole: this chunk's memory is written no more."""
    stopped: Callable[[int], None]
    """Transfer: what ``stop`` could not stop at once has stopped. Also after ``close``."""
    taken: Callable[[int, Sequence[int]], None]
    """Transfer, places: the producer need not keep these chunks, as its transport asked to know."""
    broken: Callable[[str, bool], None]
    """The connection is of no use any more: why, and whether the peer broke its word."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What a ``Sender`` calls back with."""

    sent: Callable[[int, int, bool], None]
    """Transfer, place, whether it went out: this chunk's memory is read no more."""
    ready: Callable[[int, Sequence[tuple[int, int, int]]], None]
    """Transfer, chunks (place, address, XXH3-64) that the consumer can read."""
    broken: Callable[[str], None]
    """The connection is of no use any more. What was not sent is not read any more."""


class Receiver(Protocol):
    """The consumer's end of a session's data connection."""

    def expect(self, transfer: int, views: Sequence[memoryview]) -> None:
        """Let the chunks of ``transfer`` land in these views."""

    def ready(self, transfer: int, chunks: Sequence[tuple[int, int, int]]) -> None:
        """The producer says that these (place, address, XXH3-64) can be read.

        Raises ProtocolError if it cannot say so.
        """

    def stop(self, transfer: int) -> bool:
        """Let nothing of ``transfer`` land any more. False: something does; ``stopped`` follows."""

    def forget(self, transfer: int) -> None:
        """All chunks of ``transfer`` arrived, or will not come: none may come from now on."""

    @property
    def has_room(self) -> bool:
        """Whether it may be told to expect more: what could not be stopped keeps little memory."""

    def close(self) -> None:
        """Give everything back. Caller guarantees: every transfer was stopped or forgotten.

        Nothing but ``stopped`` is called back from now on. Twice is fine.
        """


class Sender(Protocol):
    """The producer's end of a session's data connection."""

    offer: bytes
    """What the consumer needs to know to connect."""

    def push(self, transfer: int, chunks: Sequence[tuple[int, memoryview]]) -> None:
        """Bring these chunks (place, bytes) of ``transfer``; ``sent`` is called for each."""

    def taken(self, transfer: int, places: Sequence[int]) -> None:
        """The consumer says that it has read these. Raises ProtocolError if it cannot say so."""

    def drop(self, transfer: int) -> None:
        """Bring no chunk of ``transfer`` that is not being sent; ``sent`` is called for each."""

    def close(self) -> None:
        """Read nothing any more, give everything back. Calls nothing back. Twice is fine."""


class Transport(Protocol):
    """Both ends of one kind, for one engine."""

    name: bytes

    @property
    def has_room(self) -> bool:
        """Whether it may be used for more: what could not be stopped keeps little memory."""

    def send_to(self, calls: Sent) -> Sender:
        """The producer's end of a new session."""

    def receive_from(self, host: str, offer: bytes, calls: Delivered) -> Receiver:
        """The consumer's end; ``host`` is numeric. Raises ProtocolError for a bad offer."""

    def close(self) -> None:
        """Take no connection any more."""
