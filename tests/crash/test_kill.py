"""A writer is killed at any point of concurrent writing: what it said was stored is there."""

import itertools
import random
from pathlib import Path

import pytest

from tests.crash.crash_kit import Told, kill_after, present, running, verify, write

KILLS = 8
MOST_STORES = 60
"""Of three chunks each: three times what the capacity holds."""


@pytest.mark.parametrize("fsync", [False, True], ids=["", "fsync"])
@pytest.mark.parametrize("direct_io", ["auto", "off"])
@pytest.mark.parametrize("layout", ["files", "log"])
def test_a_writer_is_killed_again_and_again(
    layout: str, direct_io: str, fsync: bool, tmp_path: Path
) -> None:
    options = {"direct_io": direct_io, "fsync": fsync}
    dice = random.Random(f"{layout} {direct_io} {fsync}")
    before: set[int] = set()
    firsts = itertools.count(0, 4000 // KILLS)
    for _ in range(KILLS):
        told, first = Told(stored=before), next(firsts)
        arguments = (layout, tmp_path / "kv", direct_io, fsync, first)
        with running("tests.crash.writer", *arguments) as child:
            kill_after(child, dice.randint(1, MOST_STORES), told)
        store = verify(layout, tmp_path / "kv", told.kept, **options)
        before = present(store)
        assert before <= told.stored | set(range(first, first + 4000 // KILLS)), "out of nowhere"
        store.close()
    store = verify(layout, tmp_path / "kv", before, **options)
    more = list(range(3990, 4000))
    assert write(store, more) == [None] * len(more)
    store.close()
    verify(layout, tmp_path / "kv", set(more), **options).close()
