"""Which blocks a transfer moves to or from which chunks. Pure: numbers in, numbers out."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtiers.device.geometry import Geometry
from kvtiers.errors import Kind, KVTiersError


@dataclass(frozen=True, slots=True)
class ChunkCopy:
    """The blocks to move between the device and one chunk."""

    group: int
    slot: int
    blocks: tuple[tuple[int, int], ...]
    """(sub-block, device block), sub-blocks ascending."""
    missing: tuple[int, ...] = ()
    """Sub-blocks that have no device block: a store leaves zeros there."""


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """What one job moves; each chunk in a slot of its own."""

    chunks: tuple[ChunkCopy, ...]

    def __repr__(self) -> str:
        blocks = sum(len(chunk.blocks) for chunk in self.chunks)
        return f"<CopyPlan: {blocks} blocks in {len(self.chunks)} chunks>"


def plan_copies(
    group_sizes: Sequence[int],
    block_indices: Sequence[int],
    device_block_ids: Sequence[int],
    slot_ids: Sequence[int],
    geometry: Geometry,
) -> CopyPlan:
    """Expand a transfer into chunks.

    Group by group, ``group_sizes[g]`` of the ``device_block_ids`` are consecutive blocks of the
    request, the first being its block number ``block_indices[g]``; so the first chunk of a group
    may begin in its middle and the last may end early. Each chunk takes the next of ``slot_ids``.
    Raises KVTiersError (``Kind.BROKEN``) if the numbers do not fit together.
    """
    per_chunk = geometry.blocks_per_chunk
    _check_counts(group_sizes, block_indices, len(device_block_ids), geometry)
    device, slots = iter(device_block_ids), iter(slot_ids)
    chunks: list[ChunkCopy] = []
    for group, (size, first) in enumerate(zip(group_sizes, block_indices, strict=True)):
        begin, end = first % per_chunk, first % per_chunk + size
        for base in range(0, end if size else 0, per_chunk):
            subs = range(max(begin - base, 0), min(end - base, per_chunk))
            slot = next(slots, None)
            if slot is None:
                raise _inconsistent(
                    f"the chunks of group {group} need more than {len(slot_ids)} slots"
                )
            blocks = tuple((sub, int(next(device))) for sub in subs)
            missing = tuple(sub for sub in range(per_chunk) if sub not in subs)
            chunks.append(ChunkCopy(group, int(slot), blocks, missing))
    if next(slots, None) is not None:
        raise _inconsistent(f"only {len(chunks)} of {len(slot_ids)} slots are needed")
    return CopyPlan(tuple(chunks))


def _check_counts(
    group_sizes: Sequence[int], block_indices: Sequence[int], blocks: int, geometry: Geometry
) -> None:
    groups = len(geometry.groups)
    if not len(group_sizes) == len(block_indices) == groups:
        given = f"{len(group_sizes)} sizes and {len(block_indices)} block indices"
        raise _inconsistent(f"{given} were given for {groups} groups")
    if min(*group_sizes, *block_indices) < 0:
        raise _inconsistent("a group size or block index is negative")
    if sum(group_sizes) != blocks:
        raise _inconsistent(f"{blocks} blocks were given for groups of {list(group_sizes)}")


def _inconsistent(what: str) -> KVTiersError:
    return KVTiersError(
        f"A transfer does not fit the KV cache: {what}; please report this with the engine's "
        "version.",
        kind=Kind.BROKEN,
        operation="plan copies",
    )
