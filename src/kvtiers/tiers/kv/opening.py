"""What is looked at when a tier opens: whether the servers are those that are meant."""

import logging
from typing import Any

from redis.exceptions import NoPermissionError, RedisError

from kvtiers.chunks import PAGE_BYTES
from kvtiers.errors import ConfigError, KVTiersError
from kvtiers.tiers.base import StoreContext
from kvtiers.tiers.kv import memory
from kvtiers.tiers.kv.address import Address
from kvtiers.tiers.kv.commands import command
from kvtiers.tiers.kv.exchange import Server, Servers
from kvtiers.tiers.kv.failures import explained, refusal
from kvtiers.tiers.kv.names import Names
from kvtiers.tiers.kv.wire import MAX_VALUE_BYTES
from kvtiers.tiers.options import bad_option

_log = logging.getLogger("kvtiers")


def refuse_large_chunks(context: StoreContext) -> None:
    """Raise ConfigError if no server would take a chunk of this model."""
    largest = context.layout.slot_bytes
    if largest + PAGE_BYTES > MAX_VALUE_BYTES:
        raise ConfigError(
            f"a chunk of this model has {largest} bytes, and a server takes values of up to "
            f"{MAX_VALUE_BYTES}: give fewer blocks_per_chunk"
        )


def look(
    context: StoreContext,
    address: Address,
    servers: Servers,
    names: Names,
    capacity_bytes: int | None,
) -> None:
    """Raise ConfigError if the configuration is to blame; what may pass is logged.

    An engine starts also while its servers are down: its chunks are misses until they are up.
    """
    try:
        server = servers.of(names.manifest)
        found = _ask(server, b"GET", names.manifest)
        if address.topology != "cluster":
            _refuse_cluster(server, address)
        if capacity_bytes is not None:
            _refuse_blindness(servers)
    except (RedisError, KVTiersError, OSError) as e:
        if isinstance(e, ConfigError):
            raise
        blamed = refusal(e, str(address))
        if blamed is not None:
            raise blamed from None
        reason = explained(e, "open", str(address))
        _log.warning("%s: chunks are misses until that has passed: %s", context.label, reason)
        return
    if found is not None and found != context.namespace.manifest().encode():
        name = names.manifest.decode()
        raise bad_option(
            "prefix",
            f"leads to the key {name}, which disagrees with the model and configuration of this "
            "engine: delete that key, or give another prefix",
        )


def _ask(server: Server, *words: bytes) -> Any:
    """The reply to one command. Raises errors of redis-py."""
    connection = server.pool.get_connection()
    try:
        connection.send([command(*words)])
        return connection.receive(None)
    except RedisError:
        connection.disconnect()
        raise
    finally:
        server.pool.release(connection)


def _refuse_cluster(server: Server, address: Address) -> None:
    try:
        info = _ask(server, b"INFO", b"server")
    except NoPermissionError:
        return
    if b"_mode:cluster" in info:
        raise bad_option(
            "url", f"leads to a server of a cluster: write redis+cluster:// instead of {address}"
        )


def _refuse_blindness(servers: Servers) -> None:
    try:
        memory.ask(servers, "INFO")
    except KVTiersError as e:
        if "NOPERM" in str(e):
            raise bad_option("capacity_bytes", f"cannot be kept: {e}") from None
        raise
