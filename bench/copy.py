"""The copier of the CPU beside memcpy: the same bytes, on the same number of threads.

    python -m bench.copy [--threads N] [--rounds 31] [--tiny]

A job stores 32 MiB from any device blocks into any slots, as they lie after an hour of serving; the
next loads them back. The other side is memmove of as many bytes in one piece per thread, from the
same KV cache into the same region and back. Sides take turns; both are warm, neither fits a cache
of the processor. Prints::

    LIMIT copy.contiguous <memcpy's time over ours, pages of 64 KiB: one run each>
    LIMIT copy.strided <the same, pages of 16 tokens of which a rank of two has 4 KiB each>
    FLAT copy.two_ranks <time of a 15 MB store by two ranks at once over that by one rank alone>
    RATE, NOTE ... <GB/s, and the share in processor time, which other processes do not spoil>
"""

import argparse
import ctypes
import mmap
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench.lines import median_of, remark
from kvtiers.device.copier import Direction
from kvtiers.device.cores import allowed_cores, copy_threads
from kvtiers.device.cpu import CpuCopier
from kvtiers.device.geometry import Geometry, GroupGeometry, PageMap, Run
from kvtiers.device.plans import CopyPlan, plan_copies
from kvtiers.host.region import Region

Seconds = tuple[float, float]
"""Wall time, and processor time of the thread that copies."""


@dataclass(frozen=True)
class Pages:
    """``layers`` of equal pages: ``runs`` of ``run_bytes`` on each of ``ranks``."""

    layers: int
    run_bytes: int
    runs: int = 1
    ranks: int = 1

    @property
    def block_bytes(self) -> int:
        """Bytes that a rank has of one block."""
        return self.layers * self.runs * self.run_bytes

    def geometry(self, rank: int = 0) -> Geometry:
        """As one rank sees it: chunks of one block."""
        stride, page = self.ranks * self.run_bytes, self.runs * self.run_bytes
        run = Run(0, rank * self.run_bytes, self.run_bytes, self.runs, self.run_bytes, stride)
        maps = (PageMap(n, page, self.ranks * page, (run,)) for n in range(self.layers))
        made = Geometry((GroupGeometry(0, 16, tuple(maps)),), 1, rank)
        made.check()
        return made


CONTIGUOUS = Pages(layers=16, run_bytes=64 << 10)
STRIDED = Pages(layers=16, run_bytes=4 << 10, runs=16, ranks=2)
WHOLE = Pages(layers=30, run_bytes=64 << 10)
"""15 MB are 8 blocks of it."""
HALF = Pages(layers=30, run_bytes=32 << 10, ranks=2)


class Side:
    """A KV cache of one allocation, as vLLM makes it on the CPU, and a region."""

    def __init__(self, pages: Pages, blocks: int, threads: int) -> None:
        self.geometry = pages.geometry()
        self.threads = threads
        self.num_bytes = blocks * pages.block_bytes
        self._blocks, self._slots = range(4 * blocks), range(2 * blocks)
        self._chosen = blocks
        shape = (pages.layers, 4 * blocks, pages.runs * pages.run_bytes)
        self._cache = torch.ones(shape, dtype=torch.int8)
        self._region = mmap.mmap(-1, 2 * blocks * self.geometry.slot_bytes)
        self.host = np.frombuffer(self._region, np.uint8)
        self.host[:] = 1
        self.device = self._cache.view(-1).numpy().view(np.uint8)
        self.copier = self.copier_with(time.perf_counter)
        self._random = random.Random(0)
        self._pool = ThreadPoolExecutor(threads)

    def copier_with(self, clock: Callable[[], float]) -> CpuCopier:
        """One whose outcomes are in seconds of ``clock``, on the thread that copies."""
        return CpuCopier(
            list(self._cache),
            memoryview(self._region),
            self.geometry,
            threads=self.threads,
            clock=clock,
        )

    def plan(self) -> CopyPlan:
        """Any blocks, any slots."""
        blocks = self._random.sample(self._blocks, self._chosen)
        slots = self._random.sample(self._slots, self._chosen)
        return plan_copies([self._chosen], [0], blocks, slots, self.geometry)

    def memcpy(self) -> Seconds:
        """There and back, in one piece per thread, on threads like the copier's."""
        size = self.num_bytes // self.threads
        start = self._random.randrange(len(self.device) - self.num_bytes)
        device, host = self.device.ctypes.data + start, self.host.ctypes.data

        def move(piece: int, to: int, come: int) -> float:
            began = time.thread_time()
            ctypes.memmove(to + piece * size, come + piece * size, size)
            return time.thread_time() - began

        began, pieces = time.perf_counter(), range(self.threads)
        spent = sum(self._pool.map(lambda piece: move(piece, host, device), pieces))
        spent += sum(self._pool.map(lambda piece: move(piece, device, host), pieces))
        return time.perf_counter() - began, spent

    def close(self) -> None:
        """Let go of the threads."""
        self.copier.close()
        self._pool.shutdown()


