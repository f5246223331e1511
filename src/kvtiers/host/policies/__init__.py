"""Eviction policies: the built-in ones by name, others by module path."""

import difflib
import importlib
from collections.abc import Callable

from kvtiers.errors import ConfigError
from kvtiers.host.policies.arc import ARCPolicy
from kvtiers.host.policies.base import EvictionPolicy
from kvtiers.host.policies.lru import LRUPolicy

__all__ = ["BUILT_IN", "ARCPolicy", "EvictionPolicy", "LRUPolicy", "load_policy"]

BUILT_IN: dict[str, Callable[..., EvictionPolicy]] = {"lru": LRUPolicy, "arc": ARCPolicy}

_METHODS = ("insert", "touch", "evict", "remove", "clear", "__len__", "check")


def load_policy(name: str, module_path: str | None = None, *, capacity: int) -> EvictionPolicy:
    """Build the policy ``name`` for ``capacity`` chunks.

    ``name`` is a built-in, or else a class in the module ``module_path``. Raises ConfigError if
    there is no such policy, or if it does not meet the contract of :class:`EvictionPolicy`.
    """
    if name in BUILT_IN:
        return BUILT_IN[name](capacity=capacity)
    if module_path is None:
        raise ConfigError(_unknown(name), key="eviction_policy")
    return _load_class(name, module_path, capacity)


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), BUILT_IN, n=1, cutoff=0.0)[0]
    names = ", ".join(f'"{known}"' for known in BUILT_IN)
    return (
        f'eviction_policy "{name}" is unknown: did you mean "{near}"? Built in are {names}; '
        "a policy of your own also needs cache_policy_module_path"
    )


def _load_class(name: str, module_path: str, capacity: int) -> EvictionPolicy:
    where = f'cache_policy_module_path "{module_path}"'
    try:
        module = importlib.import_module(module_path)
    except Exception as e:  # a plug-in's module may raise anything
        raise ConfigError(
            f"{where} cannot be imported ({e}): install it, or correct the path",
            key="cache_policy_module_path",
        ) from e
    found = getattr(module, name, None)
    if not isinstance(found, type):
        raise ConfigError(
            f'eviction_policy "{name}" is not a class in {where}: name a class of that module',
            key="eviction_policy",
        )
    missing = [method for method in _METHODS if not callable(getattr(found, method, None))]
    if missing:
        raise ConfigError(
            f'eviction_policy "{name}" from {where} lacks {", ".join(missing)}: '
            "add what kvtiers.host.policies.base.EvictionPolicy asks for",
            key="eviction_policy",
        )
    try:
        policy: EvictionPolicy = found(capacity=capacity)
    except Exception as e:  # a plug-in's constructor may raise anything
        raise ConfigError(
            f'eviction_policy "{name}" from {where} cannot be built with capacity={capacity}: {e}',
            key="eviction_policy",
        ) from e
    return policy
