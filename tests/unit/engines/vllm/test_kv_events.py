import pytest
from vllm.v1.kv_offload.base import Medium

from kvtiers.chunks import make_key
from kvtiers.engines.vllm.events import HOST, KVEvents
from kvtiers.events import PRIMARY, ChunksStored
from kvtiers.kvevents.spans import Place

KEYS = (make_key(b"a" * 32, 0), make_key(b"b" * 32, 0))


def test_events_show_and_prove_themselves() -> None:
    events = KVEvents(True, describe=False)
    events.places = {PRIMARY: HOST, "1:fs": Place("STORAGE")}
    events(ChunksStored("1:fs", KEYS))
    events(ChunksStored("2:silent", KEYS))
    events.check()
    assert repr(events) == "<KVEvents on: 1 pending, 2 places>"
    assert [e.medium for e in events.take()] == [Medium.STORAGE]
    assert repr(events) == "<KVEvents on: 0 pending, 2 places>"


def test_events_that_are_off_gather_nothing() -> None:
    events = KVEvents(False, describe=False)
    events(ChunksStored(PRIMARY, KEYS))
    assert repr(events) == "<KVEvents off: 0 pending, 1 places>"
    events._pending.append(object())
    with pytest.raises(AssertionError, match="events are off and some are pending"):
        events.check()
