"""What is moved at a time."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def portions(
    items: Iterable[T], bytes_of: Callable[[T], int], most_bytes: int, most: int | None = None
) -> Iterator[list[T]]:
    """Runs of ``items``, in order, of up to ``most_bytes`` and ``most`` each; at least of one."""
    some: list[T] = []
    used = 0
    for item in items:
        size = bytes_of(item)
        if some and (used + size > most_bytes or len(some) == most):
            yield some
            some, used = [], 0
        some.append(item)
        used += size
    if some:
        yield some
