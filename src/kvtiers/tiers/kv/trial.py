"""Values under names of their own on servers, to see what a user may do there and how fast."""

import secrets
import time
from contextlib import suppress
from typing import Any

from kvtiers.errors import Kind, KVTiersError
from kvtiers.tiers.kv import memory
from kvtiers.tiers.kv.address import parse_address
from kvtiers.tiers.kv.commands import asking, command_with_value
from kvtiers.tiers.kv.exchange import PLACED, Call, exchange, question
from kvtiers.tiers.kv.looking import every
from kvtiers.tiers.kv.names import TRIAL
from kvtiers.tiers.kv.options import KvOptions
from kvtiers.tiers.kv.servers import servers_of
from kvtiers.tiers.kv.urls import below_kv, options_of

_AT_ONCE = 512


class ServerTrial:
    """Calls under a prefix that nobody else uses."""

    def __init__(self, options: KvOptions) -> None:
        corner = below_kv(options, f"{TRIAL}{secrets.token_hex(4)}")
        self.options: dict[str, Any] = options_of(corner)
        self.prefix = corner.prefix
        self._ttl = b"%d" % round(corner.ttl_s or 0)
        self._servers = servers_of(parse_address(options.url), corner, time.monotonic)

    def name(self, number: int) -> bytes:
        """Of a value of this trial."""
        return f"{self.prefix}:bare:{number:08x}".encode()

    def ask(self, *words: bytes, name: bytes = b"") -> Any:
        """The answer to one command. Raises KVTiersError."""
        call = question(name, *words)
        exchange(self._servers, [call], words[0].decode())
        if isinstance(call.reply, KVTiersError):
            raise call.reply
        return call.reply

    def put(self, number: int, value: memoryview) -> None:
        """One ``SET``. Raises KVTiersError."""
        name = self.name(number)
        pieces = command_with_value([b"SET", name], [b"", value], [b"EX", self._ttl])
        call = Call(name, lambda: pieces, (bytes,))
        exchange(self._servers, [call], "SET")
        if isinstance(call.reply, KVTiersError):
            raise call.reply

    def get(self, number: int, into: memoryview) -> None:
        """One ``GET``. Raises KVTiersError if the value is not there."""
        name = self.name(number)
        call = Call(name, asking(b"GET", name), PLACED, targets=[into])
        exchange(self._servers, [call], "GET")
        if isinstance(call.reply, KVTiersError):
            raise call.reply
        if call.reply != len(into):
            raise KVTiersError("what was just written is not there any more", kind=Kind.VANISHED)

    def memory(self) -> list[memory.Memory]:
        """What each server says of its memory. Raises KVTiersError."""
        return memory.ask(self._servers, "INFO")

    def names(self) -> list[bytes]:
        """What is stored of the trial. Raises KVTiersError."""
        return list(every(self._servers, f"{self.prefix}:*".encode()))

    def clear(self) -> None:
        """Delete all of it, and go."""
        try:
            with suppress(KVTiersError):
                names = self.names()
                for at in range(0, len(names), _AT_ONCE):
                    some = names[at : at + _AT_ONCE]
                    exchange(self._servers, [question(n, b"UNLINK", n) for n in some], "UNLINK")
        finally:
            self._servers.close()
