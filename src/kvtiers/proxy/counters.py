"""What ``/metrics`` of the proxy shows, by prometheus_client, in a registry of its own."""

from enum import Enum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvtiers.proxy.gate import Gate
from kvtiers.proxy.workers import Worker

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Ending(Enum):
    """How a request ended."""

    ANSWERED = "answered"
    """A worker's answer was passed on, whatever its status."""
    REFUSED = "refused"
    """The proxy answered it: malformed, too many, nobody left."""
    BROKEN = "broken"
    """The worker failed after the first byte: the client's connection was cut."""
    LEFT = "left"
    """The client went away."""


class Prefilled(Enum):
    """How a prefill ended."""

    DONE = "done"
    FAILED = "failed"
    """Decode recomputed what it had not fetched."""
    CANCELLED = "cancelled"
    """The request was over first."""


class Looked(Enum):
    """What came of asking the index."""

    FOUND = "found"
    NOBODY = "nobody"
    FAILED = "failed"
    """Late, or no answer."""
    UNTOKENIZED = "untokenized"
    """It was not asked: no worker said in time what the tokens are."""


class Counters:
    """Counts what the proxy did."""

    def __init__(self, workers: list[Worker], gate: Gate) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "kvtiers_proxy_requests_total",
            "Requests, by how they ended.",
            ["ending"],
            registry=registry,
        )
        self._prefills = Counter(
            "kvtiers_proxy_prefills_total",
            "Prompts sent to prefill.",
            ["ending"],
            registry=registry,
        )
        self._retries = Counter(
            "kvtiers_proxy_retries_total", "Requests sent to a worker again.", registry=registry
        )
        self._sources = Counter(
            "kvtiers_proxy_sources_named_total",
            "Requests that name a worker as source of their prefix.",
            registry=registry,
        )
        self._lookups = Counter(
            "kvtiers_proxy_index_lookups_total",
            "Requests for which the presence index was to be asked.",
            ["outcome"],
            registry=registry,
        )
        self._first = Histogram(
            "kvtiers_proxy_first_byte_seconds",
            "From the end of waiting for a place to the first byte of an answer.",
            registry=registry,
            buckets=_SECONDS,
        )
        in_flight = Gauge("kvtiers_proxy_in_flight", "Requests with workers.", registry=registry)
        in_flight.set_function(lambda: gate.in_flight)
        queued = Gauge("kvtiers_proxy_queued", "Requests that wait.", registry=registry)
        queued.set_function(lambda: gate.queued)
        usable = Gauge(
            "kvtiers_proxy_worker_usable", "1: it gets requests.", ["worker"], registry=registry
        )
        for worker in workers:
            usable.labels(worker.name).set_function(lambda worker=worker: worker.usable)
        for ending in Ending:
            self._requests.labels(ending.value)
        for prefilled in Prefilled:
            self._prefills.labels(prefilled.value)

    def ended(self, ending: Ending) -> None:
        """A request is over."""
        self._requests.labels(ending.value).inc()

    def prefilled(self, prefilled: Prefilled) -> None:
        """A prefill is over."""
        self._prefills.labels(prefilled.value).inc()

    def retried(self) -> None:
        """A request is sent again."""
        self._retries.inc()

    def named(self) -> None:
        """A request names a source."""
        self._sources.inc()

    def looked(self, looked: Looked) -> None:
        """The index was to be asked."""
        self._lookups.labels(looked.value).inc()

    def first_byte(self, seconds: float) -> None:
        """The first byte of an answer came."""
        self._first.observe(seconds)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return bytes(generate_latest(self._registry))
