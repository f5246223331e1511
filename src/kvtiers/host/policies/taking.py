"""How built-in policies choose victims: from the front of an order, past what has to stay."""

from collections.abc import Callable, Collection

from kvtiers.chunks import Key
from kvtiers.host.policies.base import Staying

FEWEST_AHEAD, MOST_AHEAD = 32, 4096
"""How many keys are asked about at once after one had to stay, at first and at most."""


def take_oldest(
    size: int,
    count: int,
    staying: Staying,
    first: Callable[[int], list[Key]],
    sort_out: Callable[[list[Key], list[Key], list[Key]], None],
) -> list[Key]:
    """Take up to ``count`` keys that may leave from the front; those that stay go to the end.

    ``size``: keys in the order. ``first(n)``: the first n of them. ``sort_out(met, leaving,
    staying_here)``: of the keys ``met`` some leave, some go to the end, the rest stays in front.

    Where one stays many do, a request's whole prefix: after a refusal ever more are asked about.
    """
    taken: list[Key] = []
    unseen, ahead = size, 0
    while unseen and len(taken) < count:
        met = first(min(max(count - len(taken), ahead), unseen))
        stay = staying(met)
        if stay:
            ahead = min(max(FEWEST_AHEAD, 2 * ahead), MOST_AHEAD)
        leaving, staying_here = _part(met, stay, count - len(taken))
        unseen -= len(leaving) + len(staying_here)
        sort_out(met, leaving, staying_here)
        taken += leaving
    return taken


def _part(met: list[Key], stay: Collection[Key], count: int) -> tuple[list[Key], list[Key]]:
    """The first ``count`` of ``met`` that do not stay, and those that stay before the last one."""
    if not stay:
        return met[:count], []
    leaving: list[Key] = []
    staying_here: list[Key] = []
    for key in met:
        if key in stay:
            staying_here.append(key)
        elif len(leaving) < count:
            leaving.append(key)
        if len(leaving) == count:
            break
    return leaving, staying_here
