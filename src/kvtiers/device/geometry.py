"""Where the bytes of device blocks lie inside a chunk. Pure: numbers in, numbers out.

Canonical order, version 1. A chunk of a group holds the group's layers in order; of each layer the
``blocks_per_chunk`` canonical pages one after the other; then zeros up to a multiple of
``PAGE_BYTES``. A canonical page has the bytes that tensor-parallel size 1 would have. Where KV
heads are outermost in it, the heads of every rank are one contiguous part of each page, so that
each rank copies its own slice and no rank needs to know how many others there are.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from kvtiers.chunks import ChunkLayout, GroupLayout, granule_of, round_up

ORDER = "layer-major"
ORDER_VERSION = 1


@dataclass(frozen=True, slots=True)
class Run:
    """``count`` fragments of ``nbytes`` bytes, equally spaced on both sides. All in bytes."""

    device_offset: int
    """Start of the first fragment in the rank's own page of a device block."""
    page_offset: int
    """Start of the first fragment in the canonical page."""
    nbytes: int
    count: int = 1
    device_stride: int = 0
    page_stride: int = 0

    def device_spans(self) -> Iterator[tuple[int, int]]:
        """(start, stop) of every fragment in the rank's own page."""
        return _spans(self.device_offset, self.device_stride, self.nbytes, self.count)

    def page_spans(self) -> Iterator[tuple[int, int]]:
        """(start, stop) of every fragment in the canonical page."""
        return _spans(self.page_offset, self.page_stride, self.nbytes, self.count)


def _spans(offset: int, stride: int, nbytes: int, count: int) -> Iterator[tuple[int, int]]:
    return ((offset + i * stride, offset + i * stride + nbytes) for i in range(count))


def coalesce(runs: Iterable[Run]) -> tuple[Run, ...]:
    """The same bytes in as few runs as their order in the device page allows."""
    joined: list[Run] = []
    for run in sorted(map(_dense, runs), key=lambda r: r.device_offset):
        last = joined[-1] if joined else None
        if last is not None and _touch(last, run):
            joined[-1] = Run(last.device_offset, last.page_offset, last.nbytes + run.nbytes)
        else:
            joined.append(run)
    return tuple(joined)


def _dense(run: Run) -> Run:
    """``run`` as one fragment if its fragments touch on both sides, and without idle strides."""
    if run.count == 1 or run.device_stride == run.page_stride == run.nbytes:
        return Run(run.device_offset, run.page_offset, run.nbytes * run.count)
    return run


def _touch(a: Run, b: Run) -> bool:
    return (
        a.count == b.count == 1
        and a.device_offset + a.nbytes == b.device_offset
        and a.page_offset + a.nbytes == b.page_offset
    )


def _require(holds: bool, broken: str) -> None:
    """Not ``assert``: what an engine says of its memory is looked at under ``python -O``, too."""
    if not holds:
        raise AssertionError(broken)


@dataclass(frozen=True, slots=True)
class PageMap:
    """One layer of one group on one rank: how its page maps into the canonical page.

    A layer whose parts are divided between the ranks in different ways has one for each part; all
    name the layer's tensor, and together their runs hold the local page. ``pages`` makes them.
    """

    tensor: int
    """Index of the device tensor that holds the layer."""
    local_bytes: int
    """Bytes of the rank's own page, without padding."""
    canonical_bytes: int
    runs: tuple[Run, ...]
    num_writers: int = 1
    """Number of ranks that hold these very bytes and take turns to store them."""
    writer_index: int = 0
    portable: bool = True
    """Whether the canonical bytes are the same under every parallel configuration."""
    why_bound: str = ""
    """Why they are not, in words."""
    kind: str = "layers of an unknown kind"
    """What the layer keeps, in words: for people."""
    order: str = ""
    """Names the order of the canonical bytes where their number does not tell it."""
    why_per_block: str = "nobody says how tokens lie in a block"
    """Why a chunk's bytes depend on how many tokens a block has, in words; empty: they do not."""

    def writes(self, place: int) -> bool:
        """Whether this rank stores the page at ``place`` (see :meth:`Geometry.place`)."""
        return place % self.num_writers == self.writer_index

    def check(self) -> None:
        """Raise AssertionError unless the runs lie apart in the canonical page."""
        _require(bool(self.runs), f"no runs in {self!r}")
        full = all(run.nbytes > 0 and run.count > 0 for run in self.runs)
        _require(full, f"a run of tensor {self.tensor} is empty")
        page = sorted(span for run in self.runs for span in run.page_spans())
        inside = page[0][0] >= 0 and page[-1][1] <= self.canonical_bytes
        _require(inside, f"runs leave the canonical page of tensor {self.tensor}")
        apart = all(a[1] <= b[0] for a, b in pairwise(page))
        _require(apart, f"runs of tensor {self.tensor} overlap in the canonical page")
        turn = 0 <= self.writer_index < self.num_writers
        _require(turn, f"writer {self.writer_index} of {self.num_writers} never has a turn")


