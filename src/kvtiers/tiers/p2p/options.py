"""Options of the ``p2p`` tier."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from kvtiers.options import Reader, Unfit, option
from kvtiers.tiers.options import require

_HOST_VARIABLE, _PORT_VARIABLE = "VLLM_P2P_SIDE_CHANNEL_HOST", "VLLM_P2P_SIDE_CHANNEL_PORT"
LOOPBACK = "127.0.0.1"
_PORT = 5710


def _strings(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
        raise Unfit
    return tuple(value)


@dataclass(frozen=True, kw_only=True)
class P2POptions:
    """Options of the ``p2p`` tier."""

    host: str | None = None
    """Address on which peers are answered; ``VLLM_P2P_SIDE_CHANNEL_HOST`` if it is not set, else
    127.0.0.1. Any other than loopback needs ``keys`` and ``plaintext_data``."""
    port: int | None = None
    """Port on which peers are answered; ``VLLM_P2P_SIDE_CHANNEL_PORT`` if it is not set, else 5710.
    The index of the data-parallel engine is added to it."""
    advertised_host: str | None = None
    """Where peers reach this engine: what an answer names to whoever routes a request on to decode;
    ``host`` if it is not set. Has to be set where ``host`` stands for all addresses."""
    data_port: int = 0
    """Port of the data connections; 0: any. The index is added here too, unless it is 0."""
    transport: Literal["tcp", "nixl"] = "tcp"
    """How chunks travel: over TCP connections; or by NIXL, with TCP for peers that do not have it.
    NIXL listens wherever UCX does, asks nobody who he is, and lets peers write this process's
    memory: it needs ``plaintext_data``, and a network that only engines you trust are on."""
    backends: tuple[str, ...] = option(
        Reader("a list of strings", _strings), "Backends of NIXL.", ("UCX",)
    )
    num_threads: int = 0
    """Threads of NIXL's backends; 0: as it sees fit. Without effect over TCP."""
    keys: str | None = None
    """File with this engine's CURVE key pair, as ``kvtiers keys new`` writes it."""
    allowed_peers: tuple[str, ...] = option(
        Reader("a list of strings", _strings),
        "Public keys of the peers that are let in. One that is dialled has its address behind a "
        'space, as in "KEY host:port"; a single key without one is everybody\'s.',
        (),
    )
    plaintext_data: bool = False
    """Beyond loopback: chunks travel unencrypted, and can be changed by whoever is on the way. Only
    for a network that nobody else is on."""
    handshake_deadline_s: float = 3.0
    """For a peer's name, connection and welcome; after it the peer is left alone for a while."""
    lookup_deadline_s: float = 2.0
    """After it a chunk that a peer was asked for is a MISS."""
    load_deadline_s: float = 20.0
    """After it chunks that a peer has, but did not bring, have failed to load."""
    park_deadline_s: float = 60.0
    """How long a fetch waits for chunks that a ``remote_prefiller`` has not computed yet."""
    hold_deadline_s: float = 30.0
    """How long chunks that a peer was told of are kept in host memory for its fetch."""
    stall_deadline_s: float = 10.0
    """A peer whose data connection takes no bytes, or does not come, for so long is let go."""
    ping_interval_s: float = 2.0
    """Between signs of life that are asked of a peer."""
    silence_deadline_s: float = 10.0
    """A peer that gave no sign of life for so long is gone."""
    idle_deadline_s: float = 300.0
    """A session that nobody needed for so long is ended."""
    breaker_failures: int = 3
    """Answers in a row that came too late, after which a peer is left alone; whoever cannot be
    reached, or breaks the protocol, is at once."""
    breaker_cooldown_s: float = 5.0
    """How long a peer is left alone at first; doubled each time a trial after it fails."""
    breaker_max_cooldown_s: float = 60.0
    """How long that becomes at most."""
    max_peers: int = 128
    """Peers that are answered at once, and peers that are asked at once."""
    max_pinned_fraction: float = 0.25
    """The share of host memory that may be kept for peers."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_s"):
                require(value > 0, field.name, f"is {value:g}: give above 0")
            if field.name in ("port", "data_port") and value is not None:
                require(0 <= value < 1 << 16, field.name, f"is {value}: give 0 to 65535")
        for name in ("breaker_failures", "max_peers"):
            require(getattr(self, name) >= 1, name, f"is {getattr(self, name)}: give at least 1")
        share = self.max_pinned_fraction
        require(0 < share <= 1, "max_pinned_fraction", f"is {share:g}: give above 0, up to 1")
        require(
            self.ping_interval_s < self.silence_deadline_s,
            "ping_interval_s",
            f"is {self.ping_interval_s:g}: give less than silence_deadline_s",
        )
        require(
            self.transport == "tcp" or self.plaintext_data,
            "plaintext_data",
            "is false, but NIXL encrypts nothing, listens beyond this machine and lets peers write "
            "this process's memory: set it if nobody else is on that network, or use transport tcp",
        )
        require(
            self.keys is None or bool(self.allowed_peers),
            "allowed_peers",
            "is missing: with keys, name the public keys that are let in",
        )
        require(
            self.keys is not None or not self.allowed_peers,
            "keys",
            "is missing: allowed_peers mean nothing without this engine's own key pair",
        )

    @property
    def prefill_load_s(self) -> float:
        """How long chunks of a ``remote_prefiller`` are waited for: until it parks no longer, and
        for its answer.
        """
        return self.park_deadline_s + self.lookup_deadline_s

    @property
    def longest_load_s(self) -> float:
        """After it no consumer with these options waits for a chunk any more."""
        return max(self.load_deadline_s, self.prefill_load_s)

    def placed(self, data_parallel_index: int, environment: Mapping[str, str]) -> "P2POptions":
        """The same for one engine: with an address and ports of its own."""
        port = self.port
        if port is None:
            given = environment.get(_PORT_VARIABLE, str(_PORT))
            known = given.isdecimal() and int(given) < 1 << 16
            require(known, _PORT_VARIABLE, f"is {given!a}: give a port")
            port = int(given)
        host = self.host or environment.get(_HOST_VARIABLE) or LOOPBACK
        return replace(
            self,
            host=host,
            port=port and port + data_parallel_index,
            data_port=self.data_port and self.data_port + data_parallel_index,
        )
