"""Layers to which vLLM gives no canonical mapping: ours, and what keeps them bound."""

import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from vllm.model_executor.layers.mamba.mamba_mixer2 import mamba_v2_sharded_weight_loader
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Kinds
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
)
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CanonicalPageMapping,
    CopyRun,
)
from vllm.v1.kv_offload.config import OffloadingGroupConfig

from kvtiers.device.geometry import Geometry, GroupGeometry
from kvtiers.device.pages.report import report
from kvtiers.device.pages.shares import share_of
from kvtiers.engines.vllm.facts import EngineFacts, GroupFacts
from kvtiers.engines.vllm.layout import by_layer, geometry_of, record_of
from kvtiers.engines.vllm.namespace import GroupSpan, Identity, ModelIdentity, build_namespace
from kvtiers.engines.vllm.pages import Layer, own_pages
from kvtiers.engines.vllm.spec import KVTiersSpec

TP = (1, 2, 4, 8)
STATE_DTYPES = (torch.int16, torch.float32)
ROWS = 3


def facts_of(**changes) -> EngineFacts:
    known = {"instance": "i", "device": "cpu", "kv_cache_layout": "LBHNC", "kv_cache_dtype": "auto"}
    known |= {"model_dtype": torch.bfloat16, "groups": (), "identify": lambda _: identity()}
    return EngineFacts(**{**known, "conv_dim_first": False, **changes})


def identity() -> Identity:
    return Identity(model=ModelIdentity(digest="d"), topology={"tp": 2})


@pytest.fixture
def parallel(offloading_config) -> Callable[..., object]:
    def build(ranks: int = 1, rank: int = 0, **others):
        sizes = {"world_size": ranks, "tp_size": ranks, "rank": rank, **others}
        return offloading_config(**sizes).parallel

    return build


class Model:
    """A model of one state layer, cut by vLLM's own shapes and weight loaders.

    Channel and head number i hold the number i, so that it shows where each of them went.
    """

    def __init__(self, kind: Kinds, heads: int, groups: int) -> None:
        self.kind, self.heads, self.groups = kind, heads, groups
        self.facts = facts_of(state_groups=groups if kind is Kinds.MAMBA2 else None)

    def spec(self, tp: int) -> MambaSpec:
        make = MambaStateShapeCalculator
        if self.kind is Kinds.MAMBA1:
            shapes = make.mamba1_state_shape(tp, self.heads, 5, ROWS + 1)
        elif self.kind is Kinds.MAMBA2:
            shapes = make.mamba2_state_shape(
                tp, self.heads * 6, self.groups, self.heads, 6, 4, ROWS + 1
            )
        elif self.kind is Kinds.GDN_ATTN:
            shapes = make.gated_delta_net_state_shape(tp, self.groups, self.heads, 4, 6, ROWS + 1)
        else:
            shapes = make.short_conv_state_shape(tp, self.heads, ROWS + 1)
        return MambaSpec(64, tuple(shapes), STATE_DTYPES[: len(shapes)], mamba_type=self.kind)

    def channels(self, tp: int, rank: int) -> np.ndarray:
        """The numbers of the channels of a rank's convolution."""
        extra = 0
        if self.kind is Kinds.MAMBA2:
            extra = MambaStateShapeCalculator.extra_groups_for_head_shards(self.groups, tp)
            one = ((self.groups + extra) * 4, extra * 4, extra > 0)
            settings = [(self.heads * 6, 0, False), one, one]
        elif self.kind is Kinds.GDN_ATTN:
            settings = [(self.groups * 4, 0, False)] * 2 + [(self.heads * 6, 0, False)]
        else:
            settings = [(self.heads, 0, False)]
        total = sum(full - more for full, more, _ in settings)
        param = torch.nn.Parameter(torch.zeros(self._local_channels(tp)), requires_grad=False)
        mamba_v2_sharded_weight_loader(settings, tp, rank)(param, torch.arange(total).float())
        return param.numpy().astype(np.int16)

    def _local_channels(self, tp: int) -> int:
        return self.spec(tp).shapes[0][1]

    def page(self, tp: int, rank: int) -> np.ndarray:
        """The bytes of a rank's page."""
        spec = self.spec(tp)
        parts = [np.tile(self.channels(tp, rank), (ROWS, 1)).view(np.uint8).ravel()]
        if len(spec.shapes) > 1:
            share = share_of(self.heads, tp, rank)
            numbers = np.arange(share.first, share.first + share.count, dtype=np.float32)
            rest = int(np.prod(spec.shapes[1][1:]))
            parts.append(np.repeat(numbers, rest).view(np.uint8))
        return np.concatenate(parts)


