"""The rule of docs/embedding.md by which a rank finds its bytes in a stored file, without us."""

import os

import pytest

from kvtiers.chunks import PAGE_BYTES
from kvtiers.tiers.base import Item
from kvtiers.tiers.fs.names import chunk_path
from tests.unit.device.device_kv import Model
from tests.unit.tiers.fs.fs_kit import Folder
from tests.unit.tiers.tier_kit import NAMESPACE, key, page_aligned

BLOCKS = {0: 3, 1: 1}
"""The device block of each sub-block."""


def rank_pages(file: int, geometry, group: int = 0) -> dict[tuple[int, int], bytes]:
    """(layer, sub-block) -> the rank's own page, read from a chunk's file."""
    found = {}
    for layer, page in enumerate(geometry.groups[group].pages):
        for sub in range(geometry.blocks_per_chunk):
            begin = PAGE_BYTES + geometry.page_start(group, layer, sub)
            local = bytearray(page.local_bytes)
            for run in page.runs:
                for (at, end), (start, _) in zip(run.device_spans(), run.page_spans(), strict=True):
                    local[at:end] = os.pread(file, end - at, begin + start)
            found[layer, sub] = bytes(local)
    return found


@pytest.mark.parametrize("kind", ["hnd", "nhd", "mla", "opaque"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_rank_finds_its_pages_in_the_file_of_a_chunk(folder: Folder, kind: str, tp: int) -> None:
    model = Model(kind, heads=4, layers=3, blocks_per_chunk=len(BLOCKS))
    logical = model.logical(blocks=4)
    chunk = model.chunk(logical, BLOCKS, tp)
    payload = page_aligned(len(chunk))
    payload[:] = chunk
    store = folder.open()
    assert store.write([Item(key(1), payload)]) == [None]
    store.close()
    path = folder.root / NAMESPACE.id / chunk_path(key(1))
    assert path.stat().st_size == PAGE_BYTES + model.geometry(tp, 0).chunk_bytes(0)
    file = os.open(path, os.O_RDONLY)
    try:
        for rank in range(tp):
            own = model.pages(logical, tp, rank)
            found = rank_pages(file, model.geometry(tp, rank))
            assert found == {
                (layer, sub): own[layer, block].tobytes()
                for layer in range(model.layers)
                for sub, block in BLOCKS.items()
            }
    finally:
        os.close(file)


def test_the_heads_of_a_rank_are_one_range_of_each_page(folder: Folder) -> None:
    """With heads outermost: a reader asks for one range per layer and block."""
    geometry = Model("hnd", heads=4, layers=3, blocks_per_chunk=2).geometry(tp=2, rank=1)
    assert geometry.fragments_per_chunk(0) == 3 * 2
