"""The ``kv`` tier on a Valkey of its own, against a bare loop of the same client library.

    PYTHONPATH=src .venv/bin/python -m bench.kv [--rounds 7] [--tiny]

The tier is driven as an engine drives it: jobs of 16 MiB, divided over its lanes. The bare loop has
as many connections, and sends as many chunks with each pipeline; it knows no header, no checksum
and no deadline, and what it gets it leaves where redis-py puts it. They take turns: every round
measures each of them, the order alternates, and a ratio is the median of the rounds' ratios.
The server has no disk, and keeps to loopback: what is measured is the client. Prints::

    LIMIT kv.<put|get>[.2MiB] <ours over the bare loop, in chunks of 256 KiB or of 2 MiB>
    RATE kv.<put|get>[.2MiB] <GB/s: ours> <bare> <processor seconds per GB: ours> <bare>
"""

import argparse
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import redis
from xxhash import xxh3_64_intdigest

from bench.lines import median_of, remark
from kvtiers.chunks import ChunkLayout, GroupLayout, Key, Namespace, make_key
from kvtiers.tiers import build_tier
from kvtiers.tiers.base import Job, JobKind, JobOutcome
from kvtiers.tiers.views import ChunkViews
from tests.servers.valkey import Valkey, valkey

LANES = 4
"""Connections of each side."""
JOB_BYTES = 16 << 20
SLICE_BYTES = JOB_BYTES // LANES
"""What ours sends over one connection at a time, and so the bare loop."""
SIZES = {"": 256 << 10, ".2MiB": 2 << 20}
ROUND_BYTES, TINY_BYTES = 1 << 28, 1 << 25
ROUNDS = 7
ACTS = ("put", "put", "get")
"""Of a round. Putting takes a fraction of the time, and its ratio is the one in doubt."""
PATIENCE_S = 60.0

Act = Callable[[Sequence[Key]], None]


class Memory:
    """Host memory: equal slots, each with bytes of its own."""

    def __init__(self, chunk_bytes: int, total: int) -> None:
        self.chunk_bytes, self.slots = chunk_bytes, total // chunk_bytes
        self.view = memoryview(mmap.mmap(-1, total))
        for at in range(0, total, 1 << 20):
            self.view[at : at + (1 << 20)] = os.urandom(1 << 20)
        self._digest = xxh3_64_intdigest(self.view)

    def slot(self, number: int) -> memoryview:
        return self.view[number * self.chunk_bytes : (number + 1) * self.chunk_bytes]

    def spoil(self) -> None:
        """Change every slot, so that ``intact`` says whether all were read."""
        for number in range(self.slots):
            self.slot(number)[:8] = bytes(8)

    def intact(self) -> bool:
        return bool(xxh3_64_intdigest(self.view) == self._digest)


class Ours:
    """The tier, once with the lanes for writing and once with those for reading."""

    def __init__(self, url: str, memory: Memory) -> None:
        self._memory = memory
        self._tiers = {
            JobKind.STORE: self._tier(url, n_read_threads=1, n_write_threads=LANES),
            JobKind.LOAD: self._tier(url, n_read_threads=LANES - 1, n_write_threads=1),
        }

    def _tier(self, url: str, **lanes: int) -> Any:
        return build_tier(
            {"type": "kv", "url": url, "prefix": "ours", **lanes},
            0,
            namespace=Namespace({"bench": "kv"}),
            layout=ChunkLayout((GroupLayout(0, self._memory.chunk_bytes, 16),)),
            clock=time.monotonic,
            wall_clock=time.time,
        )

    def put(self, keys: Sequence[Key]) -> None:
        self._run(JobKind.STORE, keys)

    def get(self, keys: Sequence[Key]) -> None:
        self._run(JobKind.LOAD, keys)

    def _run(self, kind: JobKind, keys: Sequence[Key]) -> None:
        tier = self._tiers[kind]
        submit = tier.submit_store if kind is JobKind.STORE else tier.submit_load
        step = JOB_BYTES // self._memory.chunk_bytes
        for number, first in enumerate(range(0, len(keys), step)):
            slots = tuple(range(first, min(first + step, len(keys))))
            chosen = tuple(keys[slot] for slot in slots)
            views = ChunkViews.of([self._view(slot, kind) for slot in slots])
            if not submit(Job(number, kind, chosen, slots, views)):
                raise SystemExit(f"kvtiers refused a {kind.value} job: {tier!r}")
        tier.drain_jobs(PATIENCE_S)
        ended = tier.get_finished_jobs()
        done = sum(len(o.done) for o in ended if isinstance(o, JobOutcome))
        if done != len(keys):
            raise SystemExit(f"kvtiers: {done} of {len(keys)} chunks")

    def _view(self, slot: int, kind: JobKind) -> memoryview:
        view = self._memory.slot(slot)
        return view.toreadonly() if kind is JobKind.STORE else view

    def close(self) -> None:
        for tier in self._tiers.values():
            tier.shutdown(PATIENCE_S)


