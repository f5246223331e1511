"""What tools see of keys at servers: how large a value is and when it was used, without using it.

``OBJECT IDLETIME`` says for how long nobody used a key (https://valkey.io/commands/object-idletime/);
a server that evicts by frequency keeps no such time.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from redis.exceptions import ResponseError

from kvtiers.errors import Kind, KVTiersError
from kvtiers.tiers.kv.exchange import Servers, exchange, question
from kvtiers.tiers.kv.scanning import names_at

_AT_ONCE = 512


class Quietly:
    """Greets a server so that looking is no use there: its eviction goes on as if nobody looked.

    Servers before Valkey 7.2 and Redis 7.2 cannot do that, and a user may lack the right.
    """

    def __init__(self, refused: Callable[[], None]) -> None:
        self._refused = refused

    def __call__(self, connection: Any) -> None:
        """Log in, and ask for it. Raises errors of redis-py."""
        connection.on_connect()
        connection.send_command("CLIENT", "NO-TOUCH", "ON")
        try:
            connection.read_response()
        except ResponseError:
            self._refused()


@dataclass(frozen=True, slots=True)
class Seen:
    """A key."""

    name: bytes
    bytes: int
    """Of its value; 0 for what is no string."""
    idle_s: float | None
    """For so long nobody used it. None: the server does not say."""


def every(servers: Servers, pattern: bytes) -> Iterator[bytes]:
    """Each name that matches, once. Raises KVTiersError."""
    known: set[bytes] = set()
    for server in servers.all():
        for name in names_at(servers, server, pattern):
            if name not in known:
                known.add(name)
                yield name


def seen(servers: Servers, names: Iterable[bytes]) -> Iterator[Seen | None]:
    """What is there of each name; None where it is absent. Raises KVTiersError."""
    left = iter(names)
    while some := list(islice(left, _AT_ONCE)):
        yield from _seen(servers, some)


def _seen(servers: Servers, names: Sequence[bytes]) -> Iterator[Seen | None]:
    there = [question(name, b"EXISTS", name) for name in names]
    lengths = [question(name, b"STRLEN", name) for name in names]
    idle = [question(name, b"OBJECT", b"IDLETIME", name) for name in names]
    exchange(servers, [*there, *lengths, *idle], "look")
    for name, *calls in zip(names, there, lengths, idle, strict=True):
        exists, length, idle_s = (call.reply for call in calls)
        for reply in (exists, length):
            if isinstance(reply, KVTiersError) and reply.kind is not Kind.CORRUPT:
                raise reply
        if not exists:
            yield None
            continue
        yield Seen(
            name,
            length if isinstance(length, int) else 0,
            idle_s if isinstance(idle_s, int) else None,
        )
