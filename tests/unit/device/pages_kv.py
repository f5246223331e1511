"""Logical KV and states, cut into ranks by plain slicing: the oracle of the tests of pages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from kvtiers.device.geometry import Geometry, GroupGeometry, PageMap
from kvtiers.device.pages.attention import Axis, KVTensor, attention_page
from kvtiers.device.pages.latent import latent_page
from kvtiers.device.pages.shares import share_of
from kvtiers.device.pages.state import Section, StateTensor, state_pages

TOKENS, ELEMENTS, ITEM = 4, 3, 2
LAYERS = 2
PADDING = 40
"""Bytes after each page, or after the pages of all layers, that belong to nobody."""
OLD, NOBODYS = 0xEE, 0x55
B, KV, H, N, E = Axis.BLOCK, Axis.KV, Axis.HEAD, Axis.TOKEN, Axis.ELEMENT
LOGICAL = (B, KV, H, N, E)

Bytes = np.ndarray


@dataclass(frozen=True)
class Layer:
    """What one layer keeps: bytes per block, of a rank's device tensors and of canonical pages."""

    tensors: int
    pages: Callable[[int, int, int], tuple[PageMap, ...]]
    """(first device tensor, ranks, rank) -> page maps."""
    local: Callable[[int, int], list[Bytes]]
    """(ranks, rank) -> (blocks, bytes) of each device tensor."""
    canonical: list[Bytes]
    """(blocks, bytes) of each canonical page."""


