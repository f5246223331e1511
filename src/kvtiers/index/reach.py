"""How far along a prompt pods hold it, whole and by tier. Pure.

Where groups read all tokens, all pods are measured at once: each integer along the chain that
differs from those before it takes out the places that end there. Windows and states follow the
planner of ``kvtiers.core.prefix``.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from kvtiers.chunks import Lookup
from kvtiers.core.prefix import longest_prefix
from kvtiers.index.places import Pod, Tier
from kvtiers.index.presence import Presence, bits_of


@dataclass(frozen=True, slots=True)
class Reach:
    """What one pod holds of a prompt, from its start."""

    pod: str
    tokens: int
    """In whichever of its tiers each block is."""
    tiers: tuple[tuple[Tier, int], ...]
    """Tokens that are in this one tier, of tiers that have any; most first."""
    complete: bool
    """Whether that is all, as far as is known."""


def reach(
    presence: Presence, hashes: Sequence[int], tokens_per_hash: int, pods: Iterable[Pod]
) -> list[Reach]:
    """Of each pod that holds something of this chain, how far; those that hold most first.

    ``hashes``: of the prompt's blocks of ``tokens_per_hash`` tokens, in order. A pod whose blocks
    are no multiple of that cannot be compared, and is left out.
    """
    ends = _ends(presence, hashes)
    found: list[Reach] = []
    for pod in pods:
        sizes = {g.block_size or tokens_per_hash for g in pod.groups.values()}
        if any(size % tokens_per_hash for size in sizes):
            continue
        if sizes == {tokens_per_hash} and all(g.reads_all for g in pod.groups.values()):
            one = _at_once(pod, ends, tokens_per_hash)
        elif sizes:
            one = _planned(pod, presence, hashes, tokens_per_hash)
        else:
            continue
        if one.tokens:
            found.append(one)
    found.sort(key=lambda one: -one.tokens)
    return found


class _Ends(NamedTuple):
    """By the bit of a place or group, how many blocks from the start of the prompt have it."""

    of_place: dict[int, int]
    of_group: dict[int, int]


def _ends(presence: Presence, hashes: Sequence[int]) -> _Ends:
    masks = presence.blocks.along(hashes)
    ends = _Ends({}, {})
    places = masks[0] if masks else 0
    groups, at = presence.owners(places), 0
    for mask in dict.fromkeys(mask for mask, _ in groupby(masks)):
        lost_places, lost_groups = places & ~mask, groups & ~presence.owners(mask)
        if lost_places or lost_groups:
            at = masks.index(mask, at)
            ends.of_place.update(dict.fromkeys(bits_of(lost_places), at))
            ends.of_group.update(dict.fromkeys(bits_of(lost_groups), at))
            places ^= lost_places
            groups ^= lost_groups
    ends.of_place.update(dict.fromkeys(bits_of(places), len(masks)))
    ends.of_group.update(dict.fromkeys(bits_of(groups), len(masks)))
    return ends


def _at_once(pod: Pod, ends: _Ends, tokens_per_hash: int) -> Reach:
    groups = len(pod.groups)
    hashes = min(ends.of_group.get(group.bit, 0) for group in pod.groups.values())
    per_tier: dict[Tier, list[int]] = {}
    for place in pod.places.values() if hashes else ():
        end = ends.of_place.get(place.bit)
        if end:
            per_tier.setdefault(place.tier, []).append(end)
    tiers = {t: min(each) * tokens_per_hash for t, each in per_tier.items() if len(each) == groups}
    return _answer(pod, hashes * tokens_per_hash, tiers)


def _planned(pod: Pod, presence: Presence, hashes: Sequence[int], tokens_per_hash: int) -> Reach:
    groups = [group.attention(n, tokens_per_hash) for n, group in pod.groups.items()]
    per_chunk = {g.group: g.tokens_per_chunk // tokens_per_hash for g in groups}
    get = presence.blocks.get

    def tokens(bits: Mapping[int, int]) -> int:
        def ask(group: int, chunk: int) -> Lookup:
            last = (chunk + 1) * per_chunk[group] - 1
            there = last < len(hashes) and get(hashes[last]) & bits.get(group, 0)
            return Lookup.HIT if there else Lookup.MISS

        most = len(hashes) * tokens_per_hash
        return longest_prefix(groups, most, ask, granularity=tokens_per_hash).tokens

    anywhere: dict[int, int] = {}
    by_tier: dict[Tier, dict[int, int]] = {}
    for place in pod.places.values():
        anywhere[place.group] = anywhere.get(place.group, 0) | place.bit
        by_tier.setdefault(place.tier, {})[place.group] = place.bit
    return _answer(pod, tokens(anywhere), {tier: tokens(b) for tier, b in by_tier.items()})


def _answer(pod: Pod, tokens: int, tiers: Mapping[Tier, int]) -> Reach:
    some = sorted(((t, n) for t, n in tiers.items() if n), key=lambda one: -one[1])
    return Reach(pod.name, tokens, tuple(some), pod.complete)
