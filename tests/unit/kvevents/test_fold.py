"""The fold of a stream gives what a reader of all of it knows."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.kvevents.fold import StreamFold
from kvtiers.kvevents.messages import (
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    encode,
)
from kvtiers.kvevents.sidefile import SideFile

from .readers import Llmd
from .tree import BLOCK, prompt

PROMPTS = [prompt(4, seed) for seed in range(3)]
PLACES = [("GPU", None, None), ("CPU", "LOCAL", "0:primary"), ("STORAGE", "LOCAL", "1:fs")]


def fold():
    return StreamFold(lambda: SideFile(None, "", 1 << 20))


def stored(chunks, medium, locality, owner, **more):
    first = chunks[0]
    return BlockStored(
        block_hashes=[c.hashes[0] for c in chunks],
        parent_block_hash=None if first.parent is None else first.parent.hashes[-1],
        token_ids=[t for c in chunks for t in c.tokens],
        block_size=BLOCK,
        medium=medium,
        group_idx=0,
        kv_cache_spec_kind="full_attention",
        locality=locality,
        ownership=owner,
        **more,
    )


def removed(chunk, medium, locality, owner):
    return BlockRemoved([chunk.hashes[0]], medium, 0, locality, owner)


STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 2), st.booleans()), max_size=40
)


@given(STEPS, st.integers(1, 5))
def test_a_late_reader_counts_as_one_that_heard_all(steps, parts):
    """Blocks that are there twice are told of twice, as vLLM does with equal blocks on a device.

    What follows on a block that is nowhere is of no use to anybody, and readers skip it.
    """
    folded, heard, late = fold(), Llmd(), Llmd(orphans=True)
    for n, depth, place, there in steps:
        place = PLACES[place]
        label = place[0].lower()
        if there:
            event = stored(PROMPTS[n][: depth + 1], *place)
        elif heard.counts[label, 0, PROMPTS[n][depth].hashes[0]]:
            event = removed(PROMPTS[n][depth], *place)
        else:
            continue
        heard.read(encode(Batch(0.0, [event])))
        assert folded.take(event) is False
        folded.check()
    for events in folded.inventory(2, parts):
        late.read(encode(Batch(0.0, events)))
    anywhere = {h for (_, _, h), n in heard.counts.items() if n}
    of_use = set()
    for chunks in PROMPTS:
        hashes = [c.hashes[0] for c in chunks]
        of_use |= {h for i, h in enumerate(hashes) if anywhere.issuperset(hashes[:i])}
    assert +late.counts == Counter({k: n for k, n in heard.counts.items() if n and k[2] in of_use})
    folded.close()


def test_a_clearance_voids_everything():
    folded = fold()
    folded.take(stored(PROMPTS[0], *PLACES[0]))
    assert folded.take(AllBlocksCleared()) is True
    assert [*folded.inventory(10, 10)] == []
    folded.check()


def test_all_that_a_block_has_is_kept():
    folded = fold()
    event = stored(
        PROMPTS[0],
        *PLACES[0],
        lora_id=3,
        lora_name="l",
        extra_keys=[["l", "salt"], None, None, ["l"]],
    )
    folded.take(event)
    (told,) = folded.inventory(10, 10)
    assert told == [event]
    assert repr(folded).startswith("<StreamFold <Narrator 4 chunks")


def test_digests_and_bare_hashes():
    folded, chunk = fold(), PROMPTS[0][0]
    folded.take(BlockStored([chunk.digests[0]], None, [], 0, medium="CPU", group_idx=0))
    ((told,),) = folded.inventory(10, 10)
    assert (told.block_hashes, told.token_ids) == (chunk.hashes, [])


def test_a_repeated_block_that_is_gone_is_noticed():
    folded = fold()
    folded.take(stored(PROMPTS[0], *PLACES[0]))
    folded._repeated["x", PROMPTS[0][0].key] = 1
    with pytest.raises(AssertionError, match="what is gone was repeated"):
        folded.check()


def test_it_takes_at_most_75_bytes_a_block_and_forgets_what_left():
    it, n = StreamFold(lambda: SideFile(None, "", 1 << 24)), 20_000
    at, parent = PLACES[0], None
    for first in range(1, n, 500):
        hashes = [k * 0x9E3779B97F4A7C15 % (1 << 64) for k in range(first, first + 500)]
        it.take(BlockStored(hashes, parent, [7] * 500 * BLOCK, BLOCK, None, at[0], group_idx=0))
        parent = hashes[-1]
    assert it.said == n
    assert it.narrator.nbytes <= 75 * n
    it.check()
    for first in range(1, n, 500):
        hashes = [k * 0x9E3779B97F4A7C15 % (1 << 64) for k in range(first, first + 500)]
        it.take(BlockRemoved(hashes, at[0], 0))
    assert len(it.narrator._table) == 0
    it.close()
