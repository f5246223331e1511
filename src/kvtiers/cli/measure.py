"""Measuring a tier as an engine would use it, by jobs, and the disk below it by plain calls."""

import errno
import hashlib
import mmap
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtiers.chunks import ChunkLayout, GroupLayout, Key, Namespace, make_key
from kvtiers.errors import Kind, KVTiersError, map_errors
from kvtiers.tiers import build_tier
from kvtiers.tiers.base import Job, JobKind, JobOutcome, SecondaryTierManager
from kvtiers.tiers.views import ChunkViews

_IN_FLIGHT_BYTES = 64 << 20
_JOB_CHUNKS = 64
_SAMPLES = 200
"""Chunks that are moved one at a time, to see how long one takes."""
_PATIENCE_S = 60.0
_POLL_S = 0.0002


@dataclass(frozen=True, slots=True)
class Figures:
    """One line of the result."""

    name: str
    bytes_per_s: float
    p50_s: float
    p99_s: float
    direct: bool | None = None
    """Whether the disk alone was used past the page cache."""

    def document(self) -> dict[str, Any]:
        """As JSON."""
        shown: dict[str, Any] = {
            "name": self.name,
            "bytes_per_s": round(self.bytes_per_s),
            "p50_s": self.p50_s,
            "p99_s": self.p99_s,
        }
        return shown if self.direct is None else {**shown, "direct": self.direct}


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


def measure_tier(
    options: Mapping[str, Any], chunk: int, count: int, advance: Callable[[int], None]
) -> list[Figures]:
    """A tier that ``options`` describe: ``count`` chunks written, then read."""
    tier = build_tier(
        options,
        0,
        namespace=Namespace({"kvtiers": "bench"}),
        layout=ChunkLayout((GroupLayout(0, chunk, 1),)),
        clock=time.monotonic,
        wall_clock=time.time,
    )
    try:
        driver, figures = JobDriver(tier, chunk, count), []
        keys, single = _keys(0, count), _keys(count, min(count, _SAMPLES))
        for kind, name in ((JobKind.STORE, "tier written"), (JobKind.LOAD, "tier read")):
            speed = driver.throughput(kind, keys, advance)
            samples = driver.latencies(kind, single)
            figures.append(
                Figures(name, speed, percentile(samples, 0.5), percentile(samples, 0.99))
            )
        return figures
    finally:
        tier.shutdown(_PATIENCE_S)


def measure_raw(
    folder: str, chunk: int, count: int, direct: bool, advance: Callable[[int], None]
) -> list[Figures]:
    """One file in ``folder``, written and read chunk by chunk with nothing in between."""
    path = os.path.join(folder, "raw")
    memory = _memory(chunk, 1)
    with map_errors("bench", path):
        fd, is_direct = _open_raw(path, direct)
        try:
            figures = []
            for name, act in (("disk written", os.pwritev), ("disk read", os.preadv)):
                samples = list(_timed(act, fd, memory, count, advance))
                speed = count * chunk / max(1e-9, sum(samples))
                half, most = percentile(samples, 0.5), percentile(samples, 0.99)
                figures.append(Figures(name, speed, half, most, is_direct))
            return figures
        finally:
            os.close(fd)
            os.unlink(path)


def _open_raw(path: str, direct: bool) -> tuple[int, bool]:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    if direct:
        try:
            return os.open(path, flags | os.O_DIRECT, 0o600), True
        except OSError as e:
            if e.errno != errno.EINVAL:
                raise
    return os.open(path, flags & ~os.O_EXCL, 0o600), False


def _timed(
    act: Callable[[int, list[memoryview], int], int],
    fd: int,
    memory: memoryview,
    count: int,
    advance: Callable[[int], None],
) -> Iterator[float]:
    for i in range(count):
        began, done = time.monotonic(), 0
        while done < len(memory):
            moved = act(fd, [memory[done:]], i * len(memory) + done)
            if moved == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done += moved
        yield time.monotonic() - began
        advance(len(memory))
