import threading

import pytest

from kvtiers.tiers.views import ChunkViews
from tests.unit.tiers.tier_kit import dead

MEMORY = bytearray(b"aabbbc")
PLACES = [slice(0, 2), slice(2, 5), slice(5, 6)]


class Cut:
    """Cuts ``MEMORY`` and remembers what was asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, i: int) -> memoryview:
        self.asked.append(i)
        return memoryview(MEMORY)[PLACES[i]]


def test_views_are_cut_when_asked_for_and_once() -> None:
    views = ChunkViews(cut := Cut(), [2, 3, 1])
    assert (len(views), views.nbytes, cut.asked) == (3, 6, [])
    assert bytes(views[1]) == b"bbb"
    assert views[1] is views[1] is views[-2]
    assert [bytes(v) for v in views[1:]] == [b"bbb", b"c"]
    assert cut.asked == [1, 2]
    with pytest.raises(IndexError):
        views[3]


def test_what_is_released_is_dead_and_is_not_cut_any_more() -> None:
    views = ChunkViews(cut := Cut(), [2, 3, 1])
    kept = views[0]
    views.release([0, 1])
    assert [dead(v) for v in views] == [True, True, False]
    assert dead(kept)
    assert cut.asked == [0, 2]


def test_after_release_all_nothing_is_usable() -> None:
    views = ChunkViews(cut := Cut(), [2, 3, 1])
    kept = views[2]
    views.release_all()
    assert dead(kept)
    assert all(map(dead, views))
    assert cut.asked == [2]


def test_what_somebody_made_of_a_view_cannot_be_taken_back() -> None:
    views = ChunkViews(Cut(), [2, 3, 1])
    part = views[1][1:]
    views.release_all()
    assert bytes(part) == b"bb"
    assert dead(views[1])


def test_two_threads_that_cut_one_view_share_it_and_nothing_stays_alive() -> None:
    made, both = [], threading.Barrier(2)

    def cut(i: int) -> memoryview:
        both.wait(20)
        made.append(memoryview(MEMORY)[PLACES[i]])
        return made[-1]

    views, got = ChunkViews(cut, [2, 3, 1]), []
    threads = [threading.Thread(target=lambda: got.append(views[1])) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert got[0] is got[1]
    views.release_all()
    assert [dead(view) for view in made] == [True, True]


def test_a_view_cut_while_it_is_released_is_dead() -> None:
    kept = []

    def cut(i: int) -> memoryview:
        kept.append(memoryview(MEMORY)[PLACES[i]])
        end[i]()
        return kept[-1]

    views = ChunkViews(cut, [2, 3, 1])
    end = {0: lambda: views.release([0]), 1: views.release_all}
    assert dead(views[0])
    assert dead(views[1])
    assert all(map(dead, kept))
