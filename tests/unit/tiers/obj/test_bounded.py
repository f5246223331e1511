"""A bucket with a bound: never above it by what one engine writes, and the oldest leave."""

import time
from contextlib import contextmanager, nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.errors import ConfigError, Kind
from kvtiers.events import Reason
from kvtiers.testing.bench import Environment, Slots
from kvtiers.testing.values import LAYOUT, NAMESPACE, OTHER_NAMESPACE
from kvtiers.tiers.base import Usage
from kvtiers.tiers.obj import store as obj_store
from kvtiers.tiers.obj.maintain import maintain
from kvtiers.tiers.obj.room import Room
from kvtiers.tiers.obj.together import one_by_one
from kvtiers.tiers.places import Aim
from tests.servers.s3_faults import S3Fault, What
from tests.unit.tiers.obj.obj_kit import large, small

CAPACITY = 1 << 20
PACK = 3 * 4096
"""Bytes of a pack with one small chunk."""


def write(bench, names):
    (error,) = bench.write_from(Slots.filled(names))
    return error and error.kind


def in_the_foreground(store):
    """What it begins, it does at once; what is under way is waited for."""
    store._together.begin = store._bounded._begin = lambda act: act()
    while store._bounded.room._counting:
        store._together.run([lambda: None] * 2)


@contextmanager
def bounded(bucket, **kwargs):
    with bucket.open(capacity_bytes=CAPACITY, **kwargs) as bench:
        in_the_foreground(bench.store)
        yield bench


def test_what_was_written_first_leaves_first_and_it_is_never_above_the_bound(real):
    with bounded(real) as bench:
        written = []
        for n in range(120):
            bench.environment.wall.advance(1.0)
            name = small(n)
            kind = write(bench, name)
            if kind is not None:
                assert kind is Kind.FULL
                assert write(bench, name) is None, "there is room by then"
            written += name
            if n % 20 == 0:
                assert real.used() <= CAPACITY
        gone = [key for key, reason in bench.environment.removed if reason is Reason.EVICTED]
        assert gone == written[: len(gone)]
        assert len(gone) > 20
        bench.must_lack(gone[:3])
        bench.must_hold(written[len(gone) :])
        used = bench.store.usage().used_bytes
        assert real.used() <= used <= CAPACITY


def test_a_write_that_is_long_against_the_bound_fits_in_parts(real):
    least = 32 * (LAYOUT.slot_bytes + 4096)
    with real.open(capacity_bytes=least) as bench:
        in_the_foreground(bench.store)
        for n in range(4):
            errors = bench.write_from(Slots.filled(small(*range(100 * n, 100 * n + 100))))
            assert errors.count(None) > 2
            assert real.used() <= least


def test_what_a_clock_that_is_ahead_wrote_leaves_all_the_same(real):
    ahead = Environment(NAMESPACE)
    ahead.wall.advance(10 * 365 * 86_400.0)  # of 2023
    with real.open(environment=ahead) as bench:
        bench.write([*small("a"), *large("b")])
        bench.store.delete(small("a"))
    in_2_hours = time.time() + 7200
    report = maintain(
        real.client(), Aim(older_than_s=3600.0), one_by_one, wall_clock=lambda: in_2_hours
    )
    assert (len(report.packs), len(report.chunks), report.failed) == (2, 1, [])
    assert report.packs == sorted(report.packs)  # what says that it is gone leaves after it


def test_what_others_have_there_is_not_even_looked_at(fake, faulty):
    with faulty.open() as bench:
        bench.write(large("a"))
    fake.objects.change("bucket/kv/theirs//with/../no path", b"x" * 99)
    report = maintain(faulty.client(), Aim(max_bytes=0), one_by_one)
    assert (len(report.chunks), report.failed) == (1, [])


def test_objects_of_other_namespaces_count_and_leave(real):
    with real.open(OTHER_NAMESPACE) as theirs:
        for n in range(60):
            theirs.write(small(n))
        with bounded(real) as ours:
            assert ours.store.usage().used_bytes == real.used()
            ours.environment.wall.advance(60.0)
            for n in range(40):
                ours.write_from(Slots.filled(small(("ours", n))))
            assert theirs.read(small(0)) == [Kind.VANISHED]
            assert theirs.read(small(59)) == [None]
            assert ours.environment.removed == []
            ours.must_hold(small(("ours", 0)))


def test_what_others_wrote_is_known_after_the_next_listing(real):
    with bounded(real) as ours, real.open() as theirs:
        theirs.write(large(*range(50)))
        assert real.used() > CAPACITY
        assert write(ours, small("a")) is None, "it knows of none of it"
        ours.environment.clock.advance(obj_store.LIST_EVERY_S)
        ours.contains(small("a"))
        assert real.used() <= CAPACITY
        assert ours.store.usage() == Usage(real.used(), CAPACITY)


def test_a_bound_that_cannot_be_kept_takes_no_more(fake, faulty, caplog):
    with bounded(faulty) as bench:
        fake.fail(S3Fault(What.STATUS, "DELETE", status=403, code="AccessDenied"))
        kinds = [write(bench, small(n)) for n in range(100)]
        assert set(kinds) == {None, Kind.FULL}
        assert kinds == sorted(kinds, key=lambda kind: kind is not None), "once full it stays full"
        listings = fake.asked("LIST")
        write(bench, small("more"))
        assert fake.asked("LIST") == listings, "nor does it try again and again"
        assert faulty.used() <= CAPACITY
        fake.fail()
        bench.environment.clock.advance(60.0)
        write(bench, small("more"))
        assert write(bench, small("more")) is None


def test_where_nothing_can_be_listed_little_is_written(fake, faulty, caplog):
    fake.fail(S3Fault(What.STATUS, "LIST"))
    with faulty.open(capacity_bytes=CAPACITY) as bench:
        in_the_foreground(bench.store)
        bench.environment.clock.advance(60.0)
        kinds = [write(bench, large(n)) for n in range(40)]
        assert {None, Kind.FULL} == set(kinds)
        assert bench.store.usage() is None
        fake.fail()
        assert faulty.used() < CAPACITY / 8
    assert caplog.text.count("evict fails") == 1


def test_a_bound_without_room_for_some_chunks_is_refused(real):
    with pytest.raises(ConfigError, match=r"less than 32 chunks .* give at least 786432"):
        real.store(Environment(NAMESPACE), capacity_bytes=786_431)


def test_without_a_bound_nothing_is_counted(real):
    with real.open() as bench:
        assert bench.store.usage() is None


steps = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(0, 300)),
        st.tuples(st.just("count"), st.integers(0, 1200)),
        st.tuples(st.just("fail"), st.just(0)),
    )
)


@given(steps)
def test_no_more_is_taken_than_was_counted_to_be_free(found):
    room, free, now = Room(1600), 100, 0.0
    for what, size in found:
        now += 100.0
        if what == "take":
            taken = room.take(size)
            assert taken == (size <= free)
            free -= size if taken else 0
        else:
            assert room.begin_count(now)
            assert not room.begin_count(now), "one at a time"
            room.end_count(size if what == "count" else None, now)
            free = 1600 - size if what == "count" else free
        room.check()
        assert room.used == 1600 - free


def test_what_is_written_during_a_count_is_added_to_it():
    room = Room(1600)
    assert room.begin_count(0.0)
    assert room.take(100)
    room.end_count(700, 0.0)
    assert repr(room) == "<Room 800/1600 bytes>"


def test_its_check_can_fail():
    room = Room(1600)
    room._used = -1
    with pytest.raises(AssertionError, match="-1 bytes") if __debug__ else nullcontext():
        room.check()
