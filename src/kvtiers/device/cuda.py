"""Our region in the shape that vLLM's own copy worker for CUDA, ROCm and XPU reads.

That worker keeps one view per device tensor, with the chunks of one tensor a row apart, and asks a
region for these views. Here they are cut so that its bytes land where ``geometry`` says, which is
possible when every group covers the tensors in order (:func:`vllm_compatible`). Nothing here knows
the engine: the worker is built, with ``canonical_layout=True``, by ``engines.vllm``.
"""

import mmap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from kvtiers.device.copier import Direction, refuse_slots_outside
from kvtiers.device.geometry import Geometry
from kvtiers.device.plans import CopyPlan
from kvtiers.device.sides import cut_tails, host_side, num_slots
from kvtiers.device.views import Bytes, NumpyCutter, zero
from kvtiers.device.work import Turn, turn_of, work_of
from kvtiers.errors import Kind, KVTiersError


def vllm_compatible(geometry: Geometry) -> str | None:
    """Why vLLM's copy worker cannot produce this geometry's chunks, in plain words; None: it can.

    Its view of a tensor has room for the largest page that any group keeps there, and starts where
    the view of the tensor before it ends.
    """
    if geometry.granule_bytes != geometry.slot_bytes:
        return "its chunks are of several sizes, and that worker keeps all of them a row apart"
    pages = _view_pages(geometry)
    if 0 in pages:
        return f"KV tensor {pages.index(0)} holds no layer of any group"
    starts = [sum(pages[:tensor]) * geometry.blocks_per_chunk for tensor in range(len(pages))]
    for group in geometry.groups:
        for layer, page in enumerate(group.pages):
            for sub in range(geometry.blocks_per_chunk):
                theirs = starts[page.tensor] + sub * pages[page.tensor]
                if theirs != geometry.page_start(group.group, layer, sub):
                    return (
                        f"layer {layer} of KV-cache group {group.group} lies in KV tensor "
                        f"{page.tensor}, whose place in a chunk is not the layer's: the groups "
                        "of this model do not cover the tensors in one order with equal pages"
                    )
    return None


def _view_pages(geometry: Geometry) -> list[int]:
    """Bytes of the largest canonical page in each tensor."""
    largest: dict[int, int] = {}
    for page in (page for group in geometry.groups for page in group.pages):
        largest[page.tensor] = max(largest.get(page.tensor, 0), page.canonical_bytes)
    return [largest.get(tensor, 0) for tensor in range(max(largest) + 1)]


class RegionForVllm:
    """The area of the slots as vLLM's copy worker wants to see its region.

    ``buffer`` holds the slots, slot ``i`` at ``i * geometry.slot_bytes``: all are of one size.
    ``unregister`` takes the address of memory that the worker pinned and unpins it. The worker owns
    this object and calls ``cleanup``. Names with an underscore are those the worker reads.
    Caller guarantees: the geometry is :func:`vllm_compatible`.
    """

    def __init__(
        self, buffer: memoryview, geometry: Geometry, unregister: Callable[[int], None]
    ) -> None:
        self.rank = geometry.rank
        self.num_chunks = min(num_slots(buffer.nbytes, geometry, g.group) for g in geometry.groups)
        self.total_size_bytes = self.num_chunks * geometry.slot_bytes
        self.page_size = mmap.PAGESIZE
        self.cpu_page_size = geometry.slot_bytes
        self.is_pinned = False
        self.pinned_addresses: list[int] = []
        self._row_stride = geometry.slot_bytes
        self._base: Any = torch.frombuffer(buffer, dtype=torch.int8, count=self.total_size_bytes)
        self._geometry = geometry
        cutter, size = NumpyCutter(np.frombuffer(buffer, np.uint8)), buffer.nbytes
        self._pages = [_page_views(cutter, geometry, g.group, size) for g in geometry.groups]
        self._tails = cut_tails(geometry, size, cutter)
        self._unregister = unregister
        self._views: list[Any] = []
        self._view_offset = 0

    def create_next_canonical_view(self, tensor_page_size: int) -> torch.Tensor:
        """The next device tensor's (chunks, ``tensor_page_size``) bytes, chunks a slot apart.

        Raises KVTiersError (``Kind.BROKEN``) when the tensors need more than a slot.
        """
        end = self._view_offset + tensor_page_size
        if end > self._row_stride:
            raise KVTiersError(
                f"The copy worker asks for {end} bytes of slots of {self._row_stride} bytes; "
                "please report this with the engine's version.",
                kind=Kind.BROKEN,
                operation="create view",
            )
        view = self._base.as_strided(
            (self.num_chunks, tensor_page_size), (self._row_stride, 1), self._view_offset
        )
        self._view_offset = end
        self._views.append(view)
        return view

    def create_next_worker_view(self, tensor_page_size: int) -> torch.Tensor:
        """Refused with KVTiersError: chunks here are canonical, no part belongs to one rank."""
        raise KVTiersError(
            f"A private view of {tensor_page_size} bytes a chunk was asked for, but this region "
            "holds canonical chunks: build the copy worker with canonical_layout=True.",
            kind=Kind.UNSUPPORTED,
            operation="create view",
        )

    def iter_worker_slot_ranges(self) -> Iterator[tuple[int, int]]:
        """(offset, bytes) of what this rank reads and writes: every slot, whole."""
        return ((slot * self._row_stride, self._row_stride) for slot in range(self.num_chunks))

    def zero_unwritten(self, plan: CopyPlan) -> None:
        """Zero what a store of ``plan`` leaves unwritten; call it before the store is submitted.

        Raises IndexError for a slot that is not there.
        """
        refuse_slots_outside(plan, [self.num_chunks] * len(self._pages))
        for group in work_of(plan, Direction.STORE, self._geometry):
            for turn, view in self._pages[group.group]:
                zero(view, group.by_turn[turn].zeroed)
            zero(self._tails[group.group], group.tails)

    def cleanup(self) -> None:
        """Unpin and let go of the memory, so that its owner can unmap it. Twice is fine."""
        while self.pinned_addresses:
            self._unregister(self.pinned_addresses.pop())
        self.is_pinned = False
        self._views.clear()
        self._pages.clear()
        self._tails.clear()
        self._base = None

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant, if any."""
        assert self.is_pinned or not self.pinned_addresses, "unpinned, but addresses are left"
        assert self._view_offset <= self._row_stride, "the views are wider than a slot"

    def __repr__(self) -> str:
        state = "pinned" if self.is_pinned else "pageable"
        return (
            f"<RegionForVllm rank {self.rank}: {self.num_chunks} slots of {self._row_stride} "
            f"bytes, {state}, {len(self._views)} views>"
        )


def _page_views(
    cutter: NumpyCutter, geometry: Geometry, group: int, nbytes: int
) -> list[tuple[Turn, Bytes]]:
    """What this rank writes of each layer of ``group``, by place, and whose turn that is."""
    return [
        (
            turn_of(page),
            cutter.host(host_side(geometry, group, run, range(layer, layer + 1), nbytes)),
        )
        for layer, page in enumerate(geometry.groups[group].pages)
        for run in page.runs
    ]
