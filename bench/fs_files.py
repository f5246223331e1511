"""The ``fs`` tier, layout ``files``, against vLLM's own fs tier and a bare loop, on one disk.

    PYTHONPATH=src .venv/bin/python -m bench.fs_files [--what 64KiB,2MiB] [--rounds 9] [--root DIR]

Both tiers are driven as an engine drives them, with equal lanes and equal jobs, in turns: every
round measures each of them once, the order alternates, and a ratio is the median of the rounds'
ratios. Ours writes, reads and verifies checksums. Files are new in every round, their folders are
not: a first round that does not count makes them. Needs 8 GB of disk. Writing is slow and uneven
for a while after many files were removed, e.g. by a run before. Prints::

    MODE fs.files O_DIRECT|buffered       whether the page cache is in the way (then files are cold)
    RATE fs.files.<write|read>.<size> <GB/s: ours> <vLLM's> <bare loop>
    RATIO fs.files.<write|read>.<size> <ours over vLLM's>
    LIMIT fs.files.<write|read>.<size> <ours over a bare pwritev/preadv loop of the same shape>
    RATIO fs.files.lookup <ours over vLLM's: keys/s asked for the first time, half of them there>
"""

import argparse
import gc
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from bench.hostmemory import PATIENCE_S, Memory, jobs, run_jobs
from kvtiers.chunks import (
    PAGE_BYTES,
    ChunkLayout,
    GroupLayout,
    Key,
    Lookup,
    Namespace,
    RequestContext,
    make_key,
)
from kvtiers.cli.bare import Bare, BareFiles, run_calls
from kvtiers.tiers import build_tier
from kvtiers.tiers.base import JobKind

LANES = 8
"""Threads of each side that may do what is measured; 8 keep this kind of disk busy."""
SIZES = {"64KiB": 64 << 10, "512KiB": 512 << 10, "2MiB": 2 << 20, "4MiB": 4 << 20}
LOOKUP = "lookup"
EVERYTHING = (*SIZES, LOOKUP)
ROUNDS = 9
LOOKUP_KEYS, KEYS_PER_REQUEST = 8192, 1024
"""8 requests that arrive together."""
STEP_S = 0.001
"""What vLLM's engine sleeps after a step in which no request could run: all wait for lookups."""


def bytes_per_round(chunk_bytes: int) -> int:
    """What each moves in a round: above 1 GiB in ``ROUNDS``. Small chunks take longer."""
    return 1 << 28 if chunk_bytes >= 512 << 10 else 1 << 27


class Ours:
    """``kvtiers``' fs tier, once with the lanes for writing and once with those for reading."""

    def __init__(self, root: str, memory: Memory) -> None:
        self.root, self.memory = root, memory
        self.tiers = {
            JobKind.STORE: self._tier(n_read_threads=1, n_write_threads=LANES),  # 1 never writes
            JobKind.LOAD: self._tier(n_read_threads=LANES - 1, n_write_threads=1),  # all read
        }
        self.direct = all(tier.store.direct for tier in self.tiers.values())

    def _tier(self, **lanes: int) -> Any:
        return build_tier(
            {"type": "fs", "root_dir": self.root, "capacity_fraction": 0.9, **lanes},
            0,
            namespace=Namespace({"bench": "fs_files"}),
            layout=ChunkLayout((GroupLayout(0, self.memory.chunk_bytes, 16),)),
            clock=time.monotonic,
            wall_clock=time.time,
        )

    def write(self, keys: Sequence[Key]) -> None:
        self._run(JobKind.STORE, keys)

    def read(self, keys: Sequence[Key]) -> None:
        self._run(JobKind.LOAD, keys)

    def _run(self, kind: JobKind, keys: Sequence[Key]) -> None:
        run_jobs(self.tiers[kind], kind, keys, self.memory)

    def look_up(self, number: int, keys: Sequence[Key]) -> int | None:
        """Ask for the keys of a request: how many are there; None: not known yet."""
        verdicts = self.tiers[JobKind.LOAD].lookup(keys, RequestContext(str(number)))
        return None if Lookup.RETRY in verdicts else verdicts.count(Lookup.HIT)

    def end_step(self) -> None:
        """The step is over."""
        self.tiers[JobKind.LOAD].on_schedule_end()
        self.tiers[JobKind.LOAD].get_finished_jobs()

    def close(self) -> None:
        for tier in self.tiers.values():
            tier.shutdown(PATIENCE_S)


