"""Metrics as a fold over the event stream: counters and observations, by name and labels.

Engine-neutral. :mod:`kvtiers.metrics.names` says under which names exporters show them. ``totals``
and ``histograms`` count since the start and may be copied on any thread; ``take`` hands out what
gathered since its last call, for an exporter that adds it up across processes.
"""

import statistics
import time
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtiers.events import (
    PRIMARY,
    ChunksCopied,
    ChunksDeclined,
    ChunksPrompted,
    ChunksRemoved,
    ChunksStored,
    CopiesFailed,
    Event,
    Hop,
    LookedUp,
    LookupsSettled,
    LookupTimed,
    PrefillTimed,
    Reason,
    StoreOffered,
    TransferFinished,
    TransferStarted,
    WarmedUp,
)
from kvtiers.metrics.names import BUCKETS, Labels
from kvtiers.metrics.recurrence import Recurrence, sampled
from kvtiers.metrics.stays import Stays

_PACES = 15
"""Steps that computed prompts, of whose pace the median is taken."""
_MAX_UNTAKEN = 4096
"""Values of one kind that are kept for ``take``; where nobody takes, the histograms have them."""


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
    ``misses`` (tier, reason); ``loaded_tokens`` (tier); ``bytes``, ``seconds`` (hop, tier);
    ``copied`` (hop); ``warmed_up`` (outcome); ``prompted``, ``saved_seconds`` (). Observations:
    ``lookup_seconds``, ``lookup_waited_seconds``, ``promote_seconds``, ``cascade_seconds``,
    ``evicted_age`` (tier); ``store_offered``, ``store_seconds``, ``load_seconds``,
    ``request_wait_seconds``, ``reuse_distance`` (). ``active`` (hop, tier): jobs and chunks in
    flight now.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` gives monotonic seconds."""
        self._clock = clock
        self._recurrence = Recurrence()
        self._stays = Stays()
        self._paces: deque[float] = deque(maxlen=_PACES)
        """Seconds for a token of a prompt, in the last steps."""
        self._sample = Sample()
        self.totals: defaultdict[tuple[str, Labels], float] = defaultdict(float)
        """Counters since the start. ``copy`` is safe on any thread."""
        self.histograms: dict[tuple[str, Labels], list[float]] = {}
        """How many values lie in each bucket, and above all; last, their sum. As ``totals``."""
        self.active: dict[tuple[Hop, str], list[int]] = {}
        self._folds = {
            LookedUp: self._looked_up,
            LookupsSettled: self._settled,
            LookupTimed: self._lookup_timed,
            ChunksStored: self._stored,
            ChunksRemoved: self._removed,
            ChunksPrompted: self._prompted,
            PrefillTimed: self._prefilled,
            ChunksDeclined: self._declined,
            TransferStarted: self._started,
            TransferFinished: self._finished,
            ChunksCopied: self._copied,
            CopiesFailed: self._copies_failed,
            StoreOffered: self._offered,
            WarmedUp: self._warmed_up,
        }

    def __call__(self, event: Event) -> None:
        """Fold one event; one that nothing is counted of passes by."""
        fold = self._folds.get(type(event))
        if fold is not None:
            fold(event)  # type: ignore[operator]

    @property
    def distinct(self) -> float | None:
        """How many of the chunks of prompts were never seen before, about; None: not known yet."""
        new = self._recurrence.new_fraction
        return None if new is None else new * self.totals["prompted", ()]

    def take(self) -> Sample:
        """What gathered since the last call."""
        sample, self._sample = self._sample, Sample()
        return sample

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        for (hop, tier), (jobs, chunks) in self.active.items():
            fit = 0 < jobs <= chunks or jobs == chunks == 0
            assert fit, f"{hop} of {tier}: {jobs} jobs with {chunks} chunks are in flight"
        self._recurrence.check()
        self._stays.check()
        assert all(n >= 0 for n in self._sample.counters.values()), "a counter went down"
        for name, values in self._sample.observations.items():
            assert len(values) <= _MAX_UNTAKEN, f"{name}: more values wait than may"
            assert sum(self.histograms[name][:-1]) >= len(values), f"{name}: values are lost"

    def __repr__(self) -> str:
        jobs = sum(jobs for jobs, _ in self.active.values())
        return f"<Metrics {len(self._sample.counters)} counters to take, {jobs} jobs in flight>"

    def _count(self, name: str, labels: Labels, amount: float) -> None:
        key = (name, labels)
        self._sample.counters[key] += amount
        self.totals[key] += amount

    def _observe(self, name: str, labels: Labels, value: float) -> None:
        key = (name, labels)
        untaken = self._sample.observations[key]
        if len(untaken) < _MAX_UNTAKEN:
            untaken.append(value)
        bounds = BUCKETS[name]
        counts = self.histograms.get(key)
        if counts is None:
            counts = self.histograms[key] = [0] * (len(bounds) + 2)
        counts[bisect_left(bounds, value)] += 1
        counts[-1] += value

    def _looked_up(self, e: LookedUp) -> None:
        self._count("lookups", (e.tier,), e.queries)
        if e.hits:
            self._count("hits", (e.tier,), e.hits)

    def _settled(self, e: LookupsSettled) -> None:
        for (tier, reason), chunks in e.missed.items():
            self._count("misses", (tier, reason), chunks)
        for tier, tokens in e.loaded.items():
            self._count("loaded_tokens", (tier,), tokens)
        if e.loaded and self._paces:
            saved = sum(e.loaded.values()) * statistics.median(self._paces)
            self._count("saved_seconds", (), saved)

    def _lookup_timed(self, e: LookupTimed) -> None:
        if e.seconds is not None:
            self._observe("lookup_seconds", (e.tier,), e.seconds)
        if e.waited_s is not None:
            self._observe("lookup_waited_seconds", (e.tier,), e.waited_s)

    def _stored(self, e: ChunksStored) -> None:
        self._count("stored", (e.tier,), len(e.keys))
        some = sampled(e.keys)
        if some:
            self._stays.came(e.tier, some, self._clock())
            if e.tier == PRIMARY:
                self._recurrence.store(some)

    def _prompted(self, e: ChunksPrompted) -> None:
        self._count("prompted", (), len(e.keys))
        for distance in self._recurrence.ask(sampled(e.keys)):
            self._observe("reuse_distance", (), distance)

    def _prefilled(self, e: PrefillTimed) -> None:
        self._paces.append(e.seconds / e.tokens)

    def _removed(self, e: ChunksRemoved) -> None:
        self._count("removed", (e.tier, e.reason), len(e.keys))
        some = sampled(e.keys)
        if some:
            stayed = self._stays.left(e.tier, some, self._clock())
            for seconds in stayed if e.reason is Reason.EVICTED else ():
                self._observe("evicted_age", (e.tier,), seconds)

    def _declined(self, e: ChunksDeclined) -> None:
        self._count("declined", (e.hop, e.tier, e.reason), e.chunks)

    def _started(self, e: TransferStarted) -> None:
        active = self.active.setdefault((e.hop, e.tier), [0, 0])
        active[0] += 1
        active[1] += e.chunks

    def _finished(self, e: TransferFinished) -> None:
        active = self.active.setdefault((e.hop, e.tier), [0, 0])
        active[0] -= 1
        active[1] -= e.done + e.failed
        if e.failed:
            reason = e.reason if e.reason else "failed"
            self._count("jobs_failed", (e.hop, e.tier, reason), 1)
            self._count("chunks_failed", (e.hop, e.tier, reason), e.failed)
        if e.done:
            self._count("bytes", (e.hop, e.tier), e.bytes)
            self._count("seconds", (e.hop, e.tier), e.seconds)
            self._observe(f"{e.hop}_seconds", (e.tier,), e.took_s)

    def _copied(self, e: ChunksCopied) -> None:
        self._count("copied", (e.hop,), e.chunks)
        self._observe(f"{e.hop}_seconds", (), e.seconds)
        if e.waited_s is not None:
            self._observe("request_wait_seconds", (), e.waited_s)

    def _copies_failed(self, e: CopiesFailed) -> None:
        self._count("chunks_failed", (e.hop, e.tier, "failed"), e.chunks)

    def _offered(self, e: StoreOffered) -> None:
        self._observe("store_offered", (), e.chunks)

    def _warmed_up(self, e: WarmedUp) -> None:
        for outcome, chunks in e._asdict().items():
            if chunks:
                self._count("warmed_up", (outcome,), chunks)
