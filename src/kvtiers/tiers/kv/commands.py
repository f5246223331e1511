"""Commands as they are sent: arrays of bulk strings (RESP), in pieces that are not joined. Pure."""

from collections.abc import Callable, Sequence

Piece = bytes | memoryview


def asking(*words: bytes) -> Callable[[], list[Piece]]:
    """What makes a command that has no value: it is made at once."""
    made: list[Piece] = [command(*words)]
    return lambda: made


def command(*words: bytes) -> bytes:
    """A command as it is sent."""
    return b"*%d\r\n" % len(words) + b"".join(map(_bulk, words))


def _bulk(word: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(word), word)


def command_with_value(
    before: Sequence[bytes], value: Sequence[Piece], after: Sequence[bytes] = ()
) -> list[Piece]:
    """A command of which one word is what ``value`` has in pieces; they are not joined."""
    size = sum(map(len, value))
    start = b"*%d\r\n" % (len(before) + 1 + len(after)) + b"".join(map(_bulk, before))
    first, *rest = value
    return [start + b"$%d\r\n" % size + bytes(first), *rest, b"\r\n" + b"".join(map(_bulk, after))]
