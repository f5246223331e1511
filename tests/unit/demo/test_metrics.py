from kvtiers.demo.metrics import TokenCounts, parse_counts

SCRAPE = """\
# HELP vllm:prompt_tokens_by_source_total Number of prompt tokens by source.
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 418.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_cache_hit"} 384.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="external_kv_transfer"} 896.0
vllm:prompt_tokens_by_source_created{engine="0",model_name="m",source="local_compute"} 1.79e+09
# TYPE vllm:prompt_tokens_cached_by_source_total counter
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="m",source="device"} 384.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="m",source="host"} 256.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="m",source="p2p"} 0.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="m",source="disk"} 5.12e+02
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="m",source="external_unspecified"} 128.0
vllm:prompt_tokens_cached_by_source_created{engine="0",model_name="m",source="disk"} 1.79e+09
vllm:prompt_tokens_cached_total{engine="0",model_name="m"} 1280.0
"""  # noqa: E501


def test_counts_by_source():
    counts = parse_counts(SCRAPE)
    assert counts == TokenCounts(computed=418, device=384, host=256, disk=512, other=128)
    assert counts.cached == 1280
    assert counts.prompt == 418 + 384 + 896


def test_engines_are_added_up():
    both = SCRAPE + SCRAPE.replace('engine="0"', 'engine="1"')
    assert parse_counts(both) == parse_counts(SCRAPE) + parse_counts(SCRAPE)


def test_a_server_without_the_counters_counts_nothing():
    assert parse_counts("# nothing\nother_total 3.0\n") == TokenCounts()


def test_delta_of_two_scrapes():
    later = parse_counts(SCRAPE.replace('source="host"} 256.0', 'source="host"} 640.0'))
    assert later - parse_counts(SCRAPE) == TokenCounts(host=384)
