"""Where prompt tokens came from, out of a server's ``/metrics``."""

from dataclasses import dataclass, fields

from kvtiers.observe.exposition import parse

_CACHED = "vllm:prompt_tokens_cached_by_source_total"
_PROMPT = "vllm:prompt_tokens_by_source_total"


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Prompt tokens by where their KV cache came from."""

    computed: int = 0
    device: int = 0
    host: int = 0
    disk: int = 0
    other: int = 0
    """Peers, and what a connector does not name."""

    @property
    def cached(self) -> int:
        """Tokens that were not computed."""
        return self.device + self.host + self.disk + self.other

    @property
    def prompt(self) -> int:
        """All tokens."""
        return self.computed + self.cached

    def __sub__(self, earlier: "TokenCounts") -> "TokenCounts":
        return TokenCounts(
            *(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(TokenCounts))
        )

    def __add__(self, more: "TokenCounts") -> "TokenCounts":
        return TokenCounts(
            *(getattr(self, f.name) + getattr(more, f.name) for f in fields(TokenCounts))
        )


def parse_counts(exposition: str) -> TokenCounts:
    """Counts since the server's start, all engines together, from Prometheus' text format.

    A source that the server does not report counts 0.
    """
    scrape = parse(exposition)
    sums = {f.name: 0.0 for f in fields(TokenCounts)}
    sums["computed"] = scrape.total(_PROMPT, source="local_compute")
    for source, value in scrape.by(_CACHED, "source").items():
        sums[source if source in ("device", "host", "disk") else "other"] += value
    return TokenCounts(**{field: round(value) for field, value in sums.items()})
