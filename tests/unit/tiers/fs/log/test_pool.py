"""Segments: what each may become, what fits, which leaves first."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.chunks import PAGE_BYTES, make_key
from kvtiers.tiers.fs.log import format as fmt
from kvtiers.tiers.fs.log.format import FIRST_PAGE, MAX_ROWS
from kvtiers.tiers.fs.log.pool import RUN_PAGES, Event, Pool, Segment, State
from tests.unit.tiers.tier_kit import key

ALLOWED = {
    (State.FREE, Event.FOUND): State.SEALED,
    (State.FREE, Event.TAKEN): State.TAKEN,
    (State.TAKEN, Event.FREED): State.FREE,
    (State.TAKEN, Event.BEGUN): State.ACTIVE,
    (State.ACTIVE, Event.FILLED): State.FULL,
    (State.FULL, Event.SEALED): State.SEALED,
    (State.SEALED, Event.RESUMED): State.ACTIVE,
    (State.SEALED, Event.LEFT): State.DRAINING,
    (State.DRAINING, Event.FREED): State.FREE,
}


@pytest.mark.parametrize(("was", "event"), itertools.product(State, Event))
def test_a_segment_goes_round_and_no_other_way(was, event):
    segment = Segment(0, 1 << 20, was)
    if (was, event) in ALLOWED:
        segment.to(event)
        assert segment.state is ALLOWED[was, event]
        return
    with pytest.raises(ValueError, match="cannot be"):
        segment.to(event)
    assert segment.state is was


def test_a_full_segment_is_sealed_by_whoever_wrote_last():
    segment = Segment(0, 1 << 20, State.TAKEN)
    segment.begin(1, 0.0)
    segment.begin_write()
    segment.begin_write()
    assert not segment.end_write()
    assert not segment.fill()
    assert segment.end_write()
    quiet = Segment(0, 1 << 20, State.TAKEN)
    quiet.begin(1, 0.0)
    assert quiet.fill()


@pytest.mark.parametrize("rows", [[], [(key(1), 3, 8192, 0)]])
def test_a_segment_that_is_read_is_free_after_the_last_read_and_not_before_it_was_emptied(rows):
    segment = Segment(0, 1 << 20)
    segment.found(1, 0.0)
    segment.take_in(rows)
    segment.begin_read()
    segment.begin_read()
    segment.leave()
    segment.end_read()
    segment.begin_read()
    segment.end_read()
    assert segment.state is State.DRAINING
    segment.emptied()
    assert segment.state is State.DRAINING
    segment.end_read()
    assert segment.state is State.FREE
    segment.take()
    segment.begin(2, 0.0)
    segment.begin_read()
    segment.end_read()
    assert segment.state is State.ACTIVE


def test_a_segment_whose_last_read_ends_before_it_was_emptied_waits_for_that():
    segment = Segment(0, 1 << 20)
    segment.found(1, 0.0)
    segment.begin_read()
    segment.leave()
    segment.end_read()
    assert segment.state is State.DRAINING
    segment.emptied()
    assert segment.state is State.FREE


def names(lengths):
    return [make_key(n.to_bytes(length, "big"), 0) for n, length in enumerate(lengths)]


@given(
    st.lists(st.tuples(st.integers(2, 508), st.integers(0, 40_000)), min_size=1, max_size=400),
    st.integers(8, 3000),
)
def test_runs_lie_apart_and_leave_room_for_head_and_table(wanted, segment_pages):
    segment = Segment(0, segment_pages * PAGE_BYTES, State.TAKEN)
    segment.begin(1, 0.0)
    todo = list(zip(names([length for length, _ in wanted]), [n for _, n in wanted], strict=True))
    behind, written = FIRST_PAGE, []
    while todo and (run := segment.allocate(todo)) is not None:
        part, todo = todo[: len(run.rows)], todo[len(run.rows) :]
        assert [(k, n) for k, _, n, _ in run.rows] == part
        assert run.page >= behind
        assert len(part) <= MAX_ROWS
        pages = sum(fmt.pages_of(n) for _, n in part)
        assert pages <= RUN_PAGES or len(part) == 1
        head = fmt.pack_head(run.rows, 1)
        assert run.page * PAGE_BYTES + len(head) == run.rows[0][1] * PAGE_BYTES
        behind = fmt.end_of(run.rows)
        written += run.rows
        segment.wrote(run.rows)
    table = fmt.pack_table(written, 1)
    assert behind * PAGE_BYTES + len(table) <= segment.nbytes


def test_what_is_resumed_goes_on_behind():
    segment = Segment(0, 100 * PAGE_BYTES, State.SEALED)
    rows = [(key(1), 3, 8192, 0), (key(2), 5, 100, 0)]
    segment.take_in(rows)
    segment.resume(rows)
    assert segment.allocate([(key(3), 1)]).page == 6
    assert segment.keys == [key(1), key(2)]


def sealed(pool, number, sequence):
    segment = Segment(number, pool.segment_bytes, State.SEALED, sequence)
    pool.found(segment)
    return segment


def test_there_are_no_more_segments_than_the_capacity_holds():
    pool = Pool(10 * PAGE_BYTES * 100, PAGE_BYTES * 300)
    assert [pool.new() is not None for _ in range(4)] == [True, True, True, False]
    pool.check()
    assert pool.free() is None, "their files are not there yet"
    pool.forget(pool.segments[1])
    assert pool.new().number == 1


def test_the_first_that_was_begun_leaves_first_unless_somebody_writes():
    pool = Pool(1 << 30, 1 << 20)
    third, first, second = (sealed(pool, n, s) for n, s in ((0, 9), (1, 4), (2, 6)))
    assert pool.victim() is first
    first.leave()
    assert pool.victim() is second
    assert pool.last_sealed() is third
    assert pool.next_sequence() == 10


def test_free_segments_of_another_length_are_misfits_and_so_are_those_too_many():
    pool = Pool(3 << 20, 1 << 20)
    for number, nbytes in enumerate([1 << 20, 1 << 19, 1 << 20, 1 << 20]):
        pool.found(Segment(number, nbytes))
    assert [s.number for s in pool.misfits()] == [1]
    pool.capacity_bytes = 2 << 20
    assert sum(s.nbytes for s in pool.misfits()) >= pool.used_bytes - pool.capacity_bytes