MODELS = {
    "mamba1": Model(Kinds.MAMBA1, 24, 0),
    "mamba2": Model(Kinds.MAMBA2, 16, 8),
    "mamba2-one-group": Model(Kinds.MAMBA2, 16, 1),
    "gdn": Model(Kinds.GDN_ATTN, 16, 8),
    "short-conv": Model(Kinds.SHORT_CONV, 24, 0),
}


def chunk_of(model: Model, tp: int, parallel) -> bytes:
    """One block of the model's layer, as all ranks store it; its bytes load back on each."""
    geometries = []
    for rank in range(tp):
        pages = own_pages(0, Layer(model.spec(tp)), model.facts, parallel(tp, rank))
        assert not isinstance(pages, str), pages
        geometries.append(Geometry((GroupGeometry(0, 64, pages),), 1, rank))
        geometries[-1].check()
    chunk = np.full(geometries[0].payload_bytes(0), 0xEE, np.uint8)
    for geometry in geometries:
        copy(geometry, model.page(tp, geometry.rank), chunk, store=True)
    for geometry in geometries:
        loaded = np.zeros_like(model.page(tp, geometry.rank))
        copy(geometry, loaded, chunk, store=False)
        assert (loaded == model.page(tp, geometry.rank)).all()
    return chunk.tobytes()


def copy(geometry: Geometry, device: np.ndarray, chunk: np.ndarray, *, store: bool) -> None:
    for layer, page in enumerate(geometry.groups[0].pages):
        start = geometry.page_start(0, layer, 0)
        if store and not page.writes(0):
            continue
        for run in page.runs:
            for (a, z), (p, q) in zip(run.device_spans(), run.page_spans(), strict=True):
                if store:
                    chunk[start + p : start + q] = device[a:z]
                else:
                    device[a:z] = chunk[start + p : start + q]


@pytest.mark.parametrize("name", MODELS)
def test_states_have_the_same_bytes_under_every_tp_as_vllm_cuts_them(name, parallel):
    assert len({chunk_of(MODELS[name], tp, parallel) for tp in TP}) == 1


def mamba2(tp: int = 2, **changes) -> MambaSpec:
    return replace(MODELS["mamba2-one-group"].spec(tp), **changes)


