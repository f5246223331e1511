"""The README's configuration through vLLM's server module, and what is left when it ends."""

import json
import re
import signal
from pathlib import Path

import pytest

from kvtiers.engines.vllm.metrics import definitions
from tests.vllm.offloading import CHUNK_BYTES, files_of
from tests.vllm.serving import serving

TOKENS = 2000
CACHED = 1920
CHUNKS = 15
BYTES = CHUNKS * CHUNK_BYTES["llama"]

DASHBOARDS = """
kv_offload_total_bytes_total kv_offload_total_time_total kv_offload_size
kv_offload_load_bytes_total kv_offload_load_time_total kv_offload_load_size
kv_offload_store_bytes_total kv_offload_store_time_total kv_offload_store_size
kv_offload_lookup_sync_delay_seconds kv_offload_lookup_async_delay_seconds
kv_offload_allocation_failure_total
kv_offload_cpu_cache_usage_perc kv_offload_cpu_cache_write_usage_perc
kv_offload_cpu_cache_read_usage_perc kv_offload_cpu_allocation_size
kv_offload_tiering_lookup_sync_delay_seconds kv_offload_tiering_lookup_async_delay_seconds
kv_offload_tiering_read_bytes_total kv_offload_tiering_read_time_total
kv_offload_tiering_write_bytes_total kv_offload_tiering_write_time_total
kv_offload_tiering_promotion_job_failures_total kv_offload_tiering_cascade_job_failures_total
kv_offload_tiering_chunk_queries_total kv_offload_tiering_chunk_hits_total
kv_offload_tiering_promotion_allocation_failures_total
kv_offload_tiering_primary_write_usage_perc kv_offload_tiering_primary_read_usage_perc
kv_offload_tiering_active_promotion_jobs kv_offload_tiering_active_cascade_jobs
kv_offload_tiering_backpressure_blocks_dropped_total
"""
"""What vLLM 0.32 exports of a tiered configuration, without the "vllm:". Two names are missing, of
a detector of slow tiers that we do not have: backpressure_store_latency_ema, and
backpressure_stores_dropped."""


def readme(root):
    """The JSON of the README's ``vllm serve`` line, with sizes and a folder for a test."""
    text = (Path(__file__).parents[2] / "README.md").read_text()
    config = json.loads(re.search(r"--kv-transfer-config '(.*?)'", text, re.DOTALL)[1])
    extra = config["kv_connector_extra_config"]
    extra["cpu_bytes_to_use"] = 64_000_000
    extra["secondary_tiers"][0] |= {"root_dir": str(root), "capacity_fraction": 0.1}
    return config


def declared(scrape):
    """Kind of each metric, by name."""
    return dict(re.findall(r"^# TYPE vllm:(\S+) (\w+)$", scrape, re.MULTILINE))


def assert_names(scrape):
    kinds = declared(scrape)
    assert not set(DASHBOARDS.split()) - kinds.keys(), "dashboards would lose these"
    for name, metadata in definitions().items():
        kind = type(metadata).__name__.removeprefix("Offloading").removesuffix("Metadata").lower()
        suffix = "_total" if kind == "counter" else ""
        assert kinds.get(name.removeprefix("vllm:") + suffix) == kind, name


@pytest.mark.timeout(600)
def test_the_readme_from_the_first_request_to_a_disk_hit_after_a_restart(
    checkpoint, prompt, tmp_path
):
    asked, root = prompt(TOKENS), tmp_path / "kv"
    primary, fs = {"tier": "0:primary"}, {"tier": "1:fs"}
    with serving(checkpoint("llama"), readme(root), tmp_path / "first.log") as server:
        assert server.ask(asked)[1] == 0
        server.wait_for(BYTES, "vllm:kv_offload_tiering_write_bytes_total", **fs)
        expected, cached = server.ask(asked)
        assert cached == CACHED, "a device hit: what the other answers are compared with"
        server.post("/reset_prefix_cache")
        assert server.ask(asked) == (expected, CACHED)
        server.wait_for(BYTES, "vllm:kv_offload_load_bytes_total")
        assert_names(server.scrape())
        for name, value, labels in (
            ("vllm:kv_offload_store_bytes_total", BYTES, {}),
            ("vllm:kv_offload_total_bytes_total", BYTES, {"transfer_type": "GPU_to_CPU"}),
            ("vllm:kv_offload_total_bytes_total", BYTES, {"transfer_type": "CPU_to_GPU"}),
            ("vllm:kv_offload_tiering_read_bytes_total", 0, fs),
            ("vllm:kv_offload_tiering_chunk_hits_total", CHUNKS, primary),
            ("vllm:kv_offload_tiering_active_cascade_jobs", 0, fs),
            ("vllm:kv_offload_cpu_cache_usage_perc", 0, {}),
            ("vllm:kv_offload_cpu_allocation_size_sum", CHUNKS, {}),
            ("vllm:kvtiers_chunks_stored_total", CHUNKS, primary),
            ("vllm:kvtiers_chunks_stored_total", CHUNKS, fs),
            ("vllm:kvtiers_chunks_failed_total", 0, {}),
            ("vllm:kvtiers_host_bytes", BYTES, {"state": "resident"}),
            ("vllm:external_prefix_cache_hits_total", CACHED, {}),
        ):
            assert server.value(name, **labels) == value, (name, labels)
        assert server.value("vllm:kv_offload_tiering_write_time_total", **fs) > 0
        assert server.value("vllm:kv_offload_lookup_sync_delay_seconds_count") > 0
        capacity = server.value("vllm:kvtiers_host_bytes", state="capacity")
        assert 63_000_000 < capacity <= 64_000_000
        server.end_by(signal.SIGTERM)
        server.assert_nothing_is_left()
    assert len(files_of(root)) == CHUNKS
    with serving(checkpoint("llama"), readme(root), tmp_path / "second.log") as server:
        assert server.ask(asked) == (expected, CACHED)
        server.wait_for(BYTES, "vllm:kv_offload_tiering_read_bytes_total", **fs)
        disk = server.value("vllm:prompt_tokens_cached_by_source_total", source="disk")
        assert disk == CACHED
        server.end_by(signal.SIGINT)
        server.assert_nothing_is_left()


@pytest.mark.timeout(600)
def test_a_killed_server_gives_its_memory_back(checkpoint, prompt, tmp_path):
    with serving(checkpoint("llama"), readme(tmp_path / "kv"), tmp_path / "log") as server:
        server.ask(prompt(TOKENS))
        server.end_by(signal.SIGKILL)
        server.assert_nothing_is_left()
