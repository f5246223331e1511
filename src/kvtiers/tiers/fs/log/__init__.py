"""Layout ``log``: a log of segments on a local disk, with one owner."""

from kvtiers.tiers.fs.log.store import LogStore

__all__ = ["LogStore"]
