from itertools import product

import numpy as np
import pytest
import torch

from kvtiers.device.copier import Direction
from kvtiers.device.geometry import Elsewhere, Geometry, GroupGeometry, opaque_page
from kvtiers.device.pages.attention import KVTensor, attention_page
from kvtiers.device.pages.latent import latent_page
from kvtiers.device.pages.report import report
from kvtiers.device.pages.shares import is_even, share_of
from kvtiers.device.pages.state import state_pages
from kvtiers.device.plans import ChunkCopy, CopyPlan
from kvtiers.errors import Kind, KVTiersError
from tests.unit.device.device_kv import copy_now
from tests.unit.device.pages_kv import (
    ELEMENTS,
    ITEM,
    KV,
    LAYERS,
    NOBODYS,
    OLD,
    TOKENS,
    B,
    E,
    H,
    Layer,
    N,
    Rank,
    attention,
    expected_chunk,
    gated_delta_net,
    latent,
    mamba1,
    mamba2,
    short_conv,
    state,
)

TP = (1, 2, 4, 8)
BLOCKS = 9
ORDERS = {
    "hnd-packed": (H, N, KV, E),
    "nhd-packed": (N, H, KV, E),
    "nhd-k-heads-then-v-heads": (N, KV, H, E),
    "nhd-planes": (KV, N, H, E),
    "hnd-planes": (KV, H, N, E),
    "hnd-tensors": (H, N, E),
    "nhd-tensors": (N, H, E),
    "k-transposed": (KV, H, E, N),
}
STATES = {
    "mamba1": mamba1(),
    "mamba2-a-group-per-head": mamba2(8),
    "mamba2-few-groups": mamba2(2),
    "mamba2-one-group": mamba2(1),
    "mamba2-dim-first": mamba2(2, dim_first=True),
    "gdn": gated_delta_net(8, 16),
    "gdn-few-k-heads-dim-first": gated_delta_net(4, 8, dim_first=True),
    "short-conv": short_conv(),
}


def layers_of(kind: str) -> list[Layer]:
    """Of ``kind`` as the tests name it, with contents of their own."""
    if kind == "latent":
        return [latent(30, BLOCKS, seed=1), latent(12, BLOCKS, seed=2)]  # the latent, an indexer
    if kind in STATES:
        return [state(STATES[kind], BLOCKS, seed=10 * i) for i in range(LAYERS)]
    order, heads = kind.rsplit("/", 1)
    return [attention(ORDERS[order], int(heads), BLOCKS, seed=i) for i in range(LAYERS)]


KINDS = [
    *(f"{order}/{heads}" for order in ORDERS for heads in (8, 2)),
    *(f"{order}/{heads}" for order in ("hnd-packed", "nhd-packed") for heads in (1, 3, 6)),
    "latent",
    *STATES,
]
BLOCKS_OF_A_CHUNK = [7, 2, 3, 0, 8, 5, 1, 6]


