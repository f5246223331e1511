"""The ``kv`` tier: chunks as values of Valkey or Redis servers.

redis-py is needed only where such a tier is built: ``pip install kvtiers[kv]``.
"""

from kvtiers.errors import ConfigError
from kvtiers.tiers.base import ChunkStore, StoreContext
from kvtiers.tiers.kv.options import KvOptions
from kvtiers.tiers.options import bad_option


def build(context: StoreContext, options: KvOptions) -> ChunkStore:
    """The store of a configured ``kv`` tier. Raises ConfigError naming the option."""
    refuse_missing_client()
    from kvtiers.tiers.kv.store import KvStore

    return KvStore(context, options)


def refuse_missing_client() -> None:
    """Raise ConfigError if redis-py is not there, or not one that is known to fit."""
    try:
        import redis
    except ImportError:
        raise _lacks("which is not installed") from None
    if redis.__version__.partition(".")[0] != "8":
        raise _lacks(f"of which {redis.__version__} is installed") from None


def _lacks(what: str) -> ConfigError:
    return bad_option("type", f'is "kv", which needs redis-py 8, {what}: pip install "kvtiers[kv]"')


__all__ = ["KvOptions", "build", "refuse_missing_client"]
