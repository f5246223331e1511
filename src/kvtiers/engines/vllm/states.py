"""The pages of vLLM's state-space layers, from a rank's shapes.

Sources, vLLM 0.32: ``MambaBase.bind_kv_cache`` packs the state tensors of a page one after the
other; their shapes are those of ``MambaStateShapeCalculator``; weight loaders give every rank a
contiguous part of each section of the convolution, and where there is one group of B and C only,
the same group to all ranks (``mamba_v2_sharded_weight_loader``).
"""

from math import prod

from vllm.utils.torch_utils import get_dtype_size
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Kinds
from vllm.v1.kv_cache_interface import MambaSpec

from kvtiers.device.geometry import PageMap
from kvtiers.device.pages.latent import latent_page
from kvtiers.device.pages.state import (
    ORDER_VERSION,
    PER_BLOCK,
    Section,
    StateTensor,
    state_pages,
)
from kvtiers.engines.vllm.facts import EngineFacts
from kvtiers.errors import Kind, KVTiersError

_AXES = {
    Kinds.MAMBA1: [2, 2],
    Kinds.MAMBA2: [2, 3],
    Kinds.GDN_ATTN: [2, 3],
    Kinds.SHORT_CONV: [2],
}
"""How many axes each state tensor has."""


def own_states(
    tensor: int, spec: MambaSpec, facts: EngineFacts, ranks: int, rank: int
) -> tuple[PageMap, ...]:
    """The pages of one layer on one rank. KVTiersError ``UNSUPPORTED`` says why there are none."""
    if spec.tp_replicated:
        shapes = " ".join("x".join(map(str, shape)) for shape in spec.shapes)
        page = latent_page(
            tensor,
            spec.real_page_size_bytes,
            ranks,
            rank,
            kind="state",
            order=f"state {ORDER_VERSION}: {shapes} on every rank",
            why_per_block=PER_BLOCK,
        )
        return (page,)
    return state_pages(tensor, _state_tensors(spec, facts, ranks), ranks, rank)


def _state_tensors(spec: MambaSpec, facts: EngineFacts, ranks: int) -> list[StateTensor]:
    """Those of all ranks together; the first is a convolution's."""
    kind, shapes = spec.mamba_type, spec.shapes
    if [len(shape) for shape in shapes] != _AXES.get(kind) or not all(map(all, shapes)):
        listed = ", ".join("x".join(map(str, shape)) for shape in shapes)
        raise _uncertain(f"a state of {kind.name} with tensors of {listed} is not known")
    if facts.conv_dim_first is None:
        raise _uncertain("nobody says in which order the state of a convolution lies")
    channels, steps = shapes[0] if facts.conv_dim_first else shapes[0][::-1]
    rows, inner = (1, steps) if facts.conv_dim_first else (steps, 1)
    sizes = [get_dtype_size(dtype) for dtype in spec.dtypes]
    if kind is Kinds.SHORT_CONV:
        return [StateTensor((Section(channels * ranks, 1),), sizes[0], rows, inner)]
    sections = _sections(kind, channels, shapes[1], facts.state_groups, ranks)
    # By heads, as the last section of q | k | v and the first of x | B | C and x alone.
    heads = sections[-1] if kind is Kinds.GDN_ATTN else sections[0]
    rest = prod(shapes[1]) * ranks // (heads.parts * heads.width)
    temporal = StateTensor((heads,), sizes[1], inner=rest)
    return [StateTensor(sections, sizes[0], rows, inner), temporal]


def _sections(
    kind: Kinds, channels: int, temporal: tuple[int, ...], groups: int | None, ranks: int
) -> tuple[Section, ...]:
    """What the channels of a convolution are on all ranks; ``channels`` are those of one."""
    if kind is Kinds.MAMBA1:
        if temporal[0] != channels:
            raise _uncertain(f"it has {channels} channels, but a state of {temporal[0]}")
        return (Section(channels * ranks, 1),)
    heads, width, state = temporal
    others, rest = divmod(channels - heads * width, 2 * state)
    if others < 1 or rest:
        raise _uncertain(f"{channels} channels are not those of {heads} heads and their groups")
    of_heads = Section(heads * ranks, width)
    if kind is Kinds.GDN_ATTN:
        of_keys = Section(others * ranks, state)
        return (of_keys, of_keys, of_heads)
    of_groups = Section(_groups(others, groups, ranks), state)
    return (of_heads, of_groups, of_groups)


def _groups(local: int, told: int | None, ranks: int) -> int:
    """All groups of B and C. One on each of several ranks may be the same: the config tells."""
    total = local * ranks
    if ranks > 1 and local == 1:
        if told not in (1, total):
            raise _uncertain(f"nobody says whether {ranks} ranks hold one group or {ranks}")
        return told
    if told not in (None, total):
        raise _uncertain(f"ranks hold {total} groups, but the model's config says {told}")
    return total


def _uncertain(why: str) -> KVTiersError:
    return KVTiersError(why, kind=Kind.UNSUPPORTED, operation="describe pages")
