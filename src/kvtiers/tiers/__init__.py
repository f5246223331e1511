"""Secondary tiers: what there is, and how one is built from what a user wrote.

A built-in tier is named by ``type``. A tier of your own is a class in a module that Python can
import::

    {"type": "MyTier", "module_path": "my.package", "any": "option"}

It is called as ``MyTier(context, any="option")`` with a :class:`~kvtiers.tiers.base.StoreContext`.
If it has ``submit_store`` it is a ``SecondaryTier`` and is used as it is; if it has ``write`` and
``read`` it is a ``ChunkStore`` and gets lanes, deadlines and the rest from ``StoreTier``, tuned by
the attributes ``runner_options``, ``medium`` and ``locality`` where it has them.
"""

import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from kvtiers.chunks import ChunkLayout, Namespace
from kvtiers.errors import ConfigError
from kvtiers.tiers import fs, memory
from kvtiers.tiers.base import Capabilities, ChunkStore, SecondaryTier, StoreContext
from kvtiers.tiers.lanes import Inbox
from kvtiers.tiers.options import RunnerOptions, bad_option, located, nearest, parse
from kvtiers.tiers.runner import StoreTier, TierIdentity

_log = logging.getLogger("kvtiers")

_WITHOUT_EFFECT = {"backpressure"}
"""Keys of vLLM's own tiers that a configuration may bring along."""


@dataclass(frozen=True, slots=True)
class TierType:
    """A built-in tier."""

    options: type[Any]
    """A ``RunnerOptions`` with ``locality`` and ``enable_kv_events``."""
    build: Callable[[StoreContext, Any], ChunkStore]
    medium: str


TIER_TYPES: Mapping[str, TierType] = {
    "fs": TierType(fs.FsOptions, fs.build, "STORAGE"),
    "memory": TierType(memory.MemoryOptions, memory.build, "CPU"),
}


def build_tier(
    options: Mapping[str, Any],
    position: int,
    *,
    namespace: Namespace,
    layout: ChunkLayout,
    clock: Callable[[], float],
    wall_clock: Callable[[], float],
) -> SecondaryTier:
    """Build the tier that ``secondary_tiers[position]`` describes.

    Its label in events is ``"<position + 1>:<type>"``; 0 is host memory. Raises ConfigError that
    names the key, e.g. ``secondary_tiers[0].root_dir``.
    """
    inbox = Inbox()
    try:
        name = _type_of(options)
        context = StoreContext(name, namespace, layout, clock, wall_clock, inbox.removed)
        label = f"{position + 1}:{name}"
        rest = {k: v for k, v in options.items() if k not in ("type", "module_path")}
        if "module_path" in options:
            return _build_foreign(options["module_path"], context, inbox, label, rest)
        return _build_own(TIER_TYPES[name], context, inbox, label, rest)
    except ConfigError as e:
        raise located(e, f"secondary_tiers[{position}]") from e


def _type_of(options: Mapping[str, Any]) -> str:
    name = options.get("type")
    if not isinstance(name, str) or not name:
        raise bad_option("type", f"is {name!r}: give {' or '.join(TIER_TYPES)}, or a class name")
    if "module_path" not in options and name not in TIER_TYPES:
        hint = nearest(name, list(TIER_TYPES), "types")
        raise bad_option(
            "type",
            f"is {name!r}, which is no built-in tier{hint}; a class of your own needs module_path",
        )
    return name


def _build_own(
    tier: TierType, context: StoreContext, inbox: Inbox, label: str, rest: Mapping[str, Any]
) -> SecondaryTier:
    for key in _WITHOUT_EFFECT & rest.keys():
        _log.warning("%s: the option %s has no effect in kvtiers", label, key)
    options = parse(tier.options, {k: v for k, v in rest.items() if k not in _WITHOUT_EFFECT})
    identity = TierIdentity(context.name, label, tier.medium, options.locality)
    store = tier.build(context, options)
    return StoreTier(store, identity, options, inbox, context.clock)


def _build_foreign(
    module_path: object, context: StoreContext, inbox: Inbox, label: str, rest: Mapping[str, Any]
) -> SecondaryTier:
    tier = _construct(_find_class(module_path, context.name), context, rest)
    if hasattr(tier, "submit_store"):
        return cast(SecondaryTier, tier)
    if not (hasattr(tier, "write") and hasattr(tier, "read")):
        raise bad_option(
            "type",
            f"is {context.name}, which is neither a SecondaryTier (it has no submit_store) nor a "
            "ChunkStore (it has no write and read): see kvtiers.tiers.base",
        )
    if not isinstance(getattr(tier, "capabilities", None), Capabilities):
        raise bad_option(
            "type", f"is {context.name}, a ChunkStore that does not declare its capabilities"
        )
    identity = TierIdentity(
        context.name, label, getattr(tier, "medium", None), getattr(tier, "locality", None)
    )
    options = getattr(tier, "runner_options", RunnerOptions())
    return StoreTier(tier, identity, options, inbox, context.clock)


def _find_class(module_path: object, name: str) -> Callable[..., Any]:
    if not isinstance(module_path, str) or not module_path:
        raise bad_option("module_path", f"is {module_path!r}: name a module, e.g. my.package")
    try:
        module = importlib.import_module(module_path)
    except Exception as e:
        raise bad_option(
            "module_path", f"is {module_path}, which cannot be imported ({e}): is it installed?"
        ) from e
    found = getattr(module, name, None)
    if not callable(found):
        raise bad_option("type", f"is {name}, but {module_path} has no class of that name")
    return cast(Callable[..., Any], found)


def _construct(cls: Callable[..., Any], context: StoreContext, rest: Mapping[str, Any]) -> Any:
    try:
        return cls(context, **rest)
    except ConfigError:
        raise
    except Exception as e:
        what = "does not accept its options" if isinstance(e, TypeError) else "could not be built"
        raise bad_option("type", f"is {context.name}, which {what}: {e}") from e


__all__ = ["TIER_TYPES", "TierType", "build_tier"]
