"""Where both sides of every copy lie in memory, as numbers, for all copiers.

Both sides of layers that are copied together are strided arrays by place, so that one block costs
one pair of indices. A copier cuts them out of its memory in its own way: see :class:`Cutter`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

from kvtiers.device.geometry import Geometry, PageMap, Run
from kvtiers.device.work import Turn, turn_of

if TYPE_CHECKING:
    import torch

V = TypeVar("V")
"""What a copier has of a side: numbers, or a view of its memory."""


class Strided(NamedTuple):
    """An array of bytes in a larger memory; its last axis is dense. All in bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Sides(NamedTuple, Generic[V]):
    """Both sides of one run of some layers, by place."""

    device: V
    """(blocks, layers, fragments, bytes)"""
    host: V
    """(slots, sub-blocks, layers, fragments, bytes)"""


class LayerSides(NamedTuple, Generic[V]):
    """Layers that are copied together: see :class:`Layers`."""

    turn: Turn
    block_bytes: int
    """Bytes of one block in all of these layers."""
    runs: tuple[Sides[V], ...]


class Cutter(Protocol[V]):
    """Turns numbers into views of a device storage and of the area of the slots."""

    def both(self, storage: "torch.Tensor", sides: Sides[Strided]) -> Sides[V]:
        """Views of both sides. ``storage``: the whole of it, as bytes in one dimension."""

    def host(self, side: Strided) -> V:
        """A view of the area of the slots."""


def num_slots(nbytes: int, geometry: Geometry, group: int) -> int:
    """How many slots there are for chunks of ``group`` in an area of ``nbytes`` bytes."""
    return max(0, 1 + (nbytes - geometry.chunk_bytes(group)) // geometry.slot_start(1))


def sizes_of(
    tensors: "Sequence[torch.Tensor]", nbytes: int, geometry: Geometry
) -> list[tuple[int, int]]:
    """By group: how many slots there are, and device blocks in all of its layers."""
    return [
        (num_slots(nbytes, geometry, g.group), min(tensors[p.tensor].shape[0] for p in g.pages))
        for g in geometry.groups
    ]


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
    """``layers`` with ``new`` at their end, or None if that is not one regular pattern.

    Memory ascends in it: torch has no view with a negative stride.
    """
    step = new.device_start - layers.device_start
    if layers.count > 1:
        step -= layers.device_step * (layers.count - 1)
    same = (
        _bytes_alike(layers.page) == _bytes_alike(new.page)
        and layers.device.data_ptr() == new.device.data_ptr()
        and (layers.block_step, layers.num_blocks) == (new.block_step, new.num_blocks)
        and step > 0
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


def cut_layers(
    tensors: "Sequence[torch.Tensor]",
    geometry: Geometry,
    nbytes: int,
    cutter: Cutter[V],
    chosen: Sequence[range] | None = None,
) -> list[list[LayerSides[V]]]:
    """By group, views of the ``chosen`` layers (all); the slots lie in ``nbytes`` bytes."""
    return [
        [
            _layer_sides(layers, geometry, g.group, nbytes, cutter)
            for layers in gather_layers(tensors, g.pages, chosen[g.group] if chosen else None)
        ]
        for g in geometry.groups
    ]


def cut_tails(geometry: Geometry, nbytes: int, cutter: Cutter[V]) -> list[V]:
    """By group, (slots, bytes) behind the payload of its chunks, of which there may be none."""
    tails = []
    for group in range(len(geometry.groups)):
        payload, whole = geometry.payload_bytes(group), geometry.chunk_bytes(group)
        shape = (num_slots(nbytes, geometry, group), whole - payload)
        tails.append(cutter.host(Strided(shape, (geometry.slot_start(1), 1), payload)))
    return tails


def _layer_sides(
    layers: Layers, geometry: Geometry, group: int, nbytes: int, cutter: Cutter[V]
) -> LayerSides[V]:
    runs = tuple(
        cutter.both(
            layers.device,
            Sides(
                _device_side(layers, run),
                host_side(
                    geometry, group, run, range(layers.first, layers.first + layers.count), nbytes
                ),
            ),
        )
        for run in layers.page.runs
    )
    block_bytes = layers.count * sum(run.count * run.nbytes for run in layers.page.runs)
    return LayerSides(turn_of(layers.page), block_bytes, runs)


def _device_side(layers: Layers, run: Run) -> Strided:
    return Strided(
        (layers.num_blocks, layers.count, run.count, run.nbytes),
        (layers.block_step, layers.device_step, run.device_stride, 1),
        layers.device_start + run.device_offset,
    )


def host_side(geometry: Geometry, group: int, run: Run, layers: range, nbytes: int) -> Strided:
    """One run of equal ``layers`` of ``group``: (slots, sub-blocks, layers, fragments, bytes)."""
    page = geometry.groups[group].pages[layers.start]
    slots, subs = num_slots(nbytes, geometry, group), geometry.blocks_per_chunk
    layer_step = page.canonical_bytes * subs
    return Strided(
        (slots, subs, len(layers), run.count, run.nbytes),
        (geometry.slot_start(1), page.canonical_bytes, layer_step, run.page_stride, 1),
        geometry.page_start(group, layers.start, 0) + run.page_offset,
    )
