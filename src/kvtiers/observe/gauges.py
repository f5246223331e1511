"""What stands now: host memory, tiers, backlogs, queues - the values of all gauges.

They are read on the thread that owns the manager, now and then, and may be looked at on any.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtiers.events import Hop
from kvtiers.host.parts import HostUse
from kvtiers.metrics import Metrics, names
from kvtiers.metrics.names import Labels
from kvtiers.tiers.base import Peers, Standing, Usage

INTERVAL_S = 0.1
"""How often gauges in motion are read; nobody scrapes them more often than that."""

_HOST_STATES = ("capacity", "resident", "pinned", "filling")
_TIER_STATES = ("used", "capacity", "resident")
_OF_TIERS = (
    names.PROMOTED_FRACTION,
    names.CASCADED_FRACTION,
    names.PROMOTIONS,
    names.CASCADES,
    names.BACKLOG,
    names.QUEUE_JOBS,
    names.QUEUE_BYTES,
    names.TIER_STATE,
)
_NO_JOBS = (0, 0)
_NOT_KNOWN = (None, None, None)

Values = Mapping[tuple[str, Labels], float]


class LabelledTier(Protocol):
    """What the gauges of a tier are made of."""

    @property
    def label(self) -> str:
        """Its name in metrics."""

    def usage(self) -> Usage | None:
        """How full it is, if that is known."""

    def standing(self) -> Standing:
        """What it is doing."""

    def peers(self) -> Peers | None:
        """Other engines, if it deals with any."""


@dataclass(frozen=True, slots=True)
class _Watched:
    """A gauge whose value somebody else has."""

    name: str
    labels: Labels
    read: Callable[[], float | None]


class Gauges:
    """Reads the gauges of one engine."""

    def __init__(
        self,
        metrics: Metrics,
        tiers: Sequence[LabelledTier],
        slot_bytes: int,
        backlogs: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """``backlogs``: chunks that wait for a cascade, by label of the tier."""
        self._metrics = metrics
        self._tiers = tuple(tiers)
        self._slot_bytes = slot_bytes
        self._backlogs = backlogs
        self._watched: list[_Watched] = []
        self.values: Values = {}
        """Those that are known, as last read; never changed, but replaced."""
        self._use: HostUse | None = None
        self._read_at = -math.inf

    def watch(self, name: str, labels: Labels, read: Callable[[], float | None]) -> None:
        """Have a gauge among the others; ``read`` is called as they are, None: not known."""
        self._watched.append(_Watched(name, labels, read))

    def refresh(self, use: HostUse, now: float) -> bool:
        """Read them anew if it is time to; whether that was done.

        It is at once when host memory came to rest otherwise than it was, and else at most every
        ``INTERVAL_S``: while transfers are in flight gauges move in every step.
        """
        if now - self._read_at < INTERVAL_S and not (use != self._use and self._at_rest(use)):
            return False
        self.values = self._read(use)
        self._use, self._read_at = use, now
        return True

    def moved(self, use: HostUse) -> bool:
        """Whether one of them is otherwise than it was last read."""
        return self._read(use) != self.values

    def _read(self, use: HostUse) -> Values:
        return {**self._of_host(use), **self._of_tiers(use), **self._of_others()}

    def _at_rest(self, use: HostUse) -> bool:
        return not use.filling and not any(jobs for jobs, _ in self._metrics.active.values())

    def _of_host(self, use: HostUse) -> dict[tuple[str, Labels], float]:
        slots, size = use.slots or 1, self._slot_bytes
        found: dict[tuple[str, Labels], float] = {
            (names.USED_FRACTION, ()): (use.pinned + use.filling) / slots,
            (names.FILLING_FRACTION, ()): use.filling / slots,
            (names.PINNED_FRACTION, ()): use.pinned / slots,
        }
        counts = (use.slots, use.resident, use.pinned, use.filling)
        for state, count in zip(_HOST_STATES, counts, strict=True):
            found[names.HOST_BYTES, (state,)] = count * size
        return found

    def _of_tiers(self, use: HostUse) -> dict[tuple[str, Labels], float]:
        found: dict[tuple[str, Labels], float] = {}
        backlogs, slots, active = self._backlogs(), use.slots or 1, self._metrics.active
        for tier in self._tiers:
            label = (tier.label,)
            promoting = active.get((Hop.PROMOTE, tier.label), _NO_JOBS)
            cascading = active.get((Hop.CASCADE, tier.label), _NO_JOBS)
            filled, read = (n * use.per_chunk / slots for n in (promoting[1], cascading[1]))
            standing = tier.standing()
            values = (
                *(filled, read, promoting[0], cascading[0], backlogs.get(tier.label, 0)),
                *(standing.jobs, standing.job_bytes, int(standing.circuit)),
            )
            for name, value in zip(_OF_TIERS, values, strict=True):
                if value is not None:
                    found[name, label] = value
            for state, count in self._of_peers(tier):
                key = names.PEERS, (state,)
                found[key] = found.get(key, 0) + count
            for state, size in zip(_TIER_STATES, tier.usage() or _NOT_KNOWN, strict=True):
                if size is not None:
                    found[names.TIER_BYTES, (tier.label, state)] = size
        return found

    def _of_peers(self, tier: LabelledTier) -> Iterable[tuple[str, int]]:
        peers = tier.peers()
        return () if peers is None else peers._asdict().items()

    def _of_others(self) -> dict[tuple[str, Labels], float]:
        read: list[tuple[str, Labels, float | None]]
        read = [(names.DISTINCT, (), self._metrics.distinct)]
        read += [(w.name, w.labels, w.read()) for w in self._watched]
        return {(name, labels): value for name, labels, value in read if value is not None}

    def check(self) -> None:
        """Raise AssertionError if a gauge was read that nobody declared."""
        for name, labels in self.values:
            assert len(names.BY_NAME[name].labels) == len(labels), f"{name} has other labels"

    def __repr__(self) -> str:
        tiers = ", ".join(tier.label for tier in self._tiers) or "no tiers"
        return f"<Gauges: {len(self.values)} known; {tiers}, slots of {self._slot_bytes} bytes>"
