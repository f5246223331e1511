"""Host memory as numpy views by place: one block is two indices and one assignment.

So are many that are equally spaced.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtiers.device.copier import Direction
from kvtiers.device.sides import LayerSides, Sides, Strided
from kvtiers.device.strided import BlockPlace, strided_ranges

if TYPE_CHECKING:
    import torch

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Index = tuple[Any, tuple[Any, Any], int]
"""Of the device side, of the host side, and how many blocks that are."""


class NumpyCutter:
    """Views of host memory, on both sides. ``host`` is the area of the slots."""

    def __init__(self, host: Bytes) -> None:
        self._host = host

    def both(self, storage: "torch.Tensor", sides: Sides[Strided]) -> Sides[Bytes]:
        """Views of both sides."""
        device = window(storage.numpy().view(np.uint8), sides.device)
        return Sides(device, self.host(sides.host))

    def host(self, side: Strided) -> Bytes:
        """A view of the area of the slots."""
        return window(self._host, side)


def window(buffer: Bytes, side: Strided) -> Bytes:
    """A strided view; numpy refuses one that would leave ``buffer``."""
    return np.ndarray(side.shape, np.uint8, buffer, side.offset, side.strides)


def move(layers: LayerSides[Bytes], chosen: Sequence[Index], direction: Direction) -> int:
    """Copy these blocks of the layers; how many bytes that were."""
    for device, host in layers.runs:
        if direction is Direction.STORE:
            for block, slot, _ in chosen:
                host[slot] = device[block]
        else:
            for block, slot, _ in chosen:
                device[block] = host[slot]
    return layers.block_bytes * sum(count for _, _, count in chosen)


def zero(view: Bytes, places: Iterable[tuple[int, ...]]) -> None:
    """Zero the host side ``view`` at ``places``."""
    for place in places:
        view[place] = 0


def indices(places: Iterable[BlockPlace]) -> list[Index]:
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
        for part in strided_ranges(places)
    ]


def _along(first: int, step: int, count: int) -> Any:
    """An index for ``count`` places ``step`` apart, or for the one place all of them are."""
    if step == 0 or count == 1:
        return first
    end = first + step * count
    return slice(first, end if end >= 0 else None, step)