@pytest.mark.parametrize(
    ("spec", "facts", "why"),
    [
        (mamba2(), {}, "nobody says whether 2 ranks hold one group or 2"),
        (mamba2(), {"state_groups": 4}, "nobody says whether 2 ranks hold one group or 2"),
        (MODELS["mamba2"].spec(2), {"state_groups": 1}, "ranks hold 8 groups, but the model's"),
        (mamba2(), {"conv_dim_first": None, "state_groups": 1}, "nobody says in which order"),
        (mamba2(mamba_type=Kinds.LINEAR), {}, "a state of LINEAR with tensors of 3x56, 8x6x4 is"),
        (
            mamba2(shapes=((3, 8), (2, 2, 2), (1, 1)), dtypes=(torch.int16,) * 3),
            {},
            "a state of MAMBA2 with tensors of 3x8, 2x2x2, 1x1 is not known",
        ),
        (mamba2(shapes=((3, 8), (2, 2))), {}, "with tensors of 3x8, 2x2 is not known"),
        (mamba2(shapes=((3, 8, 1), (2, 2, 2))), {}, "with tensors of 3x8x1, 2x2x2 is not known"),
        (mamba2(shapes=((3, 8), (2, 0, 2))), {}, "with tensors of 3x8, 2x0x2 is not known"),
        (mamba2(shapes=((3, 9), (1, 6, 4))), {}, "9 channels are not those of 1 heads"),
        (
            MambaSpec(64, ((3, 8), (9, 4)), STATE_DTYPES, mamba_type=Kinds.MAMBA1),
            {},
            "it has 8 channels, but a state of 9",
        ),
    ],
)
def test_a_state_that_cannot_be_told_apart_says_why(spec, facts, why, parallel):
    got = own_pages(0, Layer(spec), facts_of(**facts), parallel(2))
    assert isinstance(got, str)
    assert why in got


def test_where_channels_are_outermost_the_bytes_are_others_and_say_so(parallel):
    spec = MODELS["gdn"].spec(1)
    turned = replace(spec, shapes=(spec.shapes[0][::-1], spec.shapes[1]))
    (a, *_), (b, *_) = (
        own_pages(0, Layer(s), facts_of(conv_dim_first=first), parallel())
        for s, first in ((spec, False), (turned, True))
    )
    assert a.canonical_bytes == b.canonical_bytes
    assert a.order != b.order


def test_a_state_that_every_rank_holds_whole_is_stored_once(parallel):
    spec = mamba2(tp_replicated=True)
    (page,) = own_pages(0, Layer(spec), facts_of(), parallel(4, 3))
    assert (page.num_writers, page.writer_index, page.kind) == (4, 3, "state")
    assert page.canonical_bytes == page.local_bytes == spec.real_page_size_bytes


def latent(kind=SlidingWindowMLASpec, **changes):
    needed = {"block_size": 64, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}
    window = {"sliding_window": 128} if kind is SlidingWindowMLASpec else {}
    return kind(**{**needed, **window, "max_tp_shards": 1, **changes})


@pytest.mark.parametrize(
    "spec",
    [
        latent(),
        latent(alignment=512),
        latent(MLAAttentionSpec, tokens_per_state=4, state_content_bytes=584, alignment=576),
    ],
)
def test_latents_are_stored_once_in_turns(spec, parallel):
    pages = [own_pages(3, Layer(spec), facts_of(), parallel(4, rank)) for rank in range(4)]
    assert [page.writer_index for (page,) in pages] == [0, 1, 2, 3]
    for (page,) in pages:
        assert page.canonical_bytes == page.local_bytes == spec.unpadded_page_size_bytes
        assert (page.tensor, page.kind) == (3, "latent")


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (latent(max_tp_shards=None), "nobody says that all ranks hold the same latent"),
        (latent(HiddenStateCacheSpec), "nobody says that all ranks hold the same latent"),
        (latent(kv_quant_mode=KVQuantMode.FP8_PER_TOKEN_HEAD), "scales of its own"),
    ],
)
def test_latents_that_may_differ_between_ranks_stay_bound(spec, why, parallel):
    assert why in own_pages(0, Layer(spec), facts_of(), parallel(2))


@pytest.mark.parametrize("others", [{"dcp_size": 2}, {"pcp_size": 2}, {"world_size": 4}])
def test_other_ways_to_divide_the_work_stay_bound(parallel, others):
    why = own_pages(0, Layer(latent()), facts_of(), parallel(2, **others))
    assert why == "ranks divide the work otherwise than by tensor parallelism"


def attention(**changes):
    needed = {"block_size": 16, "num_kv_heads": 4, "head_size": 8, "dtype": torch.bfloat16}
    return FullAttentionSpec(**{**needed, "head_size_v": 4, **changes})


