"""How an index asks a policy, which may be somebody else's, for victims."""

from kvtiers.chunks import Key
from kvtiers.errors import Kind, KVTiersError
from kvtiers.host.policies.base import EvictionPolicy, Staying


def victims_of(policy: EvictionPolicy, count: int, staying: Staying) -> list[Key]:
    """What ``policy.evict`` chose. Raises ``Kind.BROKEN`` if it raises anything."""
    try:
        victims = list(policy.evict(count, staying))
        set(victims)  # they are to be looked up: a key can be hashed
    except Exception as e:
        raise broken_policy(policy, f"failed ({type(e).__name__}: {e})") from e
    return victims


def broken_policy(policy: EvictionPolicy, what: str) -> KVTiersError:
    """The error for a policy that does not keep its contract."""
    return KVTiersError(
        f"eviction policy {type(policy).__name__} {what}: correct it, "
        'or set eviction_policy to "lru"',
        kind=Kind.BROKEN,
        operation="evict",
    )
