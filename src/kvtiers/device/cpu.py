"""The copier for KV caches in host memory: one thread, numpy, no torch operation.

Copies are strided numpy assignments: they release the GIL and are single-threaded. A torch
``copy_`` would start an OpenMP team that spins beside the model's own.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtiers.device.copier import CopyOutcome, Direction
from kvtiers.device.geometry import ChunkCopy, CopyPlan, Geometry, PageMap
from kvtiers.device.strided import (
    Bytes,
    Layers,
    Segment,
    gather_layers,
    segments,
    window,
    zero_unwritten,
)
from kvtiers.errors import Kind, KVTiersError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class _Job:
    id: int
    direction: Direction
    plan: CopyPlan


class CpuCopier:
    """Copies between CPU tensors and the slots in ``region_buffer``, in order, on one thread.

    ``tensors`` are the KV cache, (blocks, bytes of a padded page) of one-byte elements;
    ``region_buffer`` is the area of the slots, slot ``i`` at ``i * geometry.granule_bytes``.
    ``clock`` (seconds) is read on the copier's thread before and after each job.
    Raises KVTiersError (``Kind.BROKEN``) if the tensors do not fit the geometry.
    """

    def __init__(
        self,
        tensors: Sequence["torch.Tensor"],
        region_buffer: memoryview,
        geometry: Geometry,
        *,
        clock: Callable[[], float] = time.perf_counter,
        thread: Callable[..., threading.Thread] = threading.Thread,
    ) -> None:
        _check_tensors(tensors, geometry)
        self._geometry = geometry
        self._clock = clock
        self._host: Bytes = np.frombuffer(region_buffer, dtype=np.uint8)
        self._num_slots = len(self._host) // geometry.granule_bytes
        self._layers = [gather_layers(tensors, group.pages) for group in geometry.groups]
        self._changed = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._unfinished: set[int] = set()
        self._outcomes: list[CopyOutcome] = []
        self._done = 0
        self._failed = 0
        self._closing = False
        self._thread = thread(target=self._work, name="kvtiers-copier", daemon=True)
        self._thread.start()

    def submit(self, job_id: int, direction: Direction, plan: CopyPlan) -> None:
        """Take a job; returns before its bytes move."""
        with self._changed:
            if self._closing:
                raise _error(f"Copy job {job_id} came after the copier was closed.", Kind.CLOSED)
            if job_id in self._unfinished:
                raise _error(f"Copy job {job_id} was submitted twice.", Kind.BROKEN)
            self._unfinished.add(job_id)
            self._waiting.append(_Job(job_id, direction, plan))
            self._changed.notify_all()

    def poll(self) -> list[CopyOutcome]:
        """Jobs that ended since the last call."""
        with self._changed:
            outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def wait(self, job_ids: Collection[int]) -> None:
        """Block until none of these jobs is unfinished."""
        with self._changed:
            self._changed.wait_for(lambda: self._unfinished.isdisjoint(job_ids))

    def close(self) -> None:
        """Finish the running job, fail the waiting ones, let go of all memory."""
        with self._changed:
            self._closing = True
            while self._waiting:
                job = self._waiting.popleft()
                self._finish(CopyOutcome(job.id, False, 0, 0.0, "the copier was closed"))
            self._changed.notify_all()
        self._thread.join()
        self._layers = []
        self._host = np.empty(0, np.uint8)

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant, if any."""
        with self._changed:
            waiting = {job.id for job in self._waiting}
            assert len(waiting) == len(self._waiting), "a job waits twice"
            assert waiting <= self._unfinished, "a waiting job counts as finished"
            assert len(self._unfinished - waiting) <= 1, "more than one job is running"
            assert not (self._closing and waiting), "a job waits for a closed copier"

    def __repr__(self) -> str:
        state = "closed" if self._closing else "open"
        return (
            f"<CpuCopier {state}: {len(self._unfinished)} unfinished, {self._done} done, "
            f"{self._failed} failed>"
        )

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                job = self._waiting.popleft()
            outcome = self._run(job)
            with self._changed:
                self._finish(outcome)

    def _finish(self, outcome: CopyOutcome) -> None:
        self._unfinished.discard(outcome.job_id)
        self._outcomes.append(outcome)
        self._done += outcome.ok
        self._failed += not outcome.ok
        self._changed.notify_all()

    def _run(self, job: _Job) -> CopyOutcome:
        begin = self._clock()
        try:
            self._check_range(job.plan)
            if job.direction is Direction.STORE:
                zero_unwritten(self._host, self._geometry, job.plan)
            moved = sum(
                self._copy_group(group, job) for group in {chunk.group for chunk in job.plan.chunks}
            )
        except Exception as e:  # whatever it was: a failed copy is a miss, the engine goes on
            seconds = self._clock() - begin
            return CopyOutcome(job.id, False, 0, seconds, f"{type(e).__name__}: {e}")
        return CopyOutcome(job.id, True, moved, self._clock() - begin)

    def _check_range(self, plan: CopyPlan) -> None:
        """Layers share one storage, where a block beyond the last one is another layer's."""
        for chunk in plan.chunks:
            num_blocks = min(layers.num_blocks for layers in self._layers[chunk.group])
            if not 0 <= chunk.slot < self._num_slots:
                raise IndexError(f"slot {chunk.slot} of {self._num_slots}")
            for _, block in chunk.blocks:
                if not 0 <= block < num_blocks:
                    raise IndexError(f"device block {block} of {num_blocks}")

    def _copy_group(self, group: int, job: _Job) -> int:
        chunks = [chunk for chunk in job.plan.chunks if chunk.group == group]
        everything = segments(_places(chunks))
        moved = 0
        for layers in self._layers[group]:
            chosen = everything
            if job.direction is Direction.STORE and layers.page.num_writers > 1:
                chosen = segments(self._own_places(layers.page, chunks))
            moved += sum(self._copy(group, layers, s, job.direction) for s in chosen)
        return moved

    def _own_places(
        self, page: PageMap, chunks: Sequence[ChunkCopy]
    ) -> Iterator[tuple[int, int, int]]:
        place = self._geometry.place
        return (p for c in chunks for p in _places([c]) if page.writes(place(c.group, p[0], p[1])))

    def _copy(self, group: int, layers: Layers, part: Segment, direction: Direction) -> int:
        page, granule = layers.page, self._geometry.granule_bytes
        device_start = layers.device_start + part.block * layers.block_step
        host_start = part.slot * granule + self._geometry.page_start(group, layers.first, part.sub)
        layer_step = page.canonical_bytes * self._geometry.blocks_per_chunk
        block_step = part.slot_step * granule + part.sub_step * page.canonical_bytes
        moved = 0
        for run in page.runs:
            shape = (layers.count, part.blocks, run.count, run.nbytes)
            device = window(
                layers.device,
                shape,
                device_start + run.device_offset,
                (layers.device_step, part.block_step * layers.block_step, run.device_stride, 1),
            )
            host = window(
                self._host,
                shape,
                host_start + run.page_offset,
                (layer_step, block_step, run.page_stride, 1),
            )
            if direction is Direction.STORE:
                host[:] = device
            else:
                device[:] = host
            moved += device.size
        return moved


def _places(chunks: Iterable[ChunkCopy]) -> Iterator[tuple[int, int, int]]:
    return ((chunk.slot, sub, block) for chunk in chunks for sub, block in chunk.blocks)


def _check_tensors(tensors: Sequence["torch.Tensor"], geometry: Geometry) -> None:
    for page in (page for group in geometry.groups for page in group.pages):
        if page.tensor >= len(tensors):
            raise _error(
                f"A layer names KV tensor {page.tensor} of {len(tensors)}; please report this with "
                "the engine's version.",
                Kind.BROKEN,
            )
        tensor = tensors[page.tensor]
        fits = (
            tensor.device.type == "cpu"
            and tensor.element_size() == 1
            and tensor.dim() == 2
            and tensor.stride(1) == 1
            and tensor.shape[1] >= page.local_bytes
        )
        if not fits:
            raise _error(
                f"KV tensor {page.tensor} ({tuple(tensor.shape)}, {tensor.dtype}, {tensor.device}) "
                f"is no table of blocks with {page.local_bytes} bytes in host memory; please "
                "report this with the engine's version.",
                Kind.BROKEN,
            )


def _error(message: str, kind: Kind) -> KVTiersError:
    return KVTiersError(message, kind=kind, operation="copy")
