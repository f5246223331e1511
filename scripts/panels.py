"""What the Grafana dashboard shows, row by row; ``scripts/dashboard.py`` makes it of this.

In queries ``[R]`` stands for Grafana's interval of rates; a selector of engines is added.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Panel:
    """One picture: (query, legend) pairs, a unit of Grafana, what a person reads in it."""

    title: str
    unit: str
    meaning: str
    queries: Sequence[tuple[str, str]]
    maximum: float | None = None
    right: str | None = None
    """Legend of the query whose axis is at the right, in seconds."""


def quantiles(name: str, legend: str, by: str = "") -> list[tuple[str, str]]:
    """The median and the 99th percentile of a histogram."""
    labels = f"le, {by}" if by else "le"
    return [
        (
            f"histogram_quantile({share}, sum by ({labels}) (rate({name}_bucket[R])))",
            f"{legend} p{100 * share:.0f}",
        )
        for share in (0.5, 0.99)
    ]


ROWS: Sequence[tuple[str, Sequence[Panel]]] = (
    (
        "Does it pay?",
        (
            Panel(
                "Prompt tokens by source",
                "short",
                "Where the KV cache of prompt tokens came from, per second. What is computed was "
                "nowhere.",
                (
                    (
                        'sum(rate(vllm:prompt_tokens_by_source_total{source="local_compute"}[R]))',
                        "computed",
                    ),
                    (
                        "sum by (source) (rate(vllm:prompt_tokens_cached_by_source_total[R]))",
                        "{{source}}",
                    ),
                ),
            ),
            Panel(
                "Time to first token, beside the share of tokens that were cached",
                "percentunit",
                "Falls as more of the prompts need not be computed.",
                (
                    (
                        "sum(rate(vllm:prompt_tokens_cached_by_source_total[R])) / "
                        "(sum(rate(vllm:prompt_tokens_cached_by_source_total[R])) + "
                        "sum(rate(vllm:prompt_tokens_by_source_total"
                        '{source="local_compute"}[R])))',
                        "cached",
                    ),
                    *quantiles("vllm:time_to_first_token_seconds", "first token"),
                ),
                maximum=1,
                right="/first token.*/",
            ),
            Panel(
                "Hit rate, and what unlimited capacity would give",
                "percentunit",
                "Since the start. Now: tokens of prompts that were not computed. The ceiling: "
                "chunks of prompts that had been asked for before.",
                (
                    (
                        "sum(vllm:prompt_tokens_cached_by_source_total) / "
                        "(sum(vllm:prompt_tokens_cached_by_source_total) + "
                        "sum(vllm:prompt_tokens_by_source_total"
                        '{source="local_compute"}))',
                        "now",
                    ),
                    (
                        "clamp_min(1 - sum(vllm:kvtiers_distinct_chunks) / "
                        "sum(vllm:kvtiers_asked_chunks_total), 0)",
                        "ceiling",
                    ),
                ),
                maximum=1,
            ),
            Panel(
                "Hit rate by tier",
                "percentunit",
                "Of what each tier was asked for: of the device tokens, below chunks.",
                (
                    (
                        "sum(rate(vllm:prefix_cache_hits_total[R])) / "
                        "sum(rate(vllm:prefix_cache_queries_total[R]))",
                        "device",
                    ),
                    (
                        "sum by (tier) (rate(vllm:kv_offload_tiering_chunk_hits_total[R])) / "
                        "sum by (tier) (rate(vllm:kv_offload_tiering_chunk_queries_total[R]))",
                        "{{tier}}",
                    ),
                ),
                maximum=1,
            ),
            Panel(
                "Misses by reason",
                "cps",
                "Chunks per second that a tier did not give, and why.",
                (
                    (
                        "sum by (tier, reason) (rate(vllm:kvtiers_lookup_misses_total[R]))",
                        "{{tier}} {{reason}}",
                    ),
                ),
            ),
            Panel(
                "Tokens loaded by tier, and computing time saved",
                "short",
                "Tokens per second that were loaded, by the tier that had them; seconds of "
                "computing that were saved per second (an estimate).",
                (
                    (
                        "sum by (source) (rate(vllm:kvtiers_loaded_tokens_total[R]))",
                        "{{source}}",
                    ),
                    ("sum(rate(vllm:kvtiers_saved_seconds_total[R]))", "saved"),
                ),
                right="saved",
            ),
        ),
    ),
    (
        "What the tiers hold",
        (
            Panel(
                "Host memory",
                "bytes",
                "Resident chunks against capacity; pinned: in use by transfers now.",
                (("sum by (state) (vllm:kvtiers_host_bytes)", "{{state}}"),),
            ),
            Panel(
                "Tiers below: used and capacity",
                "bytes",
                "Used: all namespaces; resident: of this engine's, where a tier knows.",
                (("sum by (tier, state) (vllm:kvtiers_tier_bytes)", "{{tier}} {{state}}"),),
            ),
            Panel(
                "Chunks that came and went",
                "cps",
                "Chunks per second that became resident, and that are so no more, by reason.",
                (
                    ("sum by (tier) (rate(vllm:kvtiers_chunks_stored_total[R]))", "{{tier}} came"),
                    (
                        "sum by (tier, reason) (rate(vllm:kvtiers_chunks_removed_total[R]))",
                        "{{tier}} {{reason}}",
                    ),
                ),
            ),
            Panel(
                "Age at eviction",
                "s",
                "How long what made room for others had been there. Small: too little room.",
                quantiles("vllm:kvtiers_evicted_age_seconds", "{{tier}}", "tier"),
            ),
            Panel(
                "Distance of re-use",
                "short",
                "How many other chunks are asked for until one is asked for again: a tier of so "
                "many chunks has it still.",
                quantiles("vllm:kvtiers_reuse_distance_chunks", "distance"),
            ),
        ),
    ),
    (
        "How fast it moves",
        (
            Panel(
                "Read, towards the accelerator",
                "Bps",
                "Loads from host memory, promotions from the tiers below.",
                (
                    ("sum(rate(vllm:kv_offload_load_bytes_total[R]))", "load"),
                    (
                        "sum by (tier) (rate(vllm:kv_offload_tiering_read_bytes_total[R]))",
                        "promote {{tier}}",
                    ),
                ),
            ),
            Panel(
                "Written, away from the accelerator",
                "Bps",
                "Stores to host memory, cascades to the tiers below.",
                (
                    ("sum(rate(vllm:kv_offload_store_bytes_total[R]))", "store"),
                    (
                        "sum by (tier) (rate(vllm:kv_offload_tiering_write_bytes_total[R]))",
                        "cascade {{tier}}",
                    ),
                ),
            ),
            Panel(
                "Speed while busy",
                "Bps",
                "Bytes by the seconds spent on them: what a tier gives when it is asked to.",
                (
                    (
                        "sum by (tier) (rate(vllm:kv_offload_tiering_read_bytes_total[R])) / "
                        "sum by (tier) (rate(vllm:kv_offload_tiering_read_time_total[R]))",
                        "read {{tier}}",
                    ),
                    (
                        "sum by (tier) (rate(vllm:kv_offload_tiering_write_bytes_total[R])) / "
                        "sum by (tier) (rate(vllm:kv_offload_tiering_write_time_total[R]))",
                        "write {{tier}}",
                    ),
                ),
            ),
            Panel(
                "Latency of reading",
                "s",
                "One load from host memory; one promotion from a tier, queue included.",
                (
                    *quantiles("vllm:kvtiers_load_seconds", "load"),
                    *quantiles("vllm:kvtiers_promotion_seconds", "promote {{tier}}", "tier"),
                ),
            ),
            Panel(
                "Latency of writing",
                "s",
                "One store to host memory; one cascade to a tier, queue included.",
                (
                    *quantiles("vllm:kvtiers_store_seconds", "store"),
                    *quantiles("vllm:kvtiers_cascade_seconds", "cascade {{tier}}", "tier"),
                ),
            ),
            Panel(
                "What requests wait for",
                "s",
                "From a request's first lookup that was not answered at once to the end of its "
                "load; the lookup of one chunk; the verdict on one that a tier did not give at "
                "once.",
                (
                    *quantiles("vllm:kvtiers_request_wait_seconds", "request"),
                    *quantiles(
                        "vllm:kv_offload_tiering_lookup_sync_delay_seconds",
                        "lookup {{tier}}",
                        "tier",
                    ),
                    *quantiles(
                        "vllm:kv_offload_tiering_lookup_async_delay_seconds",
                        "verdict {{tier}}",
                        "tier",
                    ),
                ),
            ),
        ),
    ),
    (
        "Does it keep up?",
        (
            Panel(
                "Jobs in flight",
                "short",
                "Promotions and cascades that run or wait in a tier.",
                (
                    (
                        "sum by (tier) (vllm:kv_offload_tiering_active_promotion_jobs)",
                        "promote {{tier}}",
                    ),
                    (
                        "sum by (tier) (vllm:kv_offload_tiering_active_cascade_jobs)",
                        "cascade {{tier}}",
                    ),
                    ("sum by (tier) (vllm:kvtiers_queue_jobs)", "taken {{tier}}"),
                ),
            ),
            Panel(
                "Waiting for a tier",
                "short",
                "Chunks in host memory that a tier has not taken; bytes that it has not ended "
                "with, at the right.",
                (
                    ("sum by (tier) (vllm:kvtiers_backlog_chunks)", "{{tier}} chunks"),
                    ("sum by (tier) (vllm:kvtiers_queue_bytes)", "{{tier}} bytes"),
                ),
                right="/.* bytes/",
            ),
            Panel(
                "Not taken",
                "cps",
                "Chunks per second that a hop did not take, by reason. Evicted ones are lost to "
                "that tier; all others are offered again.",
                (
                    (
                        "sum by (hop, tier, reason) (rate(vllm:kvtiers_chunks_declined_total[R]))",
                        "{{hop}} {{tier}} {{reason}}",
                    ),
                ),
            ),
            Panel(
                "Failures",
                "cps",
                "Chunks per second that could not be moved, or were found damaged. Each is a miss.",
                (
                    (
                        "sum by (hop, tier, reason) (rate(vllm:kvtiers_chunks_failed_total[R]))",
                        "{{hop}} {{tier}} {{reason}}",
                    ),
                    (
                        "sum by (tier) (rate(vllm:kvtiers_checksum_failures_total[R]))",
                        "{{tier}} damaged",
                    ),
                ),
            ),
            Panel(
                "Tiers left alone",
                "short",
                "0: in use. 1: tried again. 2: left alone after repeated failures.",
                (("max by (tier) (vllm:kvtiers_tier_state)", "{{tier}}"),),
                maximum=2,
            ),
            Panel(
                "Warm-up",
                "short",
                "Chunks of the hot list since the start, by what became of them.",
                (("sum by (outcome) (vllm:kvtiers_warm_up_chunks_total)", "{{outcome}}"),),
            ),
        ),
    ),
    (
        "Events and peers",
        (
            Panel(
                "Events",
                "cps",
                "Events per second for routers and indexes; dropped ones are found by resync.",
                (
                    (
                        "sum by (type, medium) (rate(vllm:kvtiers_events_emitted_total[R]))",
                        "{{type}} {{medium}}",
                    ),
                    ("sum(rate(vllm:kvtiers_events_dropped_total[R]))", "dropped"),
                ),
            ),
            Panel(
                "Queue of events",
                "short",
                "Chunks there is news of that is not told yet.",
                (("sum(vllm:kvtiers_event_queue_chunks)", "chunks"),),
            ),
            Panel(
                "Peers",
                "Bps",
                "Bytes per second from and to other engines; how many of these there are, at the "
                "right.",
                (
                    (
                        "sum by (direction) (rate(vllm:kvtiers_peer_bytes_total[R]))",
                        "{{direction}}",
                    ),
                    ("sum by (state) (vllm:kvtiers_peers)", "peers {{state}}"),
                ),
                right="/peers.*/",
            ),
        ),
    ),
)
