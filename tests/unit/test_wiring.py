"""What is wired: the index that fits the region, and the chunks of a hot list."""

import logging
import time
from dataclasses import replace

import pytest

from kvtiers.chunks import PAGE_BYTES, ChunkLayout, GroupLayout, Lookup, RequestContext, make_key
from kvtiers.config import parse_config
from kvtiers.core.exclusive import ExclusiveManager
from kvtiers.core.manager import TieringManager
from kvtiers.errors import ConfigError
from kvtiers.events import WarmedUp
from kvtiers.host.index import HostIndex
from kvtiers.host.region import Region
from kvtiers.host.sized import SizedIndex
from kvtiers.host.slabs import SizeClasses, slab_bytes_for
from kvtiers.testing.bench import Environment
from kvtiers.tiers.base import Around
from kvtiers.tiers.hot import HotPrefix, write_hot_list
from kvtiers.tiers.p2p.build import build_configured
from kvtiers.tiers.p2p.options import P2POptions
from kvtiers.wiring import apart, wire
from tests.unit.cli.cli_kit import CHUNK, KEYS, NAMESPACE, OTHER, Tier, good, kvtiers
from tests.unit.tiers.tier_kit import LAYOUT, filled


@pytest.fixture
def wired(tmp_path):
    """``wired(hot_list)``: a manager over real memory and a real folder, started with it."""
    tier = Tier(tmp_path / "kv").fill()
    opened = []

    def start(hot_list):
        region = Region.attach("warm", {}, 16, CHUNK, str(tmp_path))
        opened.append(region)
        config = {
            "cpu_bytes_to_use": 16 * CHUNK,
            "secondary_tiers": [
                {"type": "fs", "root_dir": str(tier.root), "capacity_bytes": 1 << 30}
            ],
            "warm_manifest": str(hot_list),
        }
        made = wire(parse_config(config), region, LAYOUT, NAMESPACE)
        opened.append(made.manager)
        return made.manager, region

    yield tier, start
    for each in reversed(opened):
        if isinstance(each, Region):
            each.close()
        else:
            each.shutdown(1.0, time.monotonic)


def test_what_warm_wrote_is_promoted_at_the_start(wired, tmp_path):
    tier, start = wired
    good(kvtiers("warm", tier.url, "--from-recent", "3", "-o", tmp_path / "hot.json"))
    manager, region = start(tmp_path / "hot.json")
    while manager.has_pending_work(time.monotonic()):
        manager.end_step(time.monotonic())
        for attached in manager.tiers:
            attached.drain_jobs(10.0)
    request = manager.on_new_request(RequestContext("r"))
    assert [manager.lookup(k, request) for k in KEYS[1:]] == [Lookup.HIT] * 3
    for i, slot in zip((1, 2, 3), manager.load(KEYS[1:], request), strict=True):
        assert bytes(region.view(slot, CHUNK, writable=False)) == bytes(filled(i, CHUNK))
    manager.complete_load(request)


def test_a_manifest_for_others_is_said_and_does_nothing(wired, tmp_path, caplog):
    _, start = wired
    strange = make_key(bytes(32), 7)  # of a group that this engine has not
    path = tmp_path / "hot.json"
    write_hot_list(
        str(path), [HotPrefix(OTHER.id, tuple(KEYS)), HotPrefix(NAMESPACE.id, (strange,))]
    )
    with caplog.at_level(logging.WARNING, "kvtiers"):
        start(path)
    assert "names no chunk of this engine" in caplog.text


def test_a_manifest_that_is_none_is_refused_before_serving(wired, tmp_path):
    _, start = wired
    with pytest.raises(ConfigError, match=r"^warm_manifest: .* cannot be read"):
        start(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("slots", "slot_bytes", "slab_slots", "index"),
    [(8, 3 * PAGE_BYTES, 1, HostIndex), (24, PAGE_BYTES, 6, SizedIndex)],
)
def test_the_index_is_of_the_sizes_into_which_the_workers_cut_the_region(
    tmp_path, slots, slot_bytes, slab_slots, index
):
    layout = ChunkLayout((GroupLayout(0, PAGE_BYTES, 16), GroupLayout(1, 3 * PAGE_BYTES, 16)))
    config = parse_config({"cpu_bytes_to_use": slots * slot_bytes, "eviction_policy": "arc"})
    with Region.attach("a", {}, slots, slot_bytes, str(tmp_path), slab_slots=slab_slots) as region:
        manager = wire(config, region, layout, NAMESPACE).manager
        assert f"<{index.__name__} {slots} slots" in repr(manager)
        request = manager.on_new_request(RequestContext("r"))
        keys = [make_key(bytes([n]), n % 2) for n in range(8)]
        plan = manager.store(keys, request)
        assert plan.keys == keys
        views = [
            manager._views([key], [slot], True)[0]
            for key, slot in zip(plan.keys, plan.slots, strict=True)
        ]
        for number, view in enumerate(views):
            view[:] = bytes([number]) * view.nbytes
        assert [set(view) for view in views] == [{n} for n in range(8)], "none overlaps another"
        views.clear()
        manager.check()
        manager.shutdown(0.0, time.monotonic)


