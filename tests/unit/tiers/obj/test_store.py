"""A bucket of a real server: what lies where, what others did, what left."""

import pytest

from kvtiers.errors import ConfigError, Kind, KVTiersError
from kvtiers.events import Reason
from kvtiers.testing.bench import Environment, Slots
from kvtiers.testing.values import NAMESPACE, OTHER_NAMESPACE
from kvtiers.tiers.obj import names
from kvtiers.tiers.obj import store as obj_store
from kvtiers.tiers.obj.together import one_by_one
from tests.unit.tiers.obj.obj_kit import Bucket, large, small

ID = NAMESPACE.id


def packs_of(bucket):
    return [name for name in bucket.names() if names.pack_at(ID, name)]


def only_now(bench):
    """Nothing in the background: what is begun there is done at once."""
    bench.store._together.begin = lambda act: act()


def test_small_chunks_of_one_write_are_one_object_and_large_ones_are_their_own(real):
    with real.open() as bench:
        bench.write([*small("a", "b", "c"), *large("d", "e")])
        bench.must_hold([*small("c", "a"), *large("e"), *small("b")])
    single = [names.chunk_name(ID, key) for key in large("d", "e")]
    (pack,) = packs_of(real)
    assert real.names() == sorted([pack, names.manifest_name(ID), *single])


def test_a_long_write_makes_several_packs(real, monkeypatch):
    monkeypatch.setattr(obj_store, "MAX_PACK_BYTES", 4 * 8192)
    with real.open() as bench:
        bench.write(small(*range(10)))
        bench.must_hold(small(*range(10)))
    assert len(packs_of(real)) == 3


def test_what_two_engines_pack_at_once_is_one_chunk_stored_twice(real):
    with real.open() as ours, real.open() as theirs:
        ours.write(small("a", "b"))
        theirs.write(small("b", "c"))
        assert len(packs_of(real)) == 2
        for bench in (ours, theirs):
            bench.must_hold(small("a", "b", "c"))
            listed = [entry.key for entry in bench.store.scan()]
            assert sorted(listed) == sorted(small("a", "b", "c"))


def test_what_is_known_is_not_packed_again(real):
    with real.open() as ours, real.open() as theirs:
        ours.write(small("a", "b"))
        assert theirs.contains(small("a")) == [True]
        theirs.write(small("a", "b", "c"))
        first, second = packs_of(real)
        assert real.client().size(first) == 4096 * 5
        assert real.client().size(second) == 4096 * 3


def test_a_pack_named_by_a_slow_clock_is_found_by_the_next_listing_of_all(real):
    slow = Environment(NAMESPACE)
    slow.wall.now -= 3600
    with real.open() as ours, real.open(environment=slow) as theirs:
        only_now(ours)
        ours.write(small("a"))
        theirs.write(small("b"))
        assert ours.contains(small("b")) == [False]
        ours.environment.clock.advance(obj_store.LIST_EVERY_S)
        assert ours.contains(small("b")) == [True]
        ours.must_hold(small("a", "b"))


def test_whoever_has_seen_a_later_name_gives_a_later_one(real):
    slow = Environment(NAMESPACE)
    slow.wall.now -= 3600
    with real.open() as ours, real.open(environment=slow) as theirs:
        ours.write(small("a"))
        theirs.contains(small("a"))
        theirs.write(small("b"))
        ours.must_hold(small("b"))
        theirs.store.delete(small("a"))
        ours.must_lack(small("a"))


def test_what_is_deleted_from_a_pack_is_gone_for_good(real):
    with real.open() as bench:
        bench.write(small("a", "b"))
        bench.store.delete(small("a"))
    with real.open() as bench:
        bench.must_lack(small("a"))
        assert [entry.key for entry in bench.store.scan()] == small("b")
        bench.write(small("a"))
    with real.open() as bench:
        bench.must_hold(small("a", "b"))


def test_the_chunks_of_a_pack_that_left_are_misses_and_said_to_be_gone(real):
    with real.open() as bench:
        bench.write(small("a", "b", "c"))
        real.client().delete(packs_of(real))
        assert bench.read(small("a", "b")) == [Kind.VANISHED, Kind.VANISHED]
        assert sorted(bench.environment.removed) == sorted(
            (key, Reason.VANISHED) for key in small("a", "b", "c")
        )
        bench.must_lack(small("c"))
        bench.write(small("a"))
        bench.must_hold(small("a"))


def test_packs_that_left_are_noticed_in_the_background(real):
    with real.open() as bench:
        only_now(bench)
        bench.write(small("a", "b"))
        real.client().delete(packs_of(real))
        assert bench.contains(small("a")) == [True], "until then it is believed"
        bench.environment.clock.advance(obj_store.LIST_EVERY_S)
        assert bench.contains(small("a", "b")) == [False, False]
        assert set(bench.environment.removed) == {(k, Reason.VANISHED) for k in small("a", "b")}