def random_bytes(*shape: int, seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(1, 256, shape, dtype=np.uint8)


def in_memory(order: Sequence[Axis], logical: Bytes) -> Bytes:
    """(blocks, KV, heads, tokens, elements, bytes) in memory order, with the axes of ``order``."""
    places = [LOGICAL.index(axis) for axis in order]
    return np.ascontiguousarray(logical.transpose(0, *places, 5))


def attention(
    order: tuple[Axis, ...], heads: int, blocks: int, seed: int, tokens: int = TOKENS
) -> Layer:
    """``order``: the axes of a page in memory. Without KV: a tensor for K and one for V.

    The content of a token depends on the seed and its position only.
    """
    stream = random_bytes(blocks, tokens, 2, heads, ELEMENTS, ITEM, seed=seed)
    logical = np.ascontiguousarray(stream.transpose(0, 2, 3, 1, 4, 5))
    parts = [logical] if KV in order else [logical[:, i : i + 1] for i in range(2)]
    full = order if KV in order else (KV, *order)

    def mine(part: Bytes, ranks: int, rank: int) -> Bytes:
        share = share_of(heads, ranks, rank)
        return in_memory(full, part[:, :, share.first : share.first + share.count])

    def pages(first: int, ranks: int, rank: int) -> tuple[PageMap, ...]:
        made = []
        for index, part in enumerate(parts):
            memory = mine(part, ranks, rank)
            axes = zip((B, *full), memory.shape, memory.strides, strict=False)
            told = [(a, n, s) for a, n, s in axes if a in order or a is B]
            described = KVTensor(*map(tuple, zip(*told, strict=True)), ITEM)
            made.append(attention_page(first + index, described, share_of(heads, ranks, rank)))
        return tuple(made)

    return Layer(
        len(parts),
        pages,
        lambda ranks, rank: [mine(part, ranks, rank).reshape(blocks, -1) for part in parts],
        [in_memory(full, part).reshape(blocks, -1) for part in parts],
    )


def latent(nbytes: int, blocks: int, seed: int) -> Layer:
    content = random_bytes(blocks, nbytes, seed=seed)
    return Layer(
        1,
        lambda first, ranks, rank: (latent_page(first, nbytes, ranks, rank),),
        lambda ranks, rank: [content],
        [content],
    )


def state(states: Sequence[StateTensor], blocks: int, seed: int) -> Layer:
    whole = [
        [
            random_bytes(blocks, s.rows, g.parts, g.width * s.inner * s.itemsize, seed=seed + i + j)
            for j, g in enumerate(s.sections)
        ]
        for i, s in enumerate(states)
    ]

    def local(ranks: int, rank: int) -> list[Bytes]:
        tensors = []
        for sections in whole:
            mine = []
            for section in sections:
                share = share_of(section.shape[2], ranks, rank)
                part = section[:, :, share.first : share.first + share.count]
                mine.append(part.reshape(*part.shape[:2], -1))
            tensors.append(np.concatenate(mine, axis=2).reshape(blocks, -1))
        return [np.concatenate(tensors, axis=1)]

    flat = [section for sections in whole for section in sections]
    parts = list(dict.fromkeys(section.shape[2] for section in flat))
    canonical = [
        np.concatenate([s.reshape(blocks, -1) for s in flat if s.shape[2] == n], axis=1)
        for n in parts
    ]
    return Layer(
        1, lambda first, ranks, rank: state_pages(first, states, ranks, rank), local, canonical
    )


def mamba1(channels: int = 24) -> list[StateTensor]:
    return [
        StateTensor((Section(channels, 1),), 2, rows=3),
        StateTensor((Section(channels, 1),), 4, inner=5),
    ]


def mamba2(groups: int, *, dim_first: bool = False, heads: int = 8) -> list[StateTensor]:
    conv = (Section(heads, 3), Section(groups, 4), Section(groups, 4))
    rows, inner = (1, 3) if dim_first else (3, 1)
    return [StateTensor(conv, 2, rows, inner), StateTensor((Section(heads, 3),), 4, inner=4)]


def gated_delta_net(k_heads: int, v_heads: int, *, dim_first: bool = False) -> list[StateTensor]:
    conv = (Section(k_heads, 4), Section(k_heads, 4), Section(v_heads, 3))
    rows, inner = (1, 3) if dim_first else (3, 1)
    return [StateTensor(conv, 2, rows, inner), StateTensor((Section(v_heads, 3),), 4, inner=4)]


def short_conv(channels: int = 16) -> list[StateTensor]:
    return [StateTensor((Section(channels, 1),), 2, rows=2)]


class Rank:
    """One rank's device memory: a storage, and a view of it for every device tensor."""

    def __init__(
        self, layers: Sequence[Layer], per_chunk: int, ranks: int, rank: int, *, cross_layer: bool
    ) -> None:
        firsts = list(accumulate((layer.tensors for layer in layers), initial=0))
        pages = [
            page
            for layer, first in zip(layers, firsts, strict=False)
            for page in layer.pages(first, ranks, rank)
        ]
        group = GroupGeometry(0, TOKENS * per_chunk, tuple(pages))
        self.geometry = Geometry((group,), per_chunk, rank)
        self.geometry.check()
        self.content = [part for layer in layers for part in layer.local(ranks, rank)]
        self.storage, self.views = _placed(self.content, cross_layer=cross_layer)

    def fill(self) -> None:
        """Put the logical content where the engine would have it."""
        for view, content in zip(self.views, self.content, strict=True):
            view[:, : content.shape[1]] = content

    def copy(self, chunk: Bytes, blocks: Sequence[int], slot: int, *, store: bool) -> Bytes:
        """Move sub-blocks between the device and ``chunk``; how often each byte was written."""
        written = np.zeros(len(chunk), int)
        for layer, page in enumerate(self.geometry.groups[0].pages):
            for sub, block in enumerate(blocks):
                if store and not page.writes(self.geometry.place(0, slot, sub)):
                    continue
                start = self.geometry.page_start(0, layer, sub)
                device = self.views[page.tensor][block]
                for run in page.runs:
                    for (a, z), (p, q) in zip(run.device_spans(), run.page_spans(), strict=True):
                        if store:
                            chunk[start + p : start + q] = device[a:z]
                            written[start + p : start + q] += 1
                        else:
                            device[a:z] = chunk[start + p : start + q]
        return written


def _placed(content: Sequence[Bytes], *, cross_layer: bool) -> tuple[Bytes, list[Bytes]]:
    """A storage of bytes that are nobody's, and (blocks, bytes and more) views of it.

    Layer-major: each tensor's pages one after the other. Cross-layer: the pages of all tensors
    interleaved block by block.
    """
    blocks = content[0].shape[0]
    sizes = [part.shape[1] + PADDING for part in content]
    storage = np.full(blocks * sum(sizes), NOBODYS, np.uint8)
    starts = list(accumulate(sizes, initial=0))
    if cross_layer:
        rows = storage.reshape(blocks, -1)
        views = [rows[:, a:z] for a, z in pairwise(starts)]
    else:
        parts = [storage[blocks * a : blocks * z] for a, z in pairwise(starts)]
        views = [part.reshape(blocks, -1) for part in parts]
    return storage, views


def expected_chunk(layers: Sequence[Layer], blocks: Sequence[int], nbytes: int) -> Bytes:
    """The canonical chunk: of each page the sub-blocks, then zeros."""
    parts = [page[block] for layer in layers for page in layer.canonical for block in blocks]
    payload = np.concatenate(parts)
    return np.concatenate([payload, np.zeros(nbytes - len(payload), np.uint8)])
