"""Options of tiers: typed at the door, frozen after.

Errors name the key as the user wrote it (``secondary_tiers[0].root_dir``), in one sentence.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from kvtiers.errors import ConfigError
from kvtiers.options import Wording, options_of, read_options, refuse_unknown

T = TypeVar("T")

_MAX_THREADS = 256
_MAX_INTEGER = (1 << 63) - 1

_WORDING = Wording(
    unknown="{key} is not a known option: {hint}",
    near="did you mean {near}?",
    others="the options are {known}",
    missing="{key} is missing: give {expects}",
    unfit="{key} is {value}: give {expects}",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunnerOptions:
    """How :class:`kvtiers.tiers.runner.StoreTier` drives a store."""

    n_read_threads: int = 8
    """Lanes that take lookups and loads; at most 256."""
    n_write_threads: int = 8
    """Lanes that take stores when there is nothing to look up or load; at most 256."""
    max_queued_store_bytes: int = 1 << 30
    """Host memory that unfinished stores may hold; above it stores are refused (pressure)."""
    store_deadline_s: float = 60.0
    """After it a cascade has failed; it is offered again later."""
    load_deadline_s: float = 10.0
    """After it a promotion has failed: its chunks are misses."""
    lookup_deadline_s: float = 1.0
    """After it an unanswered lookup is a MISS."""
    scan_deadline_s: float = 30.0
    """After it a step of the start-up scan counts as hung: a new lane takes the place of its
    lane, and chunks are asked for."""
    negative_ttl_s: float = 5.0
    """How long an absent chunk, or one that failed to load, is not asked for again; 0.5 s if it
    is less, for the answer has to outlive the step that asked."""
    max_tracked_chunks: int = 2_000_000
    """Bound of the table of known chunks (about 200 bytes each)."""
    recheck_s: float = 600.0
    """With ``enable_kv_events``, on storage that others clear: each chunk that is said to be there
    is asked for within so many seconds, of a working engine, so that its loss is told of; 0: when a
    load of it fails."""
    min_slice_bytes: int = 1 << 20
    """A job is split over the lanes into slices of at least this many bytes."""
    transfer_retries: int = 2
    """How often an error that may pass is tried again, at once and within the deadline."""
    breaker_failures: int = 5
    """Failures in a row after which the tier is left alone."""
    breaker_cooldown_s: float = 5.0
    """How long the tier is left alone at first; doubled each time a trial after it fails."""
    breaker_max_cooldown_s: float = 60.0
    """How long that becomes at most."""
    max_replacement_threads: int = 16
    """Lanes that may hang in a dead device at once and be replaced."""

    def __post_init__(self) -> None:
        for name in ("n_read_threads", "n_write_threads", "max_tracked_chunks", "breaker_failures"):
            require(getattr(self, name) >= 1, name, f"is {getattr(self, name)}: give at least 1")
        for name in ("n_read_threads", "n_write_threads"):
            n = getattr(self, name)
            require(n <= _MAX_THREADS, name, f"is {n}: give at most {_MAX_THREADS}")
        for field in dataclasses.fields(RunnerOptions):
            value = getattr(self, field.name)
            minimum = "above 0" if field.name.endswith("deadline_s") else "0 or more"
            good = value > 0 if field.name.endswith("deadline_s") else value >= 0
            require(good, field.name, f"is {value:g}: give {minimum}")


def require(good: bool, key: str, complaint: str) -> None:
    """Raise ConfigError ``"<key> <complaint>"`` unless ``good``."""
    if not good:
        raise bad_option(key, complaint)


def bad_option(key: str, complaint: str) -> ConfigError:
    """The error for an option; :func:`located` puts the place of the tier in front of its key."""
    return ConfigError(f"{key} {complaint}", key=key)


def located(error: ConfigError, where: str) -> ConfigError:
    """``error``, saying that it is about the tier at ``where`` (``secondary_tiers[0]``)."""
    joint = "." if "key" in error.context else ": "
    return ConfigError(f"{where}{joint}{error}", **{**error.context, "where": where})


def parse(cls: type[T], values: Mapping[str, Any]) -> T:
    """Build the dataclass ``cls`` from what a user wrote.

    Raises ConfigError for an unknown key (with the nearest valid one), a missing one, or a value
    of another type. A bool is no int; an int is a float, and 1e9 is an int; null is no value.
    """
    options = options_of(cls)
    refuse_unknown(values, options, _WORDING)
    for key, value in values.items():
        if isinstance(value, int):
            require(abs(value) <= _MAX_INTEGER, key, "is too large: give less than 2**63")
    given = {key: value for key, value in values.items() if value is not None}
    return cls(**read_options(options, given, _WORDING))
