"""A scheduler step while every lane of an ``fs`` tier is at work, over the same step at rest.

    python -m bench.io_steps [--blocks 7] [--steps 50] [--root DIR] [--layout files|log]
                             [--tiny]

Our manager with one ``fs`` tier: chunks of 512 KiB in a shared mapping, real files. The timed step
is 64 lookups of chunks in host memory, 64 chunks stored and confirmed, and the end of the step,
which takes in what the lanes finished and sends the next job. Before it, untimed, another step
sends a promotion of 64 chunks from disk. At rest the lanes are idle again when the timed step
begins; at work all lanes have something to do and more is queued. Blocks of both alternate. The
garbage collector is off. Prints::

    MODE io O_DIRECT|buffered
    RATE io <GB/s stored and loaded while at work; share of the lanes that had work then>
    TIME io.step.<rest|work> <ms: median and 99th percentile; the same of processor time>
    NOTE io.step.<rest|work> <how often the thread waited, or lost its core>
    FLAT io.step_p99 <99th percentile at work / at rest>
"""

import argparse
import mmap
import os
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.collector import no_collector
from bench.lines import figure, remark
from bench.operations import lookup_one
from bench.sides import BATCH, TOKENS, Side, manager_over, request_keys
from kvtiers.chunks import ChunkLayout, GroupLayout, Namespace
from kvtiers.tiers import build_tier

PATIENCE_S = 60.0
BOUNDS = {"files": {"capacity_fraction": 0.9}, "log": {"capacity_bytes": 8 << 30}}
"""Files are removed behind the tier's back: it must not think that its folder is full."""
NAMES = {"files": "io", "log": "io_log"}
"""How the figures of each layout are called."""
_QUEUED = 8
"""Pieces of work (1 MiB and more) that are queued when a step at work begins; lanes have theirs."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is done."""

    blocks: int = 7
    steps: int = 50
    """Timed steps of a block."""
    chunk_bytes: int = 512 << 10
    slots: int = 2048
    on_disk: int = 3072
    """Chunks on disk to promote, in turn: more than there are slots, so none is in host memory."""


TINY = Size(blocks=2, steps=2, chunk_bytes=4096)


@dataclass(frozen=True, slots=True)
class Step:
    """One timed step."""

    seconds: float
    processor: float
    """Seconds that the thread ran."""
    waits: int
    """How often it gave its core up: for a lock, the interpreter's among them, or for I/O."""
    preemptions: int
    """How often it lost its core to another thread."""
    lanes_busy: float
    """Share of the lanes that had work when it began."""
    stored: int


