"""The ``fs`` tier, layout ``log``, against vLLM's own fs tier and a bare loop, on one disk.

    PYTHONPATH=src .venv/bin/python -m bench.fs_log [--what 64KiB,index] [--rounds 9] [--root DIR]
                                                    [--direct-io auto|off]

Both tiers are driven as an engine drives them (``bench.fs_files``), with equal lanes and jobs, in
turns; a ratio is the median of the rounds' ratios. A cache is new for a while and then full for
the rest of its life, so both are measured in both states. New: nothing was removed yet, and our
segments are made. Full: each round takes the place of the oldest one - ours removes it while it is
timed, vLLM's has no bound, so its files are removed between the rounds, as an evictor beside it
would. Then the last rounds are read. Needs 10 GB of disk. Prints::

    MODE fs.log O_DIRECT|buffered         whether the page cache is in the way (then it is cold)
    RATE fs.log.<...>.<size> <GB/s: ours> <vLLM's> <bare loop>
    RATIO fs.log.write.<size>             ours over vLLM's, full
    RATIO fs.log.fresh_write.<size>       the same, new
    RATIO fs.log.read.<size>
    LIMIT fs.log.<write|fresh_write|read>.<size>   ours over bare pwritev/preadv calls of 4 MiB in a
                                          preallocated file, new or written before as ours is
    COST fs.log.index_bytes               memory of the process per chunk, a million chunks open
    COST fs.log.open_s, fs.log.open_killed_s   opening them after a clean stop, after SIGKILL
"""

import argparse
import gc
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bench.fs_files import (
    LANES,
    ROUNDS,
    SIZES,
    BareRounds,
    Ours,
    Upstream,
    bytes_per_round,
    drop_from_page_cache,
    new_keys,
    scratch,
    timed,
)
from bench.hostmemory import PATIENCE_S, Memory
from kvtiers.chunks import PAGE_BYTES, ChunkLayout, GroupLayout, Key, Namespace, make_key
from kvtiers.cli.bare import BareSegments
from kvtiers.tiers import build_tier
from kvtiers.tiers.base import Item, JobKind, StoreContext
from kvtiers.tiers.fs.log import LogStore

INDEX = "index"
EVERYTHING = (*SIZES, INDEX)
ROUNDS_HELD = 8
"""What fits into a full cache; as many rounds are measured while it is new."""
INDEX_CHUNKS = 1_000_000
_NAMESPACE = Namespace({"bench": "fs_log"})


class Log(Ours):
    """``kvtiers``' fs tier, layout ``log``: one owner, so the same tier writes and reads."""

    def __init__(self, root: str, memory: Memory, direct_io: str) -> None:
        self.root, self.memory = root, memory
        held = ROUNDS_HELD * memory.slots * memory.chunk_bytes
        tier: Any = build_tier(
            {
                "type": "fs",
                "layout": "log",
                "root_dir": root,
                "capacity_bytes": held,
                "direct_io": direct_io,
                "n_read_threads": LANES // 2,
                "n_write_threads": LANES // 2,
            },
            0,
            namespace=_NAMESPACE,
            layout=ChunkLayout((GroupLayout(0, memory.chunk_bytes, 16),)),
            clock=time.monotonic,
            wall_clock=time.time,
        )
        self.tiers = dict.fromkeys(JobKind, tier)
        self.direct = tier.store.direct

    def make_room(self, full: bool) -> None:
        """It does so itself."""


class BoundedUpstream(Upstream):
    """vLLM's fs tier with an evictor beside it."""

    def __init__(self, root: str, memory: Memory) -> None:
        super().__init__(root, memory)
        self._rounds: list[set[Path]] = []

    def make_room(self, full: bool) -> None:
        """Take note of the last round's files; remove those of the oldest round."""
        known: set[Path] = set().union(*self._rounds)
        there = {p for p in Path(self.root).rglob("*") if p.is_file()}
        self._rounds.append(there - known)
        if full:
            for path in self._rounds.pop(0):
                path.unlink()


class Lives:
    """The same life for each: new, full, read."""

    def __init__(self, root: str, chunk_bytes: int, direct_io: str) -> None:
        self.memory = Memory(chunk_bytes, bytes_per_round(chunk_bytes))
        log = Log(f"{root}/ours", self.memory, direct_io)
        self.direct = log.direct
        self.subjects: dict[str, Any] = {
            "ours": log,
            "upstream": BoundedUpstream(f"{root}/upstream", self.memory),
            "bare": self._bare(f"{root}/bare"),
        }
        self.seconds: dict[tuple[str, str], list[float]] = {}
        self._number = 0

    def _bare(self, root: str) -> BareRounds:
        os.makedirs(root)
        count = ROUNDS_HELD * self.memory.slots
        segments = BareSegments(
            f"{root}/segments", self.memory.slot_of, self.memory.chunk_bytes, count, self.direct
        )
        return BareRounds(root, self.memory, segments, ROUNDS_HELD)

    def write(self, state: str, rounds: int) -> None:
        """Write so many rounds with each, in an order that alternates."""
        for _ in range(rounds):
            self._number += 1
            keys = self._keys()
            for name in self._order():
                os.sync()
                self._note(state, name, timed(partial(self.subjects[name].write, keys)))
            for subject in self.subjects.values():
                subject.make_room(full=state == "write")

    def read(self, rounds: int) -> None:
        """Read the last round so often with each."""
        keys = self._keys()
        for _ in range(rounds):
            for name in self._order():
                if not self.direct:
                    drop_from_page_cache(self.subjects[name].root)
                self.memory.spoil()
                self._note("read", name, timed(partial(self.subjects[name].read, keys)))
                if not self.memory.intact():
                    raise SystemExit(f"{name} read wrong bytes")

    def _keys(self) -> list[Key]:
        return new_keys(f"{self.memory.chunk_bytes}/{self._number}", self.memory.slots)

    def _order(self) -> list[str]:
        self._turn = -getattr(self, "_turn", -1)
        return list(self.subjects)[:: self._turn]

    def _note(self, state: str, name: str, seconds: float) -> None:
        self.seconds.setdefault((state, name), []).append(seconds)

    def lines(self, state: str, size: str) -> Iterator[str]:
        """What was measured in a state."""
        total = self.memory.slots * self.memory.chunk_bytes
        rates = [total / median(self.seconds[state, n]) / 1e9 for n in self.subjects]
        yield f"RATE fs.log.{state}.{size} {' '.join(f'{rate:.2f}' for rate in rates)}"
        for kind, other in (("RATIO", "upstream"), ("LIMIT", "bare")):
            pairs = zip(self.seconds[state, other], self.seconds[state, "ours"], strict=True)
            yield f"{kind} fs.log.{state}.{size} {median(a / b for a, b in pairs):.2f}"

    def close(self) -> None:
        """Stop all."""
        for subject in self.subjects.values():
            subject.close()


