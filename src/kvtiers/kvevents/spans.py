"""How blocks are told of: in few events, parents before children.

Readers skip blocks whose parent they do not know, and want the tokens of an event to be exactly as
many as its blocks hold.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtiers.kvevents.descriptions import Description
from kvtiers.kvevents.messages import BlockRemoved, BlockStored

MAX_HASHES = 1024
"""In one event."""


@dataclass(frozen=True, slots=True)
class Place:
    """How a tier is called on the event stream."""

    medium: str
    """``CPU`` or ``STORAGE``: readers know no other."""
    locality: str | None = None
    """``LOCAL`` or ``REMOTE``."""
    ownership: str | None = None
    """Tells tiers of one medium apart, e.g. ``1:fs``."""


@dataclass(frozen=True, slots=True)
class Group:
    """What readers are told of a KV-cache group."""

    kind: str | None = None
    sliding_window: int | None = None
    """Tokens."""


class Described(NamedTuple):
    """Blocks of one chunk and the group they belong to."""

    group: int
    description: Description


def stored(
    come: Iterable[tuple[Place, Iterable[Described]]], groups: Mapping[int, Group]
) -> Iterator[BlockStored]:
    """Events that say of places which chunks they have now."""
    chains = [(place, chain) for place, chunks in come for chain in chained(chunks)]
    chains.sort(key=lambda one: one[1][0].description.start)
    for place, chain in chains:
        yield from _of_chain(chain, place, groups)


def chained(chunks: Iterable[Described]) -> list[list[Described]]:
    """Runs in which each chunk follows on the one before.

    Told in the order in which they begin, a parent comes before its children: it is in a run that
    begins before theirs.
    """
    chains: list[list[Described]] = []
    open_at: dict[tuple[int, int], list[Described]] = {}
    for chunk in sorted(chunks, key=lambda c: c.description.start):
        d = chunk.description
        chain = None if d.parent is None else open_at.pop((chunk.group, d.parent), None)
        if chain is not None and not _fits(chain[-1].description, d):
            chain = None
        if chain is None:
            chain = []
            chains.append(chain)
        chain.append(chunk)
        open_at[chunk.group, d.hashes[-1]] = chain
    return chains


def _fits(before: Description, after: Description) -> bool:
    return (
        before.block_size == after.block_size
        and before.start + len(before.tokens) == after.start
        and (before.lora_id, before.lora_name) == (after.lora_id, after.lora_name)
    )


def _of_chain(
    chain: Sequence[Described], place: Place, groups: Mapping[int, Group]
) -> Iterator[BlockStored]:
    run: list[Description] = []
    count = 0
    for _, description in chain:
        if run and count + len(description.hashes) > MAX_HASHES:
            yield _event(chain[0].group, run, place, groups)
            run, count = [], 0
        run.append(description)
        count += len(description.hashes)
    yield _event(chain[0].group, run, place, groups)


def _event(
    group: int, run: Sequence[Description], place: Place, groups: Mapping[int, Group]
) -> BlockStored:
    first, facts = run[0], groups.get(group, Group())
    extra = None
    if any(d.extra_keys is not None for d in run):
        extra = [e for d in run for e in d.extra_keys or [None] * len(d.hashes)]
    return BlockStored(
        block_hashes=[h for d in run for h in d.hashes],
        parent_block_hash=first.parent,
        token_ids=[t for d in run for t in d.tokens],
        block_size=first.block_size,
        lora_id=first.lora_id,
        medium=place.medium,
        lora_name=first.lora_name,
        extra_keys=extra,
        group_idx=group,
        kv_cache_spec_kind=facts.kind,
        kv_cache_spec_sliding_window=facts.sliding_window,
        locality=place.locality,
        ownership=place.ownership,
    )


def bare(block_hash: int, group: int, place: Place) -> BlockStored:
    """The event of a chunk of which only its hash is known."""
    return BlockStored(
        block_hashes=[block_hash],
        parent_block_hash=None,
        token_ids=[],
        block_size=0,
        medium=place.medium,
        group_idx=group,
        locality=place.locality,
        ownership=place.ownership,
    )


def removed(hashes: Sequence[int], group: int, place: Place) -> Iterator[BlockRemoved]:
    """Events that say none of these is in ``place`` any more."""
    for at in range(0, len(hashes), MAX_HASHES):
        yield BlockRemoved(
            block_hashes=hashes[at : at + MAX_HASHES],
            medium=place.medium,
            group_idx=group,
            locality=place.locality,
            ownership=place.ownership,
        )
