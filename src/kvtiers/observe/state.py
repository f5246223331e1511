"""What an engine is doing now, as one JSON document: its tiers, counters since the start, jobs.

Nothing of it waits for the manager: values that the thread which owns it puts in place now and
then, and counters, for which that thread may wait while events are folded.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvtiers.events import PRIMARY
from kvtiers.metrics import Metrics, names
from kvtiers.observe.gauges import Gauges
from kvtiers.tiers.base import Circuit

_HOST_STATES = ("capacity", "used", "resident", "pinned", "filling")
STATES: Mapping[int, str] = {
    Circuit.CLOSED: "in use",
    Circuit.TRIAL: "on trial",
    Circuit.OPEN: "left alone",
}
"""What a tier is, in the words of ``/state``, of its page and of ``kvtiers top``."""
_SHOWN_AS = {"misses": "lookup_misses"}
"""Counters that are shown as exporters call them."""


class Placed(Protocol):
    """What is shown of a tier beside its figures."""

    @property
    def label(self) -> str:
        """What it is called."""

    @property
    def medium(self) -> str | None:
        """What it is made of."""

    @property
    def locality(self) -> str | None:
        """How far away it is."""


@dataclass(frozen=True, slots=True)
class Engine:
    """What does not change."""

    model: str
    namespace: str
    replica: int
    started_at: float
    """Seconds since the epoch."""


class State:
    """Makes the document, on any thread."""

    def __init__(
        self,
        engine: Engine,
        tiers: Sequence[Placed],
        metrics: Metrics,
        gauges: Gauges,
        wall_clock: Callable[[], float],
        inert: Callable[[], bool] = lambda: False,
    ) -> None:
        """``inert``: whether offloading was switched off after a fault."""
        self._engine = engine
        self._tiers = tiers
        self._metrics = metrics
        self._gauges = gauges
        self._wall_clock = wall_clock
        self._inert = inert

    def __call__(self) -> dict[str, Any]:
        """The document."""
        engine = self._engine
        return {
            "engine": {
                "model": engine.model,
                "namespace": engine.namespace,
                "replica": engine.replica,
                "started_at": engine.started_at,
                "now": self._wall_clock(),
                "inert": self._inert(),
            },
            "tiers": [self._host(), *map(self._tier, self._tiers)],
            "counters": [
                {"name": _SHOWN_AS.get(name, name), "labels": list(labels), "value": value}
                for (name, labels), value in self._metrics.totals.items()
            ],
            "active": [
                {"hop": hop, "tier": tier, "jobs": jobs, "chunks": chunks}
                for (hop, tier), (jobs, chunks) in self._metrics.active.items()
                if jobs
            ],
        }

    def _host(self) -> dict[str, Any]:
        figures = self._sizes(names.HOST_BYTES, ())
        place = {"label": PRIMARY, "medium": "CPU", "locality": "LOCAL"}
        return {**place, "state": STATES[Circuit.CLOSED], **figures}

    def _tier(self, tier: Placed) -> dict[str, Any]:
        circuit = self._gauges.values.get((names.TIER_STATE, (tier.label,)))
        state = None if circuit is None else STATES[int(circuit)]
        figures = self._sizes(names.TIER_BYTES, (tier.label,))
        place = {"label": tier.label, "medium": tier.medium, "locality": tier.locality}
        return {**place, "state": state, **figures}

    def _sizes(self, gauge: str, labels: tuple[str, ...]) -> dict[str, float | None]:
        values = self._gauges.values
        return {f"{state}_bytes": values.get((gauge, (*labels, state))) for state in _HOST_STATES}

    def __repr__(self) -> str:
        return f"<State of {self._engine.model}, {len(self._tiers)} tiers>"
