"""Measuring a tier as an engine would use it, by jobs, and the disk below it by bare calls."""

import hashlib
import mmap
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtiers.chunks import PAGE_BYTES, ChunkLayout, GroupLayout, Key, Namespace, make_key
from kvtiers.cli.bare import FANS, Bare, BareFiles, BareSegments, run_calls
from kvtiers.errors import Kind, KVTiersError, map_errors
from kvtiers.tiers import build_tier
from kvtiers.tiers.base import Job, JobKind, JobOutcome, SecondaryTierManager
from kvtiers.tiers.fs.files import FilesStore
from kvtiers.tiers.fs.folders import make_folder
from kvtiers.tiers.fs.log import LogStore
from kvtiers.tiers.options import RunnerOptions
from kvtiers.tiers.runner import StoreTier
from kvtiers.tiers.views import ChunkViews

_IN_FLIGHT_BYTES = 64 << 20
_JOB_CHUNKS = 64
_SAMPLES = 200
"""Chunks that are moved one at a time, to see how long one takes."""
LANES = (
    RunnerOptions.n_write_threads,
    RunnerOptions.n_read_threads + RunnerOptions.n_write_threads,
)
"""Threads of a tier that write, and that read: those for writing read too."""
_PATIENCE_S = 60.0
_POLL_S = 0.0002
_SLACK_BYTES = 64 << 20
_SLACK_CHUNKS = 20
"""Of a capacity: a log makes a few segments of a few chunks each."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One line of the result."""

    name: str
    bytes_per_s: float
    p50_s: float
    p99_s: float