def transfer_lines(root: str, size: str, rounds: int, direct_io: str) -> Iterator[str]:
    """The lines of one chunk size."""
    lives = Lives(root, SIZES[size], direct_io)
    try:
        lives.write("warm-up", 1)
        lives.write("fresh_write", ROUNDS_HELD - 1)
        lives.write("warm-up", 1)
        lives.write("write", rounds)
        lives.read(rounds)
    finally:
        lives.close()
    yield f"MODE fs.log {'O_DIRECT' if lives.direct else 'buffered, cold files'}"
    for state in ("write", "fresh_write", "read"):
        yield from lives.lines(state, size)


# -- the index ------------------------------------------------------------------------------------


def open_log(root: str, chunks: int) -> LogStore:
    """A log with room for ``chunks`` of one page."""
    layout = ChunkLayout((GroupLayout(0, PAGE_BYTES, 16),))
    context = StoreContext(
        "fs", "1:fs", _NAMESPACE, layout, time.monotonic, time.time, lambda *_: None
    )
    return LogStore(context, root, capacity_bytes=chunks * PAGE_BYTES * 5 // 4 + (64 << 20))


def fill(root: str, chunks: int, kill: bool) -> None:
    """Write so many; then stop as asked. In a process of its own."""
    store = open_log(root, chunks)
    payload = memoryview(mmap.mmap(-1, PAGE_BYTES))
    per_call = 1024
    for first in range(0, chunks, per_call):
        keys = [_index_key(n) for n in range(first, min(chunks, first + per_call))]
        if any(store.write([Item(key, payload) for key in keys])):
            raise SystemExit("a write failed")
    if kill:
        os.kill(os.getpid(), signal.SIGKILL)
    store.close()


def _index_key(number: int) -> Key:
    return make_key(number.to_bytes(32, "big"), 0)


def reopen(root: str, chunks: int) -> None:
    """Open what was filled; print seconds and bytes per chunk. In a process of its own."""
    gc.collect()
    before, began = _resident(), time.perf_counter()
    store = open_log(root, chunks)
    seconds = time.perf_counter() - began
    if not all(store.contains([_index_key(0), _index_key(chunks - 1)])):
        raise SystemExit("chunks are missing")
    print(seconds, (_resident() - before) / chunks)
    os._exit(0)  # as it was: not stopped


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * PAGE_BYTES


def index_lines(root: str, chunks: int) -> Iterator[str]:
    """The lines of the index."""
    for name, kill in (("open_s", False), ("open_killed_s", True)):
        place = f"{root}/{name}"
        code = _child(f"fill({place!r}, {chunks}, {kill})").returncode
        if code != (-signal.SIGKILL if kill else 0):
            raise SystemExit(f"filling a log ended with {code}")
        seconds, per_chunk = _child(f"reopen({place!r}, {chunks})").stdout.split()
        yield f"COST fs.log.{name} {float(seconds):.3f}"
        if not kill:
            yield f"COST fs.log.index_bytes {float(per_chunk):.0f}"


def _child(call: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"from bench.fs_log import *; {call}"]
    return subprocess.run(
        command, stdout=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=False
    )


def lines(
    what: Sequence[str] = EVERYTHING,
    rounds: int = ROUNDS,
    parent: str | None = None,
    direct_io: str = "auto",
    chunks: int = INDEX_CHUNKS,
) -> Iterator[str]:
    """The lines of each of ``what``, as soon as they are known; see ``bench.fs_files.lines``."""
    for each in what:
        gc.collect()
        gc.freeze()
        with scratch(parent or tempfile.gettempdir()) as root:
            if each == INDEX:
                yield from index_lines(root, chunks)
            else:
                yield from transfer_lines(root, each, rounds, direct_io)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--what", default=",".join(EVERYTHING), help="sizes, and index")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--root", type=os.path.abspath, help="where to make a folder")
    parser.add_argument("--direct-io", choices=("auto", "off"), default="auto")
    parser.add_argument("--chunks", type=int, default=INDEX_CHUNKS, help="of index")
    given = parser.parse_args()
    what = given.what.split(",")
    for line in lines(what, given.rounds, given.root, given.direct_io, given.chunks):
        print(line, flush=True)


if __name__ == "__main__":
    main()
