"""The fs tier as the core sees it: built from options, driven by steps."""

from pathlib import Path
from typing import Any

import pytest

from kvtiers.chunks import Lookup
from kvtiers.errors import Kind
from kvtiers.events import ChunksRemoved, ChunksStored, Reason
from kvtiers.tiers.base import StoreContext
from kvtiers.tiers.fs import FsOptions, build
from kvtiers.tiers.lanes import Inbox
from tests.unit.tiers.fs.fs_kit import Folder, capacity, flip
from tests.unit.tiers.tier_kit import LAYOUT, NAMESPACE, Bench, key, payload

HIT, MISS = Lookup.HIT, Lookup.MISS


def bench(root: Path, **options: Any) -> Bench:
    inbox = Inbox()
    folder = Folder(root)
    context = StoreContext(
        "fs", "1:fs", NAMESPACE, LAYOUT, folder.clock, folder.wall, inbox.removed
    )
    return Bench(
        build(context, FsOptions(root_dir=str(root), **{"capacity_bytes": 1 << 30} | options)),
        inbox,
    )


def test_a_restarted_engine_and_a_second_one_find_the_chunks(tmp_path: Path) -> None:
    with bench(tmp_path / "kv") as first:
        first.run(first.store_job(1, 2))
        with bench(tmp_path / "kv") as second:
            assert second.resolve(1, 2, 3) == [HIT, HIT, MISS]
            load = second.load_job(1, 2)
            kept = [view[:] for view in load.views]
            assert set(second.run(load).done) == {key(1), key(2)}
            assert [bytes(view) for view in kept] == [payload(1), payload(2)]
            first.run(first.store_job(4))
            assert second.resolve(4) == [HIT]
    with bench(tmp_path / "kv") as restarted:
        assert restarted.resolve(1, 2, 4) == [HIT] * 3


def test_a_damaged_chunk_becomes_a_miss_and_an_event(tmp_path: Path) -> None:
    with bench(tmp_path / "kv") as tier:
        tier.run(tier.store_job(1, 2))
        flip(Folder(tmp_path / "kv").file(1), -1)
        outcome = tier.run(tier.load_job(1, 2))
        assert outcome.done == (key(2),)
        assert outcome.failed[key(1)].kind is Kind.CORRUPT
        assert tier.lookup(1, 2) == [MISS, HIT]
        assert tier.run(tier.store_job(1)).done == (key(1),)
        assert tier.lookup(1) == [HIT]
        assert tier.tier.take_events() == [
            ChunksStored("1:fake", (key(1), key(2))),
            ChunksRemoved("1:fake", (key(1),), Reason.CORRUPT),
            ChunksStored("1:fake", (key(1),)),
        ]


def test_replayed_events_are_what_is_on_disk(tmp_path: Path) -> None:
    with bench(tmp_path / "kv", capacity_bytes=capacity(5)) as tier:
        held: set[bytes] = set()
        for n in range(40):
            tier.run(tier.store_job(n, n // 2))
            for event in tier.tier.take_events():
                if isinstance(event, ChunksStored):
                    assert not held & set(event.keys)
                    held |= set(event.keys)
                elif isinstance(event, ChunksRemoved):
                    assert set(event.keys) <= held
                    held -= set(event.keys)
            assert held == {entry.key for entry in tier.store.scan()}
            tier.store.check()


def test_what_a_write_evicts_of_its_own_is_not_said_to_be_stored(tmp_path: Path) -> None:
    """It left before the write as a whole was reported."""
    with bench(tmp_path / "kv", capacity_bytes=capacity(5)) as tier:
        assert len(tier.scanned().run(tier.store_job(*range(12))).done) == 12
        there = {entry.key for entry in tier.store.scan()}
        (stored,) = tier.tier.take_events()
        assert isinstance(stored, ChunksStored)
        assert set(stored.keys) == there
        assert len(there) == 5
        assert tier.resolve(*range(12)).count(HIT) == 5
        assert set(tier.run(tier.store_job(*range(12))).done) == {key(n) for n in range(12)}
        tier.tier.check()


@pytest.mark.parametrize("layout", ["files", "log"])
def test_how_full_it_is_is_known_from_the_start_and_after_what_was_stored(
    tmp_path: Path, layout: str
) -> None:
    chosen = {"layout": layout, "capacity_bytes": 1 << 24}
    with bench(tmp_path / "kv", **chosen) as tier:
        tier.scanned().run(tier.store_job(1))
        tier.clock.advance(1.0)
        tier.run(tier.store_job(2, 3))
        used = tier.tier.usage()
        assert used is not None
        assert used.capacity_bytes == 1 << 24
        there = sum(p.lstat().st_size for p in (tmp_path / "kv").rglob("*") if p.is_file())
        assert there <= used.used_bytes < there + 4096
    with bench(tmp_path / "kv", **chosen) as again:
        before = again.tier.usage()
        assert before is not None
        assert 0 < before.used_bytes <= used.used_bytes + (64 << 10)


def test_where_others_see_to_the_bound_nobody_says_how_full_it_is(tmp_path: Path) -> None:
    with bench(tmp_path / "kv", eviction="external", capacity_bytes=None) as tier:
        tier.run(tier.store_job(1))
        assert tier.tier.usage() is None
