"""Two writers of one key at once, and a deletion between the ends of their writes."""

import pytest

from tests.unit.tiers.fs.log.log_kit import kill, read, write
from tests.unit.tiers.tier_kit import CHUNK, filled, key, payload


@pytest.mark.parametrize("leave", ["close", "kill"])
def test_what_is_there_after_it_is_there_after_a_restart(log, leave):
    """The first to have room is the last to have written: it was deleted with what is behind it."""
    store = log.open()
    write(store, 2)  # there is a segment
    room = store._core.find_room([(key(1), CHUNK)])
    write(store, 1)  # the second writer, in room behind it
    store.delete([key(1)])
    assert read(store, 1) != [payload(1)]
    assert store._core.append(*room, [filled(1)]) is None
    assert store.contains([key(1)]) == [False]
    store.check()
    store.close() if leave == "close" else kill(store)
    store = log.open()
    assert store.contains([key(1), key(2)]) == [False, True]
    write(store, 1)
    assert read(store, 1) == [payload(1)]
    store.check()
