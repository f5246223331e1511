"""Metrics as a fold over the event stream: counters and observations, by name and labels.

Engine-neutral. :mod:`kvtiers.metrics.names` says under which names exporters show them. Events are
only gathered as they come; those of a kind are folded in one go, which costs less than to fold each
by itself. ``totals`` and ``histograms`` count since the start and may be read on any thread;
``take`` hands out what came since its last call, for an exporter that adds it up across processes.
Ages are told by when events are folded: as exactly as somebody reads often.
"""

import statistics
import time
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, NamedTuple

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
_FOLD_AT = 128
"""Events of one kind that wait to be folded."""


class Sample(NamedTuple):
    """What gathered since the last ``take``."""

    counters: dict[tuple[str, Labels], float]
    observations: dict[tuple[str, Labels], list[float]]


class Metrics:
    """A sink that counts.

    Counters (labels): ``lookups``, ``hits`` (tier); ``stored``, ``removed`` (tier[, reason]);
    ``declined`` (hop, tier, reason); ``jobs_failed``, ``chunks_failed`` (hop, tier, reason);
    ``misses`` (tier, reason); ``loaded_tokens`` (tier); ``bytes``, ``seconds`` (hop, tier);
    ``copied``, ``copied_bytes`` (hop); ``peer_chunks``, ``peer_bytes`` (direction); ``warmed_up``
    (outcome); ``told`` (type, medium); ``untold``, ``prompted``, ``saved_seconds`` ().
    Observations: ``lookup_seconds``, ``lookup_waited_seconds``, ``promote_seconds``,
    ``cascade_seconds``, ``evicted_age`` (tier); ``store_offered``, ``store_seconds``,
    ``load_seconds``, ``request_wait_seconds``, ``reuse_distance`` ().
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` gives monotonic seconds."""
        self._clock = clock
        self._recurrence = Recurrence()
        self._stays = defaultdict[str, Stays](Stays)
        self._paces: deque[float] = deque(maxlen=_PACES)
        """Seconds for a token of a prompt, in the last steps."""
        self._pace = 0.0
        """Their median; 0: not known."""
        self._counts: dict[str, defaultdict[Labels, float]] = {
            name: defaultdict(float) for name in COUNTED
        }
        self._taken: dict[tuple[str, Labels], float] = {}
        """Counters when they were last taken."""
        self._untaken: defaultdict[tuple[str, Labels], list[float]] = defaultdict(list)
        """Observed values that were not taken."""
        self._histograms: dict[tuple[str, Labels], list[float]] = {}
        self._active = defaultdict[tuple[Hop, str], list[int]](lambda: [0, 0])
        folds: dict[tuple[type, ...], Callable[[list[Any]], None]] = {
            (LookedUp,): self._looked_up,
            (PrefillTimed,): self._prefilled,
            (LookupsSettled,): self._settled,
            (LookupTimed,): self._lookup_timed,
            (ChunksStored, ChunksRemoved): self._came_and_left,
            (ChunksPrompted, ChunksGenerated): self._used,
            (ChunksDeclined,): self._declined,
            (TransferStarted, TransferFinished): self._moved,
            (ChunksCopied,): self._copied,
            (ChunksExchanged,): self._exchanged,
            (CopiesFailed,): self._copies_failed,
            (EventsTold,): self._told,
            (DescriptionsDropped,): self._dropped,
            (StoreOffered,): self._offered,
            (WarmedUp,): self._warmed_up,
        }
        self._gathered = [(kinds, list[Any](), fold) for kinds, fold in folds.items()]
        """Events that wait, and who folds them; those whose order matters wait together."""
        self._waiting = {kind: some for kinds, some, _ in self._gathered for kind in kinds}
        self._folding = Lock()

    def __call__(self, event: Event) -> None:
        """Take one event; one that nothing is counted of passes by."""
        waiting = self._waiting.get(type(event))
        if waiting is not None:
            waiting.append(event)
            if len(waiting) >= _FOLD_AT:
                with self._folding:
                    self._fold()

    @property
    def distinct(self) -> float | None:
        """How many of the chunks of prompts were never seen before, about; None: not known yet."""
        with self._folding:
            self._fold()
            new = self._recurrence.new_fraction
            return None if new is None else new * self._counts["prompted"][()]

    @property
    def active(self) -> dict[tuple[Hop, str], tuple[int, int]]:
        """Jobs and chunks in flight now, by hop and tier."""
        with self._folding:
            self._fold()
            return {key: (jobs, chunks) for key, (jobs, chunks) in self._active.items()}

    @property
    def totals(self) -> dict[tuple[str, Labels], float]:
        """Counters since the start."""
        with self._folding:
            self._fold()
            return self._totals()

    @property
    def histograms(self) -> dict[tuple[str, Labels], list[float]]:
        """How many values lie in each bucket, and above all; last, their sum."""
        with self._folding:
            self._fold()
            return {key: counts.copy() for key, counts in self._histograms.items()}

    def _totals(self) -> dict[tuple[str, Labels], float]:
        counts = self._counts.items()
        return {(name, labels): n for name, some in counts for labels, n in some.items()}

    def _fold(self) -> None:
        """Caller guarantees: nobody else folds."""
        for _, waiting, fold in self._gathered:
            if waiting:
                events = waiting.copy()
                del waiting[: len(events)]  # another thread may have appended to it
                fold(events)

    def _observe(self, name: str, labels: Labels, values: Sequence[float]) -> None:
        if not values:
            return
        key = name, labels
        untaken = self._untaken[key]
        untaken += values[: _MAX_UNTAKEN - len(untaken)]
        bounds = BUCKETS[name]
        counts = self._histograms.setdefault(key, [0] * (len(bounds) + 2))
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        counts[-1] += sum(values)

    def take(self) -> Sample:
        """What came since the last call."""
        with self._folding:
            self._fold()
            before, self._taken = self._taken, self._totals()
            observations, self._untaken = self._untaken, defaultdict(list)
        grown = {key: n - before.get(key, 0.0) for key, n in self._taken.items()}
        return Sample({key: n for key, n in grown.items() if n}, observations)

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        for (hop, tier), (jobs, chunks) in self.active.items():
            fit = 0 < jobs <= chunks or jobs == chunks == 0
            assert fit, f"{hop} of {tier}: {jobs} jobs with {chunks} chunks are in flight"
        self._recurrence.check()
        for stays in self._stays.values():
            stays.check()
        before, totals = self._taken, self.totals
        assert all(n >= before.get(key, 0.0) for key, n in totals.items()), "a counter went down"
        for key, values in self._untaken.items():
            assert len(values) <= _MAX_UNTAKEN, f"{key}: more values wait than may"
            assert sum(self._histograms[key][:-1]) >= len(values), f"{key}: values are lost"
        for kinds, waiting, _ in self._gathered:
            assert len(waiting) < _FOLD_AT, f"{kinds} are gathered and not folded"

    def __repr__(self) -> str:
        jobs = sum(jobs for jobs, _ in self.active.values())
        return f"<Metrics {len(self.totals)} counters, {jobs} jobs in flight>"

    def _looked_up(self, events: list[LookedUp]) -> None:
        lookups, hits = self._counts["lookups"], self._counts["hits"]
        for tier, queries, found in events:
            lookups[(tier,)] += queries
            if found:
                hits[(tier,)] += found

    def _settled(self, events: list[LookupsSettled]) -> None:
        misses, loaded = self._counts["misses"], self._counts["loaded_tokens"]
        saved = 0
        for e in events:
            for labels, chunks in e.missed.items():
                misses[labels] += chunks
            for tier, tokens in e.loaded.items():
                loaded[(tier,)] += tokens
                saved += tokens
        if saved and self._pace:
            self._counts["saved_seconds"][()] += saved * self._pace

    def _lookup_timed(self, events: list[LookupTimed]) -> None:
        for tier, seconds, waited_s in events:
            if seconds is not None:
                self._observe("lookup_seconds", (tier,), (seconds,))
            if waited_s is not None:
                self._observe("lookup_waited_seconds", (tier,), (waited_s,))

    def _came_and_left(self, events: list[ChunksStored | ChunksRemoved]) -> None:
        stored, removed = self._counts["stored"], self._counts["removed"]
        now, ages = self._clock(), defaultdict[str, list[float]](list)
        for e in events:
            tier, keys = e.tier, e.keys
            if isinstance(e, ChunksStored):
                stored[(tier,)] += len(keys)
                self._stays[tier].came(keys, now)
                continue
            removed[(tier, e.reason)] += len(keys)
            stayed = self._stays[tier].left(keys, now)
            if stayed and e.reason is Reason.EVICTED:
                ages[tier] += stayed
        for tier, seconds in ages.items():
            self._observe("evicted_age", (tier,), seconds)

    def _used(self, events: list[ChunksPrompted | ChunksGenerated]) -> None:
        prompted, distances = 0, list[float]()
        for e in events:
            if isinstance(e, ChunksPrompted):
                prompted += len(e.keys)
                distances += self._recurrence.ask(e.keys)
            else:
                self._recurrence.generated(e.keys)
        if prompted:
            self._counts["prompted"][()] += prompted
        self._observe("reuse_distance", (), distances)

    def _prefilled(self, events: list[PrefillTimed]) -> None:
        self._paces += (seconds / tokens for tokens, seconds in events)
        self._pace = statistics.median(self._paces)

    def _declined(self, events: list[ChunksDeclined]) -> None:
        declined = self._counts["declined"]
        for hop, tier, chunks, reason in events:
            declined[(hop, tier, reason)] += chunks

    def _moved(self, events: list[TransferStarted | TransferFinished]) -> None:
        moved, seconds = self._counts["bytes"], self._counts["seconds"]
        took = defaultdict[tuple[Hop, str], list[float]](list)
        for e in events:
            key = e.hop, e.tier
            active = self._active[key]
            if isinstance(e, TransferStarted):
                active[0] += 1
                active[1] += e.chunks
                continue
            active[0] -= 1
            active[1] -= e.done + e.failed
            if e.failed:
                labels = (*key, e.reason if e.reason else "failed")
                self._counts["jobs_failed"][labels] += 1
                self._counts["chunks_failed"][labels] += e.failed
            if e.done:
                moved[key] += e.bytes
                seconds[key] += e.seconds
                took[key].append(e.took_s)
        for (hop, tier), values in took.items():
            self._observe(f"{hop}_seconds", (tier,), values)

    def _copied(self, events: list[ChunksCopied]) -> None:
        copied, nbytes = self._counts["copied"], self._counts["copied_bytes"]
        took = defaultdict[Hop, list[float]](list)
        for hop, chunks, seconds, _, size in events:
            copied[(hop,)] += chunks
            nbytes[(hop,)] += size
            took[hop].append(seconds)
        for hop, values in took.items():
            self._observe(f"{hop}_seconds", (), values)
        waits = [e.waited_s for e in events if e.waited_s is not None]
        self._observe("request_wait_seconds", (), waits)

    def _exchanged(self, events: list[ChunksExchanged]) -> None:
        for e in events:
            self._counts["peer_chunks"][(e.direction,)] += e.chunks
            self._counts["peer_bytes"][(e.direction,)] += e.bytes

    def _copies_failed(self, events: list[CopiesFailed]) -> None:
        for e in events:
            self._counts["chunks_failed"][(e.hop, e.tier, "failed")] += e.chunks

    def _told(self, events: list[EventsTold]) -> None:
        told = self._counts["told"]
        for kind, medium, number in events:
            told[(kind, medium)] += number

    def _dropped(self, events: list[DescriptionsDropped]) -> None:
        self._counts["untold"][()] += sum(e.chunks for e in events)

    def _offered(self, events: list[StoreOffered]) -> None:
        self._observe("store_offered", (), [e.chunks for e in events])

    def _warmed_up(self, events: list[WarmedUp]) -> None:
        for e in events:
            for outcome, chunks in e._asdict().items():
                if chunks:
                    self._counts["warmed_up"][(outcome,)] += chunks