def cache_of(spec, blocks: int = 3, stride: int = 0):
    elements = spec.head_size + spec.head_size_v
    shape = (blocks, spec.num_kv_heads, spec.block_size, elements)
    page = shape[1] * shape[2] * shape[3]
    whole = torch.zeros(blocks * (stride or page), dtype=spec.dtype)
    return whole.as_strided(shape, (stride or page, shape[2] * elements, elements, 1))


def test_heads_whose_k_and_v_are_unequal_are_cut_by_the_tensor(parallel):
    spec, facts = attention(), facts_of(total_kv_heads=8)
    (page,) = own_pages(1, Layer(spec, cache_of(spec)), facts, parallel(2, 1))
    assert page.local_bytes == spec.unpadded_page_size_bytes
    assert page.canonical_bytes == 2 * page.local_bytes
    assert page.runs[0].page_offset == page.local_bytes
    assert "packs K" in page.why_per_block


@pytest.mark.parametrize(
    ("changes", "facts", "why"),
    [
        ({"kv_quant_mode": KVQuantMode.INT8_PER_TOKEN_HEAD}, {}, "a way of their own"),
        ({"num_head_slots": 8}, {}, "a way of their own"),
        ({}, {"kv_cache_layout": "BHLNC"}, "its tensor is none of"),
        ({}, {"total_kv_heads": 3}, "3 KV heads do not divide evenly between 2 ranks"),
        ({}, {"total_kv_heads": 4}, "it has 4 heads of 2"),
    ],
)
def test_attention_that_is_not_what_it_seems_stays_bound(changes, facts, why, parallel):
    spec = attention(**changes)
    known = facts_of(**{"total_kv_heads": 8, **facts})
    assert why in own_pages(0, Layer(spec, cache_of(spec)), known, parallel(2))


def test_a_tensor_with_other_tokens_than_a_block_stays_bound(parallel):
    """As many bytes as a page has do not make it one: here K and V have tokens of their own."""
    spec = attention(head_size_v=16, head_size=16)
    cache = cache_of(spec)
    told = facts_of(total_kv_heads=8)
    assert not isinstance(own_pages(0, Layer(spec, cache), told, parallel(2)), str)
    apart = cache.reshape(cache.shape[0], cache.shape[1], 2 * cache.shape[2], -1)
    assert "is not what vLLM says" in own_pages(0, Layer(spec, apart), told, parallel(2))


class Engine:
    """Two groups: full attention, which vLLM certifies, and ``other``, which it does not."""

    def __init__(self, offloading_config, other, tp: int = 2, rank: int = 0) -> None:
        self.full = attention(head_size_v=8)
        page, whole = self.full.unpadded_page_size_bytes, 2 * self.full.unpadded_page_size_bytes
        certified = CanonicalPageMapping(
            whole, page, (CopyRun(0, rank * page, page, 1, 0, 0),), 1, 0, True
        )
        nbytes = other.real_page_size_bytes
        theirs = CanonicalPageMapping(
            tp * nbytes, nbytes, (CopyRun(0, rank * nbytes, nbytes, 1, 0, 0),), 1, 0, False
        )
        names = (("a", "b"), ("c",))
        spans = [GroupSpan(g, "x", 16, 1, layers=names[g]) for g in range(2)]
        groups = (
            GroupFacts(spans[0], True, self.full, (self.full, self.full)),
            GroupFacts(spans[1], False, other, (other,)),
        )
        self.facts = facts_of(groups=groups, state_groups=1)
        self.config = offloading_config(
            groups=tuple(OffloadingGroupConfig(16, names[g], g) for g in range(2)),
            world_size=tp,
            tp_size=tp,
            rank=rank,
        )
        refs = [
            [CanonicalKVCacheRef(t, page, certified) for t in range(2)],
            [CanonicalKVCacheRef(0, nbytes, theirs)],
        ]
        self.caches = CanonicalKVCaches([], refs)

    def geometry(self, facts=None, **options) -> Geometry:
        made = geometry_of(self.caches, self.config, facts or self.facts, **options)
        made.check()
        return made

    def namespace(self, geometry: Geometry):
        record = record_of(geometry, self.config, ["f", "g"])
        spans = [g.span for g in self.facts.groups]
        return build_namespace(identity(), spans, record.named_bytes(), portable=record.portable)