@pytest.mark.parametrize(("kind", "per_chunk"), list(product(KINDS, range(1, 9))))
def test_ranks_tile_a_chunk_once_and_every_tp_stores_and_loads_the_same_bytes(kind, per_chunk):
    layers, blocks = layers_of(kind), BLOCKS_OF_A_CHUNK[:per_chunk]
    for tp, cross_layer in product(TP, (False, True)):
        ranks = [Rank(layers, per_chunk, tp, r, cross_layer=cross_layer) for r in range(tp)]
        size = ranks[0].geometry.payload_bytes(0)
        expected = expected_chunk(layers, blocks, size)
        for slot in (0, 3):
            chunk = np.full(size, OLD, np.uint8)
            written = np.zeros(size, int)
            for rank in ranks:
                rank.fill()
                written += rank.copy(chunk, blocks, slot, store=True)
            assert (written == 1).all()
            assert (chunk == expected).all()
        for rank in ranks:
            stored = rank.storage.copy()
            rank.storage[:] = NOBODYS
            rank.copy(expected, blocks, 0, store=False)
            rest = [block for block in range(BLOCKS) if block not in blocks]
            for view, content in zip(rank.views, rank.content, strict=True):
                assert (view[blocks, : content.shape[1]] == content[blocks]).all()
                assert (view[rest] == NOBODYS).all()
                assert (view[:, content.shape[1] :] == NOBODYS).all()
            assert (stored[rank.storage != NOBODYS] == rank.storage[rank.storage != NOBODYS]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_what_names_the_bytes_depends_on_no_rank_and_no_number_of_ranks(kind):
    layers = layers_of(kind)
    certificates = [
        Rank(layers, 2, tp, rank, cross_layer=False).geometry.certificate()
        for tp in TP
        for rank in range(tp)
    ]
    assert all(certificate == certificates[0] for certificate in certificates)
    assert certificates[0]["groups"][0]["portable"]


@pytest.mark.parametrize(
    ("kind", "tp", "fragments"),
    [
        ("hnd-packed/8", 1, 1),
        ("hnd-packed/8", 4, 1),
        ("nhd-packed/8", 1, 1),
        ("nhd-packed/8", 4, TOKENS),
        ("nhd-planes/8", 4, 2 * TOKENS),
        ("hnd-planes/8", 4, 2),
        ("hnd-tensors/8", 4, 2),
        ("latent", 4, 1),
        ("mamba1", 4, 4),  # 3 rows of the convolution, 1 temporal state
        ("mamba2-dim-first", 4, 4),  # x, temporal | B, C
        ("gdn", 4, 10),  # q, k, v by 3 rows, 1 temporal state
    ],
)
def test_a_block_costs_no_more_pieces_than_its_layout_has(kind, tp, fragments):
    geometry = Rank(layers_of(kind), 3, tp, tp - 1, cross_layer=True).geometry
    assert geometry.fragments_per_chunk(0) == LAYERS * 3 * fragments


@pytest.mark.parametrize(("total", "ranks"), list(product(range(1, 13), TP)))
def test_shares_cover_all_parts_in_order_and_take_turns(total, ranks):
    shares = [share_of(total, ranks, rank) for rank in range(ranks)]
    for part in range(total):
        holders = [s for s in shares if s.first <= part < s.first + s.count]
        assert [s.writer_index for s in holders] == list(range(len(holders)))
        assert {s.num_writers for s in holders} == {len(holders)}
    assert [s.first for s in shares] == sorted(s.first for s in shares)
    counts = {s.count for s in shares}
    assert 1 <= min(counts) <= max(counts) <= min(counts) + 1
    if is_even(total, ranks):
        assert len(counts) == len({s.num_writers for s in shares}) == 1


def test_several_heads_do_not_divide_evenly_and_then_some_ranks_have_more():
    assert [share_of(6, 4, rank).count for rank in range(4)] == [1, 2, 1, 2]
    assert [share_of(3, 8, rank).num_writers for rank in range(8)] == [3, 3, 3, 3, 3, 3, 2, 2]
    assert not is_even(6, 4)
    assert not is_even(3, 8)


class TestBlockSizes:
    @pytest.mark.parametrize("order", ORDERS)
    @pytest.mark.parametrize("heads", [8, 2])
    def test_engines_share_a_chunk_of_other_blocks_if_and_only_if_its_pages_say_so(
        self, order, heads
    ):
        chunks, says = set(), set()
        for tokens, per_chunk in ((1, 8), (2, 4), (4, 2), (8, 1)):
            layers = [attention(ORDERS[order], heads, per_chunk, seed=1, tokens=tokens)]
            ranks = [Rank(layers, per_chunk, 2, r, cross_layer=False) for r in range(2)]
            chunk = np.zeros(ranks[0].geometry.payload_bytes(0), np.uint8)
            for rank in ranks:
                rank.fill()
                rank.copy(chunk, range(per_chunk), 0, store=True)
                if tokens > 1:  # of one token, no order shows
                    says.add(rank.geometry.any_block_size(0))
            chunks.add(chunk.tobytes())
        assert says == {len(chunks) == 1}

    @pytest.mark.parametrize(
        ("kind", "why"),
        [
            ("hnd-packed/8", "heads of a block lie apart"),
            ("nhd-planes/8", "K and V of a block lie apart"),
            ("k-transposed/8", "K and V of a block lie apart"),
            ("gdn", "a block's state is that after its last token"),
        ],
    )
    def test_else_a_page_says_why_not(self, kind, why):
        geometry = Rank(layers_of(kind), 2, 2, 0, cross_layer=False).geometry
        assert not geometry.any_block_size(0)
        assert why in report(geometry)[0]

    def test_one_head_in_all_is_no_reason(self):
        assert Rank(layers_of("hnd-packed/1"), 2, 2, 0, cross_layer=False).geometry.any_block_size(
            0
        )

    def test_an_engine_may_know_better(self):
        tensor = KVTensor((B, N, H, E), (9, 4, 8, 6), (400, 96, 12, 2), 2)
        packed = attention_page(0, tensor, share_of(8, 1, 0), why_per_block="K is packed")
        assert packed.why_per_block == "K is packed"
        assert not attention_page(0, tensor, share_of(8, 1, 0)).why_per_block


@pytest.mark.parametrize(
    ("shape", "strides", "what"),
    [
        ((9, 2, 4, 3), (48, 24, 6, 4), "elements are 4 bytes apart instead of 2"),
        ((9, 2, 4, 3), (48, 48, 6, 2), "heads are 48 bytes apart instead of 24"),
        ((9, 2, 4, 3), (40, 24, 6, 2), "blocks are 40 bytes apart, a page has 48"),
        ((9, 4, 4, 3), (96, 24, 6, 2), "it has 4 heads of 2"),
    ],
)
def test_a_page_with_holes_or_other_heads_is_refused(shape, strides, what):
    with pytest.raises(KVTiersError, match=what) as caught:
        attention_page(0, KVTensor((B, H, N, E), shape, strides, 2), share_of(4, 2, 1))
    assert caught.value.kind is Kind.UNSUPPORTED


def test_heads_of_one_rank_that_has_one_keep_their_place_in_the_order():
    """The strides of one head say nothing; the order of the axes does."""
    heads = share_of(8, 8, 5)
    row, cell = TOKENS * ELEMENTS * ITEM, ELEMENTS * ITEM
    outside = KVTensor((B, H, N, E), (9, 1, TOKENS, ELEMENTS), (row, 999, cell, ITEM), ITEM)
    inside = KVTensor((B, N, H, E), (9, TOKENS, 1, ELEMENTS), (row, cell, 999, ITEM), ITEM)
    assert attention_page(0, outside, heads).runs[0].page_offset == 5 * row
    assert attention_page(0, inside, heads).runs[0].page_offset == 5 * cell
    assert attention_page(0, inside, heads).runs[0].count == TOKENS


@pytest.mark.parametrize(
    ("states", "name"),
    [
        (mamba1(), "state 1: 3x(24*1)x1x2 1x(24*1)x5x4"),
        (mamba2(1), "state 1: 3x(8*3|1*4|1*4)x1x2 1x(8*3)x4x4"),
    ],
)
def test_the_name_of_an_order_stays_as_it_is_for_stored_state_goes_by_it(states, name):
    assert {page.order for page in state_pages(0, states, 2, 0)} == {name}


def test_what_several_ranks_hold_of_a_state_is_a_page_of_its_own():
    heads, groups = state_pages(0, mamba2(2), 8, 5)
    assert (heads.num_writers, groups.num_writers, groups.writer_index) == (1, 4, 1)
    assert heads.local_bytes == groups.local_bytes
    (only,) = state_pages(0, mamba2(8), 8, 5)
    assert only.num_writers == 1
    assert heads.order != only.order


@pytest.mark.parametrize("kind", ["mamba2-one-group", "gdn", "latent", "nhd-planes/2"])
def test_a_copier_moves_what_the_pages_say(kind):
    """Also where two pages lie in one tensor, and where ranks take turns."""
    layers, blocks, tp = layers_of(kind), (7, 2, 3), 4
    ranks = [Rank(layers, len(blocks), tp, r, cross_layer=True) for r in range(tp)]
    region = bytearray([OLD]) * ranks[0].geometry.slot_bytes
    plan = CopyPlan((ChunkCopy(0, 0, tuple(enumerate(blocks))),))
    for rank in ranks:
        rank.fill()
        tensors = [torch.from_numpy(view).view(torch.int8) for view in rank.views]
        assert copy_now(tensors, region, rank.geometry, Direction.STORE, plan).ok
    assert (np.frombuffer(region, np.uint8) == expected_chunk(layers, blocks, len(region))).all()
    for rank in ranks:
        rank.storage[:] = NOBODYS
        tensors = [torch.from_numpy(view).view(torch.int8) for view in rank.views]
        assert copy_now(tensors, region, rank.geometry, Direction.LOAD, plan).ok
        for view, content in zip(rank.views, rank.content, strict=True):
            assert (view[list(blocks), : content.shape[1]] == content[list(blocks)]).all()
            assert (view[:, content.shape[1] :] == NOBODYS).all()


def test_a_report_says_what_is_portable_and_what_is_bound_and_why():
    latents = tuple(latent_page(t, 1000, 2, 0) for t in range(3))
    states = state_pages(0, mamba2(1), 2, 0)
    bound = (opaque_page(1, 5000, 2, 0, "its scales lie elsewhere"), opaque_page(2, 10, 2, 0))
    groups = (
        GroupGeometry(0, 32, latents),
        GroupGeometry(1, 64, (*states, *latents[1:])),
        GroupGeometry(2, 16, bound),
    )
    assert report(Geometry(groups, 2)) == (
        "group 0: latent in 3 tensors, 32 tokens and 8192 bytes a chunk, copied in 6 pieces by this"
        " rank; portable to every topology, and, under names of our own (chunk_keys), to every "
        "block size",
        "group 1: state and latent in 3 tensors, 64 tokens and 8192 bytes a chunk, copied in 24 "
        "pieces by this rank; portable to every topology, bound to this block size (a block's "
        "state is that after its last token)",
        "group 2: layers of an unknown kind in 2 tensors, 16 tokens and 20480 bytes a chunk, "
        "copied in 4 pieces by this rank; bound to this topology (its scales lie elsewhere and "
        "nobody certifies its bytes), bound to this block size (nobody says how tokens lie in a "
        "block)",
    )


def test_a_report_says_that_another_stage_binds_a_group():
    """The report is that of the first stage, whose own layers may all be portable."""
    elsewhere = Elsewhere(after=(64,), portable=False, any_block_size=False)
    group = GroupGeometry(0, 16, (latent_page(0, 64, 1, 0),), elsewhere=elsewhere)
    (line,) = report(Geometry((group,), 1))
    assert line.endswith(
        "bound to this topology (by layers of another pipeline stage), bound to this block size "
        "(by layers of another pipeline stage)"
    )
