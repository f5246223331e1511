"""A box of equally spaced elements on both sides, as few runs of bytes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from kvtiers.device.geometry import Run


@dataclass(frozen=True, slots=True)
class Step:
    """One axis of a box: how many, and how far apart on the device and in the page (bytes)."""

    count: int
    device: int
    page: int


def runs_of_box(
    nbytes: int, axes: Sequence[Step], device_offset: int = 0, page_offset: int = 0
) -> Iterator[Run]:
    """Runs over all elements of ``nbytes`` bytes. ``axes``: outermost on the device first.

    Axes that touch on both sides become one; the longest that is left becomes the fragments of a
    run, and there is a run for every place along the others.
    """
    nbytes, axes = _joined(nbytes, axes)
    along = max(axes, key=lambda a: a.count, default=Step(1, 0, 0))
    others = [a for a in axes if a is not along]
    for place in product(*(range(a.count) for a in others)):
        yield Run(
            device_offset + sum(i * a.device for i, a in zip(place, others, strict=True)),
            page_offset + sum(i * a.page for i, a in zip(place, others, strict=True)),
            nbytes,
            along.count,
            along.device,
            along.page,
        )


def _joined(nbytes: int, axes: Sequence[Step]) -> tuple[int, list[Step]]:
    left: list[Step] = []
    for axis in reversed([a for a in axes if a.count > 1]):
        inner = left[0] if left else None
        if inner is None and axis.device == axis.page == nbytes:
            nbytes *= axis.count
        elif inner and _continues(axis, inner):
            left[0] = Step(axis.count * inner.count, inner.device, inner.page)
        else:
            left.insert(0, axis)
    return nbytes, left


def _continues(outer: Step, inner: Step) -> bool:
    """Whether both are one axis with the steps of ``inner``."""
    return (outer.device, outer.page) == (inner.count * inner.device, inner.count * inner.page)
