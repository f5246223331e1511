"""Both sides of a KV cache in host memory as numpy views by place.

They are made once: then one block costs two indices and one assignment, and so do many that are
equally spaced.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvtiers.device.copier import Direction
from kvtiers.device.geometry import Geometry, PageMap
from kvtiers.device.strided import (
    Bytes,
    Layers,
    Place,
    gather_layers,
    segments,
    shares,
    window,
)

if TYPE_CHECKING:
    import torch


class RunViews(NamedTuple):
    """Both sides of one run of some layers, as bytes by place."""

    device: Bytes
    """(blocks, layers, fragments, bytes)"""
    host: Bytes
    """(slots, sub-blocks, layers, fragments, bytes)"""


Index = tuple[Any, tuple[Any, Any], int]
"""Of the device side, of the host side, and how many blocks that are."""


class Pattern(NamedTuple):
    """Layers that are copied together: see :class:`Layers`."""

    page: PageMap
    block_bytes: int
    """Bytes of one block in all of these layers."""
    runs: tuple[RunViews, ...]


def move(pattern: Pattern, chosen: Sequence[Index], direction: Direction) -> int:
    """Copy these blocks of the pattern's layers; how many bytes that were."""
    for device, host in pattern.runs:
        if direction is Direction.STORE:
            for block, slot, _ in chosen:
                host[slot] = device[block]
        else:
            for block, slot, _ in chosen:
                device[block] = host[slot]
    return pattern.block_bytes * sum(count for _, _, count in chosen)


def indices(places: Iterable[Place]) -> list[Index]:
    """Places as indices of both sides, in order."""
    return [
        (
            _along(part.block, part.block_step, part.blocks),
            (
                _along(part.slot, part.slot_step, part.blocks),
                _along(part.sub, part.sub_step, part.blocks),
            ),
            part.blocks,
        )
        for part in segments(places)
    ]


def _along(first: int, step: int, count: int) -> Any:
    """An index for ``count`` places ``step`` apart, or for the one place all of them are."""
    if step == 0 or count == 1:
        return first
    end = first + step * count
    return slice(first, end if end >= 0 else None, step)


def divided(
    tensors: Sequence["torch.Tensor"], host: Bytes, geometry: Geometry, threads: int
) -> list[list[list[Pattern]]]:
    """For each thread and group the layers that it copies."""
    ranges = [shares([p.local_bytes for p in g.pages], threads) for g in geometry.groups]
    return [
        [
            [
                _pattern(layers, host, geometry, g.group)
                for layers in gather_layers(tensors, g.pages, ranges[g.group][share])
            ]
            for g in geometry.groups
        ]
        for share in range(threads)
    ]


def _pattern(layers: Layers, host: Bytes, geometry: Geometry, group: int) -> Pattern:
    page, storage = layers.page, layers.device.numpy().view(np.uint8)
    slot_step = geometry.slot_start(1)
    num_slots = max(0, 1 + (len(host) - geometry.payload_bytes(group)) // slot_step)
    host_start = geometry.page_start(group, layers.first, 0)
    layer_step = page.canonical_bytes * geometry.blocks_per_chunk
    runs = []
    for run in page.runs:
        part = (layers.count, run.count, run.nbytes)
        device = window(
            storage,
            (layers.num_blocks, *part),
            layers.device_start + run.device_offset,
            (layers.block_step, layers.device_step, run.device_stride, 1),
        )
        slots = window(
            host,
            (num_slots, geometry.blocks_per_chunk, *part),
            host_start + run.page_offset,
            (slot_step, page.canonical_bytes, layer_step, run.page_stride, 1),
        )
        runs.append(RunViews(device, slots))
    block_bytes = layers.count * sum(run.count * run.nbytes for run in page.runs)
    return Pattern(page, block_bytes, tuple(runs))