def test_a_pack_with_a_damaged_front_is_passed_over(real, caplog):
    with real.open() as bench:
        bench.write(small("a"))
        (pack,) = packs_of(real)
        real.client().put(pack, [bytes(12288)])
    with real.open() as bench:
        bench.must_lack(small("a"))
        assert bench.contains(small("a")) == [False]
        assert caplog.text.count("is no pack of kvtiers") == 1
        bench.write(small("a"))
        bench.must_hold(small("a"))


def test_the_scan_finds_what_was_stored_and_learns_where(real):
    with real.open() as bench:
        bench.write([*small("a", "b"), *large("c")])
        bench.write(small("d"))
    with real.open() as bench:
        entries = {entry.key: entry for entry in bench.store.scan()}
        assert entries.keys() == {*small("a", "b", "d"), *large("c")}
        assert {e.bytes for e in entries.values()} == {4096, 5 * 4096}
        assert entries[small("a")[0]].used_at == bench.environment.wall.now
        assert all(bench.store._shelf.find(small("a", "b", "d")))


def test_lookups_do_not_wait_for_the_inventory(real):
    with real.open() as bench:
        bench.write(small("old"))
    with real.open() as bench, real.open() as theirs:
        shelf = bench.store._shelf
        inventory = shelf.scan(one_by_one, print)
        shelf._list("")  # it has names, and is at none of the packs yet
        theirs.write(small("new"))
        assert bench.contains(small("new", "old")) == [True, True]
        assert next(inventory).key in small("new", "old")


def test_a_close_does_not_wait_for_a_long_listing(real):
    client = real.client()
    for n in range(1001):  # more than one page
        client.put(f"{n}", [b"x"])
    pages = client.objects()
    assert len(next(pages)) == 1000
    client.close()
    with pytest.raises(KVTiersError, match="list after close") as caught:
        next(pages)
    assert caught.value.kind is Kind.CLOSED


def test_a_manifest_that_is_gone_is_written_again(real):
    with real.open() as bench:
        only_now(bench)
        real.client().delete([names.manifest_name(ID)])
        bench.environment.clock.advance(obj_store.LIST_EVERY_S)
        bench.contains(small("a"))
        assert names.manifest_name(ID) in real.names()


def test_a_manifest_that_disagrees_is_refused(real):
    with real.open():
        pass
    real.client().put(names.manifest_name(ID), [b"{}"])
    with (
        pytest.raises(ConfigError, match="disagrees with the model and configuration"),
        real.open(),
    ):
        pass
    with real.open(OTHER_NAMESPACE) as bench:
        bench.write(small("a"))


def test_a_bucket_that_is_not_there_is_refused(s3):
    bucket = Bucket(s3.endpoint, "no-such-bucket")
    with pytest.raises(ConfigError, match="404 NoSuchBucket: make the bucket"), bucket.open():
        pass


def test_wrong_credentials_are_refused_and_not_shown(real):
    real.options = {"access_key_id": "AKIAWHOISIT", "secret_access_key": "not-to-be-seen"}
    with (
        pytest.raises(ConfigError, match="403 InvalidAccessKeyId: check the cred") as e,
        real.open(),
    ):
        pass
    assert "AKIAWHOISIT" not in str(e.value)
    assert "not-to-be-seen" not in str(e.value)


def test_a_server_that_is_killed_costs_misses_and_comes_back(real, s3, caplog):
    caplog.set_level("INFO", "kvtiers")
    with real.open() as bench:
        names_ = [*small("a", "b"), *large("c")]
        bench.write(names_)
        s3.kill()
        more = Slots.filled([*small("d"), *large("e")])
        assert {e.kind for e in bench.write_from(more)} == {Kind.IO}
        assert set(bench.read(names_)) == {Kind.IO}
        for group in (small("d"), large("e")):
            with pytest.raises(Exception, match="Connection refused") as caught:
                bench.contains(group)
            assert caught.value.kind is Kind.IO
        assert bench.environment.removed == []
        s3.start()
        bench.must_hold(names_)
        bench.write([*small("d"), *large("e")])
        bench.must_hold([*small("d"), *large("e")])
    said = [r.getMessage() for r in caplog.records if r.name == "kvtiers"]
    assert sum("write fails" in line for line in said) == 1
    assert sum("write works again" in line for line in said) == 1


def test_its_repr_says_where_and_how_many(real):
    with real.open() as bench:
        bench.write(small("a", "b"))
        assert repr(bench.store) == (
            f"<ObjStore s3://{real.name}/kv/{ID}: <Shelf <PackIndex 2 chunks in 1 packs>>>"
        )
