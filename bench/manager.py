"""Cost per chunk of the manager on the scheduler's thread, beside upstream's.

    python -m bench.manager [--pairs 9] [--resident 10240] [--tiny]

Both sides run in this process, in interleaved pairs, over the same chunks with key objects of
their own; the garbage collector is off for both. Prints for each operation::

    TIME manager.<op> <us per chunk: ours> <upstream's>
    RATIO manager.<op> <upstream's over ours: median of the pairs>
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench import operations
from bench.collector import no_collector
from bench.lines import median_of, remark
from bench.operations import Operation, run
from bench.sides import BATCH, Side, ours, request_keys, upstream

IN_A_ROW = 16
"""Requests of one side before it is the other's turn."""
Work = Callable[[int], Sequence[Sequence[Any]]]
"""Number of the pair -> the keys of each request, new objects with every call."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is done."""

    resident: int = 10_240
    requests: int = 160
    """Requests of a measurement: as many chunks as are resident, so that what a side puts off
    (vLLM's LRU compacts its heap now and then) falls into every one of them."""
    pairs: int = 9
    large: int = 1_024_000


TINY = Size(resident=256, requests=2, pairs=2, large=512)


def resident(size: Size) -> Work:
    """Requests for chunks that are there, all of them in turn, beginning elsewhere every time."""
    there = size.resident // BATCH

    def work(turn: int) -> list[list[Any]]:
        return [request_keys((turn * 7 + n) % there * BATCH) for n in range(size.requests)]

    return work


def absent(size: Size, base: int) -> Work:
    """Requests for chunks that were never seen."""
    chunks = size.requests * BATCH
    return lambda turn: [
        request_keys(base + turn * chunks + n * BATCH) for n in range(size.requests)
    ]


def compare(
    name: str, operation: Operation, sides: tuple[Side, Side], work: Work, size: Size
) -> None:
    """Print one operation: upstream's time over ours, in pairs; the first pair warms up."""
    with no_collector():
        turns = [in_turns(operation, sides, work(n), work(n)) for n in range(size.pairs + 1)]
    seconds = turns[1:]
    chunks = size.requests * BATCH
    theirs, mine = (statistics.median(s) / chunks * 1e6 for s in zip(*seconds, strict=True))
    remark("TIME", f"manager.{name}", f"{mine:.3f} {theirs:.3f} us per chunk: ours, vLLM's")
    median_of("RATIO", f"manager.{name}", [a / b for a, b in seconds])


def in_turns(
    operation: Operation, sides: tuple[Side, Side], *works: Sequence[Sequence[Any]]
) -> tuple[float, float]:
    """One pair: seconds of each side, some requests at a time, so that both meet the same noise."""
    spent = [0.0, 0.0]
    for n, first in enumerate(range(0, len(works[0]), IN_A_ROW)):
        for i in (0, 1) if n % 2 else (1, 0):
            spent[i] += run(operation, sides[i], works[i][first : first + IN_A_ROW])
    return spent[0], spent[1]


def pair(slots: int, filled: int, policy: str = "lru") -> tuple[Side, Side]:
    """The manager of vLLM and ours, with chunks 0 .. filled - 1 in host memory."""
    sides = Side(upstream(slots, policy)), Side(ours(slots, policy))
    for side in sides:
        side.fill(filled)
    return sides


def measure(size: Size) -> None:
    """Print every figure."""
    far = 1 << 40
    sides = pair(4 * size.resident, size.resident)
    there = resident(size)
    compare("lookup_many_hit", operations.lookup_many, sides, there, size)
    compare("lookup_one_hit", operations.lookup_one, sides, there, size)
    compare("lookup_one_miss", operations.lookup_one, sides, absent(size, far), size)
    compare("load", operations.load, sides, there, size)
    compare("touch", operations.touch, sides, there, size)
    room = (size.pairs + 2) * size.requests * BATCH
    roomy = pair(size.resident + room, size.resident)
    compare("store", operations.store, roomy, absent(size, 2 * far), size)
    for policy, name in (("lru", "store_evict"), ("arc", "arc_store_evict")):
        full = pair(size.resident, size.resident, policy)
        compare(name, operations.store, full, absent(size, 3 * far), size)
        del full
    large = replace(size, resident=size.large)
    full = pair(large.resident, large.resident)
    compare("store_evict_1m", operations.store, full, absent(large, 3 * far), large)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--resident", type=int, default=10_240, help="chunks in host memory")
    parser.add_argument("--tiny", action="store_true", help="only to see that it runs")
    given = parser.parse_args()
    measure(TINY if given.tiny else Size(given.resident, pairs=given.pairs))


if __name__ == "__main__":
    main()
