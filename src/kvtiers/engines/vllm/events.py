"""Our residency events for vLLM: to the announcer, or as its own ``OffloadingEvent``.

Under our connector the announcer tells of tiers. With the spec alone vLLM's own tracker does, of
which it is known what it lacks: it knows neither found chunks nor tiers that went away.
"""

from collections.abc import Callable, Mapping

from vllm.v1.kv_offload.base import Locality, Medium, OffloadingEvent, OffloadKey

from kvtiers.events import PRIMARY, ChunksRemoved, ChunksStored, Event, Sink, TierReachable
from kvtiers.kvevents.spans import Place

HOST = Place("CPU", "LOCAL")
"""There is one, so it needs no name of its own, and has none at vLLM. ``vllm-router`` takes what
has a name for a store outside of the engine, and would credit it less."""


class KVEvents:
    """A sink that gathers residency events for ``take_events``; inert when events are off."""

    def __init__(self, enabled: bool, *, describe: bool) -> None:
        """``describe``: vLLM keeps what describes a chunk until the tier reports its removal."""
        self._enabled = enabled
        self._describe = describe
        self.places: Mapping[str, Place] = {PRIMARY: HOST}
        """Tiers by label; those without a place are silent."""
        self.announcer: Sink | None = None
        """Takes all events instead, if events are on."""
        self.queued: Callable[[], int | None] = lambda: None
        """About how many chunks there is news of that was not handed on; None: not known."""
        self._pending: list[OffloadingEvent] = []

    def __call__(self, event: Event) -> None:
        """Gather a residency event."""
        if not self._enabled:
            return
        if self.announcer is not None:
            self.announcer(event)
            return
        if not isinstance(event, ChunksStored | ChunksRemoved):
            return
        place = self.places.get(event.tier)
        if place is None or not event.keys:
            return
        removed = isinstance(event, ChunksRemoved)
        self._pending.append(
            OffloadingEvent(
                keys=[OffloadKey(k) for k in event.keys],
                medium=Medium(place.medium),
                removed=removed,
                locality=None if place.locality is None else Locality(place.locality),
                ownership=place.ownership,
                removal_expected=self._describe and place is not HOST,
            )
        )

    def nothing_is_there(self) -> None:
        """What the tiers hold will be found by nobody any more."""
        for label in self.places:
            self(TierReachable(label, False))

    @property
    def enabled(self) -> bool:
        """Whether anybody is told."""
        return self._enabled

    def take(self) -> list[OffloadingEvent]:
        """What gathered since the last call, in order."""
        pending, self._pending = self._pending, []
        return pending

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant, if any."""
        assert self._enabled or not self._pending, "events are off and some are pending"
        assert all(e.keys for e in self._pending), "an event about no chunk is pending"
        assert PRIMARY in self.places, "host memory has no place"

    def __repr__(self) -> str:
        state = "on" if self._enabled else "off"
        return f"<KVEvents {state}: {len(self._pending)} pending, {len(self.places)} places>"