class Bench:
    """A manager, its tier and the memory between them."""

    def __init__(self, root: str, size: Size, layout: str) -> None:
        self.root, self.size = root, size
        self._memory = memoryview(mmap.mmap(-1, size.slots * size.chunk_bytes))
        for slot in range(size.slots):
            view = self._view(slot, size.chunk_bytes, True)
            view[:] = slot.to_bytes(4, "little") * (size.chunk_bytes // 4)
        self.tier: Any = build_tier(
            {"type": "fs", "root_dir": root, "layout": layout, **BOUNDS[layout]},
            0,
            namespace=Namespace({"bench": "io_steps"}),
            layout=ChunkLayout((GroupLayout(0, size.chunk_bytes, TOKENS),)),
            clock=time.monotonic,
            wall_clock=time.time,
        )
        self.side = Side(manager_over(self.tier, size.slots, size.chunk_bytes, self._view))
        self._stored = self._promoted = 0
        """Next chunk to store; next chunk to promote, of the first ``on_disk`` ones."""
        self._recent: list[Any] = []
        while self._stored < size.on_disk + size.slots:
            self.step()
            self.wait_until_idle()
        self._kept = {str(file) for file in self._files()}

    def _view(self, slot: int, nbytes: int, writable: bool) -> memoryview:
        view = self._memory[slot * self.size.chunk_bytes :][:nbytes]
        return view if writable else view.toreadonly()

    def _files(self) -> Iterator[Path]:
        return Path(self.root).rglob("*.kvc")

    def step(self) -> Step:
        """The step that is timed."""
        side, manager = self.side, self.side.manager
        names = request_keys(self._stored)
        self._stored += BATCH
        asks, stores = side.request(self._recent), side.request(names)
        busy = self.lanes_busy
        before = resource.getrusage(resource.RUSAGE_THREAD)
        began, ran = time.perf_counter(), time.thread_time()
        lookup_one(side, self._recent, asks)
        output = manager.prepare_store(names, stores)
        manager.complete_store(set(output.keys_to_store), stores)
        side.step()
        ran, seconds = time.thread_time() - ran, time.perf_counter() - began
        after = resource.getrusage(resource.RUSAGE_THREAD)
        side.finish(asks)
        side.finish(stores)
        self._recent = output.keys_to_store
        return Step(
            seconds,
            ran,
            after.ru_nvcsw - before.ru_nvcsw,
            after.ru_nivcsw - before.ru_nivcsw,
            busy,
            len(output.keys_to_store),
        )

    def promote(self) -> None:
        """A step that asks for 64 chunks that are on disk only."""
        names = request_keys(self._promoted)
        self._promoted = (self._promoted + BATCH) % self.size.on_disk
        context = self.side.request(names)
        lookup_one(self.side, names, context)
        self.side.step()
        self.side.finish(context)

    @property
    def lanes_busy(self) -> float:
        """Share of the lanes that have work."""
        return statistics.mean(lane.work is not None for lane in self.tier._lanes._lanes)

    @property
    def queued(self) -> int:
        """Pieces of work that wait for a lane."""
        return sum(map(len, self.tier._lanes._queues.values()))

    def wait_until_idle(self) -> None:
        """Until no lane works; outcomes are left for the next step to take in."""
        quiet, until = 0, time.monotonic() + PATIENCE_S
        while quiet < 3:  # a lane is between two pieces for a moment
            time.sleep(0.0005)
            idle = not self.queued and not self.lanes_busy
            quiet = quiet + 1 if idle else 0
            if time.monotonic() > until:
                raise SystemExit(f"the lanes do not come to rest: {self.tier!r}")

    def wait_until_queue_is_short(self) -> None:
        """Until lanes are about to run out of work; the engine computes meanwhile."""
        time.sleep(0.001)
        while self.queued > _QUEUED:
            time.sleep(0.0005)

    def block(self, at_work: bool) -> list[Step]:
        """Some steps in a row."""
        steps = []
        for n in range(self.size.steps + 3):
            self.promote()
            if at_work:
                self.wait_until_queue_is_short()
            else:
                self.wait_until_idle()
            step = self.step()
            if step.stored < BATCH:
                raise SystemExit(f"no room for a step's chunks: {self.side.manager!r}")
            if n >= 3:  # the first ones fill the queue
                steps.append(step)
        return steps

    def settle(self) -> None:
        """Let everything end, and give back the room on disk."""
        self.wait_until_idle()
        self.side.step()
        self.side.step()
        for file in self._files():
            if str(file) not in self._kept:
                os.truncate(file, 0)  # removing it would slow down the making of new files

    def close(self) -> None:
        """Stop the lanes."""
        self.side.manager.core.check()
        self.tier.shutdown(PATIENCE_S)


def percentile(values: Sequence[float], share: float) -> float:
    """The value that ``share`` of all are at most."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def p99_ratio(rest: Sequence[Sequence[Step]], work: Sequence[Sequence[Step]]) -> float:
    """99th percentile over all blocks, at work over at rest."""
    at_rest, at_work = (
        percentile([s.seconds for block in blocks for s in block], 0.99) for blocks in (rest, work)
    )
    return at_work / at_rest


def measure(root: str, size: Size, layout: str = "files") -> None:
    """Print every line."""
    bench = Bench(root, size, layout)
    blocks: dict[bool, list[list[Step]]] = {False: [], True: []}
    work_s = 0.0
    try:
        with no_collector():
            for n in range(size.blocks):
                for at_work in (False, True) if n % 2 else (True, False):
                    began = time.monotonic()
                    blocks[at_work].append(bench.block(at_work))
                    bench.wait_until_idle()
                    work_s += (time.monotonic() - began) * at_work
                    bench.settle()
        remark("MODE", NAMES[layout], "O_DIRECT" if bench.tier.store.direct else "buffered")
    finally:
        bench.close()
    report(NAMES[layout], blocks[False], blocks[True], work_s, size)


def report(
    part: str,
    rest: Sequence[Sequence[Step]],
    work: Sequence[Sequence[Step]],
    work_s: float,
    size: Size,
) -> None:
    """Print the lines."""
    flat = {"rest": [s for b in rest for s in b], "work": [s for b in work for s in b]}
    moved = len(work) * (size.steps + 3) * BATCH * size.chunk_bytes
    busy = statistics.mean(s.lanes_busy for s in flat["work"])
    remark(
        "RATE",
        part,
        f"{moved / work_s / 1e9:.2f} GB/s stored and as much loaded; {busy:.0%} of the lanes busy",
    )
    for name, steps in flat.items():
        wall, ran = ([getattr(s, what) * 1e3 for s in steps] for what in ("seconds", "processor"))
        text = " ".join(
            f"{statistics.median(v):.3f} {percentile(v, 0.99):.3f}" for v in (wall, ran)
        )
        remark("TIME", f"{part}.step.{name}", f"{text} ms: median, p99; the same of processor time")
        waits, lost = (sum(getattr(s, w) for s in steps) for w in ("waits", "preemptions"))
        remark(
            "NOTE",
            f"{part}.step.{name}",
            f"{waits} waits, {lost} preemptions in {len(steps)} steps",
        )
    dice = random.Random(0)
    picks = [[dice.randrange(len(rest)) for _ in rest] for _ in range(200)]
    again = [p99_ratio([rest[i] for i in p], [work[i] for i in p]) for p in picks]
    low, _, high = statistics.quantiles(again, n=4)
    figure("FLAT", f"{part}.step_p99", p99_ratio(rest, work), (low, high))


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--layout", choices=("files", "log"), default="files")
    parser.add_argument(
        "--root", type=os.path.abspath, default=tempfile.gettempdir(), help="where to make a folder"
    )
    parser.add_argument("--tiny", action="store_true", help="only to see that it runs")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvtiers-bench-", dir=given.root) as root:
        measure(root, TINY if given.tiny else Size(given.blocks, given.steps), given.layout)


if __name__ == "__main__":
    main()
