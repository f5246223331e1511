"""A job from submit to its last word, and how it is cut into slices. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from kvtiers.chunks import Key
from kvtiers.errors import Kind, KVTiersError
from kvtiers.tiers.base import Job, JobOutcome
from kvtiers.tiers.work import Transfer

TIER_FAULTS = (Kind.IO, Kind.TIMEOUT, Kind.BROKEN, Kind.UNSUPPORTED, Kind.CLOSED)
"""Failures that speak against the tier. A full disk still serves loads; a bad chunk is one."""

MAX_SLICE_BYTES = 4 << 20
"""Of a job that comes when all lanes have work: in the end few lanes would run long slices, and
the others nothing."""


@dataclass(slots=True, eq=False)
class Taken:
    """What a tier knows of a job it took."""

    job: Job
    began: float
    deadline: float
    held_bytes: int
    """Of host memory, until no lane touches it any more."""
    pieces: set[Transfer] = field(default_factory=set)
    """Not settled: queued or running."""
    done: list[Key] = field(default_factory=list)
    failed: dict[Key, KVTiersError] = field(default_factory=dict)
    bytes: int = 0
    io_began: float | None = None
    io_ended: float = 0.0
    reported: bool = False

    def merge(self, piece: Transfer) -> None:
        """Take in the results of a piece that ended in time."""
        if any(piece.results):
            for key, size, error in zip(piece.keys, piece.bytes, piece.results, strict=True):
                if error is None:
                    self.done.append(key)
                    self.bytes += size
                else:
                    self.failed[key] = error
        else:
            self.done += piece.keys
            self.bytes += sum(piece.bytes)
        if self.io_began is None or piece.began < self.io_began:
            self.io_began = piece.began
        self.io_ended = max(piece.ended, self.io_ended)

    def check(self) -> None:
        """Raise AssertionError unless done, failed and what is under way divide the job's keys."""
        done, failed = set(self.done), set(self.failed)
        under_way = {key for piece in self.pieces for key in piece.keys}
        assert done.isdisjoint(failed), "a chunk is done and failed"
        if self.reported:  # pieces that outlived their deadline have failed
            under_way = set()
        assert under_way.isdisjoint(done | failed), "a chunk has ended and is under way"
        assert done | failed | under_way == set(self.job.keys), "the job's chunks are not all there"

    def fault(self) -> KVTiersError | None:
        """The failure that counts against the tier: one of its faults, and nothing done."""
        faults = (e for e in self.failed.values() if e.kind in TIER_FAULTS)
        return None if self.done else next(faults, None)

    def outcome(self) -> JobOutcome:
        """The job's one outcome. A piece that was not settled still uses its memory."""
        seconds = 0.0 if self.io_began is None else self.io_ended - self.io_began
        done, failed = tuple(self.done), dict(self.failed)
        return JobOutcome(self.job.id, done, failed, self.bytes, seconds, bool(self.pieces))


def split(
    sizes: Sequence[int], todo: Sequence[int], lanes: int, min_slice_bytes: int
) -> list[Sequence[int]]:
    """Cut the chunks ``todo`` (indices) into runs of about equal length.

    There are as many as ``lanes``, more if a run had above ``MAX_SLICE_BYTES`` otherwise, and fewer
    if it had less than ``min_slice_bytes`` on average: waking a lane has its price.
    """
    total = sum(sizes[i] for i in todo)
    worthwhile = max(1, total // max(1, min_slice_bytes))
    count = min(len(todo), max(lanes, total // MAX_SLICE_BYTES), worthwhile)
    bounds = [n * len(todo) // count for n in range(count + 1)] if count else [0]
    return [todo[start:end] for start, end in pairwise(bounds)]
