"""The copier for KV caches in host memory: numpy on threads of its own, no torch operation.

Copies are strided numpy assignments: they release the GIL and are single-threaded. A torch
``copy_`` would start an OpenMP team that spins beside the model's own. Both sides of every layer
are viewed once, by place, so that one block costs one pair of indices.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

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
from kvtiers.device.cores import use_allowed_cores
from kvtiers.device.geometry import Geometry
from kvtiers.device.plans import CopyPlan
from kvtiers.device.sides import LayerSides, cut_layers, cut_tails, sizes_of
from kvtiers.device.strided import balanced_ranges
from kvtiers.device.views import Bytes, NumpyCutter, indices, move, zero
from kvtiers.device.work import GroupWork, work_of

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
    ``threads`` threads, on which ``prepare`` is called first; it must not raise. ``clock``
    (seconds) is read on the first one before and after each job. Raises KVTiersError
    (``Kind.BROKEN``) if the tensors do not fit the geometry, RuntimeError if the system has no
    threads to give.
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
        size, cutter = region_buffer.nbytes, NumpyCutter(np.frombuffer(region_buffer, np.uint8))
        self._sizes = sizes_of(tensors, size, geometry)
        self._shares = [
            cut_layers(tensors, geometry, size, cutter, chosen)
            for chosen in _divided(geometry, threads)
        ]
        self._tails = cut_tails(geometry, size, cutter)
        self._prepare = prepare
        self._pool = _running_pool(threads - 1, prepare)
        self._changed = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._unfinished: set[int] = set()
        self._outcomes = Outcomes()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="kvtiers-copier", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._pool.shutdown()
            raise

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
            return self._outcomes.take()

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
        self._tails = []

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant, if any."""
        with self._changed:
            self._outcomes.check()
            waiting = {job.id for job in self._waiting}
            assert len(waiting) == len(self._waiting), "a job waits twice"
            assert waiting <= self._unfinished, "a waiting job counts as finished"
            assert len(self._unfinished - waiting) <= 1, "more than one job is running"
            assert not (self._closing and waiting), "a job waits for a closed copier"

    def __repr__(self) -> str:
        return self._outcomes.describe(
            self, is_closed=self._closing, unfinished=len(self._unfinished)
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
        self._outcomes.add(outcome)
        self._changed.notify_all()

    def _run(self, job: _Job) -> CopyOutcome:
        begin = self._clock()
        try:
            refuse_outside(job.plan, self._geometry, self._sizes)
            moved = self._move(job)
        except Exception as e:  # whatever it was: a failed copy is a miss, the engine goes on
            seconds = self._clock() - begin
            return failure(job.id, e, seconds)
        return CopyOutcome(job.id, True, moved, self._clock() - begin)

    def _move(self, job: _Job) -> int:
        """Bytes moved; no thread touches any more when this returns or raises."""
        work = work_of(job.plan, job.direction, self._geometry)
        others: list[Future[int]] = []
        try:
            for share in self._shares[1:]:
                others.append(self._pool.submit(_copy_share, share, work, job.direction))
            for group in work:
                zero(self._tails[group.group], group.tails)
            moved = _copy_share(self._shares[0], work, job.direction)
        finally:
            wait(others)
        return moved + sum(other.result() for other in others)


def _running_pool(threads: int, prepare: Callable[[], None]) -> ThreadPoolExecutor:
    """A pool of which all threads have started.

    One that starts them when there is work keeps the work where that fails, and does it when a
    later start succeeds: long after the job failed, into slots that are another's by then.
    """
    pool = ThreadPoolExecutor(
        max(1, threads), thread_name_prefix="kvtiers-copier", initializer=prepare
    )
    all_there = threading.Event()
    try:
        for _ in range(threads):
            pool.submit(all_there.wait)  # so none is idle, and each gets a thread of its own
    except BaseException:
        all_there.set()
        pool.shutdown(cancel_futures=True)
        raise
    all_there.set()
    return pool


_Share = Sequence[Sequence[LayerSides[Bytes]]]
"""By group the layers that one thread copies."""


def _divided(geometry: Geometry, threads: int) -> list[list[range]]:
    """For each thread, by group, the layers that it copies."""
    by_group = [balanced_ranges([p.local_bytes for p in g.pages], threads) for g in geometry.groups]
    return [list(ranges) for ranges in zip(*by_group, strict=True)]


def _copy_share(share: _Share, work: Sequence[GroupWork], direction: Direction) -> int:
    return sum(_copy_group(share[group.group], group, direction) for group in work)


def _copy_group(layers: Sequence[LayerSides[Bytes]], group: GroupWork, direction: Direction) -> int:
    chosen = {turn: indices(work.places) for turn, work in group.by_turn.items()}
    moved = 0
    for some in layers:
        for run in some.runs:
            zero(run.host, group.by_turn[some.turn].zeroed)
        moved += move(some, chosen[some.turn], direction)
    return moved
