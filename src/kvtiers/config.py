"""Configuration, typed at the door and frozen after: one mapping in, one dataclass out.

The mapping is vLLM's ``kv_connector_extra_config``. Keys that upstream's offloading connector reads
keep their names and meaning; those without effect here are accepted and listed in
:attr:`KVTiersConfig.ignored`, so that the caller says so once. Everything else is refused.
"""

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtiers.errors import ConfigError
from kvtiers.options import (
    Option,
    Reader,
    Unfit,
    Wording,
    exactly,
    nearest,
    not_an_option,
    number,
    option,
    options_of,
    read_options,
    read_value,
    refuse_unknown,
    shown,
    table,
    where,
    whole,
)

WHERE = "kv_connector_extra_config"
BUILTIN_POLICIES = ("lru", "arc")
"""Names of :data:`kvtiers.host.policies.BUILT_IN`."""

_WORDING = Wording(
    unknown=f"unknown key {{key!r}} in {WHERE}; {{hint}}",
    near="did you mean {near!r}?",
    others="the keys are {known}",
    missing=f"{{key}} is missing from {WHERE}; set it to {{expects}}",
    unfit=f"{{key}} in {WHERE} must be {{expects}}, not {{value}}",
)
_IN_OBSERVE = dataclasses.replace(
    _WORDING,
    unknown=f"unknown key {{key!r}} in observe of {WHERE}; {{hint}}",
    missing=f"{{key}} is missing from observe of {WHERE}; set it to {{expects}}",
    unfit=f"{{key}} in observe of {WHERE} must be {{expects}}, not {{value}}",
)


@dataclass(frozen=True, slots=True)
class TierSpec:
    """One entry of ``secondary_tiers``: which tier, and the options its own module will read."""

    type: str
    """A built-in kind (``fs``, ``memory``, ...) or the class name inside ``module_path``."""
    module_path: str | None
    """Import path of an out-of-tree tier's module; ``None`` for built-in kinds."""
    options: Mapping[str, Any] = field(repr=False)
    """Every other key of the entry, unread. Not in the repr: it may hold credentials."""

    def as_mapping(self) -> dict[str, Any]:
        """The entry as it was given."""
        place = {} if self.module_path is None else {"module_path": self.module_path}
        return {"type": self.type, **place, **self.options}


_COUNT = Reader("a whole number, 1 or more", where(whole, lambda n: n >= 1))
_COUNT_OR_ZERO = Reader("a whole number, 0 or more", where(whole, lambda n: n >= 0))
_BYTES = Reader("a whole number of bytes above 0", where(whole, lambda n: n > 0))
_SECONDS = Reader("a number of seconds above 0", where(number, lambda s: s > 0))
_SECONDS_OR_ZERO = Reader("a number of seconds, 0 or more", where(number, lambda s: s >= 0))
_FRACTION = Reader("a fraction above 0 and up to 1", where(number, lambda f: 0 < f <= 1))
_FLAG = Reader("true or false", exactly(bool))
_TEXT = Reader("a non-empty string", where(exactly(str), bool))
_KEYS = Reader("`engine` or `own`", where(exactly(str), lambda k: k in ("engine", "own")))
_FOLDER = Reader("an absolute path", where(exactly(str), lambda p: p.startswith("/")))


def _tiers(value: Any) -> tuple[TierSpec, ...]:
    if not isinstance(value, list | tuple):
        raise Unfit
    return tuple(_tier(f"secondary_tiers[{i}]", entry) for i, entry in enumerate(value))


def _tier(name: str, entry: Any) -> TierSpec:
    if not isinstance(entry, Mapping):
        raise ConfigError(
            f"{name} in {WHERE} must be a mapping with a 'type', not {shown(entry)}", key=name
        )
    if entry.get("type") is None:
        raise ConfigError(
            f"{name} in {WHERE} has no 'type'; name the kind of tier, such as 'fs'", key=name
        )
    module_path = entry.get("module_path")
    options = {k: v for k, v in entry.items() if k not in ("type", "module_path")}
    return TierSpec(
        type=read_value(f"{name}.type", _TEXT, entry["type"], _WORDING),
        module_path=None
        if module_path is None
        else read_value(f"{name}.module_path", _TEXT, module_path, _WORDING),
        options=copy.deepcopy(options),
    )


_TIERS = Reader("a list of mappings, each with a 'type'", _tiers)
_PORT = Reader("a port number, 0 to 65535", where(whole, lambda n: 0 <= n <= 65535))


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(v, str) and v for v in value):
        raise Unfit
    return tuple(value)


