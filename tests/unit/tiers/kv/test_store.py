"""What the laws do not say of a store on a key-value server."""

import pytest

from kvtiers.chunks import GroupLayout
from kvtiers.errors import ConfigError, Kind
from kvtiers.events import Reason
from kvtiers.tiers import kv
from kvtiers.tiers.base import Item
from kvtiers.tiers.kv import KvOptions, opening
from tests.servers import valkey
from tests.unit.tiers.tier_kit import CHUNK, NAMESPACE, context, filled, key

VANISHED, CORRUPT = Kind.VANISHED, Kind.CORRUPT


@pytest.fixture
def admin():
    with valkey.shared().admin() as client:
        yield client


def test_a_value_is_a_short_header_and_the_payload(opened, admin):
    one = opened()
    one.write(1)
    value = admin.get(one.name(1))
    assert value.endswith(bytes(filled(1)))
    assert len(value) - CHUNK < 100


def test_what_lies_at_a_name_and_is_no_chunk_is_found_out_and_removed(opened, admin):
    one = opened()
    one.write(1, 2, 3, 4)
    admin.delete(one.name(1))
    admin.lpush(one.name(1), "x")
    admin.setrange(one.name(2), 60, b"damage")
    admin.set(one.name(3), admin.get(one.name(4)))
    admin.append(one.name(4), "longer")
    assert one.contains(1, 2, 3, 4, 5) == [True] * 4 + [False]
    assert one.read(1, 2, 3, 4, 5) == [CORRUPT] * 4 + [VANISHED]
    assert sorted(one.removed) == sorted(
        [(key(n), Reason.CORRUPT) for n in (1, 2, 3, 4)] + [(key(5), Reason.VANISHED)]
    )
    assert one.contains(1, 2, 3, 4) == [False] * 4
    assert one.write(1, 2, 3, 4) == [None] * 4
    assert one.read(1, 2, 3, 4) == [None] * 4


def test_a_list_in_the_way_is_replaced_by_a_write(opened, admin):
    one = opened()
    admin.lpush(one.name(1), "x")
    assert one.write(1) == [None]
    assert one.read(1) == [None]


def test_calls_are_few_and_bounded(opened, admin):
    one = opened(max_batch_bytes=4 * CHUNK)
    one.write(0)
    before = admin.info("stats")["total_reads_processed"]
    assert one.write(*range(10)) == [None] * 10
    assert one.read(*range(10)) == [None] * 10
    assert one.contains(*range(10)) == [True] * 10
    # three batches each way, of which the larger ones come in several packets; one question
    assert admin.info("stats")["total_reads_processed"] - before < 40


def test_time_to_live_begins_anew_with_a_use(opened, admin):
    one = opened(ttl_s=1000)
    one.write(1, 2, 3, 4)
    for n in (1, 2, 3, 4):
        assert 990 < admin.ttl(one.name(n)) <= 1000
        admin.expire(one.name(n), 10)
    one.read(1)
    one.store.touch([key(2), key(9)])
    one.contains(3)  # a question alone is no use; it takes the news along
    assert [admin.ttl(one.name(n)) > 10 for n in (1, 2, 3, 4)] == [True, True, False, False]
    admin.expire(one.name(1), 0)
    assert one.read(1) == [VANISHED]
    assert 990 < admin.ttl(one.store._names.manifest) <= 1000


def test_a_touch_is_a_use_for_the_servers_eviction(opened, admin):
    one = opened()
    one.write(1)
    touched = admin.info("commandstats").get("cmdstat_touch", {"calls": 0})["calls"]
    one.store.touch([key(1)] * 3)
    one.contains(2)
    assert admin.info("commandstats")["cmdstat_touch"]["calls"] == touched + 1
    assert admin.ttl(one.name(1)) == -1


def test_a_manifest_says_what_the_bytes_are_and_comes_back_when_it_is_gone(opened, admin):
    one = opened()
    name = one.store._names.manifest
    one.write(1)
    assert admin.get(name) == NAMESPACE.manifest().encode()
    admin.delete(name)
    one.read(1)
    assert admin.get(name) is None
    one.clock.advance(60)
    one.read(1)
    assert admin.get(name) == NAMESPACE.manifest().encode()
    admin.set(name, "another")
    with pytest.raises(ConfigError, match=r"which disagrees with the model .* delete that key"):
        opened(prefix=one.options.prefix)


def test_stores_with_one_prefix_share_and_others_do_not(opened):
    one, two = opened(), opened()
    same = opened(prefix=one.options.prefix)
    one.write(1)
    assert same.read(1) == [None]
    assert two.read(1) == [VANISHED]
    assert [entry.key for entry in same.store.scan()] == [key(1)]


def test_a_scan_is_cut_into_steps_and_sees_past_what_is_others(opened, admin):
    one = opened()
    prefix = one.options.prefix
    admin.mset({f"{prefix}:{NAMESPACE.id}:{n}": "x" for n in range(3000)})
    admin.mset({f"{prefix}x:{n}": "x" for n in range(2000)})
    one.write(*range(20))
    list(one.store.scan())
    before = admin.info("commandstats")["cmdstat_scan"]["calls"]
    assert sorted(e.key for e in one.store.scan()) == sorted(key(n) for n in range(20))
    assert admin.info("commandstats")["cmdstat_scan"]["calls"] - before >= 5000 // 1024


def test_chunks_that_no_server_takes_are_refused():
    layout = type(context().layout)((GroupLayout(0, opening.MAX_VALUE_BYTES, 16),))
    made = context()
    object.__setattr__(made, "layout", layout)
    with pytest.raises(ConfigError, match="a server takes values of up to 536870912"):
        kv.build(made, KvOptions(url="redis://127.0.0.1:1"))


def test_a_key_that_is_too_long_fails_alone(opened):
    one = opened()
    long = key(0)[:-4] * 20 + key(0)[-4:]
    error, good = one.store.write([Item(long, filled(0)), Item(key(1), filled(1))])
    assert error.kind is Kind.UNSUPPORTED
    assert good is None
