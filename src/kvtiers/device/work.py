"""What of a plan this rank moves and zeroes: decided here, for every copier. Pure.

Ranks that hold the same bytes take turns to store them. Each zeroes what it would have written of a
sub-block that is missing; the end of a chunk is rank 0's. So no rank zeroes what another one
writes, and together they leave no old byte.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvtiers.device.copier import Direction
from kvtiers.device.geometry import Geometry, PageMap
from kvtiers.device.plans import ChunkCopy, CopyPlan
from kvtiers.device.strided import BlockPlace

Turn = tuple[int, int]
"""How many ranks take turns to store a page, and which of them this one is."""


class Work(NamedTuple):
    """What a rank moves of pages with the same turn, and what it zeroes there first."""

    places: list[BlockPlace]
    zeroed: list[tuple[int, int]]
    """(slot, sub-block)"""


class GroupWork(NamedTuple):
    """The work on one group's chunks. Where the same is moved, it is one object, not equal ones."""

    group: int
    by_turn: dict[Turn, Work]
    tails: list[tuple[int]]
    """Slots of which the rank zeroes what lies behind the payload."""


def turn_of(page: PageMap) -> Turn:
    """Whose turn it is to store ``page``."""
    return page.num_writers, page.writer_index


def work_of(plan: CopyPlan, direction: Direction, geometry: Geometry) -> list[GroupWork]:
    """The work of ``plan``, group by group. Only a store leaves anything to other ranks."""
    made = []
    for group in sorted({chunk.group for chunk in plan.chunks}):
        chunks = [chunk for chunk in plan.chunks if chunk.group == group]
        whole = Work([(c.slot, sub, block) for c in chunks for sub, block in c.blocks], [])
        pages = {turn_of(page): page for page in geometry.groups[group].pages}
        if direction is Direction.LOAD:
            made.append(GroupWork(group, dict.fromkeys(pages, whole), []))
            continue
        missing = [(chunk.slot, sub) for chunk in chunks for sub in chunk.missing]
        by_turn = {
            turn: Work(
                [p for p in whole.places if page.writes(geometry.place(group, p[0], p[1]))],
                [m for m in missing if page.writes(geometry.place(group, *m))],
            )
            for turn, page in pages.items()
        }
        made.append(GroupWork(group, by_turn, _tails(chunks, geometry)))
    return made


def _tails(chunks: Sequence[ChunkCopy], geometry: Geometry) -> list[tuple[int]]:
    group = chunks[0].group
    has_tail = geometry.payload_bytes(group) < geometry.chunk_bytes(group)
    return [(chunk.slot,) for chunk in chunks] if has_tail and geometry.rank == 0 else []
