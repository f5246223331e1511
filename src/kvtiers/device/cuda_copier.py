"""A copier for CUDA of our own, in plain torch, for geometries that vLLM's worker cannot make.

Not run on a GPU so far; ``scripts/check_cuda.py`` is what to run first. Each direction has a stream
beside the model's. A job waits for what the model had submitted before it, and for unfinished jobs
of the other direction that touch the same slots or blocks: so the effect is that of one job after
the other, while stores and loads use both directions of the bus.

A failed copy is an outcome, but CUDA errors are sticky: after one of those all others fail, too.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from kvtiers.device.copier import (
    CopyOutcome,
    Direction,
    Outcomes,
    closed,
    failure,
    refuse_outside,
    refuse_unfit,
    submitted_twice,
)
from kvtiers.device.geometry import Geometry
from kvtiers.device.plans import CopyPlan
from kvtiers.device.sides import Sides, cut_layers, cut_tails, sizes_of
from kvtiers.device.streams import Device, Event
from kvtiers.device.tables import WordCutter
from kvtiers.device.work import work_of

PORTION_BYTES = 16 << 20
"""Of device memory that a copy takes at once.

torch's allocator keeps what one copy took for the next one on the same stream: so about this much
stays taken for each direction, from its first copy on.
"""

_Upload = Callable[[Sequence[tuple[int, ...]]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Job:
    id: int
    direction: Direction
    touches: frozenset[tuple[int, int]]
    """(0, slot) and (1, device block)."""
    bytes: int
    start: Event
    end: Event
    error: Exception | None


class CudaCopier:
    """Copies between tensors of ``device`` and the slots in ``region_buffer``, which it pins.

    ``tensors`` are the KV cache, (blocks, bytes of a padded page) of one-byte elements. A copy
    takes up to ``portion_bytes`` of device memory, or one block's. Raises KVTiersError
    (``Kind.BROKEN``) if the tensors do not fit the geometry, ConfigError if the region cannot be
    pinned.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        region_buffer: memoryview,
        geometry: Geometry,
        device: Device,
        *,
        portion_bytes: int = PORTION_BYTES,
    ) -> None:
        refuse_unfit(tensors, geometry, device.kind)
        self._geometry = geometry
        self._device = device
        self._portion_bytes = portion_bytes
        size = region_buffer.nbytes
        self._sizes = sizes_of(tensors, size, geometry)
        host = device.map_host(region_buffer)
        try:
            cutter = WordCutter(host)
            self._layers = cut_layers(tensors, geometry, size, cutter)
            self._tails = cut_tails(geometry, size, cutter)
            self._streams = {direction: device.stream() for direction in Direction}
        except BaseException:
            device.unmap_host()
            raise
        self._jobs: dict[int, _Job] = {}
        self._outcomes = Outcomes()
        self._closed = False

    def submit(self, job_id: int, direction: Direction, plan: CopyPlan) -> None:
        """Take a job; returns before its bytes move."""
        if self._closed:
            raise closed(job_id)
        if job_id in self._jobs:
            raise submitted_twice(job_id)
        try:
            refuse_outside(plan, self._geometry, self._sizes)
            self._jobs[job_id] = self._begin(job_id, direction, plan)
        except Exception as e:  # whatever it was: a failed copy is a miss, the engine goes on
            self._outcomes.add(failure(job_id, e))

    def poll(self) -> list[CopyOutcome]:
        """Jobs that ended since the last call."""
        for job in list(self._jobs.values()):
            self._settle(job, wait=False)
        return self._outcomes.take()

    def wait(self, job_ids: Collection[int]) -> None:
        """Block until none of these jobs is unfinished."""
        for job_id in dict.fromkeys(job_ids):
            if job_id in self._jobs:
                self._settle(self._jobs[job_id], wait=True)

    def close(self) -> None:
        """Finish all jobs, for the device has them all; let go of all memory."""
        self._closed = True
        self.wait(list(self._jobs))
        self._layers.clear()
        self._tails.clear()
        self._device.unmap_host()

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant, if any."""
        self._outcomes.check()
        assert all(job.id == key for key, job in self._jobs.items()), "a job is under another's id"
        assert not (self._closed and self._jobs), "a closed copier has unfinished jobs"

    def __repr__(self) -> str:
        return self._outcomes.describe(self, is_closed=self._closed, unfinished=len(self._jobs))

    def _begin(self, job_id: int, direction: Direction, plan: CopyPlan) -> _Job:
        stream, touches = self._streams[direction], _touches(plan)
        # Stores read what the model has written; loads write what it may still be clearing.
        stream.wait_for(self._device.mark_model())
        for other in self._jobs.values():
            if other.direction is not direction and other.touches & touches:
                stream.wait_for(other.end)
        start, moved, error = stream.mark(), 0, None
        try:
            with stream.running():
                moved = self._run(plan, direction)
        except Exception as e:  # it has ended when what was submitted of it has
            error = e
        return _Job(job_id, direction, touches, moved, start, stream.mark(), error)

    def _run(self, plan: CopyPlan, direction: Direction) -> int:
        """Submit the work of one job; how many bytes it moves."""
        upload = _uploads(self._device)
        moved = 0
        for group in work_of(plan, direction, self._geometry):
            if group.tails:
                _zero(self._tails[group.group], upload(group.tails))
            for layers in self._layers[group.group]:
                places, zeroed = group.by_turn[layers.turn]
                count = max(1, self._portion_bytes // layers.block_bytes)
                for run in layers.runs:
                    if zeroed:
                        _zero(run.host, upload(zeroed))
                    for start in range(0, len(places), count):
                        _copy(run, upload(places)[:, start : start + count], direction)
                moved += len(places) * layers.block_bytes
        return moved

    def _settle(self, job: _Job, *, wait: bool) -> None:
        try:
            if wait:
                job.end.wait()
            elif not job.end.done():
                return
            error, seconds = job.error, job.end.seconds_since(job.start)
        except Exception as e:  # the device is broken: see the module
            error, seconds = e, 0.0
        del self._jobs[job.id]
        if error is not None:
            self._outcomes.add(failure(job.id, error, seconds))
        else:
            self._outcomes.add(CopyOutcome(job.id, True, job.bytes, seconds))


def _uploads(device: Device) -> _Upload:
    """Lists of places as tables on the device: a row per number of a place. Each list once."""
    made: dict[int, tuple[object, torch.Tensor]] = {}

    def upload(places: Sequence[tuple[int, ...]]) -> torch.Tensor:
        if id(places) not in made:
            table = device.indices(list(zip(*places, strict=True)))
            made[id(places)] = places, table  # the list is kept, and so is its id
        return made[id(places)][1]

    return upload


def _touches(plan: CopyPlan) -> frozenset[tuple[int, int]]:
    slots = ((0, chunk.slot) for chunk in plan.chunks)
    blocks = ((1, block) for chunk in plan.chunks for _, block in chunk.blocks)
    return frozenset([*slots, *blocks])


def _copy(run: Sides[torch.Tensor], table: torch.Tensor, direction: Direction) -> None:
    """``table``: (slots, sub-blocks, blocks), one column per block."""
    slots, subs, blocks = table
    if direction is Direction.STORE:
        run.host.index_put_((slots, subs), run.device.index_select(0, blocks))
    else:
        run.device.index_put_((blocks,), run.host[slots, subs])


def _zero(view: torch.Tensor, table: torch.Tensor) -> None:
    """Zero the places in ``table``, one row for each of the first dimensions of ``view``."""
    view.index_put_(tuple(table), torch.zeros((), dtype=view.dtype, device=view.device))
