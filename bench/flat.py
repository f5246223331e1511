"""How the manager's cost grows with what it holds, beside how a bare OrderedDict's grows.

    python -m bench.flat [--rounds 9] [--tiny]

Four subjects in turns: our manager with 2 million chunks and with 10 thousand, and an OrderedDict
of each size. Requests of 64 consecutive chunks, as they were stored, begin anywhere; manager and
OrderedDict are asked in the same order by key objects of their own, hashed before. Before each
timed run an untimed one warms the subject up, so that small means warm. Timed is the thread's
processor time. Prints::

    TIME manager.<op>.by_size <ns per chunk: ours large, ours small, bare large, bare small>
    FLAT manager.<op> <(ours large - ours small) / (bare large - bare small): median of the rounds>

The bare difference is the median of the rounds; one that does not stand out of its own noise is
taken for that noise, and a NOTE says so.
"""

import argparse
import random
import statistics
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import thread_time
from typing import Any

from bench import operations
from bench.collector import no_collector
from bench.lines import median_of, remark
from bench.operations import Operation
from bench.sides import BATCH, Side, key, ours, request_keys


@dataclass(frozen=True, slots=True)
class Size:
    """How much is done. A round has ``requests`` timed requests per subject."""

    small: int = 10_240
    large: int = 2_000_000 // BATCH * BATCH
    requests: int = 160
    rounds: int = 9


TINY = Size(small=256, large=1024, requests=2, rounds=2)

Bare = OrderedDict[Any, None]


def bare_lookup(order: Bare, names: Sequence[Any]) -> None:
    """``in``."""
    for name in names:
        name in order  # noqa: B015


def bare_touch(order: Bare, names: Sequence[Any]) -> None:
    """``move_to_end``, the end of the prefix first."""
    for name in reversed(names):
        order.move_to_end(name)


def bare_load(order: Bare, names: Sequence[Any]) -> None:
    """A load finds its chunks and counts as their use: ``[]`` and ``move_to_end``."""
    for name in names:
        order[name]
    bare_touch(order, names)


def bare_store(order: Bare, names: Sequence[Any]) -> None:
    """One in, the oldest out."""
    for name in reversed(names):
        order.popitem(last=False)
        order[name] = None


@dataclass(frozen=True, slots=True)
class Op:
    """An operation of ours and what a bare OrderedDict does for it."""

    name: str
    ours: Operation
    bare: Callable[[Bare, Sequence[Any]], None]


OPS = (
    Op("lookup_hit", operations.lookup_one, bare_lookup),
    Op("lookup_miss", operations.lookup_one, bare_lookup),
    Op("touch", operations.touch, bare_touch),
    Op("load", operations.load, bare_load),
    Op("store_evict", operations.store, bare_store),
)


class Pair:
    """Our manager and an OrderedDict, full of the same chunks."""

    def __init__(self, chunks: int) -> None:
        self.chunks = chunks
        self.side = Side(ours(chunks))
        self.side.fill(chunks)
        self.bare: Bare = OrderedDict((key(n), None) for n in range(chunks))
        self._fresh = chunks
        """The next chunk that was never seen; all before it were stored, the last ones remain."""
        self._elsewhere = 1 << 40
        """The next chunk to ask for in vain."""

    def starts(self, op: Op, count: int, dice: random.Random) -> list[int]:
        """First chunks of ``count`` requests."""
        if op.name == "lookup_miss":
            self._elsewhere += count * BATCH
            return [self._elsewhere + n * BATCH for n in range(count)]
        if op.name == "store_evict":
            self._fresh += count * BATCH
            return [self._fresh + (n - count) * BATCH for n in range(count)]
        first, there = self._fresh - self.chunks, self.chunks // BATCH
        return [first + dice.randrange(there) * BATCH for _ in range(count)]

    def run_ours(self, op: Op, starts: Sequence[int]) -> float:
        """Seconds of our manager."""
        return operations.run(op.ours, self.side, [request_keys(s) for s in starts])

    def run_bare(self, op: Op, starts: Sequence[int]) -> float:
        """Seconds of the OrderedDict."""
        work = [request_keys(s) for s in starts]
        spent = 0.0
        for names in work:
            hash_all(names)
            began = thread_time()
            op.bare(self.bare, names)
            spent += thread_time() - began
        return spent


def hash_all(names: Sequence[Any]) -> None:
    """As the book of positions of a request does on the other side."""
    for name in names:
        hash(name)


def round_of(op: Op, pairs: Sequence[Pair], size: Size, seed: int) -> Iterator[float]:
    """Seconds per chunk: ours and bare, of each pair."""
    for pair in pairs:
        dice = random.Random(seed)
        warm, timed = (pair.starts(op, size.requests, dice) for _ in range(2))
        for run in (pair.run_ours, pair.run_bare):
            run(op, warm)
            yield run(op, timed) / (size.requests * BATCH)


def measure(size: Size) -> None:
    """Print every figure."""
    pairs = [Pair(size.large), Pair(size.small)]
    for op in OPS:
        with no_collector():
            rounds = [tuple(round_of(op, pairs, size, seed)) for seed in range(size.rounds)]
        report(op, rounds)
    for pair in pairs:
        pair.side.manager.core.check()


def report(op: Op, rounds: Sequence[tuple[float, ...]]) -> None:
    """Print the lines of one operation, and whether the bare difference stands out of the noise."""
    name = f"manager.{op.name}"
    ours_large, bare_large, ours_small, bare_small = (
        statistics.median(r[i] for r in rounds) * 1e9 for i in range(4)
    )
    times = f"{ours_large:.0f} {ours_small:.0f} {bare_large:.0f} {bare_small:.0f}"
    text = f"{times} ns per chunk: ours large, small; OrderedDict large, small"
    remark("TIME", f"{name}.by_size", text)
    bare = [(r[1] - r[3]) * 1e9 for r in rounds]
    middle = statistics.median(bare)
    noise = max(1.0, 3 * statistics.median(abs(b - middle) for b in bare))
    if middle < noise:
        remark("NOTE", name, f"{middle:.1f} ns is no difference: taken for {noise:.1f} ns")
    median_of("FLAT", name, [(r[0] - r[2]) * 1e9 / max(middle, noise) for r in rounds])


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tiny", action="store_true", help="only to see that it runs")
    given = parser.parse_args()
    measure(TINY if given.tiny else Size(rounds=given.rounds))


if __name__ == "__main__":
    main()
