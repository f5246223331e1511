"""Which part of a layer each rank holds, and whose turn it is to store what several hold."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """``count`` of a layer's ``total`` equal parts, from ``first`` on: KV heads, or groups."""

    total: int
    first: int
    count: int
    num_writers: int = 1
    """Number of ranks that hold these very parts."""
    writer_index: int = 0


def share_of(total: int, ranks: int, rank: int) -> Share:
    """The share of one rank, the parts in the order of the ranks.

    Some ranks get one part more than others where ``ranks`` does not divide ``total``, and some
    parts one copy more where there are fewer parts than ranks and ``total`` does not divide them.
    Every part is on some rank, and no rank is without one. Uneven shares are for engines that
    divide so; vLLM refuses such models.
    """
    first = rank * total // ranks
    if total >= ranks:
        return Share(total, first, (rank + 1) * total // ranks - first)
    holders = [r for r in range(ranks) if r * total // ranks == first]
    return Share(total, first, 1, len(holders), holders.index(rank))


def is_even(total: int, ranks: int) -> bool:
    """Whether every rank gets as many parts, or every part as many copies."""
    return total % ranks == 0 or ranks % total == 0
