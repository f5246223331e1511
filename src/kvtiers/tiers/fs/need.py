"""What one write needs in room, and how far its making has come."""

from dataclasses import dataclass, field
from enum import Enum

from kvtiers.tiers.fs.account import Turn


class Step(Enum):
    """How a turn at the quota file ended."""

    MET = "the need is met"
    COUNT = "what is there must be counted first"
    MORE = "files left, and more have to"
    LACK = "no file is known that may leave"


@dataclass(slots=True)
class Need:
    """The making of room for one write."""

    size: int
    regardless: bool = False
    """Delete so much, whatever the quota says: the disk itself is full."""
    evicted: list[str] = field(default_factory=list)
    gone: int = 0
    """Bytes deleted."""
    failures: int = 0
    rounds: int = 0
    counted: bool = False

    def met_by(self, turn: Turn) -> bool:
        """Whether there is room now; it is granted with the answer."""
        if self.regardless:
            return self.gone >= self.size
        if self.size == 0:
            return turn.quota.available() >= 0
        return turn.grant(self.size)