class TestAdoption:
    def test_what_vllm_certifies_stays_as_it_was(self, offloading_config):
        engine = Engine(offloading_config, mamba2())
        ours, theirs = engine.geometry(), engine.geometry(vllms_bytes=True)
        assert ours.certificate()["groups"][0] == theirs.certificate()["groups"][0]
        assert set(theirs.certificate()["groups"][0]) == {
            "tokens_per_chunk",
            "portable",
            "page_bytes",
        }
        assert [p.runs for p in ours.groups[0].pages] == [p.runs for p in theirs.groups[0].pages]

    def test_a_state_becomes_portable_and_gets_a_namespace_of_its_own(self, offloading_config):
        engine = Engine(offloading_config, mamba2())
        ours, theirs = engine.geometry(), engine.geometry(vllms_bytes=True)
        assert (ours.portable(1), theirs.portable(1)) == (True, False)
        (bound,) = theirs.certificate()["groups"][1]["page_bytes"]
        assert engine.namespace(ours).id != engine.namespace(theirs).id
        assert engine.namespace(ours).fields["topology"] is None
        assert engine.namespace(theirs).fields["topology"] == {"tp": 2}
        assert bound == 2 * mamba2().real_page_size_bytes

    def test_a_name_is_new_too_where_another_layer_stays_bound(self, offloading_config):
        """Then the topology is named as before: the order of the state must tell them apart."""
        engine = Engine(offloading_config, mamba2())
        ours, theirs = engine.geometry(), engine.geometry(vllms_bytes=True)
        records = [record_of(g, engine.config, ["f", "g"]) for g in (ours, theirs)]
        groups = [r.named_bytes()["groups"][1] for r in records]
        assert "orders" in groups[0]
        assert "orders" not in groups[1]

    def test_every_rank_says_the_same(self, offloading_config):
        said = {
            str(record_of(e.geometry(), e.config, ["f", "g"]).to_json())
            for e in (Engine(offloading_config, mamba2(), 2, rank) for rank in range(2))
        }
        assert len(said) == 1

    def test_where_vllm_copies_its_mapping_holds_and_the_report_says_so(self, offloading_config):
        engine = Engine(offloading_config, mamba2())
        ours, theirs = engine.geometry(), engine.geometry(vllms_bytes=True)
        assert "state in 1 tensors" in report(ours)[1]
        assert "portable to every topology" in report(ours)[1]
        assert "(vLLM certifies no canonical bytes for it)" in report(theirs)[1]
        unknown = engine.geometry(replace(engine.facts, state_groups=None))
        assert "(nobody says whether 2 ranks hold one group or 2)" in report(unknown)[1]

    def test_the_cpu_binds_attention_to_its_block_size(self, offloading_config):
        (line, _) = report(Engine(offloading_config, mamba2()).geometry())
        assert line.endswith(
            "bound to this block size (the CPU backend packs K for a block as a whole)"
        )

    @pytest.mark.parametrize(
        ("layout", "packing", "free"),
        [("LBNHC", "packed", True), ("LBNHC", "split", False), ("LBHNC", "packed", False)],
    )
    def test_elsewhere_the_layout_decides(self, offloading_config, layout, packing, free):
        engine = Engine(offloading_config, mamba2())
        facts = replace(engine.facts, device="cuda", kv_cache_layout=layout, packing=packing)
        assert engine.geometry(facts).any_block_size(0) == free
        assert not engine.geometry(facts).any_block_size(1)


