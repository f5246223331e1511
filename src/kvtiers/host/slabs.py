"""How host memory is cut for chunks of unequal size. Pure: numbers in, numbers out.

Chunks that take equally many granules are a size class. Memory is cut into slabs of equal size;
what a class uses are whole slabs, with as many chunks in each as fit. So any slab can serve any
class, one after the other, and nothing is lost but what is left over at the end of a slab. That is
Bonwick's slab allocator ("The Slab Allocator: An Object-Caching Kernel Memory Allocator", USENIX
Summer 1994) with slabs of one size for all classes, as memcached has them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count

from kvtiers.chunks import GROUP_BYTES, MAX_WASTE, ChunkLayout, Key, group_suffix
from kvtiers.errors import ConfigError

MOST_SLABS = 2_048
"""Of a large memory slabs are larger than they need be: each costs some bookkeeping."""
_FLOORS_TOGETHER = 16
"""One part in so many is kept for classes that have less than their floor."""


@dataclass(frozen=True, slots=True)
class SizeClasses:
    """Which chunks take how much."""

    spans: tuple[int, ...]
    """Granules that a chunk of each class takes, ascending."""
    by_suffix: Mapping[bytes, int]
    """Index of a group's class, by the end of the group's keys."""

    @classmethod
    def of(cls, layout: ChunkLayout, granule_bytes: int) -> "SizeClasses":
        """The classes of a model whose slots are counted in granules of so many bytes."""
        taken = {g.group: -(-g.chunk_bytes // granule_bytes) for g in layout.groups}
        spans = tuple(sorted(set(taken.values())))
        return cls(spans, {group_suffix(g): spans.index(span) for g, span in taken.items()})

    def split(self, keys: Iterable[Key]) -> dict[int, list[Key]]:
        """Keys by the index of their class, in their order. Raises KeyError for unknown groups."""
        by_suffix = self.by_suffix
        parts: dict[int, list[Key]] = {}
        for key in keys:
            parts.setdefault(by_suffix[key[-GROUP_BYTES:]], []).append(key)
        return parts


def slab_granules(spans: Sequence[int], num_granules: int) -> int:
    """Granules of a slab, given those of a chunk of each class and of the whole memory.

    The least that loses at most ``MAX_WASTE`` of a slab to remainders, whichever class has it; a
    multiple of that, which loses no more, where there would be more than ``MOST_SLABS``.
    """
    if len(spans) == 1:
        return spans[0]
    least = next(
        slab for slab in count(max(spans)) if all(slab % span <= MAX_WASTE * slab for span in spans)
    )
    return least * max(1, -(-num_granules // (least * MOST_SLABS)))


def slab_bytes_for(capacity_bytes: int, classes: SizeClasses, granule_bytes: int) -> int:
    """Bytes of a slab; raises ConfigError unless there is one for each class."""
    slab = granule_bytes * slab_granules(classes.spans, capacity_bytes // granule_bytes)
    least = slab * len(classes.spans)
    if len(classes.spans) > 1 and capacity_bytes < least:
        raise ConfigError(
            f"cpu_bytes_to_use is {capacity_bytes} bytes, too few for the {len(classes.spans)} "
            f"sizes that chunks of this model have: give it at least {least} bytes",
            key="cpu_bytes_to_use",
        )
    return slab


def floor_slabs(num_slabs: int, num_classes: int) -> int:
    """Slabs that no other class can take from a class: at least one."""
    return max(1, num_slabs // (_FLOORS_TOGETHER * num_classes))


def num_tokens(layout: ChunkLayout, num_slabs: int, slab: int, granule_bytes: int) -> int:
    """How many tokens fit: each takes its part of a chunk of every group that keeps all of them.

    ``slab``: granules of one.
    """
    classes = SizeClasses.of(layout, granule_bytes)
    whole = [g for g in layout.groups if g.keeps_every_chunk] or list(layout.groups)
    per_slab = [slab // classes.spans[classes.by_suffix[group_suffix(g.group)]] for g in whole]
    slabs_per_token = sum(
        Fraction(1, n * g.tokens_per_chunk) for n, g in zip(per_slab, whole, strict=True)
    )
    return int(num_slabs / slabs_per_token)
