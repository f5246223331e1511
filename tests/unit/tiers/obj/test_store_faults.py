"""A server that fails in ways that no real one can be told to: a miss or a retry, nothing else."""

import threading
from contextlib import nullcontext

import pytest

from kvtiers.chunks import PAGE_BYTES
from kvtiers.errors import ConfigError, Kind, KVTiersError
from kvtiers.testing.bench import Slots
from kvtiers.testing.values import NAMESPACE
from kvtiers.tiers.obj import manifests, packs
from kvtiers.tiers.obj import store as obj_store
from kvtiers.tiers.obj.names import PackName
from tests.servers.s3_faults import S3Fault, What
from tests.unit.tiers.obj.obj_kit import SECRETS, large, small

PASSING = {Kind.IO, Kind.TIMEOUT}
ALL = [*small("a", "b"), *large("c", "d")]
NEW = [*small("new"), *large("new")]


FAULTS = [
    (what, method)
    for what, methods in {
        What.STATUS: ("PUT", "GET", "HEAD", "LIST"),
        What.SILENT: ("PUT", "GET", "HEAD", "LIST"),
        What.RESET: ("PUT", "GET", "LIST"),
        What.LATE: ("PUT",),
        What.REDIRECT: ("PUT", "GET", "HEAD", "LIST"),
        What.TRUNCATED: ("PUT", "GET", "LIST"),
        What.SHORT: ("PUT", "GET", "LIST"),
        What.OTHER: ("PUT", "GET"),
        What.GARBAGE: ("GET", "LIST"),
        What.SLOW: ("GET", "LIST"),
        What.RANGE: ("GET",),
        What.WHOLE: ("GET",),
        What.ETAG: ("PUT", "GET", "HEAD"),
        What.SKEW: ("GET", "HEAD", "LIST"),
        What.STALE: ("LIST",),
    }.items()
    for method in methods
]


def test_no_fault_is_left_out():
    assert {what for what, _ in FAULTS} == set(What)


def chunks(path):
    return "manifest" not in path


def asked(bench, names_):
    try:
        return set(bench.contains(names_))
    except KVTiersError as e:
        return {e.kind}


@pytest.mark.parametrize(
    ("what", "method"), FAULTS, ids=lambda value: getattr(value, "value", value)
)
def test_every_fault_is_a_miss_or_a_retry_and_passes(what, method, fake, faulty):
    hangs = what in (What.SILENT, What.SLOW)
    with faulty.open() as bench:
        bench.write(ALL)
        fake.fail(S3Fault(what, method, keys=chunks, seconds=7200, changes=3))
        with faulty.impatient(bench) if hangs else nullcontext():
            must_be_misses_or_retries(bench, method, hangs)
        fake.fail()
        bench.read(NEW)  # what was stored damaged is found out
        bench.write([*ALL, *NEW])
        bench.must_hold([*ALL, *NEW])


def must_be_misses_or_retries(bench, method, hangs):
    errors = [e and e.kind for e in bench.write_from(Slots.filled(NEW))]
    assert set(errors) <= {None} | PASSING
    there = asked(bench, ALL) | asked(bench, large("absent"))
    assert there <= {True, False} | PASSING
    kinds = bench.read(ALL)  # which fails for bytes that are not right
    assert set(kinds) <= {None, Kind.VANISHED, Kind.CORRUPT} | PASSING
    if not hangs:  # else a loaded machine may be too slow for the rest
        assert method == "PUT" or errors == [None, None]
        assert method == "GET" or kinds == [None] * 4


@pytest.mark.parametrize(
    "fault",
    [
        S3Fault(What.STATUS, first=1, status=503),
        S3Fault(What.STATUS, first=1, status=429, code="TooManyRequests"),
        S3Fault(What.STATUS, first=1, status=500, code="InternalError"),
        S3Fault(What.RESET, "GET", first=1),
        S3Fault(What.TRUNCATED, "GET", first=1),
        S3Fault(What.LATE, "PUT", first=1),
    ],
    ids=lambda fault: f"{fault.what.value}-{fault.status}",
)
@pytest.mark.parametrize("names_", [small("a"), large("a")], ids=["packed", "single"])
def test_what_passes_at_once_is_not_even_noticed(fault, names_, fake, faulty):
    with faulty.open() as bench:
        fake.fail(fault)
        bench.write(names_)
        fake.fail(fault)
        assert bench.contains(names_) == [True]
        fake.fail(fault)
        assert bench.read(names_) == [None]
        assert fake.struck()


