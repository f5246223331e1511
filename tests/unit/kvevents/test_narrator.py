"""Said is the difference between what is and what was said, parents first."""

from collections import Counter, deque

import pytest

from kvtiers.events import ChunksFound, ChunksRemoved, ChunksStored, Reason, TierReachable
from kvtiers.kvevents import narrator as module
from kvtiers.kvevents.messages import AllBlocksCleared, Batch, BlockRemoved, BlockStored, encode
from kvtiers.kvevents.narrator import Narrator
from kvtiers.kvevents.sidefile import SideFile
from kvtiers.kvevents.spans import Group, Place

from .readers import Dynamo, Llmd
from .tree import BLOCK, keys, prompt

HOST, DISK, SILENT = "0:primary", "1:fs", "2:memory"
PLACES = {HOST: Place("CPU", "LOCAL", HOST), DISK: Place("STORAGE", "LOCAL", DISK)}
FULL = {0: Group("full_attention"), 1: Group("sliding_window", 8)}


class Story:
    """A narrator, and strict readers of all that it says."""

    def __init__(self, folder=None, max_bytes=1 << 20, side=True):
        made = SideFile(None if folder is None else str(folder), "d", max_bytes) if side else None
        self.narrator = Narrator(PLACES, FULL, made)
        deque(self.narrator.recall(), maxlen=0)
        self.llmd, self.dynamo = Llmd(), Dynamo(BLOCK)
        self.said = []

    def speak(self, at_once=1000):
        """All that is to be said, as events."""
        new = []
        while self.narrator.pending:
            new += self.narrator.speak(at_once)
        self.narrator.check()
        for reader in (self.llmd, self.dynamo):
            reader.read(encode(Batch(0.0, new)))
        self.said += new
        return new

    def describe(self, chunks, expected=True):
        for c in chunks:
            self.narrator.describe(c.key, c.description, expected=expected)

    def stored(self, tier, chunks, describe=True):
        if describe:
            self.describe(chunks)
        self.narrator.take(ChunksStored(tier, keys(chunks)))

    def removed(self, tier, chunks):
        self.narrator.take(ChunksRemoved(tier, keys(chunks), Reason.EVICTED))

    def holds(self, tier, chunks):
        """Whether both readers know exactly these blocks of group 0 in the tier."""
        hashes = dict(Counter(h for c in chunks for h in c.hashes))
        medium = {"cpu": "host", "storage": "disk"}[tier]
        return self.llmd.held(tier) == hashes == dict(+self.dynamo.held[medium])


@pytest.mark.parametrize("blocks", [1, 3])
def test_one_event_for_a_prefix_with_its_tokens(blocks):
    story, chunks = Story(), prompt(5, blocks=blocks)
    story.stored(HOST, chunks)
    (event,) = story.speak()
    assert event == BlockStored(
        block_hashes=[h for c in chunks for h in c.hashes],
        parent_block_hash=None,
        token_ids=[t for c in chunks for t in c.tokens],
        block_size=BLOCK,
        medium="CPU",
        group_idx=0,
        kv_cache_spec_kind="full_attention",
        locality="LOCAL",
        ownership=HOST,
    )
    assert story.holds("cpu", chunks)


def test_once_per_residency_whatever_is_said_of_it():
    story, chunks = Story(), prompt(3)
    for _ in range(2):
        story.stored(DISK, chunks)
        story.stored(DISK, chunks)
        story.narrator.take(ChunksFound(DISK, keys(chunks)))
        story.speak()
        assert story.holds("storage", chunks)
        story.removed(DISK, chunks)
        story.removed(DISK, chunks)
        story.speak()
        assert story.holds("storage", [])
    assert [type(e) for e in story.said] == [BlockStored, BlockRemoved] * 2


def test_what_is_over_before_it_was_said_is_not_said():
    story, chunks = Story(), prompt(3)
    story.stored(HOST, chunks)
    story.removed(HOST, chunks)
    assert story.speak() == []
    assert len(story.narrator._table) == 0


def test_a_description_outlives_host_memory():
    story, chunks = Story(), prompt(4, blocks=2)
    story.stored(HOST, chunks)
    story.stored(DISK, chunks, describe=False)
    story.speak()
    story.removed(HOST, chunks)
    story.speak()
    story.stored(HOST, chunks, describe=False)  # promoted
    story.speak()
    assert story.holds("cpu", chunks)
    story.removed(HOST, chunks)
    story.removed(DISK, chunks)
    (gone, also) = story.speak()
    assert len(gone.block_hashes) == len(also.block_hashes) == 8
    assert len(story.narrator._table) == 0


