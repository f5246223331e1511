import json
from types import SimpleNamespace

import pytest
from vllm.v1.kv_offload.config import OffloadingGroupConfig

from kvtiers.chunks import ChunkLayout, GroupLayout
from kvtiers.device.geometry import Geometry, GroupGeometry, PageMap, Run, opaque_page
from kvtiers.engines.vllm.layout import (
    RegionRecord,
    check_world,
    described,
    record_of,
    tokens_of,
)
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
