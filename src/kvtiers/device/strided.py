"""Regular patterns in memory, so that few strided copies move many blocks.

On the CPU each one gives up the GIL and must get it back from a busy model thread, which may take
milliseconds; on an accelerator each is a launch. So what is equally spaced, layers included, is
moved by one.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

BlockPlace = tuple[int, int, int]
"""Slot, sub-block, device block."""


class StridedRange(NamedTuple):
    """``blocks`` blocks that are equally spaced on the device, and in host memory.

    There either the slots are, and the sub-block is one, or the other way round.
    """

    slot: int
    sub: int
    block: int
    blocks: int = 1
    slot_step: int = 0
    sub_step: int = 0
    block_step: int = 0


def strided_ranges(places: Iterable[BlockPlace]) -> list[StridedRange]:
    """Gather places, in order, into few ranges."""
    found: list[StridedRange] = []
    before = (0, 0, 0)
    for place in places:
        steps = (place[0] - before[0], place[1] - before[1], place[2] - before[2])
        is_regular = bool(steps[0]) != bool(steps[1]) and bool(steps[2])
        if found and found[-1].blocks == 1 and is_regular:
            found[-1] = StridedRange(*found[-1][:3], 2, *steps)
        elif found and found[-1].blocks > 1 and steps == found[-1][4:]:
            found[-1] = found[-1]._replace(blocks=found[-1].blocks + 1)
        else:
            found.append(StridedRange(*place))
        before = place
    return found


def balanced_ranges(weights: Sequence[int], count: int) -> list[range]:
    """``count`` ranges of neighbours that cover all of ``weights``, as equal in sum as they can be.

    A range may be empty.
    """
    total, before, ends = sum(weights), 0, [0]
    for index, weight in enumerate(weights):
        # A range ends before the item whose middle is beyond its part of the whole.
        while 2 * before + weight > 2 * total * len(ends) / count and len(ends) < count:
            ends.append(index)
        before += weight
    ends += [len(weights)] * (count + 1 - len(ends))
    return [range(a, b) for a, b in pairwise(ends)]