SPANS = {0: (4, 1), 1: (8, 5), 2: (64, 7), 3: (128, 2), 4: (256, 12)}
"""Tokens and pages of a chunk by group, as of a model with many kinds of attention."""


@pytest.mark.parametrize("disk", ["files", "log"])
def test_every_group_of_a_model_with_many_hits_after_a_restart(tmp_path, disk):
    layout = ChunkLayout(
        tuple(GroupLayout(g, n * PAGE_BYTES, tokens) for g, (tokens, n) in SPANS.items())
    )
    keys = [
        make_key(end.to_bytes(16, "big"), g)
        for end in range(4, 513, 4)
        for g, (tokens, _) in SPANS.items()
        if end % tokens == 0
    ]
    content = {k: bytes([i % 251]) * layout.chunk_bytes(k) for i, k in enumerate(keys)}
    fs = {"type": "fs", "root_dir": str(tmp_path / "kv"), "capacity_bytes": 1 << 26, "layout": disk}
    config = parse_config({"cpu_bytes_to_use": 1 << 24, "secondary_tiers": [fs]})
    classes = SizeClasses.of(layout, PAGE_BYTES)
    slab = slab_bytes_for(1 << 24, classes, PAGE_BYTES) // PAGE_BYTES

    def start(name):
        slots = (1 << 24) // (slab * PAGE_BYTES) * slab
        region = Region.attach(name, {}, slots, PAGE_BYTES, str(tmp_path), slab_slots=slab)
        return region, wire(config, region, layout, NAMESPACE).manager

    region, first = start("first")
    with region:
        plan = first.store(keys, first.on_new_request(RequestContext("stores")))
        assert plan.keys == keys
        for key, slot in zip(plan.keys, plan.slots, strict=True):
            region.view(slot, len(content[key]), True)[:] = content[key]
        first.complete_store(keys)
        assert first.drain(30.0, time.monotonic)
        first.shutdown(1.0, time.monotonic)
    region, second = start("second")
    with region:
        request = second.on_new_request(RequestContext("asks"))
        until = time.monotonic() + 30.0
        second.poll(time.monotonic())
        while second.lookup_many(keys, request) != [Lookup.HIT] * len(keys):
            assert time.monotonic() < until
            second.end_step(time.monotonic())
        second.check()
        for key, slot in zip(keys, second.load(keys, request), strict=True):
            assert region.view(slot, len(content[key]), False) == content[key]
        second.complete_load(request)
        second.shutdown(1.0, time.monotonic)


def test_a_tier_that_serves_peers_shares_the_manager(tmp_path):
    """What one thread stores another one may look up; the port is that of the replica."""
    p2p = {"type": "p2p", "port": 0, "max_pinned_fraction": 0.5}
    config = parse_config({"cpu_bytes_to_use": 16 * CHUNK, "secondary_tiers": [p2p]})
    with Region.attach("peers", {}, 16, CHUNK, str(tmp_path)) as region:
        wired = wire(config, region, LAYOUT, NAMESPACE, replica=3)
        assert isinstance(wired.manager, ExclusiveManager)
        assert wired.peers is wired.tiers[0]
        assert wired.peers.address[0] == "127.0.0.1"
        assert wired.peers._endpoint._serving is not None
        wired.manager.shutdown(5.0, time.monotonic)


def test_the_port_of_a_replica_is_its_own():
    context = Environment(NAMESPACE).context()
    tier = build_configured(replace(context, engine=Around(3)), P2POptions(port=45710))
    assert tier.address == ("127.0.0.1", 45713)
    tier.shutdown(5.0)


def test_without_peers_nothing_is_locked(tmp_path):
    config = parse_config({"cpu_bytes_to_use": 16 * CHUNK})
    with Region.attach("alone", {}, 16, CHUNK, str(tmp_path)) as region:
        wired = wire(config, region, LAYOUT, NAMESPACE)
        assert type(wired.manager) is TieringManager
        assert wired.peers is None


def test_a_listener_that_fails_is_told_no_more_and_hurts_nobody(caplog):
    heard, failed = [], []

    def broken(event):
        failed.append(event)
        raise RuntimeError("a bug")

    tell = apart([broken, heard.append])
    events = [WarmedUp(1), WarmedUp(2)]
    for event in events:
        tell(event)
    assert (heard, failed) == (events, events[:1])
    assert "is told of no more events" in caplog.text
    assert "a bug" in caplog.text
