"""The names of keys at one server, a bounded number at a time, so that others are served between.

``SCAN`` walks the whole table of a server, other keys included; a key that stays is returned at
least once (https://redis.io/docs/latest/commands/scan/).
"""

from collections.abc import Iterator

from kvtiers.errors import KVTiersError
from kvtiers.tiers.kv.exchange import Call, Server, Servers, exchange
from kvtiers.tiers.kv.wire import asking

_COUNT = b"512"
"""Keys that a server looks at in one step: others wait for so long."""


def names_at(servers: Servers, server: Server, pattern: bytes) -> Iterator[bytes]:
    """Every key that matches, perhaps twice. Raises KVTiersError."""
    cursor = b"0"
    while True:
        words = asking(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", _COUNT)
        call = Call(b"", words, server=server)
        exchange(servers, [call], "scan")
        if isinstance(call.reply, KVTiersError):
            raise call.reply
        cursor, names = call.reply
        yield from names
        if cursor == b"0":
            return
