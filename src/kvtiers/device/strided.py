"""Regular patterns in memory, so that few strided copies move many blocks.

On the CPU each one gives up the GIL and must get it back from a busy model thread, which may take
milliseconds; on an accelerator each is a launch. So what is equally spaced, layers included, is
moved by one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvtiers.device.geometry import ChunkCopy, CopyPlan, Geometry, PageMap, unwritten

if TYPE_CHECKING:
    import torch

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


Place = tuple[int, int, int]
"""Slot, sub-block, device block."""


def places_of(chunks: Iterable[ChunkCopy]) -> list[Place]:
    """Where the blocks of ``chunks`` lie, in order."""
    return [(chunk.slot, sub, block) for chunk in chunks for sub, block in chunk.blocks]


def own_places(places: Iterable[Place], page: PageMap, geometry: Geometry) -> list[Place]:
    """Those that this rank stores, of pages that several ranks hold."""
    return [p for p in places if page.writes(geometry.place(p[0], p[1]))]


class Segment(NamedTuple):
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


def segments(places: Iterable[Place]) -> list[Segment]:
    """Gather places, in order, into few segments."""
    found: list[Segment] = []
    before = (0, 0, 0)
    for place in places:
        steps = (place[0] - before[0], place[1] - before[1], place[2] - before[2])
        is_regular = bool(steps[0]) != bool(steps[1]) and bool(steps[2])
        if found and found[-1].blocks == 1 and is_regular:
            found[-1] = Segment(*found[-1][:3], 2, *steps)
        elif found and found[-1].blocks > 1 and steps == found[-1][4:]:
            found[-1] = found[-1]._replace(blocks=found[-1].blocks + 1)
        else:
            found.append(Segment(*place))
        before = place
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Layers:
    """Neighbouring layers with equal pages, equally spaced in one storage: one copy moves all."""

    device: "torch.Tensor"
    """The whole storage, one-byte elements in one dimension."""
    device_start: int
    device_step: int
    """From one layer to the next."""
    block_step: int
    """From one block to the next."""
    num_blocks: int
    page: PageMap
    first: int
    """Index of the first of these layers in its group."""
    count: int = 1


def layer_of(tensor: "torch.Tensor", page: PageMap, index: int) -> Layers:
    """One layer alone: ``tensor`` is (blocks, bytes of a padded page) of one-byte elements."""
    return Layers(
        device=tensor.as_strided((tensor.untyped_storage().nbytes(),), (1,), 0),
        device_start=tensor.storage_offset(),
        device_step=0,
        block_step=tensor.stride(0),
        num_blocks=tensor.shape[0],
        page=page,
        first=index,
    )


def _extended(layers: Layers, new: Layers) -> Layers | None:
    """``layers`` with ``new`` at their end, or None if that is not one regular pattern."""
    step = new.device_start - layers.device_start
    if layers.count > 1:
        step -= layers.device_step * (layers.count - 1)
    same = (
        _bytes_alike(layers.page) == _bytes_alike(new.page)
        and layers.device.data_ptr() == new.device.data_ptr()
        and (layers.block_step, layers.num_blocks) == (new.block_step, new.num_blocks)
        and (layers.count == 1 or step == layers.device_step)
    )
    if not same:
        return None
    return replace(layers, device_step=step, count=layers.count + 1)


def _bytes_alike(page: PageMap) -> tuple[object, ...]:
    return (page.canonical_bytes, page.runs, page.num_writers, page.writer_index)


def gather_layers(
    tensors: Sequence["torch.Tensor"], pages: Sequence[PageMap], chosen: range | None = None
) -> list[Layers]:
    """The ``chosen`` layers of a group (all), in order, in as few regular patterns as possible."""
    gathered: list[Layers] = []
    for index in range(len(pages)) if chosen is None else chosen:
        new = layer_of(tensors[pages[index].tensor], pages[index], index)
        longer = _extended(gathered[-1], new) if gathered else None
        if longer is None:
            gathered.append(new)
        else:
            gathered[-1] = longer
    return gathered


def shares(weights: Sequence[int], count: int) -> list[range]:
    """``count`` ranges of neighbours that cover all of ``weights``, as equal in sum as they can be.

    A range may be empty.
    """
    total, before, ends = sum(weights), 0, [0]
    for index, weight in enumerate(weights):
        # A share ends before the item whose middle is beyond its part of the whole.
        while 2 * before + weight > 2 * total * len(ends) / count and len(ends) < count:
            ends.append(index)
        before += weight
    ends += [len(weights)] * (count + 1 - len(ends))
    return [range(a, b) for a, b in pairwise(ends)]


def zero_unwritten(host: Bytes, geometry: Geometry, plan: CopyPlan) -> None:
    """Zero what a store of ``plan`` leaves unwritten, so that no slot shows its previous bytes.

    ``host`` is the area of the slots. Only this rank's share: see :func:`geometry.unwritten`.
    """
    for chunk in plan.chunks:
        start = geometry.slot_start(chunk.slot)
        for run in unwritten(geometry, chunk):
            shape, strides = (run.count, run.nbytes), (run.page_stride, 1)
            window(host, shape, start + run.page_offset, strides)[:] = 0


def window(buffer: Bytes, shape: tuple[int, ...], offset: int, strides: tuple[int, ...]) -> Bytes:
    """A strided view; numpy refuses one that would leave ``buffer``."""
    return np.ndarray(shape, np.uint8, buffer, offset, strides)
