"""Our residency events as vLLM's ``OffloadingEvent``: stored once, removed once, per tier."""

from dataclasses import dataclass

from vllm.v1.kv_offload.base import Locality, Medium, OffloadingEvent, OffloadKey

from kvtiers.events import PRIMARY, ChunksRemoved, ChunksStored, Event


@dataclass(frozen=True, slots=True)
class Place:
    """How a tier is called on the event stream."""

    medium: Medium
    locality: Locality | None = None
    ownership: str | None = None


HOST = Place(Medium.CPU)


class KVEvents:
    """A sink that gathers residency events for ``take_events``; inert when events are off."""

    def __init__(self, enabled: bool, *, describe: bool) -> None:
        """``describe``: vLLM keeps what describes a chunk until the tier reports its removal."""
        self._enabled = enabled
        self._describe = describe
        self.places: dict[str, Place] = {PRIMARY: HOST}
        """Tiers by label; those without a place are silent."""
        self._pending: list[OffloadingEvent] = []

    def __call__(self, event: Event) -> None:
        """Gather a residency event."""
        if not self._enabled or not isinstance(event, ChunksStored | ChunksRemoved):
            return
        place = self.places.get(event.tier)
        if place is None or not event.keys:
            return
        removed = isinstance(event, ChunksRemoved)
        self._pending.append(
            OffloadingEvent(
                keys=[OffloadKey(k) for k in event.keys],
                medium=place.medium,
                removed=removed,
                locality=place.locality,
                ownership=place.ownership,
                removal_expected=self._describe and place is not HOST,
            )
        )

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