def copied(copier: CpuCopier, plan: CopyPlan, directions: tuple[Direction, ...]) -> Seconds:
    """Wall seconds from the first submission to the last end, and seconds of the copier's clock."""
    began = time.perf_counter()
    for job, direction in enumerate(directions):
        copier.submit(job, direction, plan)
    copier.wait(range(len(directions)))
    wall = time.perf_counter() - began
    outcomes = copier.poll()
    assert all(outcome.ok for outcome in outcomes), outcomes
    return wall, sum(outcome.seconds for outcome in outcomes)


def beside_memcpy(name: str, pages: Pages, blocks: int, threads: int, rounds: int) -> None:
    """Print the figure ``name``."""
    side, both = Side(pages, blocks, threads), (Direction.STORE, Direction.LOAD)
    pairs = []
    for number in range(rounds + 2):
        ours, theirs = copied(side.copier, side.plan(), both)[0], side.memcpy()[0]
        if number >= 2:
            pairs.append((ours, theirs))
    median_of("LIMIT", name, [theirs / ours for ours, theirs in pairs])
    rates = (
        2 * side.num_bytes / statistics.median(times) / 1e9 for times in zip(*pairs, strict=True)
    )
    remark("RATE", name, "{:.1f} {:.1f} GB/s: ours, memcpy".format(*rates))
    if threads == 1:
        remark("NOTE", name, f"{_in_processor_time(side, rounds):.3f} in processor time")
    side.close()


def _in_processor_time(side: Side, rounds: int) -> float:
    copier, ratios = side.copier_with(time.thread_time), []
    for _ in range(rounds):
        ours = copied(copier, side.plan(), (Direction.STORE, Direction.LOAD))[1]
        ratios.append(side.memcpy()[1] / ours)
    copier.close()
    return statistics.median(ratios)


@contextmanager
def _rank(pages: Pages, rank: int, blocks: int, name: str) -> Iterator[Callable[[], Seconds]]:
    """A worker of its own; the call stores all blocks and says when it began and ended."""
    geometry = pages.geometry(rank)
    cache = torch.ones((pages.layers, blocks, pages.runs * pages.run_bytes), dtype=torch.int8)
    with Region.attach(name, {}, blocks, geometry.slot_bytes) as region:
        copier = CpuCopier(list(cache), region.buffer, geometry)
        plan = plan_copies([blocks], [0], range(blocks), range(blocks), geometry)

        def store() -> Seconds:
            began = time.perf_counter()
            copied(copier, plan, (Direction.STORE,))
            return began, time.perf_counter()

        try:
            yield store
        finally:
            copier.close()
            region.unlink()


def _serve(pages: Pages, rank: int, blocks: int, name: str, start: Any, answers: Any) -> None:
    """In a process of its own: store once whenever all have come to ``start``."""
    with _rank(pages, rank, blocks, name) as store:
        while True:
            start.wait()
            answers.send(store())
            if not answers.recv():
                return


def two_ranks(blocks: int, rounds: int) -> None:
    """Print how much longer two ranks at once take for the same chunks than one alone."""
    spawn = multiprocessing.get_context("spawn")
    start, pipes, workers = spawn.Barrier(2), [], []
    for rank in range(2):
        ours, theirs = spawn.Pipe()
        given = (HALF, rank, blocks, f"bench-copy-{os.getpid()}-2", start, theirs)
        workers.append(spawn.Process(target=_serve, args=given, daemon=True))
        workers[-1].start()
        pipes.append(ours)
    ratios, times = [], []
    with _rank(WHOLE, 0, blocks, f"bench-copy-{os.getpid()}-1") as alone:
        for number in range(rounds + 2):
            spans = [pipe.recv() for pipe in pipes]
            began, ended = alone()
            for pipe in pipes:
                pipe.send(number < rounds + 1)
            if number >= 2:
                both = max(end for _, end in spans) - min(begin for begin, _ in spans)
                ratios.append(both / (ended - began))
                times.append((both * 1e3, (ended - began) * 1e3))
    for worker in workers:
        worker.join()
    median_of("FLAT", "copy.two_ranks", ratios)
    middles = (statistics.median(t) for t in zip(*times, strict=True))
    size = blocks * WHOLE.block_bytes / 1e6
    remark("TIME", "copy.two_ranks", "{:.2f} {:.2f} ms: two, one; {:.0f} MB".format(*middles, size))


def measure(threads: int, rounds: int, tiny: bool = False) -> None:
    """Print all figures."""
    blocks = 2 if tiny else 32
    beside_memcpy("copy.contiguous", CONTIGUOUS, blocks, threads, rounds)
    beside_memcpy("copy.strided", STRIDED, blocks, threads, rounds)
    two_ranks(1 if tiny else 8, rounds)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    default = copy_threads(len(allowed_cores()), 1)
    parser.add_argument("--threads", type=int, default=default, help="of each side")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--tiny", action="store_true", help="only to see that it runs")
    given = parser.parse_args()
    measure(given.threads, 7 if given.tiny else given.rounds, given.tiny)


if __name__ == "__main__":
    main()
