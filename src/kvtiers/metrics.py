"""Metrics as a fold over the event stream: counters, gauges and observations, by name and labels.

Engine-neutral: an exporter maps the names to its own. ``take`` hands out what gathered since the
last call, so that an exporter can add it up across processes.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from kvtiers.events import (
    ChunksDeclined,
    ChunksRemoved,
    ChunksStored,
    CopiesFailed,
    Event,
    Hop,
    LookedUp,
    LookupsSettled,
    LookupTimed,
    StoreOffered,
    TransferFinished,
    TransferStarted,
    WarmedUp,
)

Labels = tuple[str, ...]


@dataclass(slots=True)
class Sample:
    """What gathered since the last ``take``."""

    counters: dict[tuple[str, Labels], float] = field(default_factory=lambda: defaultdict(float))
    observations: dict[tuple[str, Labels], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )


class Metrics:
    """A sink that counts.

    Counters (labels): ``lookups``, ``hits`` (tier); ``stored``, ``removed`` (tier[, reason]);
    ``declined`` (hop, tier, reason); ``jobs_failed``, ``chunks_failed`` (hop, tier, reason);
    ``misses`` (tier, reason); ``loaded_tokens`` (tier);
    ``bytes``, ``seconds`` (hop, tier); ``warmed_up`` (outcome). Observations: ``lookup_seconds``,
    ``lookup_waited_seconds`` (tier), ``store_offered`` (). ``active`` (hop, tier): jobs and chunks
    in flight now.
    """

    def __init__(self) -> None:
        self._sample = Sample()
        self.active: dict[tuple[Hop, str], list[int]] = {}
        self._folds = {
            LookedUp: self._looked_up,
            LookupsSettled: self._settled,
            LookupTimed: self._lookup_timed,
            ChunksStored: self._stored,
            ChunksRemoved: self._removed,
            ChunksDeclined: self._declined,
            TransferStarted: self._started,
            TransferFinished: self._finished,
            CopiesFailed: self._copies_failed,
            StoreOffered: self._offered,
            WarmedUp: self._warmed_up,
        }

    def __call__(self, event: Event) -> None:
        """Fold one event."""
        self._folds[type(event)](event)  # type: ignore[operator]

    def take(self) -> Sample:
        """What gathered since the last call."""
        sample, self._sample = self._sample, Sample()
        return sample

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        for (hop, tier), (jobs, chunks) in self.active.items():
            fit = 0 < jobs <= chunks or jobs == chunks == 0
            assert fit, f"{hop} of {tier}: {jobs} jobs with {chunks} chunks are in flight"
        assert all(n >= 0 for n in self._sample.counters.values()), "a counter went down"

    def __repr__(self) -> str:
        jobs = sum(jobs for jobs, _ in self.active.values())
        return f"<Metrics {len(self._sample.counters)} counters to take, {jobs} jobs in flight>"

    def _looked_up(self, e: LookedUp) -> None:
        self._sample.counters["lookups", (e.tier,)] += e.queries
        if e.hits:
            self._sample.counters["hits", (e.tier,)] += e.hits

    def _settled(self, e: LookupsSettled) -> None:
        for (tier, reason), chunks in e.missed.items():
            self._sample.counters["misses", (tier, reason)] += chunks
        for tier, tokens in e.loaded.items():
            self._sample.counters["loaded_tokens", (tier,)] += tokens

    def _lookup_timed(self, e: LookupTimed) -> None:
        if e.seconds is not None:
            self._sample.observations["lookup_seconds", (e.tier,)].append(e.seconds)
        if e.waited_s is not None:
            self._sample.observations["lookup_waited_seconds", (e.tier,)].append(e.waited_s)

    def _stored(self, e: ChunksStored) -> None:
        self._sample.counters["stored", (e.tier,)] += len(e.keys)

    def _removed(self, e: ChunksRemoved) -> None:
        self._sample.counters["removed", (e.tier, e.reason)] += len(e.keys)

    def _declined(self, e: ChunksDeclined) -> None:
        self._sample.counters["declined", (e.hop, e.tier, e.reason)] += e.chunks

    def _started(self, e: TransferStarted) -> None:
        active = self.active.setdefault((e.hop, e.tier), [0, 0])
        active[0] += 1
        active[1] += e.chunks

    def _finished(self, e: TransferFinished) -> None:
        active = self.active.setdefault((e.hop, e.tier), [0, 0])
        active[0] -= 1
        active[1] -= e.done + e.failed
        counters = self._sample.counters
        if e.failed:
            reason = e.reason if e.reason else "failed"
            counters["jobs_failed", (e.hop, e.tier, reason)] += 1
            counters["chunks_failed", (e.hop, e.tier, reason)] += e.failed
        if e.done:
            counters["bytes", (e.hop, e.tier)] += e.bytes
            counters["seconds", (e.hop, e.tier)] += e.seconds

    def _copies_failed(self, e: CopiesFailed) -> None:
        self._sample.counters["chunks_failed", (e.hop, e.tier, "failed")] += e.chunks

    def _offered(self, e: StoreOffered) -> None:
        self._sample.observations["store_offered", ()].append(e.chunks)

    def _warmed_up(self, e: WarmedUp) -> None:
        for outcome, chunks in e._asdict().items():
            if chunks:
                self._sample.counters["warmed_up", (outcome,)] += chunks
