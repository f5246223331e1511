"""The life of one slot of host memory, as one table.

A slot is FREE, then FILLING while its one writer works, then READY under a key. One that leaves
the index while something may still touch its bytes is ORPHANED until the last holder lets go.
"""

from collections.abc import Sequence
from enum import IntEnum

from kvtiers.errors import Kind, KVTiersError


class SlotState(IntEnum):
    """Where a slot is in its life."""

    FREE = 0
    """Nobody's: may be reserved."""
    FILLING = 1
    """Under a key, held by the one writer of its bytes."""
    READY = 2
    """Under a key, its bytes are whole; held by any number of readers."""
    ORPHANED = 3
    """Under no key, but somebody may still touch its bytes."""


class SlotEvent(IntEnum):
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


_TABLE: dict[SlotEvent, dict[SlotState, SlotState]] = {
    SlotEvent.RESERVE: {SlotState.FREE: SlotState.FILLING},
    SlotEvent.COMMIT: {SlotState.FILLING: SlotState.READY},
    SlotEvent.ABORT: {SlotState.FILLING: SlotState.FREE},
    SlotEvent.HOLD: {SlotState.READY: SlotState.READY},
    SlotEvent.RELEASE: {SlotState.READY: SlotState.READY, SlotState.ORPHANED: SlotState.ORPHANED},
    SlotEvent.RELEASE_LAST: {SlotState.READY: SlotState.READY, SlotState.ORPHANED: SlotState.FREE},
    SlotEvent.DROP: {SlotState.READY: SlotState.FREE},
    SlotEvent.DROP_HELD: {
        SlotState.FILLING: SlotState.ORPHANED,
        SlotState.READY: SlotState.ORPHANED,
    },
}

# Plain integers: an IntEnum member costs a method call wherever a number is expected.
NEXT: tuple[tuple[int | None, ...], ...] = tuple(
    tuple(
        None if (after := _TABLE[event].get(state)) is None else after.value for state in SlotState
    )
    for event in SlotEvent
)
"""``NEXT[event][state]`` is the state after, or None where the event cannot happen."""


class IllegalTransition(KVTiersError):
    """An event that cannot happen to a slot in its state: a bug of the caller. Nothing changed."""

    def __init__(self, slot: int, state: int, event: SlotEvent) -> None:
        super().__init__(
            f"slot {slot} is {SlotState(state).name} and cannot take {event.name}: this is a bug "
            "in kvtiers, please report it",
            kind=Kind.BROKEN,
            operation=event.name.lower(),
            context={"slot": str(slot), "state": SlotState(state).name},
        )


def advance(states: bytearray, slots: Sequence[int], event: SlotEvent) -> None:
    """Let ``event`` happen to each of the distinct ``slots``, or to none of them.

    Raises IllegalTransition for the first slot whose state does not allow it.
    """
    row = NEXT[event]
    for slot in slots:
        if row[states[slot]] is None:
            raise IllegalTransition(slot, states[slot], event)
    for slot in slots:
        states[slot] = row[states[slot]]  # type: ignore[assignment]  # checked above
