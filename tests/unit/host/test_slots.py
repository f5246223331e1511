import itertools

import pytest

from kvtiers.errors import Kind, KVTiersError
from kvtiers.host.slots import NEXT, Event, IllegalTransition, State, advance

LEGAL = {
    (State.FREE, Event.RESERVE): State.FILLING,
    (State.FILLING, Event.COMMIT): State.READY,
    (State.FILLING, Event.ABORT): State.FREE,
    (State.FILLING, Event.DROP_HELD): State.ORPHANED,
    (State.READY, Event.HOLD): State.READY,
    (State.READY, Event.RELEASE): State.READY,
    (State.READY, Event.RELEASE_LAST): State.READY,
    (State.READY, Event.DROP): State.FREE,
    (State.READY, Event.DROP_HELD): State.ORPHANED,
    (State.ORPHANED, Event.RELEASE): State.ORPHANED,
    (State.ORPHANED, Event.RELEASE_LAST): State.FREE,
}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
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
    assert len(NEXT) == len(Event)
    assert all(len(row) == len(State) for row in NEXT)


@pytest.mark.parametrize("state", State)
def test_no_state_is_for_ever(state):
    reached = {state.value}
    for _ in State:
        reached |= {row[s] for row in NEXT for s in reached} - {None}
    assert State.FREE in reached


def test_one_illegal_slot_leaves_the_whole_batch_alone():
    states = bytearray([State.FREE, State.FREE, State.READY, State.FREE])
    before = bytes(states)
    with pytest.raises(IllegalTransition) as caught:
        advance(states, [0, 1, 2, 3], Event.RESERVE)
    assert bytes(states) == before
    assert caught.value.context == {"slot": "2", "state": "READY"}


def test_it_is_one_of_the_error_family():
    assert issubclass(IllegalTransition, KVTiersError)
