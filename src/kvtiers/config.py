"""Configuration, typed at the door and frozen after: one mapping in, one dataclass out.

The mapping is vLLM's ``kv_connector_extra_config``. Keys that upstream's offloading connector reads
keep their names and meaning; those without effect here are accepted and listed in
:attr:`KVTiersConfig.ignored`, so that the caller says so once. Everything else is refused.
"""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from kvtiers.errors import ConfigError

WHERE = "kv_connector_extra_config"
BUILTIN_POLICIES = ("lru", "arc")


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


class _Unfit(Exception):
    """A reader met a value that is not what its ``expects`` says."""


@dataclass(frozen=True, slots=True)
class _Reader:
    expects: str
    read: Callable[[Any], Any]


def _whole(value: Any) -> int:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _Unfit
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Unfit
    try:
        number = float(value)
    except OverflowError:
        raise _Unfit from None
    if not math.isfinite(number):
        raise _Unfit
    return number


def _where(convert: Callable[[Any], Any], holds: Callable[[Any], bool]) -> Callable[[Any], Any]:
    """``convert``, then refuse what does not hold."""

    def read(value: Any) -> Any:
        result = convert(value)
        if not holds(result):
            raise _Unfit
        return result

    return read


def _exactly(kind: type) -> Callable[[Any], Any]:
    return _where(lambda value: value, lambda value: type(value) is kind)


_COUNT = _Reader("a whole number, 1 or more", _where(_whole, lambda n: n >= 1))
_COUNT_OR_ZERO = _Reader("a whole number, 0 or more", _where(_whole, lambda n: n >= 0))
_BYTES = _Reader("a whole number of bytes above 0", _where(_whole, lambda n: n > 0))
_SECONDS = _Reader("a number of seconds above 0", _where(_number, lambda s: s > 0))
_SECONDS_OR_ZERO = _Reader("a number of seconds, 0 or more", _where(_number, lambda s: s >= 0))
_FRACTION = _Reader("a fraction above 0 and up to 1", _where(_number, lambda f: 0 < f <= 1))
_FLAG = _Reader("true or false", _exactly(bool))
_TEXT = _Reader("a non-empty string", _where(_exactly(str), bool))
_FOLDER = _Reader("an absolute path", _where(_exactly(str), lambda p: p.startswith("/")))


def _tiers(value: Any) -> tuple[TierSpec, ...]:
    if not isinstance(value, list | tuple):
        raise _Unfit
    return tuple(_tier(f"secondary_tiers[{i}]", entry) for i, entry in enumerate(value))


def _tier(name: str, entry: Any) -> TierSpec:
    if not isinstance(entry, Mapping):
        raise ConfigError(
            f"{name} in {WHERE} must be a mapping with a 'type', not {_shown(entry)}", key=name
        )
    if entry.get("type") is None:
        raise ConfigError(
            f"{name} in {WHERE} has no 'type'; name the kind of tier, such as 'fs'", key=name
        )
    module_path = entry.get("module_path")
    options = {k: v for k, v in entry.items() if k not in ("type", "module_path")}
    return TierSpec(
        type=_read(f"{name}.type", _TEXT, entry["type"]),
        module_path=None
        if module_path is None
        else _read(f"{name}.module_path", _TEXT, module_path),
        options=copy.deepcopy(options),
    )


_TIERS = _Reader("a list of mappings, each with a 'type'", _tiers)


def _read(key: str, reader: _Reader, value: Any) -> Any:
    try:
        return reader.read(value)
    except _Unfit:
        raise ConfigError(
            f"{key} in {WHERE} must be {reader.expects}, not {_shown(value)}", key=key
        ) from None


def _shown(value: Any) -> str:
    """``value`` for an error; of mappings and lists the kind only: they may hold credentials."""
    if isinstance(value, Mapping):
        return "a mapping"
    return "a list" if isinstance(value, list | tuple) else repr(value)