class Bare:
    """Pipelines of ``SET`` and ``GET``, and nothing else."""

    def __init__(self, port: int, memory: Memory) -> None:
        self._memory = memory
        self._clients = [redis.Redis(port=port, protocol=2) for _ in range(LANES)]

    def put(self, keys: Sequence[Key]) -> None:
        self._run(keys, lambda pipe, slot: pipe.set(keys[slot], self._memory.slot(slot)))

    def get(self, keys: Sequence[Key]) -> None:
        self._run(keys, lambda pipe, slot: pipe.get(keys[slot]))

    def _run(self, keys: Sequence[Key], add: Callable[[Any, int], object]) -> None:
        step = SLICE_BYTES // self._memory.chunk_bytes
        runs = iter(range(0, len(keys), step))
        taking = threading.Lock()
        failed: list[int] = []

        def lane(client: redis.Redis) -> None:
            while True:
                with taking:
                    first = next(runs, None)
                if first is None:
                    return
                pipe = client.pipeline(transaction=False)
                for slot in range(first, min(first + step, len(keys))):
                    add(pipe, slot)
                if not all(pipe.execute()):
                    failed.append(first)

        lanes = [threading.Thread(target=lane, args=(client,)) for client in self._clients]
        for thread in lanes:
            thread.start()
        for thread in lanes:
            thread.join(PATIENCE_S)
        if failed:
            raise SystemExit("the bare loop lost chunks")

    def close(self) -> None:
        for client in self._clients:
            client.close()


def new_keys(start: str, count: int) -> list[Key]:
    """Keys that begin so."""
    return [make_key(f"{start}/{number}".encode(), 0) for number in range(count)]


def timed(act: Act, keys: Sequence[Key]) -> tuple[float, float]:
    """Seconds that it takes, and processor seconds of this process."""
    began, began_cpu = time.perf_counter(), time.process_time()
    act(keys)
    return time.perf_counter() - began, time.process_time() - began_cpu


def measure_size(server: Valkey, suffix: str, rounds: int, total: int) -> None:
    """Print the figures of one chunk size."""
    memory = Memory(SIZES[suffix], total)
    ours, bare = Ours(server.url, memory), Bare(server.port, memory)
    took: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for number in range(rounds + 1):  # the first one makes connections and does not count
        if number == 1:
            took.clear()
        sides = [("ours", ours), ("bare", bare)][:: 1 if number % 2 else -1]
        for turn, act in enumerate(ACTS):
            keys = new_keys(f"{number}/{'again' if turn else ''}", memory.slots)
            for name, side in sides[:: 1 if turn else -1]:
                if (name, act) == ("ours", "get"):
                    memory.spoil()
                took.setdefault((name, act), []).append(timed(getattr(side, act), keys))
                if not memory.intact():
                    raise SystemExit("wrong bytes came back")
        server.do("FLUSHALL", "SYNC")
    ours.close()
    bare.close()
    for act in ("put", "get"):
        pairs = list(zip(took["ours", act], took["bare", act], strict=True))
        median_of("LIMIT", f"kv.{act}{suffix}", [b[0] / a[0] for a, b in pairs])
        rates = [total / median(t for t, _ in took[side, act]) / 1e9 for side in ("ours", "bare")]
        costs = [median(c for _, c in took[side, act]) / total * 1e9 for side in ("ours", "bare")]
        texts = [f"{value:.2f}" for value in (*rates, *costs)]
        remark("RATE", f"kv.{act}{suffix}", " ".join(texts))


def measure(rounds: int = ROUNDS, total: int = ROUND_BYTES) -> None:
    """Print all figures."""
    with valkey(maxmemory="2gb", maxmemory_policy="allkeys-lru") as server:
        for suffix in SIZES:
            measure_size(server, suffix, rounds, total)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description="The kv tier against a bare client loop")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--tiny", action="store_true", help="only to see that it runs")
    given = parser.parse_args()
    if given.tiny:
        measure(2, TINY_BYTES)
    else:
        measure(given.rounds)


if __name__ == "__main__":
    main()
