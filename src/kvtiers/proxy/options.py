"""What the proxy is told: workers and bounds, read once and then frozen."""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from urllib.parse import SplitResult, urlsplit

from kvtiers.errors import ConfigError

P2P_PORT = 5710
"""Where a ``p2p`` tier answers unless it is told otherwise."""

_HOST = re.compile(r"[A-Za-z0-9_.:%-]{1,253}")
_MAX_PORT = (1 << 16) - 1


@dataclass(frozen=True, slots=True)
class Address:
    """Where a worker is: for requests, and for its peers."""

    url: str
    """Without a slash at the end."""
    p2p_host: str
    p2p_port: int
    pod: str = ""
    """What the presence index calls it."""


@dataclass(frozen=True, slots=True)
class ProxyOptions:
    """Options of ``kvtiers proxy``. Raises ConfigError for what cannot be."""

    prefill: tuple[Address, ...] = ()
    """Workers that compute prompts, for those of ``decode``."""
    decode: tuple[Address, ...] = ()
    """Workers that answer."""
    workers: tuple[Address, ...] = ()
    """Workers that do both, and name each other as a source."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0: any that is free."""
    max_in_flight: int = 256
    """Requests that are with workers at once."""
    max_queued: int = 1024
    """Requests that wait for a place among them; those above are answered 429."""
    queue_timeout_s: float = 60.0
    """How long a request waits for a place."""
    max_body_bytes: int = 16 << 20
    """Of one request."""
    body_timeout_s: float = 30.0
    """How long a client may take to send it."""
    connect_timeout_s: float = 5.0
    """For a connection to a worker."""
    idle_timeout_s: float = 600.0
    """How long a worker may send nothing, and a client take nothing. An answer that is not streamed
    has to be complete by then."""
    health_interval_s: float = 5.0
    """Between two looks at a worker; one may take as long."""
    drain_s: float = 30.0
    """How long requests that run are waited for after SIGTERM."""
    slack: int = 4
    """By how many requests the worker that has a prefix may be busier than the idlest one, and
    still get what continues it."""
    index: str | None = None
    """URL of a presence index, without a slash at the end: it is asked who holds a prompt."""
    index_timeout_s: float = 0.1
    """For its answer, and as much for that of a worker that tokenizes the prompt."""
    pass_kv_transfer_params: bool = False
    """Whether a client's own ``kv_transfer_params`` are passed on, and not refused."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_s") and not 0 < value < float("inf"):
                raise ConfigError(f"{flag(field.name)} is {value}: give seconds above 0")
        for name in ("max_in_flight", "max_body_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{flag(name)} is {getattr(self, name)}: give at least 1")
        for name in ("max_queued", "slack"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{flag(name)} is {getattr(self, name)}: give 0 or more")
        if not 0 <= self.port <= _MAX_PORT:
            raise ConfigError(f"--port is {self.port}: give 0 to {_MAX_PORT}")
        self._check_pools()

    def _check_pools(self) -> None:
        apart = bool(self.prefill or self.decode)
        if apart == bool(self.workers):
            raise ConfigError(
                "workers are missing or of two kinds: give --prefill and --decode, or --worker"
            )
        if apart and not (self.prefill and self.decode):
            absent = "--decode" if self.prefill else "--prefill"
            raise ConfigError(f"{absent} is missing: --prefill and --decode go together")
        for pool in (self.prefill, self.decode, self.workers):
            urls = [address.url for address in pool]
            twice = next((url for url in urls if urls.count(url) > 1), None)
            if twice is not None:
                raise ConfigError(f"{twice} is named twice: name each worker once")


def flag(name: str) -> str:
    """An option's name on the command line."""
    return f"--{name.replace('_', '-')}"


def parse_address(text: str) -> Address:
    """``URL[,p2p=HOST:PORT][,pod=NAME]``; by default peers are at the URL's host and port 5710, and
    the index knows it by its own host and port.

    Raises ConfigError.
    """
    url, *rest = text.split(",")
    parts = _parsed(url, text)
    words = dict(word.partition("=")[::2] for word in rest)
    if len(words) < len(rest) or words.keys() - {"p2p", "pod"} or words.get("pod") == "":
        raise _unfit(text)
    host, port = str(parts.hostname), P2P_PORT
    if "p2p" in words:
        host, port = _peer(words["p2p"], text)
    if not _HOST.fullmatch(host):
        raise _unfit(text)
    return Address(url.rstrip("/"), host, port, words.get("pod", ""))


def parse_index(text: str) -> str:
    """The URL of a presence index. Raises ConfigError."""
    try:
        _parsed(text, text)
    except ConfigError:
        raise ConfigError(f"--index {text!a} is no index: give http://HOST:PORT") from None
    return text.rstrip("/")


def _parsed(url: str, text: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise _unfit(text) from None
    plain = parts.scheme in ("http", "https") and parts.hostname and port != 0
    if not plain or parts.query or parts.fragment or parts.username is not None:
        raise _unfit(text)
    return parts


def _peer(value: str, text: str) -> tuple[str, int]:
    host, _, port = value.rpartition(":")
    known = port.isdecimal() and port.isascii() and 0 < int(port) <= _MAX_PORT
    if not host or not known:
        raise _unfit(text)
    return host.removeprefix("[").removesuffix("]"), int(port)


def _unfit(text: str) -> ConfigError:
    return ConfigError(f"{text!a} is no worker: give http://HOST:PORT or with ,p2p=HOST:PORT")


Clock = Callable[[], float]
"""Monotonic seconds."""
