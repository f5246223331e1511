"""What the index is told: engines and bounds, read once and then frozen."""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields

from kvtiers.errors import ConfigError
from kvtiers.hashing import ALGORITHMS, DEFAULT_SEED

_NAME = re.compile(r"[^\s,=\x00-\x1f]{1,200}")
_ENDPOINT = re.compile(r"(tcp://[^\s,/*]+:\d{1,5}|ipc://[^\s,]+)")
_MAX_PORT = (1 << 16) - 1


@dataclass(frozen=True, slots=True)
class Engine:
    """One publisher of events."""

    name: str
    endpoint: str
    replay: str | None = None
    topic: str = ""
    """Only what begins with it is heard."""
    model: str = ""
    """Pods of different models have equal hashes for equal tokens: a question may name one."""


@dataclass(frozen=True, slots=True)
class IndexOptions:
    """Options of ``kvtiers index``. Raises ConfigError for what cannot be."""

    engines: tuple[Engine, ...] = ()
    host: str = "127.0.0.1"
    port: int = 9811
    """0: any that is free."""
    max_blocks: int = 4_000_000
    """Above it those leave that nobody told or asked of for longest. One takes 100 to 500 bytes."""
    max_body_bytes: int = 8 << 20
    """Of one question."""
    body_timeout_s: float = 10.0
    """How long a client may take to send it."""
    replay_timeout_s: float = 30.0
    """For one whole replay; a pause of two seconds ends it too."""
    retry_s: float = 5.0
    """Until a replay that failed is tried again; doubled each time, up to a minute."""
    forget_after_s: float = 60.0
    """How long an engine may be unreachable until all that is known of it is forgotten."""
    hash: str = "sha256"
    """Algorithm of the engines' block hashes, for questions that are token ids."""
    seed: str = DEFAULT_SEED
    """The engines' PYTHONHASHSEED."""
    snapshot_to: str | None = None
    """``redis://`` URL of a Valkey or Redis server."""
    snapshot_interval_s: float = 60.0
    """Between two snapshots of one pod."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_s") and not 0 < value < float("inf"):
                raise ConfigError(f"{flag(field.name)} is {value}: give seconds above 0")
        for name in ("max_blocks", "max_body_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{flag(name)} is {getattr(self, name)}: give at least 1")
        if not 0 <= self.port <= _MAX_PORT:
            raise ConfigError(f"--port is {self.port}: give 0 to {_MAX_PORT}")
        if self.hash not in ALGORITHMS:
            raise ConfigError(f"--hash is {self.hash!a}: give one of {', '.join(ALGORITHMS)}")
        if self.hash.startswith("xxhash") and self.seed == DEFAULT_SEED:
            raise ConfigError(f"--hash {self.hash} needs the engines' PYTHONHASHSEED: give --seed")
        if not self.engines:
            raise ConfigError("no engine is named: give --engine NAME=tcp://HOST:PORT")
        names = [engine.name for engine in self.engines]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"engine {twice} is named twice: name each once")


def flag(name: str) -> str:
    """An option's name on the command line."""
    return f"--{name.replace('_', '-')}"


def parse_engine(text: str) -> Engine:
    """``NAME=ENDPOINT[,replay=ENDPOINT][,topic=TEXT][,model=NAME]``. Raises ConfigError."""
    first, *rest = text.split(",")
    name, _, endpoint = first.partition("=")
    more = dict(word.partition("=")[::2] for word in rest)
    known = {"replay", "topic", "model"} >= more.keys() and len(more) == len(rest)
    replay = more.get("replay")
    endpoints = [endpoint] if replay is None else [endpoint, replay]
    if not known or not _NAME.fullmatch(name) or not all(map(_ENDPOINT.fullmatch, endpoints)):
        raise ConfigError(
            f"{text!a} is no engine: give NAME=tcp://HOST:PORT, and after it, if there are any, "
            ",replay=tcp://HOST:PORT ,topic=TEXT ,model=NAME"
        )
    return Engine(name, endpoint, replay, more.get("topic", ""), more.get("model", ""))


Clock = Callable[[], float]
"""Monotonic seconds."""
