"""Both sides of a KV cache as torch views by place, for copies by tables of indices.

Two operations move a layer pattern's blocks, however irregular: a gather into a dense piece on the
device, and a scatter from there. Both run on the device; host memory is reached through pinned
pages. (A strided ``copy_`` between host and device would go through pageable memory, and block.)
Elements are as wide as alignment allows: the fewer, the faster.
"""

from collections.abc import Iterator, Sequence
from math import gcd
from typing import NamedTuple

import torch

from kvtiers.device.copier import Direction
from kvtiers.device.geometry import CopyPlan, Geometry, PageMap
from kvtiers.device.strided import Layers, Place, gather_layers, own_places, places_of

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


class RunTables(NamedTuple):
    """Both sides of one run of some layers, by place, in equal words."""

    device: torch.Tensor
    """(blocks, layers, fragments, words)"""
    host: torch.Tensor
    """(slots, sub-blocks, layers, fragments, words)"""


class LayerTables(NamedTuple):
    """Layers that are copied together: see :class:`Layers`."""

    page: PageMap
    block_bytes: int
    """Bytes of one block in all of these layers."""
    runs: tuple[RunTables, ...]


class GroupTables(NamedTuple):
    """All layers of a group, and the end of its chunks."""

    layers: tuple[LayerTables, ...]
    tail: torch.Tensor | None
    """(slots, bytes) behind the payload, on the rank that zeroes them, if there are any."""

    @property
    def sizes(self) -> tuple[int, int]:
        """How many slots and device blocks all of the layers have."""
        runs = [run for layers in self.layers for run in layers.runs]
        return min(len(r.host) for r in runs), min(len(r.device) for r in runs)


def tables_of(
    tensors: Sequence[torch.Tensor], host: torch.Tensor, geometry: Geometry
) -> list[GroupTables]:
    """Views of every group: ``tensors`` are the KV cache, ``host`` the area of the slots."""
    tables = []
    for group in geometry.groups:
        payload, whole = geometry.payload_bytes(group.group), geometry.chunk_bytes(group.group)
        step = geometry.slot_start(1)
        num_slots = max(0, 1 + (len(host) - payload) // step)
        layers = tuple(
            _layer_tables(gathered, host, num_slots, geometry, group.group)
            for gathered in gather_layers(tensors, group.pages)
        )
        tail = None
        if geometry.rank == 0 and payload < whole:
            tail = host.as_strided((num_slots, whole - payload), (step, 1), payload)
        tables.append(GroupTables(layers, tail))
    return tables


def _layer_tables(
    layers: Layers, host: torch.Tensor, num_slots: int, geometry: Geometry, group: int
) -> LayerTables:
    page, runs = layers.page, []
    start = geometry.page_start(group, layers.first, 0)
    layer_step = page.canonical_bytes * geometry.blocks_per_chunk
    for run in page.runs:
        device_offset, host_offset = (
            layers.device_start + run.device_offset,
            start + run.page_offset,
        )
        part = (layers.count, run.count, run.nbytes)
        by_block = (layers.block_step, layers.device_step, run.device_stride)
        by_slot = (geometry.slot_start(1), page.canonical_bytes, layer_step, run.page_stride)
        offsets = (device_offset, host_offset, layers.device.data_ptr(), host.data_ptr())
        word = gcd(8, run.nbytes, *by_block, *by_slot, *offsets)
        slots = (num_slots, geometry.blocks_per_chunk, *part)
        runs.append(
            RunTables(
                _words(layers.device, word, (layers.num_blocks, *part), by_block, device_offset),
                _words(host, word, slots, by_slot, host_offset),
            )
        )
    block_bytes = layers.count * sum(run.count * run.nbytes for run in page.runs)
    return LayerTables(page, block_bytes, tuple(runs))


def _words(
    flat: torch.Tensor, word: int, shape: Sequence[int], strides: Sequence[int], offset: int
) -> torch.Tensor:
    """A strided view of ``flat`` bytes whose last dimension is dense; all numbers in bytes."""
    words = flat[: len(flat) // word * word].view(_WORDS[word])
    return words.as_strided(
        (*shape[:-1], shape[-1] // word), (*(s // word for s in strides), 1), offset // word
    )


class Moves(NamedTuple):
    """What one job moves of some layers, and what it zeroes there first.

    Layers of which the same is moved have the same two lists, not equal ones.
    """

    layers: LayerTables
    places: list[Place]
    zeroed: list[tuple[int, int]]
    """(slot, sub-block)"""


def moves_of(
    plan: CopyPlan, direction: Direction, tables: Sequence[GroupTables], geometry: Geometry
) -> Iterator[Moves]:
    """The work of ``plan``, layers by layers. A store leaves to other ranks what is theirs."""
    for group in sorted({chunk.group for chunk in plan.chunks}):
        chunks = [chunk for chunk in plan.chunks if chunk.group == group]
        everything = places_of(chunks)
        missing = [(chunk.slot, sub) for chunk in chunks for sub in chunk.missing]
        stored: dict[tuple[int, int], tuple[list[Place], list[tuple[int, int]]]] = {}
        for layers in tables[group].layers:
            if direction is Direction.LOAD:
                yield Moves(layers, everything, [])
                continue
            page = layers.page
            turn = page.num_writers, page.writer_index
            if turn not in stored:
                zeroed = [m for m in missing if page.writes(geometry.place(*m))]
                stored[turn] = own_places(everything, page, geometry), zeroed
            yield Moves(layers, *stored[turn])
