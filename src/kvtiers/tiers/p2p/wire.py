"""How values are written in a message: little-endian, lengths in front, nothing optional.

A codec reads and writes one value. Reading checks all that can be checked without knowing what the
value is for, and never takes more memory than the message had.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any


class ProtocolError(Exception):
    """Bytes of a peer are no message, or one that cannot come now. Says what is wrong with them."""


class Cursor:
    """Takes bytes off the front of a message."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        """The next ``count`` bytes. Raises ProtocolError if there are fewer."""
        end = self._at + count
        if end > len(self._data):
            raise ProtocolError(f"it ends after {len(self._data)} bytes, in the middle of a value")
        taken, self._at = self._data[self._at : end], end
        return taken

    @property
    def left(self) -> int:
        """Bytes that were not taken."""
        return len(self._data) - self._at


@dataclass(frozen=True, slots=True)
class Codec:
    """One kind of value."""

    write: Callable[[Any], bytes]
    read: Callable[[Cursor], Any]
    """Raises ProtocolError."""


def _number(code: str) -> Codec:
    packed = struct.Struct(f"<{code}")
    return Codec(packed.pack, lambda cursor: packed.unpack(cursor.take(packed.size))[0])


U8, U32, U64 = _number("B"), _number("I"), _number("Q")


def blob(limit: int) -> Codec:
    """Bytes, at most ``limit`` of them."""

    def write(value: bytes) -> bytes:
        return U32.write(len(value)) + value

    def read(cursor: Cursor) -> bytes:
        return cursor.take(_count(cursor, limit, "bytes"))

    return Codec(write, read)


def text(limit: int) -> Codec:
    """UTF-8, at most ``limit`` bytes of it."""
    raw = blob(limit)

    def read(cursor: Cursor) -> str:
        try:
            return str(raw.read(cursor), "utf-8")
        except UnicodeDecodeError as e:
            raise ProtocolError("a text in it is not UTF-8") from e

    return Codec(lambda value: raw.write(value.encode()), read)


def blobs(max_count: int, limit: int) -> Codec:
    """Up to ``max_count`` byte strings of at most ``limit`` bytes: lengths, then bytes."""

    def write(values: tuple[bytes, ...]) -> bytes:
        lengths = struct.pack(f"<{len(values)}H", *map(len, values))
        return b"".join((U32.write(len(values)), lengths, *values))

    def read(cursor: Cursor) -> tuple[bytes, ...]:
        count = _count(cursor, max_count, "items")
        lengths = struct.unpack(f"<{count}H", cursor.take(2 * count))
        if count and max(lengths) > limit:
            raise ProtocolError(f"an item of it has {max(lengths)} bytes: the limit is {limit}")
        ends = list(accumulate(lengths, initial=0))
        data = cursor.take(ends[-1])
        return tuple([data[start:end] for start, end in pairwise(ends)])

    return Codec(write, read)


def rows(max_count: int, codes: str) -> Codec:
    """Up to ``max_count`` tuples of numbers: ``codes`` are those of :mod:`struct`, of one tuple."""
    packed = struct.Struct(f"<{codes}")

    def write(values: tuple[tuple[int, ...], ...]) -> bytes:
        return b"".join((U32.write(len(values)), *[packed.pack(*row) for row in values]))

    def read(cursor: Cursor) -> tuple[tuple[int, ...], ...]:
        count = _count(cursor, max_count, "rows")
        return tuple(packed.iter_unpack(cursor.take(count * packed.size)))

    return Codec(write, read)


def _count(cursor: Cursor, limit: int, what: str) -> int:
    count: int = U32.read(cursor)
    if count > limit:
        raise ProtocolError(f"it announces {count} {what}: the limit is {limit}")
    return count
