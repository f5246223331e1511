"""The names of keys at one server, a bounded number at a time, so that others are served between.

``SCAN`` walks the whole table of a server, other keys included; a key that stays is returned at
least once (https://redis.io/docs/latest/commands/scan/).
"""

from collections.abc import Iterator

from redis.exceptions import InvalidResponse

from kvtiers.errors import KVTiersError
from kvtiers.tiers.kv.exchange import Server, Servers, exchange, question
from kvtiers.tiers.kv.failures import explained

_COUNT = b"512"
"""Keys that a server looks at in one step: others wait for so long."""


def names_at(servers: Servers, server: Server, pattern: bytes) -> Iterator[bytes]:
    """Every key that matches, perhaps twice. Raises KVTiersError."""
    cursor = b"0"
    while True:
        words = b"SCAN", cursor, b"MATCH", pattern, b"COUNT", _COUNT
        call = question(b"", *words, server=server)
        exchange(servers, [call], "scan")
        match call.reply:
            case KVTiersError() as error:
                raise error
            case [bytes() as cursor, list() as names]:
                yield from (name for name in names if isinstance(name, bytes))
            case _:
                raise explained(InvalidResponse("no cursor and names"), "scan", server.name)
        if cursor == b"0":
            return
