"""Secondary tiers: what there is, and how one is built from what a user wrote.

A built-in tier is named by ``type``. A tier of your own is a class in a module that Python can
import::

    {"type": "MyTier", "module_path": "my.package", "any": "option"}

It is called as ``MyTier(context, any="option")`` with a :class:`~kvtiers.tiers.base.StoreContext`.
If it has ``submit_store`` it is a ``SecondaryTierManager`` and is used as it is; if it has
``write`` and ``read`` it is a ``ChunkStore`` and gets lanes, deadlines and the rest from
``StoreTier``, tuned by the attributes ``runner_options``, ``medium`` and ``locality`` where it has
them.
"""

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from kvtiers.chunks import ChunkLayout, Namespace
from kvtiers.config import TierSpec
from kvtiers.errors import ConfigError
from kvtiers.events import tier_label
from kvtiers.options import nearest
from kvtiers.tiers import fs, kv, memory, obj
from kvtiers.tiers.base import Around, Capabilities, ChunkStore, SecondaryTierManager, StoreContext
from kvtiers.tiers.lanes import Inbox
from kvtiers.tiers.options import RunnerOptions, bad_option, located, parse, require
from kvtiers.tiers.p2p.options import P2POptions
from kvtiers.tiers.runner import StoreTier, TierIdentity

_log = logging.getLogger("kvtiers")

_WITHOUT_EFFECT = {"backpressure"}
"""Keys of vLLM's own tiers that a configuration may bring along."""


@dataclass(frozen=True, slots=True)
class TierType:
    """A built-in tier that keeps chunks in a store."""

    options: type[Any]
    """A ``RunnerOptions`` with ``locality`` and ``enable_kv_events``."""
    build: Callable[[StoreContext, Any], ChunkStore]
    medium: str
    without_effect: frozenset[str] = frozenset()
    """Keys of vLLM's tier of this name that say nothing here."""


@dataclass(frozen=True, slots=True)
class PeerType:
    """A built-in tier that is other engines."""

    options: type[Any]
    build: Callable[[StoreContext, Any], SecondaryTierManager]
    needs: tuple[str, str]
    """A module, and the package that has it."""
    without_effect: frozenset[str] = frozenset()
    """Keys of vLLM's tier of this name that say nothing here."""


def _build_p2p(context: StoreContext, options: P2POptions) -> SecondaryTierManager:
    # Not at the top: pyzmq is needed by those who have this tier, not by those who could.
    from kvtiers.tiers.p2p.build import build_configured

    return build_configured(context, options)


TIER_TYPES: Mapping[str, TierType | PeerType] = {
    "fs": TierType(fs.FsOptions, fs.build, "STORAGE"),
    "kv": TierType(kv.KvOptions, kv.build, "STORAGE"),
    "memory": TierType(memory.MemoryOptions, memory.build, "CPU"),
    "obj": TierType(obj.ObjOptions, obj.build, "STORAGE", frozenset({"io_threads"})),
    "p2p": PeerType(
        P2POptions, _build_p2p, ("zmq", "pyzmq"), frozenset({"unbound_store_timeout_s"})
    ),
}


_ALONE = Around()

_Builder = Callable[[StoreContext, Inbox], SecondaryTierManager]


def check_tiers(specs: Iterable[TierSpec]) -> None:
    """Refuse what can be refused without a model: unknown types, bad options, absent classes.

    Modules are imported; nothing is built, opened or made, so it may be asked early and often.
    Raises the ConfigError that :func:`build_tier` would.
    """
    taken: set[str] = set()
    for position, spec in enumerate(specs):
        with _at(position):
            _resolve(spec.as_mapping())
            _refuse_a_second(taken, spec.as_mapping())


def _refuse_a_second(taken: set[str], options: Mapping[str, Any]) -> None:
    """Two ``fs`` tiers in one folder would each remove what the other relies on; two ``p2p`` tiers
    would ask the same peers.
    """
    if "module_path" in options:
        return
    if options["type"] == "fs":
        folder = os.path.realpath(options["root_dir"])
        require(
            folder not in taken,
            "root_dir",
            f"is {options['root_dir']}, as of another fs tier: give each a folder of its own",
        )
        taken.add(folder)
    if options["type"] == "p2p":
        require("p2p" not in taken, "type", "is p2p once more: one asks all peers")
        taken.add("p2p")


