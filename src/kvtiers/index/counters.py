"""What ``/metrics`` of the index shows, by prometheus_client, in a registry of its own."""

from collections.abc import Iterable, Sequence
from dataclasses import fields

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvtiers.index.follower import Counts, Follower
from kvtiers.index.presence import Presence
from kvtiers.index.shared import Shared

_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.1, 1)
_HELP = {
    "batches": "Batches of events taken in.",
    "events": "Events taken in.",
    "gaps": "Times that batches were missing.",
    "restarts": "Times that the engine was another process than before.",
    "replays": "Replays asked for.",
    "failed_replays": "Replays that did not come in time.",
    "undecodable": "Batches skipped since they could not be read.",
    "unknown": "Events skipped since their class is not known.",
}


class Counters:
    """Shows what is counted elsewhere, and counts questions."""

    def __init__(
        self, presence: Presence, followers: Sequence[Follower], shared: Shared | None
    ) -> None:
        self._presence = presence
        self._followers = followers
        self._shared = shared
        self._registry = registry = CollectorRegistry()
        self._questions = Counter(
            "kvtiers_index_questions_total", "Questions, by answer.", ["answer"], registry=registry
        )
        self._seconds = Histogram(
            "kvtiers_index_lookup_seconds",
            "From hashes to the reach of every pod.",
            registry=registry,
            buckets=_SECONDS,
        )
        for given in ("found", "nobody", "refused"):
            self._questions.labels(given)
        registry.register(self)

    def answered(self, found: bool, seconds: float) -> None:
        """A question has an answer."""
        self._questions.labels("found" if found else "nobody").inc()
        self._seconds.observe(seconds)

    def refused(self) -> None:
        """A question has none."""
        self._questions.labels("refused").inc()

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return bytes(generate_latest(self._registry))

    def collect(self) -> Iterable[Metric]:
        """What the registry asks for when it is read."""
        presence = self._presence
        yield GaugeMetricFamily(
            "kvtiers_index_blocks", "Different blocks known.", len(presence.blocks)
        )
        yield CounterMetricFamily(
            "kvtiers_index_evicted_blocks", "Blocks that left for want of room.", presence.evicted
        )
        yield CounterMetricFamily(
            "kvtiers_index_unplaced", "Stores of pods with too many tiers.", presence.unplaced
        )
        yield from self._of_pods()
        if self._shared is not None:
            snapshots = CounterMetricFamily(
                "kvtiers_index_snapshots", "Snapshots, by what became of them.", labels=["outcome"]
            )
            for outcome, count in self._shared.counts().items():
                snapshots.add_metric([outcome], count)
            yield snapshots

    def _of_pods(self) -> Iterable[Metric]:
        held = GaugeMetricFamily(
            "kvtiers_index_pod_blocks",
            "Blocks that a pod holds, by tier and group.",
            labels=["pod", "medium", "locality", "ownership", "group"],
        )
        connected = GaugeMetricFamily(
            "kvtiers_index_pod_connected", "1: its events can be heard.", labels=["pod"]
        )
        complete = GaugeMetricFamily(
            "kvtiers_index_pod_complete", "1: all it said is known.", labels=["pod"]
        )
        for follower in self._followers:
            name = follower.engine.name
            connected.add_metric([name], follower.connected)
            complete.add_metric([name], follower.pod.complete)
            for place in follower.pod.places.values():
                held.add_metric([name, *place.tier, str(place.group)], place.blocks)
        yield from (held, connected, complete)
        for field in fields(Counts):
            counter = CounterMetricFamily(
                f"kvtiers_index_{field.name}", _HELP[field.name], labels=["pod"]
            )
            for follower in self._followers:
                counter.add_metric([follower.engine.name], getattr(follower.counts, field.name))
            yield counter
