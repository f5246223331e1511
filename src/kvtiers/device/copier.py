"""The contract of a copier: it moves the bytes of planned copies off the model's thread."""

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kvtiers.device.geometry import CopyPlan


class Direction(Enum):
    """Which way a job moves bytes."""

    STORE = "store"
    """Device -> host."""
    LOAD = "load"
    """Host -> device."""


@dataclass(frozen=True, slots=True)
class CopyOutcome:
    """How a job ended. After a failure its destination may hold anything."""

    job_id: int
    ok: bool
    bytes: int
    """Bytes this rank moved."""
    seconds: float
    error: str | None = None


class Copier(Protocol):
    """Moves blocks between device tensors and slots of the host region, in order of submission.

    All methods are called on the thread of the model. Caller guarantees: the slots and blocks of a
    job are neither reused nor freed before its outcome. A failed copy is an outcome, never an
    exception, and leaves the copier usable.
    """

    def submit(self, job_id: int, direction: Direction, plan: CopyPlan) -> None:
        """Take a job; returns before its bytes move.

        Raises KVTiersError: ``Kind.CLOSED`` after ``close``, ``Kind.BROKEN`` if a job of this id is
        unfinished.
        """

    def poll(self) -> list[CopyOutcome]:
        """Jobs that ended since the last call, each exactly once. Never blocks."""

    def wait(self, job_ids: Collection[int]) -> None:
        """Block until none of these jobs is unfinished; ids that are not in flight are ignored."""

    def close(self) -> None:
        """Finish the running job, fail the waiting ones, let go of all memory. Twice is fine."""
