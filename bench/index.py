"""What a question costs the presence index: a long prompt, of which many pods hold some.

    python -m bench.index [--rounds 200] [--tiny]

64 pods hold blocks of a prompt of 100,000 tokens (6,250 blocks of 16) in the accelerator, in host
memory and on disk, each up to a point of its own, in an index that is full. Hashes of prompts come
ready. What memory a block takes is measured beside it, with one pod and with all. Prints::

    COST index.lookup_ms <milliseconds of one question: median>
    COST index.block_bytes <bytes of memory for each block>
    TIME index.apply <microseconds for each block that is told>
"""

import argparse
import random
import tracemalloc
from dataclasses import dataclass
from time import thread_time

from bench.lines import figure, median_of, remark
from kvtiers.index.presence import Presence
from kvtiers.index.reach import reach
from kvtiers.kvevents.messages import BlockStored

MEDIA = ("GPU", "CPU", "STORAGE")
BLOCK = 16


@dataclass(frozen=True)
class Size:
    """How large the index and the prompt are."""

    pods: int
    prompt_blocks: int
    all_blocks: int


FULL = Size(pods=64, prompt_blocks=6250, all_blocks=1_000_000)
TINY = Size(pods=4, prompt_blocks=50, all_blocks=1000)


def stored(blocks: list[int], medium: str) -> BlockStored:
    """An event without tokens, as one that is kept for nobody."""
    return BlockStored(blocks, None, [], BLOCK, medium=medium)


def filled(size: Size, prompt: list[int], draw: random.Random) -> Presence:
    """An index with as many blocks as it may have; those of the prompt among them."""
    presence = Presence(size.all_blocks)
    others = size.all_blocks - len(prompt)
    each = others // size.pods
    for pod in range(size.pods):
        told = [draw.getrandbits(64) for _ in range(each)]
        for n, medium in enumerate(MEDIA):
            presence.apply(f"pod-{pod}", stored(told[: each >> n], medium))
    for pod in range(size.pods):
        for medium in MEDIA:
            presence.apply(f"pod-{pod}", stored(prompt[: draw.randrange(len(prompt))], medium))
    return presence


def measure(size: Size, rounds: int) -> None:
    """Print the figures."""
    draw = random.Random(8)
    prompt = [draw.getrandbits(64) for _ in range(size.prompt_blocks)]
    tracemalloc.start()
    presence = filled(size, prompt, draw)
    taken = tracemalloc.get_traced_memory()[0] / len(presence.blocks)
    tracemalloc.stop()
    pods = list(presence.pods.values())
    times = []
    for _ in range(rounds):
        asked = [int(str(block)) for block in prompt]  # no object that the index has too
        began = thread_time()
        found = reach(presence, asked, BLOCK, pods)
        times.append((thread_time() - began) * 1e3)
        assert found[0].tokens > 0
    median_of("COST", "index.lookup_ms", times)
    figure("COST", "index.block_bytes", taken, (taken, taken))
    told = [draw.getrandbits(64) for _ in range(size.prompt_blocks)]
    began = thread_time()
    presence.apply("pod-0", stored(told, "CPU"))
    spent = (thread_time() - began) / len(told) * 1e6
    remark("TIME", "index.apply", f"{spent:.2f} us for each block told to a full index")


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    measure(TINY if given.tiny else FULL, given.rounds)


if __name__ == "__main__":
    main()
