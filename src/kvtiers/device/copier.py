"""The contract of a copier: it moves the bytes of planned copies off the model's thread.

And what copiers have in common: what they refuse, and in which words.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from kvtiers.device.geometry import Geometry
from kvtiers.device.plans import CopyPlan
from kvtiers.errors import Kind, KVTiersError

if TYPE_CHECKING:
    import torch


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


class Outcomes:
    """How the jobs of one copier ended, until somebody asks. Not for several threads at once."""

    def __init__(self) -> None:
        self._new: list[CopyOutcome] = []
        self._done = 0
        self._failed = 0

    def add(self, outcome: CopyOutcome) -> None:
        """A job has ended."""
        self._new.append(outcome)
        self._done += outcome.ok
        self._failed += not outcome.ok

    def take(self) -> list[CopyOutcome]:
        """Those since the last call, in order."""
        taken, self._new = self._new, []
        return taken

    def describe(self, copier: object, *, is_closed: bool, unfinished: int) -> str:
        """The copier's ``repr``."""
        state = "closed" if is_closed else "open"
        return (
            f"<{type(copier).__name__} {state}: {unfinished} unfinished, {self._done} done, "
            f"{self._failed} failed>"
        )

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant, if any."""
        ended = self._done + self._failed
        assert len(self._new) <= ended, f"{len(self._new)} outcomes of {ended} jobs are left"

    def __repr__(self) -> str:
        return f"<Outcomes: {self._done} done, {self._failed} failed, {len(self._new)} not taken>"


class Copier(Protocol):
    """Moves blocks between device tensors and slots of the host region, in order of submission.

    Jobs that touch no slot or block in common may run at once and end in any order.
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


def failure(job_id: int, error: Exception, seconds: float = 0.0) -> CopyOutcome:
    """The outcome of a job that ``error`` ended."""
    return CopyOutcome(job_id, False, 0, seconds, f"{type(error).__name__}: {error}")


def refuse_outside(plan: CopyPlan, geometry: Geometry, sizes: Sequence[tuple[int, int]]) -> None:
    """Raise IndexError for a group, slot, sub-block or device block that is not there.

    ``sizes`` are, by group, how many slots and device blocks there are. Nobody else asks: layers
    share one storage, where a block beyond the last one is another layer's; negative numbers count
    from the end; and one index that is too high ends all work of an accelerator.
    """
    for chunk in plan.chunks:
        if not 0 <= chunk.group < len(sizes):
            raise IndexError(f"group {chunk.group} of {len(sizes)}")
    refuse_slots_outside(plan, [num_slots for num_slots, _ in sizes])
    per_chunk = geometry.blocks_per_chunk
    for chunk in plan.chunks:
        num_blocks = sizes[chunk.group][1]
        for sub, block in chunk.blocks:
            if not (0 <= block < num_blocks and 0 <= sub < per_chunk):
                raise IndexError(
                    f"device block {block} of {num_blocks}, sub-block {sub} of {per_chunk}"
                )
        for sub in chunk.missing:
            if not 0 <= sub < per_chunk:
                raise IndexError(f"sub-block {sub} of {per_chunk}")


def refuse_slots_outside(plan: CopyPlan, num_slots: Sequence[int]) -> None:
    """Raise IndexError for a slot that is not there; ``num_slots`` are by group."""
    for chunk in plan.chunks:
        if not 0 <= chunk.slot < num_slots[chunk.group]:
            raise IndexError(f"slot {chunk.slot} of {num_slots[chunk.group]}")


def refuse_unfit(tensors: Sequence["torch.Tensor"], geometry: Geometry, device: str) -> None:
    """Raise KVTiersError (``Kind.BROKEN``) for tensors that do not hold the geometry's pages.

    They must be (blocks, bytes of a padded page) of one-byte elements on a ``device`` of this type.
    """
    for page in (page for group in geometry.groups for page in group.pages):
        if page.tensor >= len(tensors):
            raise _error(
                f"A layer names KV tensor {page.tensor} of {len(tensors)}; please report this with "
                "the engine's version."
            )
        tensor = tensors[page.tensor]
        fits = (
            tensor.device.type == device
            and tensor.element_size() == 1
            and tensor.dim() == 2
            and tensor.stride(1) == 1
            and tensor.shape[1] >= page.local_bytes
        )
        if not fits:
            raise _error(
                f"KV tensor {page.tensor} ({tuple(tensor.shape)}, {tensor.dtype}, {tensor.device}) "
                f"is no table of blocks with {page.local_bytes} bytes on a {device} device; please "
                "report this with the engine's version."
            )


def closed(job_id: int) -> KVTiersError:
    """What ``submit`` raises after ``close``."""
    return _error(f"Copy job {job_id} came after the copier was closed.", Kind.CLOSED)


def submitted_twice(job_id: int) -> KVTiersError:
    """What ``submit`` raises for a job that is unfinished."""
    return _error(f"Copy job {job_id} was submitted twice.")


def _error(message: str, kind: Kind = Kind.BROKEN) -> KVTiersError:
    return KVTiersError(message, kind=kind, operation="copy")
