"""Measuring below a prefix of its own in a bucket, and a bucket alone by bare requests."""

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from kvtiers.errors import KVTiersError
from kvtiers.tiers.obj.client import Client, open_client
from kvtiers.tiers.obj.names import TRIAL
from kvtiers.tiers.obj.options import ObjOptions
from kvtiers.tiers.obj.written import options_of

_AT_ONCE = 1000


@contextmanager
def bucket_trial(options: ObjOptions) -> Iterator[tuple[dict[str, Any], Client]]:
    """Options of a tier below a new prefix, and a client beside it; nothing is left of either.

    What a kill leaves goes with ``gc``, a day later. Raises ConfigError, KVTiersError.
    """
    name = f"{TRIAL}{int(time.time()):x}-{secrets.token_hex(4)}"
    outer, said = open_client(options), options_of(options)
    said["url"] = f"{str(options.where).rstrip('/')}/{name}/tier"
    try:
        yield said, open_client(_below(options, f"{name}/bare"))
    finally:
        with suppress(KVTiersError):
            clear(outer, name)


def clear(client: Client, below: str) -> None:
    """Delete all objects below a name. Raises KVTiersError."""
    found = [stored.name for page in client.objects(below) for stored in page]
    for at in range(0, len(found), _AT_ONCE):
        client.delete(found[at : at + _AT_ONCE])


def _below(options: ObjOptions, name: str) -> ObjOptions:
    said = {key: value for key, value in options_of(options).items() if key != "type"}
    return ObjOptions(**{**said, "url": f"{str(options.where).rstrip('/')}/{name}"})


class BareObjects:
    """An object for each chunk, and nothing else. See :class:`~kvtiers.cli.bare.Bare`."""

    per_call = 1

    def __init__(self, client: Client, chunk: int) -> None:
        self._client = client
        self._chunk = chunk
        self._payload = memoryview(secrets.token_bytes(chunk))

    def write(self, first: int, end: int) -> None:
        """One request."""
        self._client.put(f"{first:08x}", [self._payload])

    def read(self, first: int, end: int) -> None:
        """One request."""
        self._client.get(f"{first:08x}", self._chunk)

    def close(self) -> None:
        """Nothing is open."""