class Upstream:
    """vLLM's fs tier, driven without an engine."""

    def __init__(self, root: str, memory: Memory) -> None:
        self.root, self.memory = root, memory
        group = SimpleNamespace(tokens_per_block=16, layer_names=("layer",))
        config = SimpleNamespace(
            groups=(group,),
            canonical_layout=False,
            replicated_layout=False,
            parallel=SimpleNamespace(
                tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0, is_parallelism_agnostic=True
            ),
            model=SimpleNamespace(name="bench", dtype="bfloat16"),
            cache=SimpleNamespace(tokens_per_hash=16),
        )
        view = memory.view.cast("B", (memory.slots, memory.chunk_bytes))
        half, spec = LANES // 2, SimpleNamespace(config=config, blocks_per_chunk=1)
        self.tier: Any = FileSystemTierManager(spec, view, "fs", root, half, half)
        self.direct = bool(self.tier._use_o_direct)

    def write(self, keys: Sequence[Key]) -> None:
        self._run(self.tier.submit_store, keys, False)

    def read(self, keys: Sequence[Key]) -> None:
        self._run(self.tier.submit_load, keys, True)

    def _run(self, submit: Callable[[Any], None], keys: Sequence[Key], promotion: bool) -> None:
        request = ReqContext("r")
        for number, first, end in jobs(keys, self.memory.chunk_bytes):
            submit(TransferJob(number, keys[first:end], np.arange(first, end), promotion, request))
        self.tier.drain_jobs()
        if not all(result.success for result in self.tier.get_finished_jobs()):
            raise SystemExit("vLLM's fs tier failed a job")

    def look_up(self, number: int, keys: Sequence[Key]) -> int | None:
        """As ``Ours.look_up``."""
        request = ReqContext(str(number))
        verdicts = [self.tier.lookup(key, request) for key in keys]
        if LookupResult.RETRY in verdicts:
            return None
        self.tier.on_request_finished(request)
        return verdicts.count(LookupResult.HIT)

    def end_step(self) -> None:
        """As ``Ours.end_step``."""
        self.tier.on_schedule_end(ScheduleEndContext((), ()))
        self.tier.get_finished_jobs()

    def close(self) -> None:
        self.tier.shutdown()


class BareRounds:
    """Calls of a shape and nothing else: rounds one behind the other, ``held`` of them, or all."""

    def __init__(self, root: str, memory: Memory, bare: Bare, held: int | None = None) -> None:
        self.root, self._slots, self._bare, self._held = root, memory.slots, bare, held
        self._round = -1

    def write(self, keys: Sequence[Key]) -> None:
        self._round += 1
        self._run(self._bare.write)

    def read(self, keys: Sequence[Key]) -> None:
        self._run(self._bare.read)

    def _run(self, act: Callable[[int, int], None]) -> None:
        place = self._round if self._held is None else self._round % self._held
        run_calls(self._bare, act, LANES, place * self._slots, (place + 1) * self._slots)

    def make_room(self, full: bool) -> None:
        """It writes over what is there."""

    def close(self) -> None:
        self._bare.close()


def new_keys(round_: str, count: int) -> list[Key]:
    """Keys that were never used before.

    vLLM's tier has a folder for every five hex digits of a digest, ours for every two. Here both
    come to 256, as if both were long in use: making folders would be most of what is measured.
    """
    digests = (hashlib.sha256(f"{round_}/{n}".encode()).digest() for n in range(count))
    return [make_key(d[:1] + bytes((0, d[2] & 15)) + d[3:], 0) for d in digests]


