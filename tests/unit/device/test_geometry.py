import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.chunks import PAGE_BYTES, GroupLayout
from kvtiers.device.geometry import Geometry, GroupGeometry, PageMap, Run, coalesce, opaque_page
from kvtiers.device.plans import ChunkCopy, plan_copies
from kvtiers.errors import Kind, KVTiersError
from tests.unit.device.device_kv import CELL, TOKENS, Model
from tests.unit.device.device_plans import few_heads, models, touched

TP = [1, 2, 4, 8]


def two_groups(blocks_per_chunk: int = 1) -> Geometry:
    small = tuple(opaque_page(t, 5000, 1, 0) for t in range(2))
    large = (*small, opaque_page(2, 9000, 1, 0))
    return Geometry(
        (
            GroupGeometry(0, 16, small, keeps_every_chunk=False),
            GroupGeometry(1, 64, large),
        ),
        blocks_per_chunk,
    )


@given(st.one_of(models, few_heads), st.sampled_from(TP), st.integers(0, 9), st.data())
def test_ranks_together_write_every_byte_of_a_chunk_exactly_once(model, tp, slot, data):
    per_chunk = model.blocks_per_chunk
    begin = data.draw(st.integers(0, per_chunk - 1))
    end = data.draw(st.integers(begin + 1, per_chunk))
    present = range(begin, end)
    chunk = ChunkCopy(
        0,
        slot,
        tuple((sub, 3 + sub) for sub in present),
        tuple(sub for sub in range(per_chunk) if sub not in present),
    )
    geometries = [model.geometry(tp, rank) for rank in range(tp)]
    written = np.zeros(geometries[0].chunk_bytes(0), dtype=int)
    for geometry in geometries:
        for start, stop in touched(geometry, chunk):
            written[start:stop] += 1
    assert (written == 1).all()


@given(st.one_of(models, few_heads))
def test_certificates_do_not_depend_on_rank_nor_portable_ones_on_rank_count(model):
    certificates = {
        json.dumps(model.geometry(tp, rank).certificate(), sort_keys=True)
        for tp in TP
        for rank in range(tp)
    }
    assert len(certificates) == 1
    portable = json.loads(certificates.pop())["groups"][0]["portable"]
    assert portable == model.geometry(1, 0).portable(0) == (model.kind != "opaque")


def test_replicated_heads_take_turns_by_block_not_by_rank():
    model = Model("hnd", heads=2, layers=1, blocks_per_chunk=2)
    turns = [[model.page_map(0, 8, rank).writes(place) for rank in range(4)] for place in range(8)]
    assert all(sum(turn) == 1 for turn in turns)
    assert [turn.index(True) for turn in turns] == [0, 1, 2, 3, 0, 1, 2, 3]


@pytest.mark.parametrize(("tp", "fragments"), [(1, 1), (2, 1), (8, 1)])
def test_heads_outermost_is_one_fragment_a_page_under_every_tp(tp, fragments):
    model = Model("hnd", heads=8, layers=3, blocks_per_chunk=2)
    assert model.geometry(tp, tp - 1).fragments_per_chunk(0) == 3 * 2 * fragments


def test_heads_innermost_costs_a_fragment_per_token_as_soon_as_they_are_cut():
    model = Model("nhd", heads=8, layers=3, blocks_per_chunk=2)
    assert model.geometry(1, 0).fragments_per_chunk(0) == 3 * 2
    assert model.geometry(2, 0).fragments_per_chunk(0) == 3 * 2 * TOKENS


fragments = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 2)), min_size=1, max_size=12)


@given(fragments, st.randoms(use_true_random=False))
def test_coalesced_runs_hold_the_same_byte_pairs(pieces, random):
    runs, device, page = [], 0, 0
    for size, gap in pieces:
        runs.append(Run(device, page, size, 2, size, size + gap))
        device, page = device + 2 * size, page + 2 * (size + gap)
    random.shuffle(runs)

    def pairs(some):
        return sorted(
            (a + i, b + i)
            for run in some
            for (a, stop), (b, _) in zip(run.device_spans(), run.page_spans(), strict=True)
            for i in range(stop - a)
        )

    joined = coalesce(runs)
    assert pairs(joined) == pairs(runs)
    if all(gap == 0 for _, gap in pieces):
        assert joined == (Run(0, 0, device),)


