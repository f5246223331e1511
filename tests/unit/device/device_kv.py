"""One logical KV cache, cut into ranks by plain slicing: the oracle of the device tests."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvtiers.chunks import round_up
from kvtiers.device.copier import Copier, CopyOutcome, Direction
from kvtiers.device.cpu import CpuCopier
from kvtiers.device.geometry import Geometry, GroupGeometry, PageMap, Run, coalesce, opaque_page
from kvtiers.device.plans import CopyPlan

TOKENS = 4
CELL = 24
"""Bytes of one token of one head, K and V."""
PADDING = 40
"""Bytes after each page of a device block that belong to nobody."""


@dataclass(frozen=True)
class Model:
    """Attention layers with ``heads`` KV heads; ``kind``: hnd, nhd, mla (one latent) or opaque."""

    kind: str
    heads: int
    layers: int
    blocks_per_chunk: int

    def shards(self, tp: int) -> int:
        return 1 if self.kind == "mla" else min(self.heads, tp)

    def page_map(self, tensor: int, tp: int, rank: int) -> PageMap:
        shards, copies = self.shards(tp), tp // self.shards(tp)
        heads = self.heads // shards
        page = heads * TOKENS * CELL
        shard, row = rank // copies, heads * CELL
        if self.kind == "opaque":
            return opaque_page(tensor, page, tp, rank)
        if self.kind == "nhd":
            runs = coalesce([Run(0, shard * row, row, TOKENS, row, shards * row)])
        else:
            size = TOKENS * CELL
            first = shard * heads
            runs = coalesce(Run(h * size, (first + h) * size, size) for h in range(heads))
        return PageMap(tensor, page, shards * page, runs, copies, rank % copies)

    def geometry(self, tp: int, rank: int) -> Geometry:
        pages = tuple(self.page_map(layer, tp, rank) for layer in range(self.layers))
        geometry = Geometry(
            (GroupGeometry(0, TOKENS * self.blocks_per_chunk, pages),), self.blocks_per_chunk, rank
        )
        geometry.check()
        return geometry

    def logical(self, blocks: int, seed: int = 0) -> np.ndarray:
        """(layers, blocks, heads, tokens, cell) random bytes."""
        shape = (self.layers, blocks, self.heads, TOKENS, CELL)
        return np.random.default_rng(seed).integers(1, 256, shape, dtype=np.uint8)

    def pages(self, logical: np.ndarray, tp: int, rank: int) -> np.ndarray:
        """(layers, blocks, bytes): the local pages of a rank."""
        shards = self.shards(tp)
        shard, heads = rank // (tp // shards), self.heads // shards
        mine = logical[:, :, shard * heads : (shard + 1) * heads]
        if self.kind == "nhd":
            mine = mine.transpose(0, 1, 3, 2, 4)
        return np.ascontiguousarray(mine).reshape(*mine.shape[:2], -1)

    def chunk(self, logical: np.ndarray, blocks: dict[int, int], tp: int = 1) -> bytes:
        """The canonical chunk that has ``blocks[sub]`` as its sub-block ``sub``."""
        ranks = tp if self.kind == "opaque" else 1
        whole = [self.pages(logical, ranks, rank) for rank in range(ranks)]
        size = whole[0].shape[2] * ranks
        out = bytearray()
        for layer in range(self.layers):
            for sub in range(self.blocks_per_chunk):
                block = blocks.get(sub)
                parts = [w[layer, block].tobytes() for w in whole] if block is not None else []
                out += b"".join(parts) or bytes(size)
        return bytes(out).ljust(round_up(len(out)), b"\0")


def tensors_of(pages: np.ndarray, *, shared: bool = True) -> list[torch.Tensor]:
    """One (blocks, page + padding) int8 tensor per layer; ``shared``: all in one storage."""
    layers, blocks, page = pages.shape
    whole = torch.full((layers, blocks, page + PADDING), 0x55, dtype=torch.int8)
    whole[:, :, :page] = torch.from_numpy(pages.view(np.int8))
    return [whole[i] if shared else whole[i].clone() for i in range(layers)]


def pages_of(tensors: list[torch.Tensor]) -> np.ndarray:
    return np.stack([t.numpy().view(np.uint8)[:, :-PADDING] for t in tensors])


def paddings_of(tensors: list[torch.Tensor]) -> np.ndarray:
    return np.stack([t.numpy().view(np.uint8)[:, -PADDING:] for t in tensors])


@contextmanager
def copier(
    tensors: list[torch.Tensor],
    region: bytearray,
    geometry: Geometry,
    make: Callable[..., Copier] = CpuCopier,
    **options: Any,
) -> Iterator[Any]:
    made = make(tensors, memoryview(region), geometry, **options)
    try:
        yield made
    finally:
        made.close()


def copy_now(
    tensors: list[torch.Tensor],
    region: bytearray,
    geometry: Geometry,
    direction: Direction,
    plan: CopyPlan,
    make: Callable[..., Copier] = CpuCopier,
) -> CopyOutcome:
    with copier(tensors, region, geometry, make) as made:
        made.submit(1, direction, plan)
        made.wait([1])
        (outcome,) = made.poll()
    return outcome