def drop_from_page_cache(root: str) -> None:
    """Make the files under ``root`` cold; needed where O_DIRECT does not work."""
    for file in Path(root).rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def timed(act: Callable[[], object]) -> float:
    """Seconds that ``act`` takes."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


class Transfers:
    """Rounds of writes and reads at one chunk size."""

    def __init__(self, root: str, chunk_bytes: int) -> None:
        self.memory = Memory(chunk_bytes, bytes_per_round(chunk_bytes))
        self.ours = Ours(f"{root}/ours", self.memory)
        self.upstream = Upstream(f"{root}/upstream", self.memory)
        self.direct = self.ours.direct and self.upstream.direct
        files = BareFiles(f"{root}/bare", self.memory.slot_of, self.direct)
        bare = BareRounds(f"{root}/bare", self.memory, files)
        self.subjects: dict[str, Any] = {"ours": self.ours, "upstream": self.upstream, "bare": bare}
        self.seconds: dict[tuple[str, str], list[float]] = {}

    def forget(self) -> None:
        """What was measured so far does not count."""
        self.seconds.clear()

    def round(self, number: int) -> None:
        """Write and read with each, in an order that alternates."""
        names = list(self.subjects)
        order = names if number % 2 == 0 else names[::-1]
        keys = new_keys(f"{self.memory.chunk_bytes}/{number}", self.memory.slots)
        for name in order:
            os.sync()
            self._measure("write", name, keys)
        for name in order:
            if not self.direct:
                drop_from_page_cache(self.subjects[name].root)
            self.memory.spoil()
            self._measure("read", name, keys)
            if not self.memory.intact():
                raise SystemExit(f"{name} read wrong bytes")

    def _measure(self, verb: str, name: str, keys: Sequence[Key]) -> None:
        act = getattr(self.subjects[name], verb)
        self.seconds.setdefault((verb, name), []).append(timed(lambda: act(keys)))

    def ratio(self, verb: str, other: str) -> float:
        """Median over the rounds of ours over the other."""
        pairs = zip(self.seconds[verb, other], self.seconds[verb, "ours"], strict=True)
        return median(theirs / ours for theirs, ours in pairs)

    def rate(self, verb: str, name: str) -> float:
        """Median GB/s."""
        total = self.memory.slots * self.memory.chunk_bytes
        return total / median(self.seconds[verb, name]) / 1e9

    def close(self) -> None:
        """Stop all."""
        for subject in self.subjects.values():
            subject.close()


def transfer_lines(root: str, size: str, rounds: int) -> Iterator[str]:
    """The lines of one chunk size."""
    transfers = Transfers(root, SIZES[size])
    try:
        transfers.round(0)
        transfers.forget()
        for number in range(1, rounds + 1):
            transfers.round(number)
    finally:
        transfers.close()
    yield f"MODE fs.files {'O_DIRECT' if transfers.direct else 'buffered, cold files'}"
    for verb in ("write", "read"):
        rates = [f"{transfers.rate(verb, name):.2f}" for name in transfers.subjects]
        yield f"RATE fs.files.{verb}.{size} {' '.join(rates)}"
        yield f"RATIO fs.files.{verb}.{size} {transfers.ratio(verb, 'upstream'):.2f}"
        yield f"LIMIT fs.files.{verb}.{size} {transfers.ratio(verb, 'bare'):.2f}"


def lookup_lines(root: str, rounds: int) -> Iterator[str]:
    """The lines of lookups: chunks that another engine stored just now, and as many absent."""
    memory = Memory(PAGE_BYTES, LOOKUP_KEYS // 2 * PAGE_BYTES)
    kinds: dict[str, type[Any]] = {"ours": Ours, "upstream": Upstream}
    pairs = {
        n: (kind(f"{root}/{n}", memory), kind(f"{root}/{n}", memory)) for n, kind in kinds.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(rounds):
        for name in list(kinds)[:: 1 if number % 2 == 0 else -1]:
            other, asker = pairs[name]
            there, absent = (
                new_keys(f"{what}/{number}", memory.slots) for what in ("there", "absent")
            )
            other.write(there)
            asked = [key for pair in zip(there, absent, strict=True) for key in pair]
            seconds[name].append(lookup_seconds(asker, asked))
    for pair in pairs.values():
        for subject in pair:
            subject.close()
    ours, theirs = (LOOKUP_KEYS / median(seconds[name]) / 1e3 for name in kinds)
    yield f"RATE fs.files.lookup {ours:.0f} {theirs:.0f} thousand keys/s"
    ratio = median(t / o for o, t in zip(*seconds.values(), strict=True))
    yield f"RATIO fs.files.lookup {ratio:.2f}"


def lookup_seconds(asker: Any, keys: Sequence[Key]) -> float:
    """How long it takes to know of all ``keys``, every other of which is there."""
    step = KEYS_PER_REQUEST
    requests = [keys[n : n + step] for n in range(0, len(keys), step)]
    began = time.perf_counter()
    hits = wave_hits(asker, requests)
    seconds = time.perf_counter() - began
    if hits != len(keys) // 2:
        raise SystemExit(f"{type(asker).__name__} found {hits} of {len(keys) // 2} chunks")
    return seconds


def wave_hits(subject: Any, requests: Sequence[Sequence[Key]]) -> int:
    """Requests that arrive together: ask for all in every step until all is known."""
    waiting, hits = dict(enumerate(requests)), 0
    while True:
        for number, keys in list(waiting.items()):
            found = subject.look_up(number, keys)
            if found is not None:
                hits += found
                del waiting[number]
        subject.end_step()
        if not waiting:
            return hits
        time.sleep(STEP_S)


@contextmanager
def scratch(parent: str) -> Iterator[str]:
    """A folder that is gone afterwards."""
    folder = tempfile.mkdtemp(prefix="kvtiers-bench-", dir=parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def lines(
    what: Sequence[str] = EVERYTHING, rounds: int = ROUNDS, parent: str | None = None
) -> Iterator[str]:
    """The lines of each of ``what``, as soon as they are known.

    ``rounds``: each takes about a second per size. ``parent``: where to make a folder, which is
    gone afterwards; None: where temporary files are.
    """
    for each in what:
        gc.collect()
        gc.freeze()  # as vLLM does: what was imported is not looked at again and again
        with scratch(parent or tempfile.gettempdir()) as root:
            if each == LOOKUP:
                yield from lookup_lines(root, rounds)
            else:
                yield from transfer_lines(root, each, rounds)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--what", default=",".join(EVERYTHING), help="sizes, and lookup")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--root", type=os.path.abspath, help="where to make a folder")
    given = parser.parse_args()
    for line in lines(given.what.split(","), given.rounds, given.root):
        print(line, flush=True)


if __name__ == "__main__":
    main()
