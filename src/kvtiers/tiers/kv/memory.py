"""How much memory the servers use, and whether more may be stored."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtiers.errors import Kind, KVTiersError
from kvtiers.tiers.base import Usage
from kvtiers.tiers.kv.exchange import Servers, exchange, question


@dataclass(frozen=True, slots=True)
class Memory:
    """What one server says of its memory."""

    used_bytes: int
    limit_bytes: int
    """Its ``maxmemory``; 0: none."""
    policy: str

    def evicts(self, expiring: bool) -> bool:
        """Whether it makes room of chunks by itself; ``expiring``: they have a time to live."""
        return self.policy.startswith("allkeys-") or (
            expiring and self.policy.startswith("volatile-")
        )


def ask(servers: Servers, operation: str) -> list[Memory]:
    """What each server says. Raises KVTiersError, the first if several do not answer."""
    calls = [question(b"", b"INFO", b"memory", server=each) for each in servers.all()]
    exchange(servers, calls, operation)
    for call in calls:
        if isinstance(call.reply, KVTiersError):
            raise call.reply
    return [_memory(call.reply) for call in calls]


def _memory(info: bytes) -> Memory:
    lines = (line.partition(":") for line in info.decode(errors="replace").splitlines())
    said = {key: value.strip() for key, _, value in lines}
    policy = said.get("maxmemory_policy", "")
    return Memory(_number(said, "used_memory"), _number(said, "maxmemory"), policy)


def _number(said: Mapping[str, str], key: str) -> int:
    text = said.get(key, "0")
    return int(text) if text.isdecimal() else 0


class Bound:
    """``capacity_bytes``, or what the servers have as their ``maxmemory``. Any thread.

    Between two looks at the servers it counts what is written here, so that one engine stays
    within the bound, and several exceed it by what the others write in a second.
    """

    def __init__(self, capacity_bytes: int | None) -> None:
        self._capacity = capacity_bytes
        self._lock = threading.Lock()
        self._used = 0
        self._limit = 0
        """Of the servers together; 0: one of them has none."""

    def learn(self, servers: Sequence[Memory]) -> Usage | None:
        """What the servers said just now; how full they are together, if there is a bound."""
        limits = [server.limit_bytes for server in servers]
        with self._lock:
            self._used = sum(server.used_bytes for server in servers)
            self._limit = sum(limits) if all(limits) else 0
            bounds = [bound for bound in (self._capacity, self._limit) if bound]
            return Usage(self._used, min(bounds)) if bounds else None

    def take(self, nbytes: int) -> bool:
        """Whether so much more may be written; then it counts."""
        if self._capacity is None:
            return True
        with self._lock:
            if self._used + nbytes > self._capacity:
                return False
            self._used += nbytes
            return True

    def full(self) -> KVTiersError:
        """The error for what was not taken."""
        return KVTiersError(
            f"the servers use as much as capacity_bytes ({self._capacity}) allows: raise it, or "
            "let chunks leave by ttl_s",
            kind=Kind.FULL,
            operation="write",
        )

    def check(self) -> None:
        """Raise AssertionError for a number below zero."""
        assert self._used >= 0 <= self._limit, "less than nothing is used or allowed"

    def __repr__(self) -> str:
        return f"<Bound {self._used}/{self._capacity or self._limit or 'no'} bytes>"


def complaint(servers: Sequence[Memory], capacity_bytes: int | None, expiring: bool) -> str | None:
    """What an operator should know of the bound of these servers: one sentence, or nothing."""
    if any(not server.limit_bytes for server in servers):
        if capacity_bytes is not None:
            return None
        return (
            "has no maxmemory, so that chunks fill its machine: set maxmemory with "
            "maxmemory-policy allkeys-lru on the server, or capacity_bytes here"
        )
    fixed = [server.policy for server in servers if not server.evicts(expiring)]
    if fixed:
        return (
            f"has maxmemory-policy {fixed[0]}, so that it takes no new chunks once it is full: "
            "set allkeys-lru"
        )
    return None
