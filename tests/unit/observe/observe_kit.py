"""A tier that says what a test decides, and host memory at rest and in motion."""

from dataclasses import dataclass, field

from kvtiers.host.parts import HostUse
from kvtiers.tiers.base import Circuit, Peers, Standing, Usage

REST = HostUse(slots=10, resident=4, filling=0, pinned=0, orphaned=0)
BUSY = HostUse(slots=10, resident=4, filling=1, pinned=2, orphaned=0)


@dataclass
class Tier:
    label: str
    full: Usage | None = None
    stands: Standing = field(default_factory=lambda: Standing(Circuit.CLOSED, 0, 0))
    knows: Peers | None = None

    def usage(self) -> Usage | None:
        return self.full

    def standing(self) -> Standing:
        return self.stands

    def peers(self) -> Peers | None:
        return self.knows
