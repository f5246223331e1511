import itertools

import pytest

from kvtiers.errors import Kind, KVTiersError
from kvtiers.host.slots import NEXT, IllegalTransition, SlotEvent, SlotState, advance

LEGAL = {
    (SlotState.FREE, SlotEvent.RESERVE): SlotState.FILLING,
    (SlotState.FILLING, SlotEvent.COMMIT): SlotState.READY,
    (SlotState.FILLING, SlotEvent.ABORT): SlotState.FREE,
    (SlotState.FILLING, SlotEvent.DROP_HELD): SlotState.ORPHANED,
    (SlotState.READY, SlotEvent.HOLD): SlotState.READY,
    (SlotState.READY, SlotEvent.RELEASE): SlotState.READY,
    (SlotState.READY, SlotEvent.RELEASE_LAST): SlotState.READY,
    (SlotState.READY, SlotEvent.DROP): SlotState.FREE,
    (SlotState.READY, SlotEvent.DROP_HELD): SlotState.ORPHANED,
    (SlotState.ORPHANED, SlotEvent.RELEASE): SlotState.ORPHANED,
    (SlotState.ORPHANED, SlotEvent.RELEASE_LAST): SlotState.FREE,
}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(SlotState, SlotEvent)))
def test_every_event_in_every_state(state, event):
    states = bytearray([state])
    if (state, event) in LEGAL:
        advance(states, [0], event)
        assert states[0] == LEGAL[state, event]
    else:
        with pytest.raises(IllegalTransition) as caught:
            advance(states, [0], event)
        assert states[0] == state
        assert caught.value.kind is Kind.BROKEN
        assert state.name in str(caught.value)
        assert event.name in str(caught.value)


def test_the_table_covers_every_pair():
    assert len(NEXT) == len(SlotEvent)
    assert all(len(row) == len(SlotState) for row in NEXT)


@pytest.mark.parametrize("state", SlotState)
def test_no_state_is_for_ever(state):
    reached = {state.value}
    for _ in SlotState:
        reached |= {row[s] for row in NEXT for s in reached} - {None}
    assert SlotState.FREE in reached


def test_one_illegal_slot_leaves_the_whole_batch_alone():
    states = bytearray([SlotState.FREE, SlotState.FREE, SlotState.READY, SlotState.FREE])
    before = bytes(states)
    with pytest.raises(IllegalTransition) as caught:
        advance(states, [0, 1, 2, 3], SlotEvent.RESERVE)
    assert bytes(states) == before
    assert caught.value.context == {"slot": "2", "state": "READY"}


def test_it_is_one_of_the_error_family():
    assert issubclass(IllegalTransition, KVTiersError)
