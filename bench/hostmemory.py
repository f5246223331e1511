"""Host memory as tiers see it, and jobs of it as an engine sends them."""

import mmap
import os
from collections.abc import Iterator, Sequence
from typing import Any

from xxhash import xxh3_64_intdigest

from kvtiers.chunks import PAGE_BYTES, Key
from kvtiers.tiers.base import Job, JobKind, JobOutcome
from kvtiers.tiers.views import ChunkViews

JOB_BYTES = 16 << 20
PATIENCE_S = 120.0


class Memory:
    """Host memory as the tiers see it: equal slots in one shared mapping."""

    def __init__(self, chunk_bytes: int, total: int) -> None:
        self.chunk_bytes = chunk_bytes
        self.slots = total // chunk_bytes
        self.view = memoryview(mmap.mmap(-1, total))
        self._pattern = os.urandom(1 << 20)
        for at in range(0, total, len(self._pattern)):
            end = min(total, at + len(self._pattern))
            self.view[at:end] = self._pattern[: end - at]
        for slot in range(self.slots):
            self.slot(slot)[:8] = slot.to_bytes(8, "little")
        self._digest = xxh3_64_intdigest(self.view)

    def slot(self, number: int) -> memoryview:
        """The bytes of a slot."""
        return self.view[number * self.chunk_bytes : (number + 1) * self.chunk_bytes]

    def slot_of(self, number: int) -> memoryview:
        """The bytes of the slot of a chunk, of which there may be more than slots."""
        return self.slot(number % self.slots)

    def spoil(self) -> None:
        """Change every slot, so that ``intact`` says whether all were read."""
        for number in range(self.slots):
            self.slot(number)[:PAGE_BYTES] = bytes(PAGE_BYTES)

    def intact(self) -> bool:
        """Whether every byte is as it was made."""
        return xxh3_64_intdigest(self.view) == self._digest


def jobs(keys: Sequence[Key], chunk_bytes: int) -> Iterator[tuple[int, int, int]]:
    """(number, first slot, end) of each job."""
    step = max(1, JOB_BYTES // chunk_bytes)
    for number, first in enumerate(range(0, len(keys), step)):
        yield number, first, min(len(keys), first + step)


def run_jobs(tier: Any, kind: JobKind, keys: Sequence[Key], memory: Memory) -> None:
    """Move chunk ``i`` from or to slot ``i``, all at once; ends the process if one fails."""
    submit = tier.submit_store if kind is JobKind.STORE else tier.submit_load
    for number, first, end in jobs(keys, memory.chunk_bytes):
        slots = tuple(range(first, end))
        views = _views(memory, first, end - first, kind is JobKind.LOAD)
        if not submit(Job(number, kind, tuple(keys[first:end]), slots, views)):
            raise SystemExit(f"kvtiers refused a {kind.value} job: {tier!r}")
    tier.drain_jobs(PATIENCE_S)
    ended = tier.get_finished_jobs()
    done = sum(len(o.done) for o in ended if isinstance(o, JobOutcome))
    if done != len(keys):
        errors = [str(e) for o in ended for e in getattr(o, "failed", {}).values()]
        raise SystemExit(f"kvtiers: {done} of {len(keys)} chunks: {errors[:3]}")


def _views(memory: Memory, first: int, count: int, writable: bool) -> ChunkViews:
    def cut(i: int) -> memoryview:
        view = memory.slot(first + i)
        return view if writable else view.toreadonly()

    return ChunkViews(cut, [memory.chunk_bytes] * count)