def percentile(samples: Sequence[float], share: float) -> float:
    """The sample below which ``share`` of them lie."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _memory(chunk: int, count: int) -> memoryview:
    """Chunks of random bytes: what compresses or repeats would flatter the disk."""
    memory = memoryview(mmap.mmap(-1, chunk * count))
    for at in range(0, len(memory), 1 << 20):
        part = memory[at : at + (1 << 20)]
        part[:] = secrets.token_bytes(len(part))
    return memory


class JobDriver:
    """Jobs for a tier over one piece of memory, as the scheduler would send them."""

    def __init__(self, tier: SecondaryTierManager, chunk: int, count: int) -> None:
        self._tier = tier
        self._chunk = chunk
        self._per_job = max(1, min(count, _JOB_CHUNKS, _IN_FLIGHT_BYTES // 2 // chunk))
        self._memory = _memory(chunk, 2 * self._per_job)
        self._ids = 0
        self._flying: dict[int, int] = {}
        """Job -> its first slot."""

    def throughput(
        self, kind: JobKind, keys: Sequence[Key], advance: Callable[[int], None]
    ) -> float:
        """Bytes per second, two jobs at a time."""
        began = time.monotonic()
        free = [0, self._per_job]
        for at in range(0, len(keys), self._per_job):
            while not free:
                free += self._landed(advance)
            self._send(kind, keys[at : at + self._per_job], free.pop())
        while self._flying:
            self._landed(advance)
        return len(keys) * self._chunk / max(1e-9, time.monotonic() - began)

    def latencies(self, kind: JobKind, keys: Sequence[Key]) -> list[float]:
        """Seconds of jobs of one chunk, one at a time."""
        samples = []
        for key in keys:
            began = time.monotonic()
            self._send(kind, [key], 0)
            if not self._tier.drain_jobs(_PATIENCE_S):
                raise _failed(kind, "it does not end")
            samples.append(time.monotonic() - began)
            self._landed(lambda done: None)
        return samples

    def _send(self, kind: JobKind, keys: Sequence[Key], first: int) -> None:
        self._ids += 1
        slots = range(first, first + len(keys))
        memory = self._memory if kind is JobKind.LOAD else self._memory.toreadonly()
        views = [memory[s * self._chunk : (s + 1) * self._chunk] for s in slots]
        job = Job(self._ids, kind, tuple(keys), tuple(slots), ChunkViews.of(views))
        submit = self._tier.submit_load if kind is JobKind.LOAD else self._tier.submit_store
        if not submit(job):
            raise _failed(kind, "the tier does not take it")
        self._flying[job.id] = first

    def _landed(self, advance: Callable[[int], None]) -> list[int]:
        """First slots of jobs that ended, as far as any did."""
        freed = []
        for outcome in self._tier.get_finished_jobs():
            if isinstance(outcome, JobOutcome):
                for error in outcome.failed.values():
                    raise error
                advance(len(outcome.done) * self._chunk)
                freed.append(self._flying.pop(outcome.job_id))
        if not freed and self._flying:
            time.sleep(_POLL_S)
        return freed


def _keys(first: int, count: int) -> list[Key]:
    """Spread as digests are."""
    numbers = range(first, first + count)
    return [make_key(hashlib.sha256(b"%d" % n).digest(), 0) for n in numbers]


def _failed(kind: JobKind, why: str) -> KVTiersError:
    return KVTiersError(f"a {kind.value} job failed: {why}", kind=Kind.BROKEN)


def trial_options(
    folder: str, layout: str, direct_io: str, chunk: int, count: int
) -> dict[str, Any]:
    """A tier in ``folder`` that evicts none of what is measured, whatever its layout needs besides.

    No more than the disk has, which a tier would refuse. Raises OSError.
    """
    disk = os.statvfs(folder)
    wanted = (3 * count + _SLACK_CHUNKS) * (chunk + PAGE_BYTES) + _SLACK_BYTES
    return {
        "type": "fs",
        "root_dir": os.path.join(folder, "tier"),
        "layout": layout,
        "capacity_bytes": min(wanted, disk.f_blocks * disk.f_frsize),
        "direct_io": direct_io,
    }


def measure_tier(
    options: Mapping[str, Any], chunk: int, count: int, advance: Callable[[int], None]
) -> tuple[list[Figures], bool]:
    """A tier that ``options`` describe: ``count`` chunks written, then read.

    Also whether it went past the page cache.
    """
    namespace = Namespace({"kvtiers": "bench"})
    if options.get("layout") == "files":
        _make_fans(os.path.join(options["root_dir"], namespace.id))
    tier = build_tier(
        options,
        0,
        namespace=namespace,
        layout=ChunkLayout((GroupLayout(0, chunk, 1),)),
        clock=time.monotonic,
        wall_clock=time.time,
    )
    try:
        driver, figures = JobDriver(tier, chunk, count), []
        keys, single = _keys(0, count), _keys(count, min(count, _SAMPLES))
        for kind, name in ((JobKind.STORE, "tier written"), (JobKind.LOAD, "tier read")):
            speed = driver.throughput(kind, keys, advance)
            figures.append(_figures(name, speed, driver.latencies(kind, single)))
        return figures, _is_direct(tier)
    finally:
        tier.shutdown(_PATIENCE_S)


def _make_fans(folder: str) -> None:
    """As if it were long in use: the folders that chunks come into are there."""
    with map_errors("bench in", folder):
        for fan in range(FANS):
            make_folder(os.path.join(folder, f"{fan:02x}"))


def _figures(name: str, bytes_per_s: float, samples: Sequence[float]) -> Figures:
    return Figures(name, bytes_per_s, percentile(samples, 0.5), percentile(samples, 0.99))


def _is_direct(tier: SecondaryTierManager) -> bool:
    assert isinstance(tier, StoreTier)
    return isinstance(tier.store, FilesStore | LogStore) and tier.store.direct


def measure_bare(
    bare: Bare,
    chunk: int,
    count: int,
    advance: Callable[[int], None],
    medium: str = "disk",
    lanes_of: tuple[int, int] = LANES,
) -> list[Figures]:
    """The disk alone: ``count`` chunks on as many threads as a tier has for it, then single ones.

    ``bare`` has room for what ``room_for`` says. ``lanes_of``: threads that write, and that read.
    """
    figures = []
    for name, act, lanes in (
        (f"{medium} written", bare.write, lanes_of[0]),
        (f"{medium} read", bare.read, lanes_of[1]),
    ):
        began = time.monotonic()
        run_calls(bare, act, lanes, 0, count)
        speed = count * chunk / max(1e-9, time.monotonic() - began)
        advance(count * chunk)
        single = range(count, room_for(count))
        figures.append(_figures(name, speed, [_timed(act, number) for number in single]))
    return figures


def room_for(count: int) -> int:
    """How many chunks are written where ``count`` are to be moved: some more one at a time."""
    return count + min(count, _SAMPLES)


def _timed(act: Callable[[int, int], None], number: int) -> float:
    began = time.monotonic()
    act(number, number + 1)
    return time.monotonic() - began


def open_bare(folder: str, layout: str, chunk: int, count: int, direct: bool) -> Bare:
    """Calls of the shape that tiers of a layout make, on random bytes. Raises OSError."""
    slots = max(1, min(count, _IN_FLIGHT_BYTES // chunk))
    memory = _memory(chunk, slots)

    def slot(number: int) -> memoryview:
        at = number % slots * chunk
        return memory[at : at + chunk]

    path = os.path.join(folder, "bare")
    if layout == "log":
        return BareSegments(path, slot, chunk, room_for(count), direct)
    return BareFiles(path, slot, direct)
