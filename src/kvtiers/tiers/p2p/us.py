"""What one engine is for its peers."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtiers.chunks import ChunkLayout
from kvtiers.tiers.p2p.loop import Loop
from kvtiers.tiers.p2p.options import P2POptions
from kvtiers.tiers.p2p.transport import Transport


@dataclass(frozen=True, slots=True)
class Identity:
    """How an engine presents itself."""

    namespace: str
    """Its ``Namespace.id``."""
    layout: ChunkLayout
    label: str
    """What it is called in the logs of others."""


@dataclass(frozen=True, slots=True)
class Us:
    """What all sessions of one engine have in common."""

    identity: Identity
    options: P2POptions
    loop: Loop
    transports: Sequence[Transport]
    """The preferred one first."""