def check_tiles(pages: Sequence[PageMap]) -> None:
    """Raise AssertionError unless the pages of each tensor hold its local page exactly once."""
    for tensor in sorted({page.tensor for page in pages}):
        parts = [page for page in pages if page.tensor == tensor]
        local = sorted(span for p in parts for run in p.runs for span in run.device_spans())
        ends = [0, *(stop for _, stop in local)]
        sizes = {page.local_bytes for page in parts}
        starts = [*(start for start, _ in local), *sizes]
        _require(starts == ends, f"runs do not tile the local page of tensor {tensor}")


def opaque_page(
    tensor: int, page_bytes: int, num_ranks: int, rank: int, why: str = "nobody certifies its bytes"
) -> PageMap:
    """A page nobody certifies: each rank's bytes whole, at a place no other rank writes."""
    return PageMap(
        tensor=tensor,
        local_bytes=page_bytes,
        canonical_bytes=num_ranks * page_bytes,
        runs=(Run(0, rank * page_bytes, page_bytes),),
        portable=False,
        why_bound=why,
    )


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Layers of a group that no rank of this pipeline stage has: their place in the chunk."""

    before: tuple[int, ...] = ()
    """Bytes of the canonical page of each layer that comes before this stage's."""
    after: tuple[int, ...] = ()
    portable: bool = True
    any_block_size: bool = True
    orders: tuple[str, ...] = ()
    """Named orders of the pages of all stages."""


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """The layers of one KV-cache group, in order."""

    group: int
    tokens_per_chunk: int
    pages: tuple[PageMap, ...]
    keeps_every_chunk: bool = True
    elsewhere: Elsewhere = Elsewhere()


