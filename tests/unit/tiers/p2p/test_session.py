"""Every cell of the tables: what can happen is written down, what cannot changes nothing."""

from itertools import product

import pytest

from kvtiers.tiers.p2p.session import (
    CONSUMER,
    PRODUCER,
    TRANSFER,
    Act,
    Asked,
    Asking,
    Course,
    Deed,
    Heard,
    Move,
    Moving,
    Patience,
    Serving,
    Turn,
    Watch,
)

TABLES = [
    (CONSUMER, Asking, Heard, Act),
    (PRODUCER, Serving, Asked, Deed),
    (TRANSFER, Moving, Turn, Move),
]
CELLS = [
    (table, state, event)
    for table, states, events, _ in TABLES
    for state, event in product(states, events)
]


@pytest.mark.parametrize(("table", "state", "event"), CELLS)
def test_every_cell(table, state, event):
    course = Course(table, state)
    if course.takes(event):
        assert course.on(event) is table[state, event][1]
        assert course.state is table[state, event][0]
    else:
        with pytest.raises(ValueError, match="cannot happen"):
            course.on(event)
        assert course.state is state
    course.check()


@pytest.mark.parametrize(("table", "states", "events", "actions"), TABLES)
def test_tables_use_what_they_declare_and_end(table, states, events, actions):
    assert {state for state, _ in table} == set(states) - {states["ENDED"]}
    assert {event for _, event in table} == set(events)
    assert {action for _, action in table.values()} == set(actions)
    for start in states:
        reached = {start}
        for _ in states:
            reached |= {to for (state, _), (to, _) in table.items() if state in reached}
        assert states["ENDED"] in reached


FROM_PEERS = {
    Heard.WELCOME,
    Heard.REFUSED,
    Heard.RESTARTED,
    Heard.REPLY,
    Heard.GOODBYE,
    Heard.FORGED,
    Heard.BROKEN,
}


@pytest.mark.parametrize(("state", "event"), product((Asking.GREETING, Asking.OPEN), FROM_PEERS))
def test_whatever_a_producer_does_has_its_line(state, event):
    assert (state, event) in CONSUMER


@pytest.mark.parametrize(
    "event", [Asked.HELLO, Asked.MISFIT, Asked.STALE, Asked.FORGED, Asked.GOODBYE]
)
@pytest.mark.parametrize("state", [Serving.NEW, Serving.OPEN])
def test_whatever_a_consumer_does_has_its_line(state, event):
    assert (state, event) in PRODUCER


def test_only_who_is_not_to_blame_leaves_without_blame():
    leaving = {event for (_, event), (_, act) in CONSUMER.items() if act is Act.LEAVE}
    assert leaving == {Heard.GOODBYE, Heard.IDLE, Heard.STOP, Heard.RESTARTED}


PATIENCE = Patience(handshake_s=3.0, silence_s=10.0, ping_s=2.0, idle_s=60.0)


def test_a_handshake_has_a_deadline():
    watch = Watch(PATIENCE, 100.0)
    assert watch.next() == 103.0
    assert watch.due(102.9, busy=True) is None
    assert watch.due(103.0, busy=True) is Heard.LATE
    assert not watch.wants_ping(102.9)


def test_an_open_session_is_pinged_and_late_when_it_is_silent():
    watch = Watch(PATIENCE, 100.0)
    watch.opened(101.0)
    watch.check()
    assert watch.next() == 103.0
    assert watch.wants_ping(103.0)
    watch.pinged(103.0)
    watch.heard(103.1)
    assert not watch.wants_ping(104.9)
    assert watch.due(113.0, busy=True) is None
    assert watch.due(113.1, busy=True) is Heard.LATE


def test_an_idle_session_is_let_go_and_a_busy_one_is_not():
    watch = Watch(PATIENCE, 100.0)
    watch.opened(100.0)
    watch.heard(159.0)
    assert watch.due(160.0, busy=True) is None
    assert watch.due(160.0, busy=False) is Heard.IDLE
    watch.used(150.0)
    assert watch.due(160.0, busy=False) is None