_NAMES = Reader("a list of host names", _names)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveConfig:
    """Where this engine can be looked at; see :func:`describe_observe`."""

    port: int = option(
        _PORT,
        "Where the observer listens, plus the index of a data-parallel engine; 0: any free port,"
        " which the log says.",
    )
    host: str = option(
        _TEXT,
        "The address it listens at. Whoever reaches it can read what is shown, which is no"
        " prompt's text, and change nothing.",
        "127.0.0.1",
    )
    names: tuple[str, ...] = option(
        _NAMES,
        "Names by which it may be called besides addresses, `localhost` and `host`.",
        (),
    )
    max_requests: int = option(_COUNT, "How many requests are remembered, in 4 MiB at most.", 1000)


_OBSERVE_OPTIONS: Mapping[str, Option] = options_of(ObserveConfig)


def _observe(value: Any) -> ObserveConfig:
    if not isinstance(value, Mapping):
        raise Unfit
    given = {key: v for key, v in value.items() if v is not None}
    refuse_unknown(value, _OBSERVE_OPTIONS, _IN_OBSERVE)
    return ObserveConfig(**read_options(_OBSERVE_OPTIONS, given, _IN_OBSERVE))


_OBSERVE = Reader("a mapping with a `port`", _observe)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTiersConfig:
    """All settings of one engine; see :func:`describe` for what each means."""

    cpu_bytes_to_use: int = option(
        _BYTES, "Bytes of host memory for KV cache, over all workers of the engine."
    )
    blocks_per_chunk: int = option(
        _COUNT, "Blocks of one KV-cache group that are stored and loaded as one chunk.", 1
    )
    block_size: int | None = option(
        _COUNT, "The chunk's span in tokens, instead of `blocks_per_chunk`.", None
    )
    chunk_keys: str = option(
        _KEYS,
        "What chunks are named by: `engine`, vLLM's block hashes, as in its KV events; or `own`,"
        " hashes of whole chunks, which depend neither on the engine's block size nor on"
        " `--prefix-caching-hash-algo` and its seed, so that engines which differ in these share.",
        "engine",
    )
    eviction_policy: str = option(
        _TEXT, "What leaves host memory first: `lru`, `arc`, or a class of your own.", "lru"
    )
    cache_policy_module_path: str | None = option(
        _TEXT, "Import path of the module that holds your own `eviction_policy` class.", None
    )
    secondary_tiers: tuple[TierSpec, ...] = option(
        _TIERS, "Tiers below host memory, asked in this order; each has a `type` and options.", ()
    )
    store_threshold: int = option(
        _COUNT_OR_ZERO,
        "How often a chunk must be offered before it is stored; 0 and 1 store at once.",
        0,
    )
    max_tracker_size: int = option(
        _COUNT, "How many chunks `store_threshold` counts at a time.", 64_000
    )
    offload_prompt_only: bool = option(
        _FLAG, "Store chunks of the prompt only, not of generated tokens.", True
    )
    self_describing_kv_events: bool = option(
        _FLAG, "Put token ids and parents into KV events for host memory and storage.", False
    )
    kv_event_descriptions_directory: str | None = option(
        _FOLDER,
        "Where what self-describing events say of a chunk outlives the engine, so that what is"
        " found at the next start is described too; by default beside the first `fs` tier that has"
        " `enable_kv_events`, else nowhere.",
        None,
    )
    kv_event_descriptions_bytes: int = option(
        _BYTES,
        "Bound of the file with these descriptions: at most 64 bytes a block and 4 a token. Beyond"
        " it events tell hashes only.",
        2**30,
    )
    kv_event_inventory: bool = option(
        _FLAG,
        "Answer readers of vLLM's KV events that ask for a replay from the beginning with what"
        " holds now, of the device and all tiers; also tell of the tiers again after a reset.",
        False,
    )
    model_digest: str | None = option(
        _TEXT, "Names the model's weights and config instead of the computed digest.", None
    )
    promote_deadline_s: float = option(
        _SECONDS, "How long a request waits for promotions before it computes instead.", 30.0
    )
    lookup_deadline_s: float = option(
        _SECONDS, "How long a tier may say that it is still looking before it has missed.", 5.0
    )
    promotion_wait_s: float = option(
        _SECONDS_OR_ZERO, "How long a promotion waits for room in host memory.", 0.25
    )
    cascade_max_pinned_fraction: float = option(
        _FRACTION, "The part of host memory that cascades to slow tiers may hold in place.", 0.5
    )
    warm_manifest: str | None = option(
        _TEXT, "A hot list, which `kvtiers warm` wrote: its chunks are promoted at the start.", None
    )
    observe: ObserveConfig | None = option(  # noqa: RUF009 - a frozen class, as all of these
        _OBSERVE,
        "A small read-only HTTP server that shows this engine; see docs/observe.md.",
        None,
    )
    region_directory: str = option(
        _FOLDER, "The folder, in memory, of the file that workers and scheduler share.", "/dev/shm"
    )
    shutdown_deadline_s: float = option(
        _SECONDS,
        "How long a shutdown waits for cascades under way; vLLM must wait too, --shutdown-timeout.",
        10.0,
    )
    ignored: tuple[tuple[str, str], ...] = not_an_option(())
    """Keys that were given and have no effect here, each with the reason."""

    def chunk_blocks(self, tokens_per_block: int) -> int:
        """Blocks per chunk of a group with this block span (tokens).

        Raises ConfigError when ``block_size`` was given and is not a multiple of it.
        """
        if self.block_size is None:
            return self.blocks_per_chunk
        if self.block_size % tokens_per_block:
            fit = -(-self.block_size // tokens_per_block) * tokens_per_block
            raise ConfigError(
                f"block_size in {WHERE} is {self.block_size} tokens and must be a multiple of the"
                f" engine's block of {tokens_per_block} tokens; use {fit}, or set blocks_per_chunk"
                " instead",
                key="block_size",
            )
        return self.block_size // tokens_per_block


_IGNORED: Mapping[str, str] = {
    "canonical_layout": "chunks are always kept in the canonical order",
    "backpressure": "queues of secondary tiers are bounded in bytes instead",
    "tier_poll_interval_s": "tiers work on threads of their own and need no polling",
    "spec_name": "the connector brings its own spec",
    "spec_module_path": "the connector brings its own spec",
}
_SYNC_LOAD = "sync_load_budget_bytes"


_SETTINGS: Mapping[str, Option] = options_of(KVTiersConfig)


def parse_config(extra: Mapping[str, Any]) -> KVTiersConfig:
    """Read ``kv_connector_extra_config``.

    A key set to ``None`` counts as absent. Raises ConfigError, one sentence that names the key,
    for unknown keys, values that do not fit and settings that contradict each other.
    """
    given = {key: value for key, value in extra.items() if value is not None}
    refuse_unknown(extra, [*_SETTINGS, *_IGNORED, _SYNC_LOAD], _WORDING)
    _refuse_sync_loads(given)
    settings = {key: value for key, value in given.items() if key in _SETTINGS}
    values = read_options(_SETTINGS, settings, _WORDING)
    config = KVTiersConfig(**values, ignored=_without_effect(given))
    _check_relations(config, given)
    return config


def _refuse_sync_loads(given: Mapping[str, Any]) -> None:
    if given.get(_SYNC_LOAD, 0) != 0:
        raise ConfigError(
            f"{_SYNC_LOAD} in {WHERE} must stay 0, not {given[_SYNC_LOAD]!r}, because a synchronous"
            " load that fails cannot be reported to the engine",
            key=_SYNC_LOAD,
        )


def _without_effect(given: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    module = given.get("spec_module_path")
    ours = isinstance(module, str) and module.split(".")[0] == "kvtiers"
    return tuple(
        (key, reason)
        for key, reason in _IGNORED.items()
        if key in given and not (ours and key.startswith("spec_"))
    )


def _check_relations(config: KVTiersConfig, given: Mapping[str, Any]) -> None:
    if "block_size" in given and "blocks_per_chunk" in given:
        raise ConfigError(
            f"block_size and blocks_per_chunk in {WHERE} both set the chunk's span; keep one of"
            " them",
            key="block_size",
        )
    check_policy_name(config.eviction_policy, config.cache_policy_module_path)
    if config.promotion_wait_s > config.promote_deadline_s:
        raise ConfigError(
            f"promotion_wait_s ({config.promotion_wait_s:g}) in {WHERE} is longer than"
            f" promote_deadline_s ({config.promote_deadline_s:g}), so the request would be gone"
            " first; lower it",
            key="promotion_wait_s",
        )


def check_policy_name(name: str, module_path: str | None) -> None:
    """Raise ConfigError if ``name`` is no built-in policy and no module is named to find it in."""
    if name in BUILTIN_POLICIES or module_path is not None:
        return
    near = nearest(name, BUILTIN_POLICIES)
    known = " or ".join(map(repr, BUILTIN_POLICIES))
    hint = f"use {known}, or set cache_policy_module_path to the module of your own class"
    if near is not None:
        hint = f"did you mean {near!r}?"
    raise ConfigError(f"unknown eviction_policy {name!r} in {WHERE}; {hint}", key="eviction_policy")


def describe_observe() -> str:
    """The keys of ``observe`` as a markdown table."""
    return table(_OBSERVE_OPTIONS.values())


def describe() -> str:
    """All keys as a markdown table: key, what it takes, default, meaning."""
    lines = [
        f"| `{name}` | anything | | No effect: {reason}. |" for name, reason in _IGNORED.items()
    ]
    lines.append(
        f"| `{_SYNC_LOAD}` | 0 | 0 | Refused above 0: a failed synchronous load cannot be"
        " reported. |"
    )
    return table(_SETTINGS.values()) + "\n".join(lines) + "\n"