@pytest.mark.parametrize("what", [What.GARBAGE, What.OTHER, What.SHORT], ids=lambda w: w.value)
@pytest.mark.parametrize("names_", [small("a"), large("a")], ids=["packed", "single"])
def test_one_wrong_answer_is_no_damage(what, names_, fake, faulty):
    with faulty.open() as bench:
        bench.write([*names_, *small("z"), *large("z")])
        fake.fail(S3Fault(what, "GET", first=1))
        assert bench.read(names_) == [None]
        assert fake.struck() == [what]
        assert bench.environment.removed == []


ONCE = pytest.mark.parametrize(
    "what", [What.GARBAGE, What.OTHER, What.SHORT], ids=lambda w: w.value
)


@ONCE
def test_one_wrong_answer_does_not_hide_what_is_in_a_pack(what, fake, faulty):
    with faulty.open() as ours, faulty.open() as theirs:
        ours.write(small("a"))
        ours.write(small("z"))
        fake.fail(S3Fault(what, "GET", first=1))
        theirs.contains(small("a", "z"))
        assert fake.struck() == [what]
        if what is What.OTHER:  # which is the front of a pack, and says nothing true of this one
            assert set(theirs.read(small("a", "z"))) <= {None, Kind.VANISHED}
        else:
            theirs.must_hold(small("a", "z"))
        ours.must_hold(small("a", "z"))


@ONCE
def test_one_wrong_answer_is_no_other_manifest(what, fake, faulty):
    with faulty.open():
        pass
    fake.fail(S3Fault(what, "GET", first=1))
    with faulty.open():
        assert fake.struck() == [what]
    fake.fail(S3Fault(what, "GET", first=1))
    (found,) = manifests.namespaces(faulty.client(), [NAMESPACE.id])
    assert found.namespace == NAMESPACE


def test_a_pack_that_lies_about_lengths_costs_no_memory(fake, faulty):
    (name,) = small("a")
    pack = PackName(1, 5, 1)
    lie = packs.pack_front(NAMESPACE.id, [packs.Packed(name, PAGE_BYTES, 1 << 40)])
    fake.objects.change(f"bucket/kv/{pack.below(NAMESPACE.id)}", lie.ljust(1 << 20, b"z"))
    with faulty.open() as bench:
        bench.contains([name])
        before = len(fake.requests)
        assert bench.read([name]) == [Kind.CORRUPT]
        front = f"bytes=0-{PAGE_BYTES - 1}"
        assert {r.range for r in fake.requests[before:] if r.method == "GET"} == {front}
        bench.must_lack([name])  # it is said to be gone
        bench.write([name])
        bench.must_hold([name])


def test_no_more_is_read_of_a_front_than_any_front_has(fake, faulty):
    pack = PackName(1, 5, 999_999)
    fake.objects.change(f"bucket/kv/{pack.below(NAMESPACE.id)}", b"z" * (20 << 20))
    with faulty.open() as bench:
        assert bench.contains(small("a")) == [False]
        assert {r.range for r in fake.requests if r.range} <= {
            "bytes=0-1048575",
            "bytes=0-16777216",
        }


def test_damage_that_cannot_be_taken_away_is_found_again_until_it_is_written(fake, faulty, caplog):
    with faulty.open() as bench:
        bench.write(large("a"))
        fake.fail(
            S3Fault(What.GARBAGE, "GET"), S3Fault(What.STATUS, "DELETE", status=403, code="Denied")
        )
        assert bench.read(large("a")) == [Kind.CORRUPT]
        assert "delete fails" in caplog.text
        fake.fail()
        bench.write(large("a"))
        bench.must_hold(large("a"))


def test_an_entity_tag_that_is_wrong_changes_nothing(fake, faulty):
    with faulty.open() as bench:
        fake.fail(S3Fault(What.ETAG))
        bench.write(ALL)
        bench.must_hold(ALL)


def test_a_stale_listing_is_a_miss_until_it_is_fresh(fake, faulty):
    with faulty.open() as ours, faulty.open() as theirs:
        theirs.write(small("a"))
        fake.fail(S3Fault(What.STALE, "LIST", changes=1))
        assert ours.contains(small("a")) == [False]
        fake.fail()
        ours.must_hold(small("a"))


def test_a_clock_of_the_server_that_is_a_day_ahead_changes_nothing(fake, faulty):
    with faulty.open() as ours, faulty.open() as theirs:
        fake.fail(S3Fault(What.SKEW, seconds=86_400))
        ours.write(ALL)
        theirs.must_hold(ALL)
        theirs.store.delete(ALL[:1])
        ours.must_lack(ALL[:1])


def test_small_chunks_take_one_request_each_way(fake, faulty):
    many = small(*range(50))
    with faulty.open() as bench, faulty.open() as theirs:
        bench.write(many)
        fake.requests.clear()
        theirs.contains(many)
        assert (fake.asked("LIST"), fake.asked("GET"), fake.asked("HEAD")) == (1, 1, 0)
        fake.requests.clear()
        assert theirs.read(many) == [None] * 50
        assert fake.asked() == fake.asked("GET") == 1
        fake.requests.clear()
        theirs.write(small(*range(50, 100)))
        assert fake.asked() == fake.asked("PUT") == 1