def build_tier(
    options: Mapping[str, Any],
    position: int,
    *,
    namespace: Namespace,
    layout: ChunkLayout,
    clock: Callable[[], float],
    wall_clock: Callable[[], float],
    engine: Around = _ALONE,
) -> SecondaryTierManager:
    """Build the tier that ``secondary_tiers[position]`` describes.

    Its label in events is ``"<position + 1>:<type>"``; 0 is host memory. Raises ConfigError that
    names the key, e.g. ``secondary_tiers[0].root_dir``.
    """
    inbox = Inbox()
    with _at(position):
        name, build = _resolve(options)
        label = tier_label(position + 1, name)
        context = StoreContext(
            name, label, namespace, layout, clock, wall_clock, inbox.removed, engine
        )
        return build(context, inbox)


@contextmanager
def _at(position: int) -> Iterator[None]:
    """A ConfigError from the body says that it is about ``secondary_tiers[position]``."""
    try:
        yield
    except ConfigError as e:
        raise located(e, f"secondary_tiers[{position}]") from e.__cause__


def _resolve(options: Mapping[str, Any]) -> tuple[str, _Builder]:
    """The name of the tier, and what builds it: whatever can be wrong in writing is found here."""
    name = _type_of(options)
    rest = {k: v for k, v in options.items() if k not in ("type", "module_path")}
    if "module_path" in options:
        cls = _find_class(options["module_path"], name)
        return name, partial(_build_foreign, cls, rest)
    tier = TIER_TYPES[name]
    if isinstance(tier, PeerType):
        _refuse_without(name, *tier.needs)
    ignored = (_WITHOUT_EFFECT | tier.without_effect) & rest.keys()
    parsed = parse(tier.options, {k: v for k, v in rest.items() if k not in ignored})
    return name, partial(_build_own, tier, parsed, sorted(ignored))


def _refuse_without(name: str, module: str, package: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise bad_option("type", f"is {name}, which needs {package}: pip install 'kvtiers[{name}]'")


def _type_of(options: Mapping[str, Any]) -> str:
    name = options.get("type")
    if not isinstance(name, str) or not name:
        raise bad_option("type", f"is {name!r}: give {' or '.join(TIER_TYPES)}, or a class name")
    if "module_path" not in options and name not in TIER_TYPES:
        near = nearest(name, TIER_TYPES)
        hint = f"did you mean {near}?" if near else f"the types are {', '.join(TIER_TYPES)}"
        raise bad_option(
            "type",
            f"is {name!r}, which is no built-in tier: {hint}; a class of your own needs "
            "module_path",
        )
    return name


def _build_own(
    tier: TierType | PeerType,
    options: Any,
    ignored: Iterable[str],
    context: StoreContext,
    inbox: Inbox,
) -> SecondaryTierManager:
    for key in ignored:
        _log.warning("%s: the option %s has no effect in kvtiers", context.label, key)
    if isinstance(tier, PeerType):
        return tier.build(context, options)
    identity = TierIdentity(
        context.name, context.label, tier.medium, options.locality, told=options.enable_kv_events
    )
    store, total_bytes = tier.build(context, options), context.layout.total_bytes
    return StoreTier(store, identity, options, inbox, context.clock, total_bytes=total_bytes)


_TIER_NAMES = (
    "name",
    "medium",
    "locality",
    "lookup",
    "submit_load",
    "get_finished_jobs",
    "touch",
    "drain_jobs",
    "shutdown",
)


def _build_foreign(
    cls: Callable[..., Any], rest: Mapping[str, Any], context: StoreContext, inbox: Inbox
) -> SecondaryTierManager:
    tier = _construct(cls, context, rest)
    if hasattr(tier, "submit_store"):
        missing = [n for n in _TIER_NAMES if not hasattr(tier, n)]
        require(not missing, "type", f"is {context.name}, a tier that lacks {', '.join(missing)}")
        return cast(SecondaryTierManager, tier)
    if not (hasattr(tier, "write") and hasattr(tier, "read")):
        raise bad_option(
            "type",
            f"is {context.name}, which is neither a SecondaryTierManager (it has no submit_store) "
            "nor a ChunkStore (it has no write and read): see kvtiers.tiers.base",
        )
    if not isinstance(getattr(tier, "capabilities", None), Capabilities):
        raise bad_option(
            "type", f"is {context.name}, a ChunkStore that does not declare its capabilities"
        )
    identity = TierIdentity(
        context.name,
        context.label,
        getattr(tier, "medium", None),
        getattr(tier, "locality", None),
    )
    options = getattr(tier, "runner_options", RunnerOptions())
    require(
        isinstance(options, RunnerOptions),
        "type",
        f"is {context.name}, whose runner_options are no RunnerOptions",
    )
    total_bytes = context.layout.total_bytes
    return StoreTier(tier, identity, options, inbox, context.clock, total_bytes=total_bytes)


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


__all__ = ["TIER_TYPES", "PeerType", "TierType", "build_tier", "check_tiers"]
