"""What vLLM took of KV events is told to metrics."""

from types import SimpleNamespace
from typing import Any

from kvtiers.engines.vllm.telling import ReadyEvents, TiersTracker
from kvtiers.events import DescriptionsDropped, Event, EventsTold
from kvtiers.kvevents.messages import BlockRemoved, BlockStored


def test_events_are_counted_by_type_and_medium_when_they_are_taken() -> None:
    notes = SimpleNamespace(dropped=0, queued=3)
    announcer: Any = SimpleNamespace(
        notes=notes, send_captured=lambda: None, wake=lambda: None, capture=None, pending=False
    )
    ready = ReadyEvents()
    tracker = TiersTracker(announcer, ready, describe=True)
    told: list[Event] = []
    tracker.sink = told.append
    stored = BlockStored([1], None, [7], 1, medium="STORAGE")
    ready.say([stored, stored, BlockRemoved([1], medium="CPU")])
    assert tracker.queued == 3 + 3
    assert len(list(tracker.take_events([]))) == 3
    assert tracker.queued == 3
    assert told == [EventsTold("BlockStored", "STORAGE", 2), EventsTold("BlockRemoved", "CPU", 1)]
    told.clear()
    assert list(tracker.take_events([])) == []
    notes.dropped = 5
    ready.say([stored])
    assert len(list(tracker.take_events([]))) == 1
    assert told[-1] == DescriptionsDropped(5)
