"""The ``obj`` tier: chunks in a bucket of S3, or of what speaks like it, of GCS or Azure."""

from kvtiers.tiers.base import StoreContext
from kvtiers.tiers.obj.client import Client, open_client
from kvtiers.tiers.obj.nixl import open_nixl
from kvtiers.tiers.obj.options import ObjOptions
from kvtiers.tiers.obj.store import ObjStore


def client_of(options: ObjOptions) -> Client:
    """What makes the requests of a configured tier. Raises ConfigError naming the option."""
    client = open_client(options)
    return open_nixl(options, client) if options.transport == "nixl" else client


def build(context: StoreContext, options: ObjOptions) -> ObjStore:
    """The store of a configured ``obj`` tier. Raises ConfigError naming the option."""
    return ObjStore(
        context,
        client_of(options),
        max_requests=options.max_requests,
        max_packed=options.max_tracked_chunks,
        capacity_bytes=options.capacity_bytes,
    )


__all__ = ["ObjOptions", "build", "client_of"]
