"""Pages of layers that keep a state: state-space models, linear attention, short convolutions.

A rank's page is one state tensor after the other. Along one axis of each lie sections, divided
between the ranks each on its own: x, B and C of Mamba2's convolution, or q, k and v of a gated
delta-net, by heads; its temporal state is one such section. B and C belong to groups of heads;
where there are fewer groups than ranks, several ranks hold the same group.

Canonical order, version 1. The sections that are divided into equally many parts are one page, in
the order in which they lie on the device; there is a page for each number of parts, by first
appearance. So neither depends on the ranks, and what several ranks hold is a page of its own, which
they take turns to store. A section keeps its order of axes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvtiers.device.geometry import PageMap, Run, coalesce
from kvtiers.device.pages.boxes import Step, runs_of_box
from kvtiers.device.pages.shares import Share, share_of

ORDER_VERSION = 1
PER_BLOCK = "a block's state is that after its last token"


@dataclass(frozen=True, slots=True)
class Section:
    """``parts`` parts (heads, groups, channels) of ``width`` elements each, on all ranks."""

    parts: int
    width: int


@dataclass(frozen=True, slots=True)
class StateTensor:
    """``rows`` x the sections, one after the other x ``inner`` elements of ``itemsize`` bytes."""

    sections: tuple[Section, ...]
    itemsize: int
    rows: int = 1
    inner: int = 1

    def order_name(self) -> str:
        """Names the order of its bytes. It is in namespaces: a change renames stored state."""
        cut = "|".join(f"{s.parts}*{s.width}" for s in self.sections)
        return f"{self.rows}x({cut})x{self.inner}x{self.itemsize}"


@dataclass(frozen=True, slots=True)
class _Piece:
    """A section on one rank: bytes from row to row, and where its rows start on the device."""

    share: Share
    rows: int
    part_bytes: int
    device_offset: int
    device_stride: int

    @property
    def canonical_bytes(self) -> int:
        return self.rows * self.share.total * self.part_bytes

    def runs(self, page_offset: int) -> Iterator[Run]:
        stride = self.share.total * self.part_bytes
        return runs_of_box(
            self.share.count * self.part_bytes,
            [Step(self.rows, self.device_stride, stride)],
            self.device_offset,
            page_offset + self.share.first * self.part_bytes,
        )


def state_pages(
    tensor: int, states: Sequence[StateTensor], ranks: int, rank: int
) -> tuple[PageMap, ...]:
    """The pages of one layer on one rank; together they hold the state tensors, without padding."""
    pieces: list[_Piece] = []
    local_bytes = 0
    for state in states:
        placed, nbytes = _place(state, local_bytes, ranks, rank)
        pieces += placed
        local_bytes += nbytes
    order = f"state {ORDER_VERSION}: {' '.join(state.order_name() for state in states)}"
    kinds = dict.fromkeys(piece.share.total for piece in pieces)
    return tuple(
        _page(tensor, [p for p in pieces if p.share.total == parts], local_bytes, order)
        for parts in kinds
    )


def _place(state: StateTensor, start: int, ranks: int, rank: int) -> tuple[list[_Piece], int]:
    """The sections of a state tensor that lies at ``start`` in the rank's page; its bytes."""
    element = state.inner * state.itemsize
    shares = [share_of(section.parts, ranks, rank) for section in state.sections]
    widths = [
        share.count * section.width * element
        for share, section in zip(shares, state.sections, strict=True)
    ]
    row = sum(widths)
    pieces = [
        _Piece(share, state.rows, section.width * element, start + sum(widths[:i]), row)
        for i, (share, section) in enumerate(zip(shares, state.sections, strict=True))
    ]
    return pieces, state.rows * row


def _page(tensor: int, pieces: Sequence[_Piece], local_bytes: int, order: str) -> PageMap:
    runs: list[Run] = []
    canonical_bytes = 0
    for piece in pieces:
        runs += piece.runs(canonical_bytes)
        canonical_bytes += piece.canonical_bytes
    share = pieces[0].share
    return PageMap(
        tensor=tensor,
        local_bytes=local_bytes,
        canonical_bytes=canonical_bytes,
        runs=coalesce(runs),
        num_writers=share.num_writers,
        writer_index=share.writer_index,
        kind="state",
        order=order,
        why_per_block=PER_BLOCK,
    )
