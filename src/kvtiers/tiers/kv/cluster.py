"""A cluster: which of its servers has which key.

Keys divide into 16384 slots by their CRC16, and slots lie at servers, which say of each other who
has what (https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/). What is known
of that may be old: a server that is asked for a slot that it has not names the one that has it.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import AskError, InvalidResponse, MovedError, RedisError, ResponseError

from kvtiers.errors import Kind, KVTiersError
from kvtiers.tiers.kv.address import Host, host_and_port
from kvtiers.tiers.kv.commands import command
from kvtiers.tiers.kv.exchange import Server
from kvtiers.tiers.kv.failures import explained
from kvtiers.tiers.kv.wire import Life

_REFRESH_S = 1.0
"""The table of slots is asked for at most so often."""
_PAUSE_S = 1.0
"""For so long a server that cannot be reached is not tried: its keys would hold up the others'."""
_SLOTS = command(b"CLUSTER", b"SLOTS")


class ClusterServers:
    """The primaries of a cluster. Any thread.

    ``hosts``: some of them, to ask at first; ``connect`` makes a server of a host, without
    connecting, and ``disconnect`` closes what it has and nobody uses. ``trial_s``: a call ends
    within that.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        connect: Callable[[Host], Server],
        disconnect: Callable[[Server], None],
        life: Life,
        trial_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._hosts = tuple(hosts)
        self._connect = connect
        self._disconnect = disconnect
        self._life = life
        self._trial_s = trial_s
        self._clock = clock
        self._lock = threading.Lock()
        self._refreshing = threading.Lock()
        self._servers: dict[Host, Server] = {}
        self._slots: list[Host | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        self._known = False
        self._why = "none was asked"
        self._cause: Exception | None = None
        self._stale = True
        self._asked_at: float | None = None
        self._out_until: dict[Host, float] = {}

    def of(self, name: bytes) -> Server:
        """Who has the slot of that key; KVTiersError if nobody has, or he is out for a moment."""
        self._refresh()
        slot = key_slot(name)
        host = self._slots[slot]
        if host is None:
            self._stale = True
            raise _failure(f"slot {slot} of the cluster has no server: see to the cluster")
        self._refuse_if_out(host)
        return self._server(host)

    def all(self) -> list[Server]:
        """The servers that have slots. Raises KVTiersError if one is out, or they are not known."""
        self._refresh()
        hosts = sorted({host for host in self._slots if host is not None})
        for host in hosts:
            self._refuse_if_out(host)
        return [self._server(host) for host in hosts]

    def _refuse_if_out(self, host: Host) -> None:
        """Let one caller try a server that was left alone for long enough; no other meanwhile."""
        if host not in self._out_until:
            return
        with self._lock:
            now = self._clock()
            if now >= self._out_until.get(host, now):
                if host in self._out_until:
                    self._out_until[host] = now + self._trial_s
                return
        raise _failure(f"{host_and_port(host)} could not be reached a moment ago")

    def moved(self, error: MovedError | AskError) -> Server:
        """Who is named by an error, which is remembered if it is for good."""
        host = (error.host, error.port)
        if not (error.host and 0 < error.port < 1 << 16 and 0 <= error.slot_id < len(self._slots)):
            raise _failure("a server does not know who has a slot: see to the cluster")
        if isinstance(error, MovedError):
            self._slots[error.slot_id] = host
            self._stale = True  # others will have moved, too
        return self._server(host)

    def failed(self, server: Server) -> None:
        """Ask who has its slots now, and leave it alone for a moment."""
        self._stale = True
        with self._lock:
            for host, known in self._servers.items():
                if known is server:
                    self._out_until[host] = self._clock() + _PAUSE_S

    def worked(self, server: Server) -> None:
        """It answered: it is left alone no more."""
        if self._out_until:
            with self._lock:
                for host, known in self._servers.items():
                    if known is server:
                        self._out_until.pop(host, None)

    def close(self) -> None:
        """Close all connections, for good."""
        self._life.end()
        with self._lock:
            servers = list(self._servers.values())
        for server in servers:
            self._disconnect(server)

    def _server(self, host: Host) -> Server:
        with self._lock:
            if host not in self._servers:
                self._servers[host] = self._connect(host)
            return self._servers[host]

    def _refresh(self) -> None:
        """Learn the table anew if there is reason to. Others go on with the old one meanwhile."""
        if not self._stale or not self._refreshing.acquire(blocking=not self._known):
            return
        try:
            now = self._clock()
            if self._stale and (self._asked_at is None or now >= self._asked_at + _REFRESH_S):
                self._asked_at = now
                self._learn()
        finally:
            self._refreshing.release()
        if not self._known:
            what = f"no server of the cluster says who has what: {self._why}"
            raise _failure(what) from self._cause

    def _learn(self) -> None:
        candidates = dict.fromkeys((*self._servers, *self._hosts))
        for host in sorted(candidates, key=lambda host: self._out_until.get(host, 0.0)):
            try:
                self._take(slots_of(self._ask(host), host))
                return
            except (RedisError, OSError) as e:
                self._cause = e
                self._why = str(explained(e, "CLUSTER SLOTS", host_and_port(host)))

    def _ask(self, host: Host) -> Any:
        pool = self._server(host).pool
        connection = pool.get_connection()
        try:
            connection.send([_SLOTS])
            return connection.receive(None)
        except ResponseError:
            raise
        except BaseException:
            connection.disconnect()
            raise
        finally:
            pool.release(connection)

    def _take(self, slots: list[Host | None]) -> None:
        self._slots = slots
        self._known, self._stale = True, None in slots
        used = set(slots)
        with self._lock:
            left = [self._servers.pop(host) for host in list(self._servers) if host not in used]
            self._out_until = {h: until for h, until in self._out_until.items() if h in used}
        for server in left:
            self._disconnect(server)

    def check(self) -> None:
        """Raise AssertionError if a server is left alone that nobody knows."""
        with self._lock:
            assert set(self._out_until) <= set(self._servers), "an unknown server is left alone"
        assert len(self._slots) == REDIS_CLUSTER_HASH_SLOTS, "slots are missing"

    def __repr__(self) -> str:
        return f"<ClusterServers {len(set(self._slots) - {None})} servers>"


def slots_of(table: Any, asked: Host) -> list[Host | None]:
    """Who has each slot, by the reply to ``CLUSTER SLOTS`` of ``asked``, who need not name himself.

    Raises InvalidResponse for a reply that is none.
    """
    slots: list[Host | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
    try:
        for first, last, (name, port, *_), *_ in table:
            if not (0 <= first <= last < len(slots) and 0 < port < 1 << 16):
                raise ValueError(f"slots {first} to {last} at port {port}")
            host = ((name or b"").decode() or asked[0], port)
            slots[first : last + 1] = [host] * (last + 1 - first)
    except (ValueError, TypeError, AttributeError) as e:
        raise InvalidResponse(f"no table of slots: {e}") from None
    return slots


def _failure(what: str) -> KVTiersError:
    return KVTiersError(what, kind=Kind.IO, operation="find a key")