def _option(reader: _Reader, doc: str, default: Any = MISSING) -> Any:
    return field(default=default, metadata={"reader": reader, "doc": doc})


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTiersConfig:
    """All settings of one engine; see :func:`describe` for what each means."""

    cpu_bytes_to_use: int = _option(
        _BYTES, "Bytes of host memory for KV cache, over all workers of the engine."
    )
    blocks_per_chunk: int = _option(
        _COUNT, "Blocks of one KV-cache group that are stored and loaded as one chunk.", 1
    )
    block_size: int | None = _option(
        _COUNT, "The chunk's span in tokens, instead of `blocks_per_chunk`.", None
    )
    eviction_policy: str = _option(
        _TEXT, "What leaves host memory first: `lru`, `arc`, or a class of your own.", "lru"
    )
    cache_policy_module_path: str | None = _option(
        _TEXT, "Import path of the module that holds your own `eviction_policy` class.", None
    )
    secondary_tiers: tuple[TierSpec, ...] = _option(
        _TIERS, "Tiers below host memory, asked in this order; each has a `type` and options.", ()
    )
    store_threshold: int = _option(
        _COUNT_OR_ZERO,
        "How often a chunk must be offered before it is stored; 0 and 1 store at once.",
        0,
    )
    max_tracker_size: int = _option(
        _COUNT, "How many chunks `store_threshold` counts at a time.", 64_000
    )
    offload_prompt_only: bool = _option(
        _FLAG, "Store chunks of the prompt only, not of generated tokens.", True
    )
    self_describing_kv_events: bool = _option(
        _FLAG, "Put token ids and parents into KV events for host memory and storage.", False
    )
    model_digest: str | None = _option(
        _TEXT, "Names the model's weights and config instead of the computed digest.", None
    )
    promote_deadline_s: float = _option(
        _SECONDS, "How long a request waits for promotions before it computes instead.", 30.0
    )
    lookup_deadline_s: float = _option(
        _SECONDS, "How long a tier may say that it is still looking before it has missed.", 5.0
    )
    promotion_wait_s: float = _option(
        _SECONDS_OR_ZERO, "How long a promotion waits for room in host memory.", 0.25
    )
    cascade_max_pinned_fraction: float = _option(
        _FRACTION, "The part of host memory that cascades to slow tiers may hold in place.", 0.5
    )
    region_directory: str = _option(
        _FOLDER, "The folder, in memory, of the file that workers and scheduler share.", "/dev/shm"
    )
    shutdown_deadline_s: float = _option(
        _SECONDS, "How long a shutdown waits for cascades under way.", 10.0
    )
    ignored: tuple[tuple[str, str], ...] = ()
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


def _settings() -> dict[str, Field[Any]]:
    return {f.name: f for f in fields(KVTiersConfig) if f.metadata}


def parse_config(extra: Mapping[str, Any]) -> KVTiersConfig:
    """Read ``kv_connector_extra_config``.

    A key set to ``None`` counts as absent. Raises ConfigError, one sentence that names the key,
    for unknown keys, values that do not fit and settings that contradict each other.
    """
    given = {key: value for key, value in extra.items() if value is not None}
    settings = _settings()
    _refuse_unknown(extra, [*settings, *_IGNORED, _SYNC_LOAD])
    _refuse_sync_loads(given)
    if "cpu_bytes_to_use" not in given:
        raise ConfigError(
            f"cpu_bytes_to_use is missing from {WHERE}; set it to the bytes of host memory that"
            " KV cache may take, over all workers",
            key="cpu_bytes_to_use",
        )
    values = {
        key: _read(key, settings[key].metadata["reader"], value)
        for key, value in given.items()
        if key in settings
    }
    config = KVTiersConfig(**values, ignored=_without_effect(given))
    _check_relations(config, given)
    return config


def _refuse_unknown(keys: Iterable[Any], valid: list[str]) -> None:
    for key in keys:
        if key in valid:
            continue
        hint = _nearest(str(key), valid) or f"the keys are {', '.join(sorted(valid))}"
        raise ConfigError(f"unknown key {key!r} in {WHERE}; {hint}", key=str(key))


def _nearest(word: str, valid: Sequence[str]) -> str | None:
    near = get_close_matches(word, valid, n=1)
    return f"did you mean {near[0]!r}?" if near else None


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
    policy = config.eviction_policy
    if policy not in BUILTIN_POLICIES and config.cache_policy_module_path is None:
        hint = _nearest(policy, BUILTIN_POLICIES) or (
            "use 'lru' or 'arc', or set cache_policy_module_path to the module of your own class"
        )
        raise ConfigError(
            f"unknown eviction_policy {policy!r} in {WHERE}; {hint}", key="eviction_policy"
        )
    if config.promotion_wait_s > config.promote_deadline_s:
        raise ConfigError(
            f"promotion_wait_s ({config.promotion_wait_s:g}) in {WHERE} is longer than"
            f" promote_deadline_s ({config.promote_deadline_s:g}), so the request would be gone"
            " first; lower it",
            key="promotion_wait_s",
        )


def describe() -> str:
    """All keys as a markdown table: key, what it takes, default, meaning."""
    lines = ["| key | takes | default | meaning |", "|---|---|---|---|"]
    for name, setting in _settings().items():
        takes, doc = setting.metadata["reader"].expects, setting.metadata["doc"]
        lines.append(f"| `{name}` | {takes} | {_default(setting)} | {doc} |")
    for name, reason in _IGNORED.items():
        lines.append(f"| `{name}` | anything | | No effect: {reason}. |")
    lines.append(
        f"| `{_SYNC_LOAD}` | 0 | 0 | Refused above 0: a failed synchronous load cannot be"
        " reported. |"
    )
    return "\n".join(lines) + "\n"


def _default(setting: Field[Any]) -> str:
    if setting.default is MISSING:
        return "required"
    if setting.default is None:
        return "not set"
    if isinstance(setting.default, bool):
        return str(setting.default).lower()
    if setting.default == ():
        return "none"
    return f"{setting.default}"
