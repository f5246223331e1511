import json
from types import SimpleNamespace

import pytest
from vllm.v1.kv_offload.config import OffloadingGroupConfig

from kvtiers.chunks import ChunkLayout, GroupLayout
from kvtiers.cli.common import spans_of
from kvtiers.device.geometry import Geometry, GroupGeometry, PageMap, Run, opaque_page
from kvtiers.engines.vllm.layout import (
    RegionRecord,
    check_world,
    described,
    namespace_of,
    record_of,
    tokens_of,
)
from kvtiers.engines.vllm.namespace import GroupSpan, Identity, ModelIdentity
from kvtiers.errors import ConfigError

PAGE = 4096


@pytest.fixture
def record(offloading_config) -> RegionRecord:
    """Two of an engine's groups are offloaded: the first is portable, the second a window."""
    whole = PageMap(0, PAGE, PAGE, (Run(0, 0, PAGE),))
    window = opaque_page(1, PAGE, 2, 0)
    geometry = Geometry(
        (
            GroupGeometry(0, 16, (whole, whole, whole)),
            GroupGeometry(1, 16, (window,), keeps_every_chunk=False),
        ),
        1,
    )
    groups = tuple(OffloadingGroupConfig(16, ("a", "b", "c"), i) for i in (1, 3))
    config = offloading_config(groups=groups, world_size=2)
    return record_of(geometry, config, ["hnd-packed", "hnd-split"])


def test_what_a_header_gives_back_is_what_was_put_in(record) -> None:
    there = json.loads(json.dumps(record.to_json()))
    assert RegionRecord.from_json(there) == record


def test_groups_go_by_vllms_ids_and_bytes_by_what_geometry_vouches_for(record) -> None:
    assert record.layout == ChunkLayout(
        (GroupLayout(1, 3 * PAGE, 16), GroupLayout(3, 2 * PAGE, 16, keeps_every_chunk=False))
    )
    assert record.portable is False
    named = record.named_bytes()
    assert named["byte_formats"] == ["hnd-packed", "hnd-split"]
    assert [g["page_bytes"] for g in named["groups"]] == [[[PAGE, 3]], [[2 * PAGE, 1]]]
    assert named["order"] == "layer-major"


class TestChunksOfAnyBlockSize:
    """Latents of one model under two engines: blocks of 64 and of 128 tokens, chunks of 256."""

    def named(self, offloading_config, tokens_per_block, why_per_block="", own=True):
        page = tokens_per_block * 1152
        latent = PageMap(0, page, page, (Run(0, 0, page),), why_per_block=why_per_block)
        per_chunk = 256 // tokens_per_block
        geometry = Geometry((GroupGeometry(0, 256, (latent, latent)),), per_chunk)
        groups = (OffloadingGroupConfig(tokens_per_block, ("a", "b"), 0),)
        record = record_of(geometry, offloading_config(groups=groups), ["lbhnc-rank3"])
        spans = [GroupSpan(0, "MLAAttentionSpec", tokens_per_block, per_chunk, layers=("a", "b"))]
        model = ModelIdentity(digest="m")
        return namespace_of(record, Identity(model=model), spans, own_keys=own)

    def test_under_names_of_our_own_they_are_one_namespace(self, offloading_config) -> None:
        ids = {self.named(offloading_config, tokens).id for tokens in (64, 128, 256)}
        assert len(ids) == 1

    def test_under_the_engines_names_they_are_not(self, offloading_config) -> None:
        ids = {self.named(offloading_config, tokens, own=False).id for tokens in (64, 128, 256)}
        assert len(ids) == 3

    def test_nor_where_a_page_says_that_its_bytes_depend_on_the_block(
        self, offloading_config
    ) -> None:
        ids = {self.named(offloading_config, t, "K is packed").id for t in (64, 128, 256)}
        assert len(ids) == 3

    def test_tools_read_the_span_of_a_chunk_all_the_same(self, offloading_config) -> None:
        (span,) = spans_of(self.named(offloading_config, 64))
        assert span.tokens_per_chunk == 256


def test_workers_that_the_scheduler_does_not_know_of_are_refused(record) -> None:
    check_world(record, 2)
    with pytest.raises(ConfigError, match="between 2 ranks, but the scheduler counts 4"):
        check_world(record, 4)


def test_windows_do_not_count_for_the_tokens_that_fit() -> None:
    full, window = GroupLayout(0, PAGE, 16), GroupLayout(1, PAGE, 16, keeps_every_chunk=False)
    cut = SimpleNamespace(num_slots=100, slot_bytes=PAGE, slab_slots=1)
    assert tokens_of(ChunkLayout((full, window)), cut) == 1600
    assert tokens_of(ChunkLayout((full, full)), cut) == 800
    assert tokens_of(ChunkLayout((window,)), cut) == 1600
    assert described(ChunkLayout((full, window)), cut) == f"100 chunks of at most {PAGE} bytes"


def test_memory_for_chunks_of_several_sizes_is_described_by_its_slabs():
    layout = ChunkLayout(
        (GroupLayout(0, 2 * PAGE, 16), GroupLayout(1, PAGE, 16), GroupLayout(2, 3 * PAGE, 16))
    )
    cut = SimpleNamespace(num_slots=60, slot_bytes=PAGE, slab_slots=6)
    assert (
        described(layout, cut) == "chunks of 4096, 8192 and 12288 bytes in 10 slabs of 24576 bytes"
    )
    # 16 tokens take 1/3, 1/6 and 1/2 of a slab.
    assert tokens_of(layout, cut) == 10 * 16
