"""Two writers of one key at once, and a deletion between the ends of their writes."""

import pytest

from tests.unit.tiers.fs.log.log_kit import kill, read, write
from tests.unit.tiers.tier_kit import CHUNK, filled, key, payload

_LOOKED_THROUGH = pytest.mark.xfail(
    strict=True,
    reason="the deletion is written down up to the row of the second writer, which lies behind "
    "that of the first. A table has the rows in the order in which they were completed; where "
    "there is none, a segment is looked through in the order of its pages, and it reaches both",
)


@pytest.mark.parametrize("leave", ["close", pytest.param("kill", marks=_LOOKED_THROUGH)])
def test_what_is_there_after_it_is_there_after_a_restart(log, leave):
    """The first to have room is the last to have written: what it reported as stored stays."""
    store = log.open()
    write(store, 2)  # there is a segment
    room = store._core.find_room([(key(1), CHUNK)])
    write(store, 1)  # the second writer, in room behind it
    store.delete([key(1)])
    assert read(store, 1) != [payload(1)]
    assert store._core.append(*room, [filled(1)]) is None
    before = read(store, 1)
    store.close() if leave == "close" else kill(store)
    assert read(log.open(), 1) == before
