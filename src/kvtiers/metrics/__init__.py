"""Metrics as a fold over the event stream: counters and observations, by name and labels.

Engine-neutral. :mod:`kvtiers.metrics.names` says under which names exporters show them. ``totals``
and ``histograms`` count since the start and may be read on any thread; ``take`` hands out what
gathered since its last call, for an exporter that adds it up across processes. An event costs a
microsecond or so: what can be done now and then is.
"""

import statistics
import time
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable
from typing import NamedTuple

from kvtiers.events import (
    ChunksCopied,
    ChunksDeclined,
    ChunksExchanged,
    ChunksGenerated,
    ChunksPrompted,
    ChunksRemoved,
    ChunksStored,
    CopiesFailed,
    DescriptionsDropped,
    Event,
    EventsTold,
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
from kvtiers.metrics.names import BUCKETS, COUNTED, Labels
from kvtiers.metrics.recurrence import Recurrence
from kvtiers.metrics.stays import Stays

_PACES = 15
"""Steps that computed prompts, of whose pace the median is taken."""
_MAX_UNTAKEN = 4096
"""Values of one kind that are kept for ``take``; where nobody takes, the histograms have them."""
_SETTLE_AT = 1024
"""Values of one kind that are not in a histogram."""


class Sample(NamedTuple):
    """What gathered since the last ``take``."""

    counters: dict[tuple[str, Labels], float]
    observations: dict[tuple[str, Labels], list[float]]


class Metrics:
    """A sink that counts.

    Counters (labels): ``lookups``, ``hits`` (tier); ``stored``, ``removed`` (tier[, reason]);
    ``declined`` (hop, tier, reason); ``jobs_failed``, ``chunks_failed`` (hop, tier, reason);
    ``misses`` (tier, reason); ``loaded_tokens`` (tier); ``bytes``, ``seconds`` (hop, tier);
    ``copied`` (hop); ``peer_chunks``, ``peer_bytes`` (direction); ``warmed_up`` (outcome);
    ``told`` (type, medium); ``untold``, ``prompted``, ``saved_seconds`` (). Observations:
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
        self._pace = 0.0
        """Their median; 0: not known."""
        self._counts: dict[str, defaultdict[Labels, float]] = {
            name: defaultdict(float) for name in COUNTED
        }
        counts = self._counts
        self._n_bytes = counts["bytes"]
        self._n_copied = counts["copied"]
        self._n_hits = counts["hits"]
        self._n_loaded_tokens = counts["loaded_tokens"]
        self._n_lookups = counts["lookups"]
        self._n_misses = counts["misses"]
        self._n_prompted = counts["prompted"]
        self._n_removed = counts["removed"]
        self._n_saved_seconds = counts["saved_seconds"]
        self._n_seconds = counts["seconds"]
        self._n_stored = counts["stored"]
        self._taken: dict[tuple[str, Labels], float] = {}
        """Counters when they were last taken."""
        self._observed: dict[str, defaultdict[Labels, list[float]]] = {
            name: defaultdict(list) for name in BUCKETS
        }
        """Values that are in no histogram yet. The lists stay, and are emptied."""
        self._took = {hop: self._observed[f"{hop}_seconds"] for hop in Hop}
        self._offers = self._observed["store_offered"][()]
        self._untaken: defaultdict[tuple[str, Labels], list[float]] = defaultdict(list)
        """Values that are, and were not taken."""
        self.histograms: dict[tuple[str, Labels], list[float]] = {}
        """How many values lie in each bucket, and above all; last, their sum. As of the last
        ``settle``. A copy is safe on any thread.
        """
        self.active: dict[tuple[Hop, str], list[int]] = {}
        self._folds = {
            LookedUp: self._looked_up,
            LookupsSettled: self._settled,
            LookupTimed: self._lookup_timed,
            ChunksStored: self._stored,
            ChunksRemoved: self._removed,
            ChunksPrompted: self._prompted,
            ChunksGenerated: self._generated,
            PrefillTimed: self._prefilled,
            ChunksDeclined: self._declined,
            TransferStarted: self._started,
            TransferFinished: self._finished,
            ChunksCopied: self._copied,
            ChunksExchanged: self._exchanged,
            CopiesFailed: self._copies_failed,
            EventsTold: self._told,
            DescriptionsDropped: self._dropped,
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
        return None if new is None else new * self._n_prompted[()]

    @property
    def totals(self) -> dict[tuple[str, Labels], float]:
        """Counters since the start. On any thread."""
        counts = [(name, by_labels.copy()) for name, by_labels in self._counts.items()]
        return {(name, labels): n for name, some in counts for labels, n in some.items()}

    def settle(self) -> None:
        """Put what was observed into the histograms."""
        for name, by_labels in self._observed.items():
            for labels, values in by_labels.items():
                if values:
                    self._put((name, labels), values)
                    values.clear()

    def _put(self, key: tuple[str, Labels], values: list[float]) -> None:
        untaken = self._untaken[key]
        untaken += values[: _MAX_UNTAKEN - len(untaken)]
        bounds = BUCKETS[key[0]]
        counts = self.histograms.setdefault(key, [0] * (len(bounds) + 2))
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        counts[-1] += sum(values)

    def take(self) -> Sample:
        """What gathered since the last call."""
        self.settle()
        before, self._taken = self._taken, self.totals
        grown = {key: n - before.get(key, 0.0) for key, n in self._taken.items()}
        observations, self._untaken = self._untaken, defaultdict(list)
        return Sample({key: n for key, n in grown.items() if n}, observations)

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        for (hop, tier), (jobs, chunks) in self.active.items():
            fit = 0 < jobs <= chunks or jobs == chunks == 0
            assert fit, f"{hop} of {tier}: {jobs} jobs with {chunks} chunks are in flight"
        self._recurrence.check()
        self._stays.check()
        before, totals = self._taken, self.totals
        assert all(n >= before.get(key, 0.0) for key, n in totals.items()), "a counter went down"
        for key, values in self._untaken.items():
            assert len(values) <= _MAX_UNTAKEN, f"{key}: more values wait than may"
            assert sum(self.histograms[key][:-1]) >= len(values), f"{key}: values are lost"
        for name, by_labels in self._observed.items():
            waiting = max(map(len, by_labels.values()), default=0)
            assert waiting < _SETTLE_AT, f"{name}: values are not settled"

    def __repr__(self) -> str:
        jobs = sum(jobs for jobs, _ in self.active.values())
        return f"<Metrics {len(self.totals)} counters, {jobs} jobs in flight>"

    def _observe(self, values: list[float], value: float) -> None:
        values.append(value)
        if len(values) >= _SETTLE_AT:
            self.settle()

    def _looked_up(self, e: LookedUp) -> None:
        label = (e.tier,)
        self._n_lookups[label] += e.queries
        if e.hits:
            self._n_hits[label] += e.hits

    def _settled(self, e: LookupsSettled) -> None:
        for (tier, reason), chunks in e.missed.items():
            self._n_misses[(tier, reason)] += chunks
        for tier, tokens in e.loaded.items():
            self._n_loaded_tokens[(tier,)] += tokens
        if e.loaded and self._pace:
            self._n_saved_seconds[()] += sum(e.loaded.values()) * self._pace

    def _lookup_timed(self, e: LookupTimed) -> None:
        if e.seconds is not None:
            self._observe(self._observed["lookup_seconds"][(e.tier,)], e.seconds)
        if e.waited_s is not None:
            self._observe(self._observed["lookup_waited_seconds"][(e.tier,)], e.waited_s)

    def _stored(self, e: ChunksStored) -> None:
        self._n_stored[(e.tier,)] += len(e.keys)
        self._stays.came(e.tier, e.keys, self._clock())

    def _prompted(self, e: ChunksPrompted) -> None:
        self._n_prompted[()] += len(e.keys)
        for distance in self._recurrence.ask(e.keys):
            self._observe(self._observed["reuse_distance"][()], distance)

    def _generated(self, e: ChunksGenerated) -> None:
        self._recurrence.generated(e.keys)

    def _prefilled(self, e: PrefillTimed) -> None:
        self._paces.append(e.seconds / e.tokens)
        self._pace = statistics.median(self._paces)

    def _removed(self, e: ChunksRemoved) -> None:
        self._n_removed[(e.tier, e.reason)] += len(e.keys)
        stayed = self._stays.left(e.tier, e.keys, self._clock())
        for seconds in stayed if e.reason is Reason.EVICTED else ():
            self._observe(self._observed["evicted_age"][(e.tier,)], seconds)

    def _declined(self, e: ChunksDeclined) -> None:
        self._counts["declined"][(e.hop, e.tier, e.reason)] += e.chunks

    def _started(self, e: TransferStarted) -> None:
        active = self.active.setdefault((e.hop, e.tier), [0, 0])
        active[0] += 1
        active[1] += e.chunks

    def _finished(self, e: TransferFinished) -> None:
        key = (e.hop, e.tier)
        active = self.active.setdefault(key, [0, 0])
        active[0] -= 1
        active[1] -= e.done + e.failed
        if e.failed:
            reason = e.reason if e.reason else "failed"
            self._counts["jobs_failed"][(e.hop, e.tier, reason)] += 1
            self._counts["chunks_failed"][(e.hop, e.tier, reason)] += e.failed
        if e.done:
            self._n_bytes[key] += e.bytes
            self._n_seconds[key] += e.seconds
            self._observe(self._took[e.hop][(e.tier,)], e.took_s)

    def _copied(self, e: ChunksCopied) -> None:
        self._n_copied[(e.hop,)] += e.chunks
        self._observe(self._took[e.hop][()], e.seconds)
        if e.waited_s is not None:
            self._observe(self._observed["request_wait_seconds"][()], e.waited_s)

    def _exchanged(self, e: ChunksExchanged) -> None:
        self._counts["peer_chunks"][(e.direction,)] += e.chunks
        self._counts["peer_bytes"][(e.direction,)] += e.bytes

    def _copies_failed(self, e: CopiesFailed) -> None:
        self._counts["chunks_failed"][(e.hop, e.tier, "failed")] += e.chunks

    def _told(self, e: EventsTold) -> None:
        self._counts["told"][(e.type, e.medium)] += e.events

    def _dropped(self, e: DescriptionsDropped) -> None:
        self._counts["untold"][()] += e.chunks

    def _offered(self, e: StoreOffered) -> None:
        self._observe(self._offers, e.chunks)

    def _warmed_up(self, e: WarmedUp) -> None:
        for outcome, chunks in e._asdict().items():
            if chunks:
                self._counts["warmed_up"][(outcome,)] += chunks
