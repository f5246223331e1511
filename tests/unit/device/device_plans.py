"""Models and plans of any shape, for the tests of every copier."""

import numpy as np
from hypothesis import strategies as st

from kvtiers.device.copier import Direction
from kvtiers.device.geometry import Geometry
from kvtiers.device.plans import ChunkCopy, CopyPlan, plan_copies
from kvtiers.device.work import turn_of, work_of
from tests.unit.device.device_kv import Model

BLOCKS, SLOTS = 12, 5
OLD = 0xEE
models = st.builds(
    Model,
    kind=st.sampled_from(["hnd", "nhd", "mla", "opaque"]),
    heads=st.sampled_from([8, 16]),
    layers=st.integers(1, 3),
    blocks_per_chunk=st.integers(1, 4),
)
few_heads = st.builds(
    Model,
    kind=st.sampled_from(["hnd", "nhd"]),
    heads=st.sampled_from([1, 2, 4]),
    layers=st.integers(1, 3),
    blocks_per_chunk=st.integers(1, 4),
)


def touched(geometry: Geometry, chunk: ChunkCopy) -> list[tuple[int, int]]:
    """Spans of a chunk that one rank writes when it stores it, zeros included."""
    (group,) = work_of(CopyPlan((chunk,)), Direction.STORE, geometry)
    payload, whole = geometry.payload_bytes(chunk.group), geometry.chunk_bytes(chunk.group)
    spans = [(payload, whole)] * len(group.tails)
    for layer, page in enumerate(geometry.groups[chunk.group].pages):
        work = group.by_turn[turn_of(page)]
        for sub in [place[1] for place in [*work.places, *work.zeroed]]:
            start = geometry.page_start(chunk.group, layer, sub)
            spans += [(start + a, start + b) for run in page.runs for a, b in run.page_spans()]
    return spans


def plan_of(*pairs: tuple[int, int]) -> CopyPlan:
    """Blocks of group 0 of a model with chunks of one block: (slot, device block) each."""
    return CopyPlan(tuple(ChunkCopy(0, slot, ((0, block),)) for slot, block in pairs))


@st.composite
def plans(draw, model: Model) -> CopyPlan:
    """Some blocks of a request, in any device blocks and any slots."""
    per_chunk = model.blocks_per_chunk
    slots = draw(st.lists(st.integers(0, SLOTS - 1), unique=True, min_size=1, max_size=4))
    first = draw(st.integers(0, per_chunk - 1))
    last_chunk = first if len(slots) == 1 else 0
    size = (len(slots) - 1) * per_chunk + draw(st.integers(last_chunk + 1, per_chunk)) - first
    order = draw(st.sampled_from(["up", "down", "any"]))
    blocks = list(range(BLOCKS)) * 2 if order == "up" else list(range(BLOCKS - 1, -1, -1)) * 2
    if order == "any":
        blocks = [b for _ in range(2) for b in draw(st.permutations(range(BLOCKS)))]
    return plan_copies([size], [first], blocks[:size], slots, model.geometry(1, 0))


def used(model: Model, plan: CopyPlan, logical: np.ndarray, tp: int) -> dict[int, bytes]:
    return {chunk.slot: model.chunk(logical, dict(chunk.blocks), tp) for chunk in plan.chunks}


def fresh_region(geometry: Geometry) -> bytearray:
    return bytearray([OLD]) * (SLOTS * geometry.slot_bytes)