def test_a_large_chunk_takes_one_request_each_way(fake, faulty):
    with faulty.open() as bench:
        fake.requests.clear()
        bench.write(large("a", "b"))
        assert fake.asked() == fake.asked("PUT") == 2
        fake.requests.clear()
        assert bench.contains(large("a", "b", "c")) == [True, True, False]
        assert fake.asked() == fake.asked("HEAD") == 3
        fake.requests.clear()
        bench.read(large("a", "b"))
        assert fake.asked() == fake.asked("GET") == 2


class Counted:
    """A lock that says how many wait for it."""

    def __init__(self, lock):
        self._lock, self.came = lock, threading.Semaphore(0)

    def __enter__(self):
        self.came.release()
        self._lock.acquire()

    def __exit__(self, *_):
        self._lock.release()


def test_lookups_that_come_together_share_a_listing(fake, faulty):
    with faulty.open() as bench:
        bench.write(small("a"))
        fake.requests.clear()
        shelf, results = bench.store._shelf, []
        under_way = shelf._listing
        shelf._listing = Counted(under_way)
        threads = [
            threading.Thread(target=lambda n=n: results.append(bench.contains(small("a", n))))
            for n in range(8)
        ]
        with under_way:
            for thread in threads:
                thread.start()
            for _ in threads:
                assert shelf._listing.came.acquire(timeout=20)
        for thread in threads:
            thread.join(20)
        assert results == [[True, False]] * 8
        assert fake.asked("LIST") == 1


def test_nothing_that_is_said_has_a_secret_in_it(fake, faulty, caplog):
    caplog.set_level("DEBUG")
    said = []
    with faulty.open() as bench:
        said += [repr(bench.store), repr(bench.store._client), repr(bench.store._client.store)]
        for what in set(What) - {What.SILENT, What.SLOW}:
            fake.fail(S3Fault(what, keys=chunks, first=4))
            said += map(repr, bench.write_from(Slots.filled(NEW)))
            said += map(repr, bench.read_into(Slots([*ALL, *NEW])))
        fake.fail(S3Fault(What.SILENT))
        with faulty.impatient(bench):
            said += map(repr, bench.read_into(Slots(large("a"))))
    fake.fail(S3Fault(What.STATUS, status=403, code="AccessDenied"))
    with pytest.raises(ConfigError) as caught, faulty.open():
        pass
    said += [repr(caught.value), caplog.text]
    assert len(said) > 50
    assert not [text for text in said if any(secret in text for secret in SECRETS[:2])]


def test_a_server_that_does_not_answer_is_refused_at_the_start(fake, faulty):
    fake.fail(S3Fault(What.SILENT))
    faulty.options["request_timeout_s"] = 0.3
    with pytest.raises(ConfigError, match="no answer in time: is the server alive"), faulty.open():
        pass


def test_trouble_in_the_background_is_said_once_and_when_it_has_passed(fake, faulty, caplog):
    caplog.set_level("INFO", "kvtiers")
    with faulty.open() as bench:
        bench.store._together.begin = lambda act: act()
        for failing in (1, 1, 0, 0):
            fake.fail(*[S3Fault(What.STATUS, "LIST")] * failing)
            bench.environment.clock.advance(obj_store.LIST_EVERY_S)
            bench.contains(large("a"))
    assert caplog.text.count("list fails") == caplog.text.count("list works again") == 1


def test_a_front_that_could_not_be_read_is_read_later(fake, faulty):
    with faulty.open() as ours, faulty.open() as theirs:
        theirs.write(small("a"))
        fake.fail(S3Fault(What.STATUS, "GET"))
        assert ours.contains(small("a")) == [False]
        fake.fail()
        ours.must_hold(small("a"))


def test_what_a_pack_that_was_not_written_had_is_not_there(fake, faulty):
    with faulty.open() as bench:
        fake.fail(S3Fault(What.STATUS, "PUT"))
        (error,) = bench.write_from(Slots.filled(small("a")))
        assert error.kind is Kind.IO
        fake.fail()
        bench.must_lack(small("a"))


def test_a_chunk_whose_deletion_was_not_written_is_gone_here_alone(fake, faulty):
    with faulty.open() as ours, faulty.open() as theirs:
        ours.write(small("a"))
        fake.fail(S3Fault(What.STATUS, "PUT"))
        with pytest.raises(KVTiersError, match="503"):
            ours.store.delete(small("a"))
        fake.fail()
        ours.must_lack(small("a"))
        theirs.must_hold(small("a"))