def test_layers_lie_one_after_the_other_with_their_sub_blocks_together():
    geometry = two_groups(blocks_per_chunk=2)
    starts = [geometry.page_start(1, layer, sub) for layer in range(3) for sub in range(2)]
    assert starts == [0, 5000, 10000, 15000, 20000, 29000]
    assert geometry.payload_bytes(1) == 38000


def test_layout_rounds_chunks_to_pages_and_slots_to_the_largest_chunk():
    geometry = two_groups()
    assert geometry.layout().groups == (
        GroupLayout(0, 3 * PAGE_BYTES, 16, keeps_every_chunk=False),
        GroupLayout(1, 5 * PAGE_BYTES, 64),
    )
    assert geometry.slot_bytes == geometry.layout().slot_bytes == 5 * PAGE_BYTES
    assert not geometry.portable(0)


def test_slots_of_unequal_chunks_are_counted_in_what_divides_all_of_them():
    geometry = two_groups()
    assert geometry.granule_bytes == PAGE_BYTES
    assert [geometry.span(group) for group in (0, 1)] == [3, 5]
    whole = replace(geometry, one_size=True)
    assert whole.granule_bytes == whole.slot_bytes == 5 * PAGE_BYTES
    assert [whole.span(group) for group in (0, 1)] == [1, 1]
    assert whole.layout() == geometry.layout()


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("group", [0, 1])
def test_ranks_share_the_writing_of_replicated_chunks_of_every_size(tp, group):
    model = Model("mla", heads=1, layers=1, blocks_per_chunk=40)

    def geometry(rank):
        page = model.page_map(0, tp, rank)
        groups = (GroupGeometry(0, 16, (page,)), GroupGeometry(1, 16, (page,) * 3))
        return Geometry(groups, model.blocks_per_chunk, rank)

    ranks = [geometry(rank) for rank in range(tp)]
    span = ranks[0].span(group)
    assert ranks[0].span(0) < ranks[0].span(1)
    chunk = ChunkCopy(group, 5 * span, tuple((n, n) for n in range(model.blocks_per_chunk)))
    written = np.zeros(ranks[0].chunk_bytes(group), dtype=int)
    for rank in ranks:
        spans = touched(rank, chunk)
        assert sum(stop - start for start, stop in spans) > 0.9 * len(written) / tp
        for start, stop in spans:
            written[start:stop] += 1
    assert (written == 1).all()


@pytest.mark.parametrize("group", [0, 1])
def test_writers_take_turns_between_neighbours_of_every_size(group):
    geometry = two_groups(blocks_per_chunk=1)
    span = geometry.span(group)
    first = 4 * span
    places = [geometry.place(group, first + n * span, 0) for n in range(4)]
    assert places == list(range(places[0], places[0] + 4))


def test_one_uncertified_layer_makes_its_group_not_portable():
    sure = PageMap(0, CELL, CELL, (Run(0, 0, CELL),))
    mixed = Geometry((GroupGeometry(0, 1, (sure, opaque_page(1, CELL, 1, 0))),), 1)
    assert Geometry((GroupGeometry(0, 1, (sure, sure)),), 1).portable(0)
    assert not mixed.portable(0)
    assert mixed.certificate()["groups"][0]["portable"] is False


@pytest.mark.parametrize(
    ("page", "broken"),
    [
        (PageMap(0, 8, 8, ()), "no runs"),
        (PageMap(0, 0, 0, (Run(0, 0, 0),)), "is empty"),
        (PageMap(0, 8, 8, (Run(0, 0, 8), Run(8, 8, 1, 0))), "is empty"),
        (PageMap(0, 8, 8, (Run(0, 0, 6),)), "do not tile"),
        (PageMap(0, 8, 8, (Run(1, 0, 7),)), "do not tile"),
        (PageMap(0, 8, 16, (Run(0, 0, 5), Run(4, 8, 4))), "do not tile"),
        (PageMap(0, 8, 8, (Run(0, 1, 8),)), "leave the canonical page"),
        (PageMap(0, 8, 16, (Run(0, -1, 8),)), "leave the canonical page"),
        (PageMap(0, 8, 16, (Run(0, 0, 4), Run(4, 2, 4))), "overlap"),
        (PageMap(0, 8, 8, (Run(0, 0, 8),), 2, 2), "never has a turn"),
    ],
)
def test_check_names_what_is_wrong_with_a_page(page, broken):
    with pytest.raises(AssertionError, match=broken):
        Geometry((GroupGeometry(0, 1, (page,)),), 1).check()


