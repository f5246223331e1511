"""The servers that an address leads to, and redis-py's pools of connections to them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from redis.backoff import NoBackoff
from redis.connection import ConnectionPool
from redis.exceptions import AskError, MovedError
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from kvtiers.tiers.kv import wire
from kvtiers.tiers.kv.address import Address, Host, host_and_port
from kvtiers.tiers.kv.cluster import ClusterServers
from kvtiers.tiers.kv.exchange import Server, Servers
from kvtiers.tiers.kv.failures import explained
from kvtiers.tiers.kv.options import KvOptions, secret

_SPARE = 4
"""Connections beyond those of lanes: for ``close``, and whoever builds the tier."""


@dataclass(slots=True, eq=False)
class OneServer:
    """All keys are at one server, or at whoever Sentinel names at the time."""

    server: Server
    life: wire.Life
    sentinel: Sentinel | None = None

    def of(self, name: bytes) -> Server:
        """The one."""
        return self.server

    def all(self) -> list[Server]:
        """The one."""
        return [self.server]

    def moved(self, error: MovedError | AskError) -> Server:
        """Raises KVTiersError: it should be asked as a cluster."""
        raise explained(error, "find a key", self.server.name)

    def failed(self, server: Server) -> None:
        """The tier's breaker leaves it alone."""

    def worked(self, server: Server) -> None:
        """The tier's breaker hears of it."""

    def close(self) -> None:
        """Close all connections, also to Sentinel."""
        self.life.end()
        _disconnect(self.server)
        if self.sentinel is not None:
            self.sentinel.close()


def servers_of(
    address: Address,
    options: KvOptions,
    clock: Callable[[], float],
    greet: Callable[[Any], None] | None = None,
) -> Servers:
    """Connects to nobody yet. Raises ConfigError if a secret is not where the options say.

    ``greet`` logs in on a new connection, in place of its ``on_connect``, which it calls.
    """
    life = wire.Life()
    common = {**_login(address, options), **_common(options), "life": life}
    common["redis_connect_func"] = greet
    if address.topology == "cluster":
        kind = wire.TlsWire if address.tls else wire.TcpWire
        tls = _tls(options) if address.tls else {}
        return ClusterServers(
            address.hosts,
            lambda host: _server(kind, host, {**common, **tls}),
            _disconnect,
            life,
            options.connect_timeout_s + options.timeout_s,
            clock,
        )
    common["db"] = address.db
    if address.topology == "sentinel":
        return _sentinel(address, options, common, life)
    if address.path:
        pool = _pool(wire.UnixWire, path=address.path, **common)
        return OneServer(Server(str(address), pool), life)
    (host,) = address.hosts
    if address.tls:
        return OneServer(_server(wire.TlsWire, host, {**common, **_tls(options)}), life)
    return OneServer(_server(wire.TcpWire, host, common), life)


def _server(kind: type, host: Host, keywords: dict[str, Any]) -> Server:
    pool = _pool(kind, host=host[0], port=host[1], socket_keepalive=True, **keywords)
    return Server(host_and_port(host), pool)


def _sentinel(
    address: Address, options: KvOptions, common: dict[str, Any], life: wire.Life
) -> OneServer:
    tls = {**_tls(options), "ssl": True} if address.tls else {}
    sentinel = Sentinel(  # type: ignore[no-untyped-call]
        address.hosts,
        sentinel_kwargs={
            "username": options.sentinel_username,
            "password": secret(options, "sentinel_"),
            "socket_timeout": options.connect_timeout_s,
            "socket_connect_timeout": options.connect_timeout_s,
            "retry": _never(),
            "protocol": 2,
            **tls,
        },
    )
    kind = wire.SentinelTlsWire if address.tls else wire.SentinelWire
    pool = SentinelConnectionPool(  # type: ignore[no-untyped-call]
        address.service,
        sentinel,
        connection_class=kind,
        socket_keepalive=True,
        **common,
        **(_tls(options) if address.tls else {}),
    )
    return OneServer(Server(str(address), pool), life, sentinel)


def _login(address: Address, options: KvOptions) -> dict[str, Any]:
    password = address.password if address.password is not None else secret(options)
    return {"username": options.username or address.username, "password": password}


def _common(options: KvOptions) -> dict[str, Any]:
    """Nobody tries again but the runner, which knows the deadline: so no retry here."""
    threads = options.n_read_threads + options.n_write_threads + options.max_replacement_threads
    return {
        "protocol": 2,
        "parser_class": wire.PARSER,
        "driver_info": None,  # a user would need the right to say it
        "max_connections": threads + _SPARE,
        "socket_connect_timeout": options.connect_timeout_s,
        "socket_timeout": options.timeout_s,
        "retry": _never(),
    }


def _tls(options: KvOptions) -> dict[str, Any]:
    return {
        "ssl_ca_certs": options.tls_ca_file,
        "ssl_certfile": options.tls_cert_file,
        "ssl_keyfile": options.tls_key_file,
        "ssl_check_hostname": options.tls_check_hostname,
    }


def _never() -> Retry:
    return Retry(NoBackoff(), 0)


def _pool(kind: type, **keywords: Any) -> ConnectionPool:
    return ConnectionPool(connection_class=kind, **keywords)


def _disconnect(server: Server) -> None:
    """Close what nobody uses. A lane that is inside goes on, unless its life has ended."""
    server.pool.disconnect(inuse_connections=False)
