"""What a namespace is: written beside its chunks, and compared when a tier is opened."""

from collections.abc import Callable, Iterable

from kvtiers.chunks import Namespace
from kvtiers.errors import ConfigError, Kind, KVTiersError
from kvtiers.tiers.obj import names
from kvtiers.tiers.obj.client import Client
from kvtiers.tiers.options import bad_option
from kvtiers.tiers.places import Found, parse_manifest

_MAX_BYTES = 1 << 20


def open_manifest(client: Client, namespace: Namespace) -> None:
    """Write the manifest, whether it is there or not: so it is known that writing works.

    Raises ConfigError if the bucket cannot be used, or has another manifest under this name.
    """
    name = names.manifest_name(namespace.id)
    ours = namespace.manifest().encode()
    try:
        found = _get(client, name, lambda said: said == ours)
        if found is None or found == ours:
            client.put(name, [ours])
    except KVTiersError as e:
        raise bad_option("url", f"names a bucket that cannot be used: {e}") from None
    if found is not None and found != ours:
        raise _disagrees(client, namespace.id)


def keep_manifest(client: Client, namespace: Namespace) -> None:
    """Write it again if it is gone, as a rule of the bucket may have it. Raises KVTiersError."""
    name = names.manifest_name(namespace.id)
    if client.size(name) is None:
        client.put(name, [namespace.manifest().encode()])


def namespaces(client: Client, folders: Iterable[str]) -> list[Found]:
    """Every namespace among ``folders``, damaged ones included. Raises KVTiersError."""
    return [_found(client, name) for name in folders if names.is_namespace(name)]


def _found(client: Client, namespace_id: str) -> Found:
    try:
        name = names.manifest_name(namespace_id)
        manifest = _get(client, name, lambda said: _parsed(said, namespace_id) is not None)
    except KVTiersError as e:
        return Found(namespace_id, None, f"its {names.MANIFEST} cannot be read: {e}")
    if manifest is None:
        return Found(namespace_id, None, f"it has no {names.MANIFEST}")
    namespace = _parsed(manifest, namespace_id)
    if namespace is None:
        problem = f"its {names.MANIFEST} is damaged or of another namespace"
        return Found(namespace_id, None, problem)
    return Found(namespace_id, namespace)


def _parsed(manifest: bytes, namespace_id: str) -> Namespace | None:
    namespace = parse_manifest(manifest)
    return namespace if namespace is not None and namespace.id == namespace_id else None


def _get(client: Client, name: str, is_good: Callable[[bytes], bool]) -> bytes | None:
    """Asked for twice unless it is good, for what is in storage may be better than what came."""
    found = _ask(client, name)
    return found if found is None or is_good(found) else _ask(client, name)


def _ask(client: Client, name: str) -> bytes | None:
    try:
        return bytes(client.get(name, _MAX_BYTES))
    except KVTiersError as e:
        if e.kind is Kind.VANISHED:
            return None
        if e.kind is Kind.CORRUPT:  # it has no bytes at all
            return b""
        raise


def _disagrees(client: Client, namespace_id: str) -> ConfigError:
    where = f"{client.where}/{names.manifest_name(namespace_id)}"
    return bad_option(
        "url",
        f"holds {where}, which disagrees with the model and configuration of this engine: "
        f"remove what lies below {client.where}/{namespace_id}",
    )
