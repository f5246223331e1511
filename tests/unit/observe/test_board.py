"""One glance at an engine: hit rates, flows and what is missing, out of two scrapes."""

import pytest

from kvtiers.observe.board import board
from kvtiers.observe.exposition import Scrape, parse

BEFORE = """\
vllm:prefix_cache_queries_total 1000
vllm:prefix_cache_hits_total 500
vllm:kv_cache_usage_perc 0.25
vllm:kv_offload_tiering_chunk_queries_total{tier="0:primary"} 10
vllm:kv_offload_tiering_chunk_hits_total{tier="0:primary"} 10
vllm:kv_offload_tiering_read_bytes_total{tier="1:fs"} 1e6
vllm:kvtiers_host_bytes{state="capacity"} 4096
vllm:kvtiers_chunks_removed_total{tier="0:primary",reason="evicted"} 1
"""
AFTER = """\
vllm:prefix_cache_queries_total 2000
vllm:prefix_cache_hits_total 600
vllm:kv_cache_usage_perc 0.5
vllm:kv_offload_tiering_chunk_queries_total{tier="0:primary"} 30
vllm:kv_offload_tiering_chunk_hits_total{tier="0:primary"} 15
vllm:kv_offload_tiering_chunk_queries_total{tier="1:fs"} 15
vllm:kv_offload_tiering_chunk_hits_total{tier="1:fs"} 12
vllm:kv_offload_tiering_read_bytes_total{tier="1:fs"} 5e6
vllm:kv_offload_tiering_active_promotion_jobs{tier="1:fs"} 2
vllm:kv_offload_tiering_active_cascade_jobs{tier="1:fs"} 1
vllm:kv_offload_load_bytes_total 8e6
vllm:kvtiers_promotion_seconds_bucket{tier="1:fs",le="0.1"} 3
vllm:kvtiers_promotion_seconds_bucket{tier="1:fs",le="+Inf"} 4
vllm:kvtiers_host_bytes{state="capacity"} 4096
vllm:kvtiers_host_bytes{state="resident"} 1024
vllm:kvtiers_tier_bytes{tier="1:fs",state="used"} 300
vllm:kvtiers_tier_bytes{tier="1:fs",state="capacity"} 400
vllm:kvtiers_tier_state{tier="1:fs"} 2
vllm:kvtiers_chunks_removed_total{tier="0:primary",reason="evicted"} 9
vllm:kvtiers_lookup_misses_total{tier="1:fs",reason="absent"} 3
vllm:kvtiers_lookup_misses_total{tier="1:fs",reason="corrupt"} 1
vllm:kvtiers_chunks_declined_total{hop="cascade",tier="1:fs",reason="pressure"} 4
vllm:kvtiers_asked_chunks_total 45
vllm:kvtiers_distinct_chunks 9
vllm:prompt_tokens_by_source_total{source="local_compute"} 100
vllm:prompt_tokens_cached_by_source_total{source="disk"} 300
vllm:prompt_tokens_cached_by_source_total{source="p2p"} 0
vllm:time_to_first_token_seconds_bucket{le="0.5"} 2
vllm:time_to_first_token_seconds_bucket{le="+Inf"} 2
"""


@pytest.fixture
def seen():
    return board(parse(BEFORE), parse(AFTER), 4.0)


def test_tiers_stand_in_their_order(seen):
    assert [row.label for row in seen.tiers] == ["device", "0:primary", "1:fs"]


def test_hit_rates_are_of_the_time_between_and_of_all(seen):
    device, host, disk = seen.tiers
    assert (device.hit_rate, device.hit_rate_ever) == (0.1, 0.3)
    assert (host.hit_rate, host.hit_rate_ever) == (0.25, 0.5)
    assert (disk.hit_rate, disk.hit_rate_ever) == (0.8, 0.8)


def test_flows_are_per_second(seen):
    _, host, disk = seen.tiers
    assert host.read_bytes_s == 2e6
    assert host.written_bytes_s is None
    assert host.removed_s == 2
    assert disk.read_bytes_s == 1e6
    assert disk.jobs == 3
    assert disk.read_p50_s == pytest.approx(0.1 * 2 / 3)
    assert disk.read_p99_s == 0.1


def test_room(seen):
    device, host, disk = seen.tiers
    assert device.used_share == 0.5
    assert (host.used_bytes, host.capacity_bytes, host.used_share) == (1024, 4096, 0.25)
    assert (disk.used_bytes, disk.capacity_bytes, disk.used_share) == (300, 400, 0.75)


def test_state_of_the_breaker(seen):
    assert [row.state for row in seen.tiers] == [None, "in use", "left alone"]


def test_what_is_missed_and_what_is_not_done(seen):
    assert [(c.labels, c.per_s, c.ever) for c in seen.misses] == [
        (("1:fs", "absent"), 0.75, 3),
        (("1:fs", "corrupt"), 0.25, 1),
    ]
    assert [c.labels for c in seen.trouble] == [("cascade", "1:fs", "pressure")]


def test_tokens_come_from_somewhere_and_sources_that_never_gave_are_left_out(seen):
    assert [(c.labels, c.per_s) for c in seen.tokens] == [(("computed",), 25), (("disk",), 75)]


def test_an_exporter_beside_vllm_tells_the_tokens_that_tiers_had():
    only = parse('vllm:kvtiers_loaded_tokens_total{source="1:fs"} 128')
    (count,) = board(Scrape(), only, 2.0).tokens
    assert (count.labels, count.per_s, count.ever) == (("1:fs",), 64, 128)


def test_latency_and_ceiling(seen):
    assert seen.ttft_p50_s == 0.25
    assert seen.ceiling == 0.8


def test_an_engine_without_kvtiers_shows_its_device_alone():
    only = parse("vllm:prefix_cache_queries_total 1\nvllm:prefix_cache_hits_total 1")
    assert [row.label for row in board(Scrape(), only, 1.0).tiers] == ["device"]


def test_nothing_is_nothing():
    empty = board(Scrape(), parse("up 1"), 1.0)
    assert (empty.tiers, empty.tokens, empty.misses, empty.ceiling) == ((), (), (), None)


def test_tiers_of_two_digits_stand_behind_those_of_one():
    lines = [
        f'vllm:kv_offload_tiering_chunk_queries_total{{tier="{t}"}} 1'
        for t in ("10:kv", "2:fs", "odd")
    ]
    labels = [row.label for row in board(Scrape(), parse("\n".join(lines)), 1.0).tiers]
    assert labels == ["2:fs", "10:kv", "odd"]
