"""Reading what a pack says is in it."""

from kvtiers.chunks import PAGE_BYTES
from kvtiers.errors import Kind, KVTiersError
from kvtiers.tiers.obj.client import Client
from kvtiers.tiers.obj.names import PackName
from kvtiers.tiers.obj.packs import MAX_FRONT_BYTES, Packed, parse_front


def read_front(
    client: Client, namespace_id: str, pack: PackName
) -> list[Packed] | KVTiersError | None:
    """What is in a pack; None if it is not there, an error (``CORRUPT``) if it does not say.

    That only if it is so twice, for what is in storage may be better than what came.
    Raises KVTiersError if it cannot be read.
    """
    said = _read(client, namespace_id, pack)
    return _read(client, namespace_id, pack) if isinstance(said, KVTiersError) else said


def _read(client: Client, namespace_id: str, pack: PackName) -> list[Packed] | KVTiersError | None:
    # Whoever gives names gives lengths: no more memory than any front takes.
    most = min(pack.front_pages * PAGE_BYTES, MAX_FRONT_BYTES + 1)
    try:
        front = client.get(pack.below(namespace_id), most)
    except KVTiersError as e:
        if e.kind is Kind.VANISHED:
            return None
        if e.kind is not Kind.CORRUPT:
            raise
        front = memoryview(b"")  # it has no bytes at all
    return parse_front(front, namespace_id)