def test_check_names_what_is_wrong_with_groups():
    page = opaque_page(0, 8, 1, 0)
    with pytest.raises(AssertionError, match="group 1 stands at place 0"):
        Geometry((GroupGeometry(1, 1, (page,)),), 1).check()
    with pytest.raises(AssertionError, match="has no layers"):
        Geometry((GroupGeometry(0, 1, ()),), 1).check()


def test_plan_begins_and_ends_in_the_middle_of_chunks():
    plan = plan_copies([7, 0], [2, 0], [10, 11, 12, 13, 14, 15, 16], [5, 6, 7], two_groups(4))
    assert plan.chunks == (
        ChunkCopy(0, 5, ((2, 10), (3, 11)), (0, 1)),
        ChunkCopy(0, 6, ((0, 12), (1, 13), (2, 14), (3, 15)), ()),
        ChunkCopy(0, 7, ((0, 16),), (1, 2, 3)),
    )


def test_plan_keeps_groups_apart_and_skips_empty_ones():
    plan = plan_copies([2, 3], [9, 4], np.array([10, 11, 22, 23, 24]), [1, 2, 3, 4], two_groups(2))
    assert plan.chunks == (
        ChunkCopy(0, 1, ((1, 10),), (0,)),
        ChunkCopy(0, 2, ((0, 11),), (1,)),
        ChunkCopy(1, 3, ((0, 22), (1, 23)), ()),
        ChunkCopy(1, 4, ((0, 24),), (1,)),
    )
    assert type(plan.chunks[0].blocks[0][1]) is int
    assert plan_copies([0, 0], [3, 1], [], [], two_groups(2)).chunks == ()


@given(st.integers(1, 4), st.integers(0, 9), st.integers(0, 20))
def test_plan_uses_each_block_once_in_order(per_chunk, first, size):
    slots = range(100, 100 + (first % per_chunk + size + per_chunk - 1) // per_chunk * (size > 0))
    plan = plan_copies([0, size], [0, first], range(size), slots, two_groups(per_chunk))
    assert [b for chunk in plan.chunks for _, b in chunk.blocks] == list(range(size))
    assert [chunk.slot for chunk in plan.chunks] == list(slots)
    for chunk in plan.chunks:
        subs = [sub for sub, _ in chunk.blocks]
        assert sorted([*subs, *chunk.missing]) == list(range(per_chunk))
        logical = [(first + b) % per_chunk for _, b in chunk.blocks]
        assert subs == logical


@pytest.mark.parametrize(
    ("sizes", "indices", "blocks", "slots", "what"),
    [
        ([2, 0], [0, 0], [1, 2], [7], "more than 1 slots"),
        ([2, 0], [0, 0], [1, 2], [7, 8, 9], "only 2 of 3 slots"),
        ([2, 0], [0, 0], [1, 2, 3], [7, 8], "3 blocks were given"),
        ([2], [0], [1, 2], [7, 8], "for 2 groups"),
        ([2, 0], [0], [1, 2], [7, 8], "for 2 groups"),
        ([3, -1], [0, 0], [1, 2], [7, 8], "negative"),
        ([2, 0], [-1, 0], [1, 2], [7, 8], "negative"),
    ],
)
def test_plan_refuses_numbers_that_do_not_fit(sizes, indices, blocks, slots, what):
    with pytest.raises(KVTiersError, match=what) as caught:
        plan_copies(sizes, indices, blocks, slots, two_groups())
    assert caught.value.kind is Kind.BROKEN


def test_reprs_show_sizes():
    assert repr(two_groups()) == (
        "<Geometry rank 0: 2+3 layers, 1 blocks a chunk, slots of 20480 bytes>"
    )
    plan = plan_copies([2, 0], [0, 0], [1, 2], [7, 8], two_groups())
    assert repr(plan) == "<CopyPlan: 2 blocks in 2 chunks>"