def test_it_is_kept_while_a_store_is_under_way():
    story, chunks = Story(), prompt(2)
    story.stored(DISK, chunks)
    story.describe(chunks)  # to be stored in host memory
    story.removed(DISK, chunks)
    story.stored(HOST, chunks, describe=False)
    story.speak()
    assert story.holds("cpu", chunks)


def test_parents_come_first_over_tiers_and_branches():
    story, trunk = Story(), prompt(3)
    one, two = prompt(3, 1, after=trunk[1]), prompt(2, 2, after=trunk[1])
    story.stored(HOST, [*reversed(one), *two])
    story.stored(DISK, trunk[::-1])
    story.speak()
    assert story.holds("cpu", [*one, *two])
    assert story.holds("storage", trunk)


def test_events_are_bounded_and_go_on_where_they_end():
    story, chunks = Story(), prompt(2500)
    story.stored(DISK, chunks)
    assert [len(e.block_hashes) for e in story.speak(5000)] == [1024, 1024, 452]
    story.removed(DISK, chunks)
    assert [len(e.block_hashes) for e in story.speak(5000)] == [1024, 1024, 452]
    assert story.holds("storage", [])


def test_silent_tiers_and_groups_with_windows():
    story = Story()
    window = prompt(2, group=1)
    story.stored(SILENT, prompt(2))
    story.stored(HOST, window)
    (event,) = story.speak()
    assert (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) == ("sliding_window", 8)
    assert event.group_idx == 1
    assert story.holds("cpu", [])


def test_hashes_only():
    narrator, chunks = Narrator(PLACES, FULL, None), prompt(2, blocks=2)
    narrator.describe(chunks[0].key, chunks[0].description, expected=True)
    narrator.take(ChunksStored(HOST, keys(chunks)))
    said = narrator.speak(10)
    assert [e.block_hashes for e in said] == [c.hashes[-1:] for c in chunks]
    assert {(e.block_size, *e.token_ids) for e in said} == {(0,)}
    narrator.take(ChunksRemoved(HOST, keys(chunks), Reason.RESET))
    (gone,) = narrator.speak(10)
    assert gone.block_hashes == [c.hashes[-1] for c in chunks]
    narrator.check()
    assert not narrator.wanted


def test_what_was_told_by_its_hash_is_told_again_when_it_is_known():
    story, chunks = Story(), prompt(2, blocks=2)
    story.narrator.take(ChunksFound(DISK, keys(chunks)))
    assert story.narrator.wanted == {*keys(chunks)}
    bare = story.narrator.speak(10)
    assert [e.token_ids for e in bare] == [[], []]
    story.describe(chunks, expected=False)
    assert not story.narrator.wanted
    back = story.narrator.speak(10)
    assert [e.block_hashes for e in back[:2]] == [c.hashes[-1:] for c in chunks]
    assert back[2].block_hashes == [h for c in chunks for h in c.hashes]
    story.removed(DISK, chunks)
    assert len(story.narrator.speak(10)[0].block_hashes) == 4
    story.narrator.check()


def test_a_tier_that_cannot_be_reached_has_nothing():
    story, chunks = Story(), prompt(4)
    story.stored(DISK, chunks[:3])
    story.stored(HOST, chunks)
    story.speak()
    story.narrator.take(TierReachable(DISK, False))
    story.narrator.take(TierReachable(DISK, False))
    story.speak()
    assert story.holds("storage", [])
    assert story.holds("cpu", chunks)
    story.removed(DISK, chunks[:1])
    story.stored(DISK, chunks[3:])
    assert story.speak() == []
    story.narrator.take(TierReachable(DISK, True))
    story.speak()
    assert story.holds("storage", chunks[1:])


def test_a_scan_is_told_of_when_it_is_over():
    first, chunks = Story(), prompt(9)
    first.stored(DISK, chunks)
    story = Story()
    story.describe(chunks, expected=False)
    story.narrator.take(ChunksFound(DISK, keys(chunks[5:]), complete=False))
    story.stored(DISK, chunks[4:5])
    assert story.speak() == []
    story.narrator.take(ChunksFound(DISK, keys(chunks[:4]), complete=True))
    story.speak(at_once=2)
    assert story.holds("storage", chunks)


def test_a_warm_disk_is_described_after_a_restart(tmp_path):
    before, chunks = Story(tmp_path), prompt(6, blocks=2)
    before.stored(DISK, chunks)
    before.speak()
    before.narrator.close()
    after = Story(tmp_path)
    assert after.speak() == []
    after.narrator.take(ChunksFound(DISK, keys(chunks[::-1])))
    after.speak()
    assert after.holds("storage", chunks)
    assert not after.narrator.wanted
    after.narrator.close()


