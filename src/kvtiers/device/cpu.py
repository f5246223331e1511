"""The copier for KV caches in host memory: numpy on threads of its own, no torch operation.

Copies are strided numpy assignments: they release the GIL and are single-threaded. A torch
``copy_`` would start an OpenMP team that spins beside the model's own. Both sides of every layer
are viewed once, by place, so that one block costs one pair of indices.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtiers.device.copier import (
    CopyOutcome,
    Direction,
    closed,
    failure,
    refuse_outside,
    refuse_unfit,
    submitted_twice,
)
from kvtiers.device.cores import use_allowed_cores
from kvtiers.device.geometry import CopyPlan, Geometry
from kvtiers.device.strided import Bytes, own_places, places_of, zero_unwritten
from kvtiers.device.views import Pattern, divided, indices, move

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class _Job:
    id: int
    direction: Direction
    plan: CopyPlan


class CpuCopier:
    """Copies between CPU tensors and the slots in ``region_buffer``, one job after the other.

    ``tensors`` are the KV cache, (blocks, bytes of a padded page) of one-byte elements;
    ``region_buffer`` is the area of the slots. The layers of each job are divided between
    ``threads`` threads, on which ``prepare`` is called first. ``clock`` (seconds) is read on the
    first one before and after each job. Raises KVTiersError (``Kind.BROKEN``) if the tensors do not
    fit the geometry.
    """

    def __init__(
        self,
        tensors: Sequence["torch.Tensor"],
        region_buffer: memoryview,
        geometry: Geometry,
        *,
        threads: int = 1,
        prepare: Callable[[], None] = use_allowed_cores,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        refuse_unfit(tensors, geometry, "cpu")
        self._geometry = geometry
        self._clock = clock
        self._host: Bytes = np.frombuffer(region_buffer, dtype=np.uint8)
        self._shares = divided(tensors, self._host, geometry, threads)
        self._sizes = [
            _sizes(p for share in self._shares for p in share[group.group])
            for group in geometry.groups
        ]
        self._prepare = prepare
        self._pool = ThreadPoolExecutor(
            max(1, threads - 1), thread_name_prefix="kvtiers-copier", initializer=prepare
        )  # its threads start with the first job for them
        self._changed = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._unfinished: set[int] = set()
        self._outcomes: list[CopyOutcome] = []
        self._done = 0
        self._failed = 0
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="kvtiers-copier", daemon=True)
        self._thread.start()

    def submit(self, job_id: int, direction: Direction, plan: CopyPlan) -> None:
        """Take a job; returns before its bytes move."""
        with self._changed:
            if self._closing:
                raise closed(job_id)
            if job_id in self._unfinished:
                raise submitted_twice(job_id)
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
        self._pool.shutdown()
        self._shares = []
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
        self._prepare()
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
            refuse_outside(job.plan, self._sizes)
            if job.direction is Direction.STORE:
                zero_unwritten(self._host, self._geometry, job.plan)
            moved = self._move(job)
        except Exception as e:  # whatever it was: a failed copy is a miss, the engine goes on
            seconds = self._clock() - begin
            return failure(job.id, e, seconds)
        return CopyOutcome(job.id, True, moved, self._clock() - begin)

    def _move(self, job: _Job) -> int:
        """Bytes moved; no thread touches any more when this returns or raises."""
        others = [self._pool.submit(self._copy_share, share, job) for share in self._shares[1:]]
        try:
            moved = self._copy_share(self._shares[0], job)
        finally:
            wait(others)
        return moved + sum(other.result() for other in others)

    def _copy_share(self, share: Sequence[Sequence[Pattern]], job: _Job) -> int:
        groups = {chunk.group for chunk in job.plan.chunks}
        return sum(self._copy_group(share[group], group, job) for group in groups)

    def _copy_group(self, patterns: Sequence[Pattern], group: int, job: _Job) -> int:
        places = places_of(chunk for chunk in job.plan.chunks if chunk.group == group)
        everything = indices(places)
        moved = 0
        for pattern in patterns:
            chosen = everything
            if job.direction is Direction.STORE and pattern.page.num_writers > 1:
                chosen = indices(own_places(places, pattern.page, self._geometry))
            moved += move(pattern, chosen, job.direction)
        return moved


def _sizes(patterns: Iterable[Pattern]) -> tuple[int, int]:
    """How many slots and device blocks all of these layers have."""
    runs = [run for pattern in patterns for run in pattern.runs]
    return min(len(run.host) for run in runs), min(len(run.device) for run in runs)