@pytest.mark.parametrize(
    ("device", "named"),
    [("cuda", "lbhnc-packed"), ("rocm", "rocm-lbhnc-packed"), ("xpu", "xpu-lbhnc-packed")],
)
def test_what_other_kernels_keep_has_another_name(device, named):
    """To vLLM a device of ROCm is ``cuda``, too. The name of bytes on CUDA stays as it is."""
    span = GroupSpan(0, "x", 64, 1)
    facts = facts_of(device=device, packing="packed", groups=(GroupFacts(span, True, latent()),))
    assert facts.byte_formats() == [named]


def test_blocks_that_vllm_shows_as_one_are_taken_apart_by_layer(offloading_config):
    """Like DeepSeek-V4: several groups of latents, whose pages lie interleaved in each block."""
    specs = [latent(), latent(MLAAttentionSpec, tokens_per_state=4), latent(head_size=128)]
    sizes = [spec.unpadded_page_size_bytes for spec in specs]
    blocks, stride = 5, sum(sizes) + 64
    memory = torch.arange(blocks * stride, dtype=torch.int32).to(torch.int8)
    starts = [0, sizes[0], sizes[0] + sizes[1]]
    tensors = {
        name: memory.as_strided((blocks, 1, 1, size), (stride, size, size, 1), start)
        for name, size, start in zip("abc", sizes, starts, strict=True)
    }
    names = (("a", "b"), ("c",))
    groups = tuple(
        GroupFacts(
            GroupSpan(g, "x", 64, 1, layers=names[g]),
            True,
            specs[0],
            tuple(specs["abc".index(name)] for name in names[g]),
        )
        for g in range(2)
    )
    facts = facts_of(groups=groups, tensors=tensors)
    packed = CanonicalKVCacheTensor(memory.view(blocks, stride), stride)
    whole = CanonicalKVCaches([packed], [[CanonicalKVCacheRef(0, stride)] for _ in range(2)])
    caches = by_layer(whole, facts)
    assert [ref.page_size_bytes for refs in caches.group_data_refs for ref in refs] == sizes
    for made, name in zip(caches.tensors, "abc", strict=True):
        assert torch.equal(made.tensor, tensors[name].reshape(blocks, -1))
        assert made.tensor.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
    config = offloading_config(
        groups=tuple(OffloadingGroupConfig(64, names[g], g) for g in range(2)),
        world_size=4,
        tp_size=4,
        rank=2,
    )
    geometry = geometry_of(caches, config, facts)
    geometry.check()
    assert geometry.portable(0)
    assert geometry.portable(1)
    assert {page.writer_index for group in geometry.groups for page in group.pages} == {2}
    assert by_layer(whole, None) is whole
    assert by_layer(caches, facts) is caches


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_says_at_start_up_what_each_group_is(offloading_config, tmp_path, caplog, rank):
    spec = mamba2()
    pages = torch.zeros(4, spec.real_page_size_bytes, dtype=torch.int8)
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(pages, spec.real_page_size_bytes)],
        [[CanonicalKVCacheRef(0, spec.real_page_size_bytes)]],
    )
    group = GroupFacts(GroupSpan(0, "MambaSpec", 64, 1, layers=("a",)), False, spec, (spec,))
    config = offloading_config(
        groups=(OffloadingGroupConfig(64, ("a",), 0),),
        extra_config={"cpu_bytes_to_use": 1_000_000, "region_directory": str(tmp_path)},
        world_size=2,
        tp_size=2,
        rank=rank,
    )
    made = KVTiersSpec(config, facts_of(groups=(group,), state_groups=1))
    made.note_kv_caches({"a": pages})
    caplog.set_level(logging.INFO, logger="kvtiers")
    worker = made.get_worker(caches)
    worker.shutdown()
    said = [r.getMessage() for r in caplog.records if r.getMessage().startswith("group 0: state")]
    assert len(said) == (1 if rank == 0 else 0)
    assert not made.facts.tensors