@pytest.mark.parametrize(("blocks", "reads"), [(1, 0), (3, 4)])
def test_what_left_is_read_only_where_its_hashes_are_not_known(
    tmp_path, monkeypatch, blocks, reads
):
    chunks = prompt(4, blocks=blocks)
    before = Story(tmp_path)
    before.describe(chunks)
    before.narrator.close()
    after = Story(tmp_path)
    after.stored(DISK, chunks, describe=False)
    after.speak()
    read, places = SideFile.read, []
    monkeypatch.setattr(
        SideFile, "read", lambda self, place: places.append(place) or read(self, place)
    )
    after.removed(DISK, chunks)
    (event,) = after.speak()
    assert event.block_hashes == [h for c in chunks for h in c.hashes]
    assert len(places) == reads


def test_a_block_that_is_not_named_by_its_key_is_taken_back_by_its_own_name():
    story, (chunk,) = Story(), prompt(1)
    other = chunk.description._replace(hashes=[5])
    story.narrator.describe(chunk.key, other, expected=True)
    story.narrator.take(ChunksStored(HOST, (chunk.key,)))
    story.narrator.take(ChunksStored(DISK, (chunk.key,)))
    story.speak()
    story.removed(HOST, [chunk])
    (event,) = story.speak()
    assert (type(event), event.block_hashes) == (BlockRemoved, [5])


def test_changes_beyond_the_bound_are_found_in_the_table(monkeypatch):
    monkeypatch.setattr(module, "MAX_CHANGED", 4)
    story, chunks = Story(), prompt(20)
    story.stored(HOST, chunks[:10])
    story.speak(at_once=3)
    story.stored(DISK, chunks)
    story.removed(HOST, chunks[:7])
    assert len(story.narrator._changed) <= 5
    story.speak(at_once=3)
    assert story.holds("storage", chunks)
    assert story.holds("cpu", chunks[7:10])


def test_a_full_side_file_forgets_what_is_not_there(tmp_path):
    story = Story(tmp_path, max_bytes=40 + 60 * 10)
    for seed in range(20):
        chunks = prompt(8, seed)
        story.stored(HOST, chunks)
        story.speak()
        assert story.holds("cpu", chunks), "all are described"
        story.removed(HOST, chunks)
        story.speak()
    many = prompt(30, 77)
    story.stored(HOST, many)
    bare = [e for e in story.narrator.speak(100) if not e.token_ids]
    assert 0 < len(bare) < 30, "the rest has its hash"
    story.narrator.check()
    story.narrator.close()


def test_readers_that_forgot_everything_are_told_again():
    story, chunks = Story(), prompt(5)
    story.stored(HOST, chunks)
    story.removed(HOST, chunks[4:])
    story.speak()
    for event in (
        AllBlocksCleared(),
        BlockStored([chunks[0].hashes[0]], None, [], 0, medium="CPU", group_idx=0),
    ):
        story.llmd.read(encode(Batch(0.0, [event])))
    story.narrator.renew()
    story.speak(at_once=2)
    assert story.holds("cpu", chunks[:4])


def test_the_inventory_is_what_was_said_and_changes_nothing():
    story, chunks = Story(), prompt(10)
    story.stored(HOST, chunks[:7])
    story.stored(DISK, chunks)
    story.speak()
    story.removed(HOST, chunks[:2])  # not said yet
    late = Story()
    parts = [*story.narrator.told.inventory(3, 100)]
    assert len(parts) == 4
    assert len([*story.narrator.told.inventory(3, 2)]) == 2
    for part in parts:
        late.llmd.read(encode(Batch(0.0, part)))
    assert late.llmd.held("cpu") == dict.fromkeys((c.hashes[0] for c in chunks[:7]), 1)
    assert late.llmd.held("storage") == dict.fromkeys((c.hashes[0] for c in chunks), 1)
    story.speak()
    assert story.holds("cpu", chunks[2:7])


def test_too_many_tiers_are_refused():
    with pytest.raises(ValueError, match="15 is a tier too many"):
        Narrator({str(n): Place("CPU") for n in range(16)}, {}, None)


def test_a_forgotten_change_is_noticed():
    story, chunks = Story(), prompt(1)
    story.stored(HOST, chunks)
    assert repr(story.narrator).startswith("<Narrator 1 chunks, 1 changes to say")
    story.narrator._changed.clear()
    with pytest.raises(AssertionError, match="never be said"):
        story.narrator.check()
