"""Bytes of the chunks that a tier has of its namespace, as far as is known."""

import time
from pathlib import Path
from typing import Any

import pytest

from kvtiers.chunks import ChunkLayout, GroupLayout, Key
from kvtiers.events import Reason
from kvtiers.tiers import build_tier
from kvtiers.tiers.base import Capabilities, Job, JobKind, KnowsUsage, Usage
from kvtiers.tiers.lanes import Inbox
from kvtiers.tiers.options import RunnerOptions
from kvtiers.tiers.runner import StoreTier, TierIdentity
from kvtiers.tiers.views import ChunkViews
from tests.unit.tiers.tier_kit import (
    EXCLUSIVE,
    NAMESPACE,
    SHARED,
    ScriptedStore,
    filled,
    key,
)

SMALL, LARGE = 4096, 12288
LAYOUT = ChunkLayout((GroupLayout(0, LARGE, 16), GroupLayout(1, SMALL, 16)))
NAMES = [key(n, n % 2) for n in range(6)]
ALL = 3 * (SMALL + LARGE)
FS = {"type": "fs", "n_write_threads": 1}


def open_tier(options: dict[str, Any]) -> Any:
    clocks = {"clock": time.monotonic, "wall_clock": time.time}
    return build_tier(options, 0, namespace=NAMESPACE, layout=LAYOUT, **clocks)


def run(tier: Any, names: list[Key]) -> None:
    views = ChunkViews.of([filled(1, LAYOUT.chunk_bytes(name)) for name in names])
    assert tier.submit_store(Job(1, JobKind.STORE, tuple(names), tuple(range(len(names))), views))
    assert tier.drain_jobs(20)
    rest(tier)


def rest(tier: Any) -> None:
    """Until nothing is outstanding, and what was there before is known."""
    while not tier._scan.complete and not tier.store.capabilities.instant:
        tier._inbox.wait(20)
        tier.on_schedule_end()
    tier.get_finished_jobs()
    while tier.has_pending_work():
        tier._inbox.wait(0.01)
        tier.get_finished_jobs()


@pytest.mark.parametrize(
    "options",
    [
        {"type": "memory", "capacity_bytes": 1 << 20},
        FS | {"layout": "files", "eviction": "external"},
        FS | {"layout": "files", "capacity_bytes": 1 << 24},
        FS | {"layout": "log", "capacity_bytes": 1 << 24},
    ],
    ids=["memory", "external", "files", "log"],
)
def test_it_is_the_sum_of_what_is_there_bounded_or_not_and_after_a_restart(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    if options["type"] == "fs":
        options = options | {"root_dir": str(tmp_path / "kv")}
    tier = open_tier(options)
    assert isinstance(tier, KnowsUsage)
    try:
        rest(tier)
        assert tier.usage() == (tier.usage() or Usage(0, 0))._replace(resident_bytes=0)
        run(tier, NAMES[:3])
        run(tier, NAMES)
        assert tier.usage().resident_bytes == sum(e.bytes for e in tier.store.scan()) == ALL
        bound = options.get("capacity_bytes")
        assert tier.usage().capacity_bytes == bound
        assert (tier.usage().used_bytes is None) == (bound is None)
    finally:
        tier.shutdown(10)
    again = open_tier(options)
    try:
        rest(again)
        there = ALL if again.store.capabilities.persistent else 0
        assert again.usage().resident_bytes == there
    finally:
        again.shutdown(10)


def over(store: ScriptedStore) -> StoreTier:
    identity = TierIdentity("fake", "1:fake", "STORAGE", "LOCAL")
    clock, inbox = time.monotonic, Inbox()
    sizes = LAYOUT.total_bytes
    return StoreTier(store, identity, RunnerOptions(), inbox, clock, total_bytes=sizes)


def test_before_it_is_known_what_was_there_nothing_is_said_and_what_left_does_not_count() -> None:
    store = ScriptedStore(SHARED, stored=[0, 2])
    found = store.hold("scan")
    tier = over(store)
    try:
        assert tier.usage() is None
        found.set()
        rest(tier)
        assert tier.usage() == Usage(None, None, 2 * LARGE)
        tier._inbox.removed([key(0), key(1)], Reason.VANISHED)
        rest(tier)
        assert tier.usage() == Usage(None, None, LARGE)
        tier.check()
    finally:
        tier.shutdown(10)


def test_a_store_that_keeps_nothing_is_known_without_a_scan_and_others_are_not() -> None:
    for lasting in (False, True):
        tier = over(ScriptedStore(Capabilities(lasting, shared=False, scan=False)))
        try:
            assert tier.usage() == (None if lasting else Usage(None, None, 0))
        finally:
            tier.shutdown(10)


def test_a_store_that_says_it_by_itself_is_believed() -> None:
    store = ScriptedStore(EXCLUSIVE, stored=[1])
    store.usage = lambda: Usage(7, 10, 5)  # type: ignore[attr-defined]
    tier = over(store)
    try:
        rest(tier)
        assert tier.usage() == Usage(7, 10, 5)
    finally:
        tier.shutdown(10)


def test_chunks_of_an_unknown_group_count_nothing() -> None:
    assert LAYOUT.total_bytes([key(1), key(1, 1), key(1, 9)]) == LARGE + SMALL
