"""Eviction policies: the built-in ones by name, others by module path."""

import importlib
from collections.abc import Callable, Mapping
from typing import cast

from kvtiers.config import check_policy_name
from kvtiers.errors import ConfigError
from kvtiers.host.policies.arc import ARCPolicy
from kvtiers.host.policies.base import EvictionPolicy
from kvtiers.host.policies.lru import LRUPolicy

__all__ = ["BUILT_IN", "ARCPolicy", "EvictionPolicy", "LRUPolicy", "find_policy", "load_policy"]

BUILT_IN: Mapping[str, Callable[..., EvictionPolicy]] = {"lru": LRUPolicy, "arc": ARCPolicy}
"""By the names in :data:`kvtiers.config.BUILTIN_POLICIES`."""

_METHODS = ("insert", "touch", "evict", "remove", "clear", "__len__", "check")


def load_policy(name: str, module_path: str | None = None, *, capacity: int) -> EvictionPolicy:
    """Build the policy ``name`` for ``capacity`` chunks. Raises as :func:`find_policy` does.

    Raises ConfigError, too, if a policy's own constructor fails.
    """
    found = find_policy(name, module_path)
    try:
        return found(capacity=capacity)
    except Exception as e:  # a plug-in's constructor may raise anything
        raise ConfigError(
            f'eviction_policy "{name}" cannot be built with capacity={capacity}: {e}',
            key="eviction_policy",
        ) from e


def find_policy(name: str, module_path: str | None = None) -> Callable[..., EvictionPolicy]:
    """What builds the policy ``name``; nothing is built, so it may be asked early.

    ``name`` is a built-in, or else a class in the module ``module_path``. Raises ConfigError if
    there is no such policy, or if it does not meet the contract of :class:`EvictionPolicy`.
    """
    check_policy_name(name, module_path)
    if module_path is None or name in BUILT_IN:
        return BUILT_IN[name]
    return _find_class(name, module_path)


def _find_class(name: str, module_path: str) -> Callable[..., EvictionPolicy]:
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
    return cast(Callable[..., EvictionPolicy], found)
