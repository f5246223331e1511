"""Bare calls: of the shape that is said, on as many threads, and every byte arrives."""

import threading
from contextlib import closing

import pytest

from kvtiers.chunks import PAGE_BYTES
from kvtiers.cli.bare import BareFiles, BareSegments, run_calls
from tests.unit.tiers.tier_kit import filled, page_aligned

CHUNK = 1 << 20


def opened(root, layout, slot, count):
    if layout == "files":
        return BareFiles(str(root / "bare"), slot, direct=False)
    return BareSegments(str(root / "bare"), slot, CHUNK, count, direct=False)


def test_what_is_written_is_read(tmp_path, layout):
    memory = [filled(n, CHUNK) for n in range(6)]
    with closing(opened(tmp_path, layout, memory.__getitem__, 6)) as bare:
        run_calls(bare, bare.write, 3, 0, 6)
        memory = [page_aligned(CHUNK) for _ in range(6)]
        bare._slot = memory.__getitem__
        run_calls(bare, bare.read, 3, 0, 6)
    assert [bytes(view) for view in memory] == [bytes(filled(n, CHUNK)) for n in range(6)]
    stored = sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file())
    assert stored == 6 * (CHUNK + (PAGE_BYTES if layout == "files" else 0))


class Noted:
    """Calls that wait for each other: alone none of them would end."""

    def __init__(self, per_call, together=1):
        self.per_call = per_call
        self.calls = []
        self._meet = threading.Barrier(together, timeout=60)

    def act(self, first, end):
        self._meet.wait()
        self.calls.append((first, end))


def test_as_many_calls_are_under_way_as_there_are_threads():
    bare = Noted(per_call=4, together=3)
    run_calls(bare, bare.act, 3, 0, 24)
    assert sorted(bare.calls) == [(first, first + 4) for first in range(0, 24, 4)]


def test_the_last_call_is_as_short_as_it_has_to_be():
    bare = Noted(per_call=4)
    run_calls(bare, bare.act, 1, 2, 12)
    assert bare.calls == [(2, 6), (6, 10), (10, 12)]


def test_what_is_missing_is_an_error(tmp_path, layout):
    memory = page_aligned(CHUNK)
    with (
        closing(opened(tmp_path, layout, lambda n: memory, 1)) as bare,
        pytest.raises(OSError, match=r"No such file|not there"),
    ):
        run_calls(bare, bare.read, 2, 7, 9)
