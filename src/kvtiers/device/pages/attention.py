"""Pages of attention: K and V of every head and token."""

from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from math import prod

from kvtiers.device.geometry import PageMap, coalesce
from kvtiers.device.pages.boxes import Step, runs_of_box
from kvtiers.device.pages.shares import Share
from kvtiers.errors import Kind, KVTiersError


class Axis(Enum):
    """What an axis of a tensor counts."""

    BLOCK = "blocks"
    KV = "K and V"
    HEAD = "heads"
    TOKEN = "tokens"
    ELEMENT = "elements"


@dataclass(frozen=True, slots=True)
class KVTensor:
    """A rank's tensor of one layer: what its axes count, their sizes, and strides in bytes.

    The axes of a page stand in the order they have in memory, outermost first: strides do not tell
    it where a rank has one head. ``Axis.BLOCK`` may be anywhere, or missing.

    Without ``Axis.KV`` it holds either K or V, or both side by side in the elements of a head. A
    tensor of several layers is described by one of these per layer, as is one with a plane for K
    and another for V outside of the blocks: each its own view, with a stride from block to block.
    """

    axes: tuple[Axis, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    def size(self, axis: Axis) -> int:
        """Length of ``axis``; 1 if the tensor has no such axis."""
        return self.shape[self.axes.index(axis)] if axis in self.axes else 1


def attention_page(
    tensor: int, layer: KVTensor, heads: Share, *, why_per_block: str = ""
) -> PageMap:
    """The page of a layer whose ``heads`` this rank holds.

    ``why_per_block``: what the axes do not tell of how tokens lie in a block, such as packed K.
    The canonical page has the axes of the tensor's page, in their order, with the heads of all
    ranks. What follows a page in its block, padding or other layers, is left alone.
    Raises KVTiersError ``UNSUPPORTED`` for a page that is not dense, or has other heads.
    """
    order = _memory_order(layer)
    if layer.size(Axis.HEAD) != heads.count:
        raise _unfit(f"it has {layer.size(Axis.HEAD)} heads of {heads.count}")
    local = [layer.size(axis) for axis in order]
    whole = [heads.total if axis is Axis.HEAD else layer.size(axis) for axis in order]
    inside, outside = _steps(local, layer.itemsize), _steps(whole, layer.itemsize)
    first = outside[order.index(Axis.HEAD)] * heads.first if Axis.HEAD in order else 0
    steps = [Step(*step) for step in zip(local, inside, outside, strict=True)]
    return PageMap(
        tensor=tensor,
        local_bytes=prod(local) * layer.itemsize,
        canonical_bytes=prod(whole) * layer.itemsize,
        runs=coalesce(runs_of_box(layer.itemsize, steps, page_offset=first)),
        num_writers=heads.num_writers,
        writer_index=heads.writer_index,
        kind="attention",
        why_per_block=why_per_block or _what_is_outside_of_tokens(order, whole),
    )


def _memory_order(layer: KVTensor) -> list[Axis]:
    """The axes of a page, which must be dense and fit its block."""
    known = list(zip(layer.axes, layer.shape, layer.strides, strict=True))
    inner = [axis for axis in known if axis[0] is not Axis.BLOCK]
    steps = _steps([size for _, size, _ in inner], layer.itemsize)
    for (axis, size, stride), step in zip(inner, steps, strict=True):
        if size > 1 and stride != step:
            raise _unfit(f"its {axis.value} are {stride} bytes apart instead of {step}")
    page = prod(size for _, size, _ in inner) * layer.itemsize
    block = next((stride for axis, _, stride in known if axis is Axis.BLOCK), page)
    if block < page:
        raise _unfit(f"its blocks are {block} bytes apart, a page has {page}")
    return [axis for axis, _, _ in inner]


def _steps(sizes: list[int], itemsize: int) -> list[int]:
    """Bytes from one to the next along each axis of a dense array."""
    inner = accumulate(reversed(sizes[1:]), lambda a, b: a * b, initial=itemsize)
    return list(inner)[::-1]


def _what_is_outside_of_tokens(order: list[Axis], sizes: list[int]) -> str:
    for axis, size in zip(order, sizes, strict=True):
        if axis is Axis.TOKEN:
            return ""
        if size > 1:
            return f"{axis.value} of a block lie apart, each with all of the block's tokens"
    return "it has no tokens"


def _unfit(what: str) -> KVTiersError:
    return KVTiersError(
        f"this layer's KV has no canonical page: {what}",
        kind=Kind.UNSUPPORTED,
        operation="describe pages",
    )
