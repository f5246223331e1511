"""Pods, their tiers and KV-cache groups, as events name them. Pure."""

from dataclasses import dataclass, field
from typing import NamedTuple

from kvtiers.core.prefix import Attention, AttentionGroup
from kvtiers.kvevents.messages import BlockRemoved, BlockStored

MAX_PLACES = 64
"""Of one pod; what it says of further ones is left out."""

MAX_NAME = 256
"""Characters of what names a tier, or a kind of group; longer ones are left out."""

_DEVICE = "GPU"
_WINDOWED = {
    "sliding_window": Attention.SLIDING,
    "sliding_window_mla": Attention.SLIDING,
    "chunked_local_attention": Attention.CHUNKED_LOCAL,
}


class Tier(NamedTuple):
    """What tells two tiers of a pod apart; empty where the publisher does not say it."""

    medium: str
    locality: str
    ownership: str


def tier_of(event: BlockStored | BlockRemoved) -> Tier:
    """Where the blocks of an event are. Old publishers name no medium for the accelerator."""
    return Tier(event.medium or _DEVICE, event.locality or "", event.ownership or "")


@dataclass(slots=True)
class Place:
    """One tier of one pod, for one KV-cache group."""

    tier: Tier
    group: int
    bit: int
    """A power of two that no other place has."""
    blocks: int = 0
    """How many are there."""
    last: int | None = None
    """The block that was told last."""


@dataclass(slots=True)
class Group:
    """A KV-cache group of a pod, by what was last said of it."""

    bit: int
    """A power of two that no other group of any pod has."""
    kind: str = ""
    block_size: int = 0
    """Tokens; 0: not said yet."""
    window: int = 0

    def learn(self, event: BlockStored) -> None:
        """Whatever an event says of its group replaces what was said before."""
        kind = event.kv_cache_spec_kind or ""
        self.kind = kind if 0 < len(kind) <= MAX_NAME else self.kind
        self.window = max(0, event.kv_cache_spec_sliding_window or 0) or self.window
        self.block_size = max(0, event.block_size) or self.block_size

    def attention(self, index: int, tokens_per_hash: int) -> AttentionGroup:
        """What it reads of a prompt. A kind that is not known, or not said, reads everything."""
        size = self.block_size or tokens_per_hash
        windowed = _WINDOWED.get(self.kind)
        if windowed and self.window:
            return AttentionGroup(index, size, windowed, self.window)
        state = self.kind == "mamba"
        return AttentionGroup(index, size, Attention.STATE if state else Attention.FULL)

    @property
    def reads_all(self) -> bool:
        """Whether it is of full attention, or not known to be of another kind."""
        return self.kind != "mamba" and not (self.kind in _WINDOWED and self.window)


@dataclass(slots=True)
class Pod:
    """One publisher of events."""

    name: str
    model: str = ""
    places: dict[tuple[Tier, int], Place] = field(default_factory=dict)
    groups: dict[int, Group] = field(default_factory=dict)
    bits: int = 0
    """Of all its places."""
    complete: bool = False
    """Whether all that the pod holds is known: nothing it said was missed, or forgotten."""