@dataclass(frozen=True)
class Geometry:
    """The chunks of all groups, as one rank sees them. ``groups[i].group`` is ``i``."""

    groups: tuple[GroupGeometry, ...]
    blocks_per_chunk: int
    rank: int = 0
    one_size: bool = False
    """Whether every chunk gets as much room as the largest one, however small it is."""
    slot_bytes: int = field(init=False)
    """Bytes of the largest chunk of any group."""
    granule_bytes: int = field(init=False)
    """What the numbers of slots count in: see :meth:`slot_start`."""
    _starts: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        starts = tuple(_layer_starts(g, self.blocks_per_chunk) for g in self.groups)
        object.__setattr__(self, "_starts", starts)
        sizes = [round_up(s[-1]) for s in starts]
        object.__setattr__(self, "slot_bytes", max(sizes))
        granule = max(sizes) if self.one_size else granule_of(sizes)
        object.__setattr__(self, "granule_bytes", granule)

    def slot_start(self, slot: int) -> int:
        """Where host slot ``slot`` starts in the area of the slots (bytes): nobody else says so."""
        return slot * self.granule_bytes

    def payload_bytes(self, group: int) -> int:
        """Bytes of the pages of one chunk, without the zeros at its end."""
        return self._starts[group][-1]

    def chunk_bytes(self, group: int) -> int:
        """Bytes of one chunk: a multiple of ``PAGE_BYTES``."""
        return round_up(self.payload_bytes(group))

    def page_start(self, group: int, layer_index: int, sub_block: int) -> int:
        """Where the canonical page of a layer's ``sub_block`` starts in the chunk (bytes)."""
        page = self.groups[group].pages[layer_index]
        return self._starts[group][layer_index] + sub_block * page.canonical_bytes

    def span(self, group: int) -> int:
        """Granules that a chunk of ``group`` takes."""
        return -(-self.chunk_bytes(group) // self.granule_bytes)

    def place(self, group: int, slot: int, sub_block: int) -> int:
        """A number for one block's room in host memory, equal on all ranks: it rotates writers.

        Neighbouring chunks of a group have neighbouring numbers, however far apart they start.
        """
        return slot // self.span(group) * self.blocks_per_chunk + sub_block

    def portable(self, group: int) -> bool:
        """Whether the chunks of ``group`` are the same under every parallel configuration."""
        here = self.groups[group]
        return here.elsewhere.portable and all(page.portable for page in here.pages)

    def any_block_size(self, group: int) -> bool:
        """Whether the chunks of ``group`` are the same whatever block size divides them."""
        here = self.groups[group]
        return here.elsewhere.any_block_size and not any(p.why_per_block for p in here.pages)

    def fragments_per_chunk(self, group: int) -> int:
        """Separate pieces this rank copies for a whole chunk: what its copies cost."""
        fragments = sum(run.count for page in self.groups[group].pages for run in page.runs)
        return fragments * self.blocks_per_chunk

    def layout(self) -> ChunkLayout:
        """Sizes of the chunks, for those who need not know what is in them."""
        return ChunkLayout(
            tuple(
                GroupLayout(
                    g.group, self.chunk_bytes(g.group), g.tokens_per_chunk, g.keeps_every_chunk
                )
                for g in self.groups
            )
        )

    def certificate(self) -> dict[str, Any]:
        """What the byte format depends on, as JSON values, equal on every rank.

        For portable groups it does not depend on the number of ranks either. A group that is not
        portable says so: whoever names its bytes must add the whole topology.
        """
        return {
            "order": ORDER,
            "version": ORDER_VERSION,
            "blocks_per_chunk": self.blocks_per_chunk,
            "groups": [
                {
                    "tokens_per_chunk": g.tokens_per_chunk,
                    "portable": self.portable(g.group),
                    "page_bytes": [
                        *g.elsewhere.before,
                        *(page.canonical_bytes for page in g.pages),
                        *g.elsewhere.after,
                    ],
                    **_orders(g),
                }
                for g in self.groups
            ],
        }

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant, if any."""
        _require(self.blocks_per_chunk >= 1, "a chunk holds no block")
        for index, group in enumerate(self.groups):
            _require(group.group == index, f"group {group.group} stands at place {index}")
            _require(bool(group.pages), f"group {index} has no layers")
            for page in group.pages:
                page.check()
            check_tiles(group.pages)

    def __repr__(self) -> str:
        layers = "+".join(str(len(g.pages)) for g in self.groups)
        return (
            f"<Geometry rank {self.rank}: {layers} layers, {self.blocks_per_chunk} blocks a chunk, "
            f"slots of {self.slot_bytes} bytes>"
        )


def _orders(group: GroupGeometry) -> dict[str, list[str]]:
    """The named orders of the pages, each once; nothing where none has a name."""
    own = (page.order for page in group.pages)
    named = list(dict.fromkeys(order for order in group.elsewhere.orders or own if order))
    return {"orders": named} if named else {}


def _layer_starts(group: GroupGeometry, blocks_per_chunk: int) -> tuple[int, ...]:
    """Where each layer of this stage starts in a chunk, then where the last of all ends."""
    starts = [sum(group.elsewhere.before) * blocks_per_chunk]
    for page in group.pages:
        starts.append(starts[-1] + page.canonical_bytes * blocks_per_chunk)
    starts[-1] += sum(group.elsewhere.after) * blocks_per_chunk
    return tuple(starts)
