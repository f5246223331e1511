"""The life of one slot of host memory, as one table.

A slot is FREE, then FILLING while its one writer works, then READY under a key. One that leaves
the index while something may still touch its bytes is ORPHANED until the last holder lets go.
"""

from collections.abc import Sequence
from enum import IntEnum

from kvtiers.errors import Kind, KVTiersError


class State(IntEnum):
    """Where a slot is in its life."""

    FREE = 0
    """Nobody's: may be reserved."""
    FILLING = 1
    """Under a key, held by the one writer of its bytes."""
    READY = 2
    """Under a key, its bytes are whole; held by any number of readers."""
    ORPHANED = 3
    """Under no key, but somebody may still touch its bytes."""


class Event(IntEnum):
    """What happens to a slot."""

    RESERVE = 0
    """It was given to a key and a writer."""
    COMMIT = 1
    """Its writer ended, the bytes are whole."""
    ABORT = 2
    """Its writer ended without whole bytes."""
    HOLD = 3
    """One more reader."""
    RELEASE = 4
    """One holder fewer, not the last."""
    RELEASE_LAST = 5
    """The last holder let go."""
    DROP = 6
    """Its key left the index (evicted or dropped) and nobody held it."""
    DROP_HELD = 7
    """Its key left the index while it was held."""


_TABLE: dict[Event, dict[State, State]] = {
    Event.RESERVE: {State.FREE: State.FILLING},
    Event.COMMIT: {State.FILLING: State.READY},
    Event.ABORT: {State.FILLING: State.FREE},
    Event.HOLD: {State.READY: State.READY},
    Event.RELEASE: {State.READY: State.READY, State.ORPHANED: State.ORPHANED},
    Event.RELEASE_LAST: {State.READY: State.READY, State.ORPHANED: State.FREE},
    Event.DROP: {State.READY: State.FREE},
    Event.DROP_HELD: {State.FILLING: State.ORPHANED, State.READY: State.ORPHANED},
}

# Plain integers: an IntEnum member costs a method call wherever a number is expected.
NEXT: tuple[tuple[int | None, ...], ...] = tuple(
    tuple(None if (after := _TABLE[event].get(state)) is None else after.value for state in State)
    for event in Event
)
"""``NEXT[event][state]`` is the state after, or None where the event cannot happen."""


class IllegalTransition(KVTiersError):
    """An event that cannot happen to a slot in its state: a bug of the caller. Nothing changed."""

    def __init__(self, slot: int, state: int, event: Event) -> None:
        super().__init__(
            f"slot {slot} is {State(state).name} and cannot take {event.name}: this is a bug in "
            "kvtiers, please report it",
            kind=Kind.BROKEN,
            operation=event.name.lower(),
            context={"slot": str(slot), "state": State(state).name},
        )


def advance(states: bytearray, slots: Sequence[int], event: Event) -> None:
    """Let ``event`` happen to each of the distinct ``slots``, or to none of them.

    Raises IllegalTransition for the first slot whose state does not allow it.
    """
    row = NEXT[event]
    for slot in slots:
        if row[states[slot]] is None:
            raise IllegalTransition(slot, states[slot], event)
    for slot in slots:
        states[slot] = row[states[slot]]  # type: ignore[assignment]  # checked above
