"""A cluster: chunks on all of its servers, whatever becomes of one of them."""

import threading
from collections.abc import Iterator

import pytest
from redis.crc import key_slot
from redis.exceptions import InvalidResponse

from kvtiers.errors import ConfigError, Kind
from kvtiers.tiers.base import Item
from kvtiers.tiers.kv.cluster import slots_of
from tests.servers import valkey
from tests.unit.tiers.kv.test_login import NEEDED
from tests.unit.tiers.tier_kit import CHUNK, key

MANY = range(60)


@pytest.fixture(scope="module")
def cluster() -> Iterator[valkey.Cluster]:
    with valkey.cluster(3, 1) as made:
        yield made


def prefix() -> str:
    return valkey.shared().new_prefix()


def test_chunks_spread_over_all_servers_in_one_call(cluster, opened):
    one = opened(url=cluster.url, prefix=prefix())
    before = [node.do("DBSIZE") for node in cluster.primaries]
    assert one.write(*MANY) == [None] * 60
    assert one.read(*MANY) == [None] * 60
    assert one.contains(*MANY, 99) == [True] * 60 + [False]
    assert {entry.key for entry in one.store.scan()} == {key(n) for n in MANY}
    gained = [
        node.do("DBSIZE") - size for node, size in zip(cluster.primaries, before, strict=True)
    ]
    assert sum(gained) == 61
    assert min(gained) >= 8
    one.store.delete([key(n) for n in MANY])
    assert not any(one.contains(*MANY))


def test_its_memory_is_that_of_all(cluster, opened):
    one = opened(url=cluster.url, prefix=prefix(), capacity_bytes=1 << 40)
    used = one.store.usage().used_bytes
    assert used > 2 * max(node.do("INFO", "memory")["used_memory"] for node in cluster.primaries)


def test_a_server_of_a_cluster_is_refused_as_a_single_one(cluster, opened):
    with pytest.raises(ConfigError, match=r"url .*write redis\+cluster://"):
        opened(url=cluster.primaries[0].url)


def test_a_single_server_is_refused_as_a_cluster(server, opened):
    with pytest.raises(ConfigError, match=r"is of no cluster: write redis://"):
        opened(url=f"redis+cluster://{server.host}")


def test_a_user_with_the_rights_that_the_documents_name_is_enough(cluster, opened, tmp_path):
    password = tmp_path / "password"
    password.write_text("secret")
    rights = f"{NEEDED} +cluster|slots +asking".split()
    for node in cluster.nodes:
        node.do("ACL", "SETUSER", "engine", "on", ">secret", *rights, "~ours:*")
    one = opened(url=cluster.url, username="engine", password_file=str(password), prefix="ours")
    assert one.write(*MANY) == [None] * 60
    assert one.read(*MANY) == [None] * 60
    assert len(list(one.store.scan())) == 60
    one.store.usage()
    for node in cluster.nodes:
        with node.admin() as admin:
            assert admin.acl_log() == []


def test_slots_that_move_are_followed_chunk_by_chunk(cluster, opened):
    """While a slot moves, its chunks are at two servers, and each names the other."""
    one = opened(url=cluster.url, prefix=prefix())
    source, target = cluster.primaries[:2]
    mine = [n for n in range(3000) if key_slot(one.name(n)) <= 5460]
    slots = {key_slot(one.name(n)) for n in mine[:4]}
    there, later = mine[:4], [n for n in mine[4:] if key_slot(one.name(n)) in slots][:1]
    assert one.write(*there) == [None] * 4
    for slot in slots:
        target.do("CLUSTER", "SETSLOT", slot, "IMPORTING", cluster.id_of(source))
        source.do("CLUSTER", "SETSLOT", slot, "MIGRATING", cluster.id_of(target))
    gone = one.name(there[0])
    source.do("MIGRATE", "127.0.0.1", target.port, gone, 0, 5000)
    assert one.read(*there) == [None] * 4
    assert one.write(*later) == [None] * len(later)
    assert one.contains(*there) == [True] * 4
    for slot in slots:
        names = source.do("CLUSTER", "GETKEYSINSLOT", slot, 100)
        for name in names:
            source.do("MIGRATE", "127.0.0.1", target.port, name, 0, 5000)
        for node in (target, source, cluster.primaries[2]):
            node.do("CLUSTER", "SETSLOT", slot, "NODE", cluster.id_of(target))
    assert one.read(*there, *later) == [None] * (4 + len(later))
    one.clock.advance(2)
    assert one.read(*there) == [None] * 4  # with a new table, without being sent on


def test_a_user_who_may_not_follow_a_slot_that_moves(cluster, opened, tmp_path):
    """Each call has two replies then, and both are taken: the connection keeps its place."""
    password = tmp_path / "password"
    password.write_text("secret")
    for node in cluster.nodes:
        rights = f"{NEEDED} +cluster|slots -asking ~strict:*".split()
        node.do("ACL", "SETUSER", "strict", "on", ">secret", *rights)
    login = {"username": "strict", "password_file": str(password), "prefix": "strict"}
    one = opened(url=cluster.url, **login)
    source, target = cluster.primaries[:2]
    mine = [n for n in range(3000) if key_slot(one.name(n)) <= 5460][:4]
    slots = {key_slot(one.name(n)) for n in mine}
    assert one.write(*mine) == [None] * 4
    for slot in slots:
        target.do("CLUSTER", "SETSLOT", slot, "IMPORTING", cluster.id_of(source))
        source.do("CLUSTER", "SETSLOT", slot, "MIGRATING", cluster.id_of(target))
    for n in mine[:3]:
        source.do("MIGRATE", "127.0.0.1", target.port, one.name(n), 0, 5000)
    assert one.read(*mine) == [Kind.IO] * 3 + [None]
    assert "NOPERM" in str(one.store.read([Item(key(mine[0]), memoryview(bytearray(CHUNK)))])[0])
    idle = one.store._servers._server(("127.0.0.1", target.port)).pool._available_connections
    assert len(idle) == 1
    assert not idle[0].can_read(timeout=0.2)
    assert not one.removed
    source.do("MIGRATE", "127.0.0.1", target.port, one.name(mine[3]), 0, 5000)
    for slot in slots:
        for node in (target, source, cluster.primaries[2]):
            node.do("CLUSTER", "SETSLOT", slot, "NODE", cluster.id_of(target))


@pytest.mark.parametrize(
    "table",
    [
        None,
        7,
        [7],
        [[0, 1]],
        [[0, 1, []]],
        [[0, 16384, [b"h", 1]]],
        [[5, 4, [b"h", 1]]],
        [[-1, 4, [b"h", 1]]],
        [[0, 1, [b"h", 70000]]],
        [[0, 1, [b"\xff", 1]]],
        [[b"0", 1, [b"h", 1]]],
        [[0, 1, [7, 1]]],
    ],
)
def test_what_is_no_table_of_slots(table):
    with pytest.raises(InvalidResponse, match="no table of slots"):
        slots_of(table, ("asked", 1))


def test_a_table_of_slots():
    table = [[0, 1, [b"h", 1], [b"replica", 2]], [3, 3, [None, 5, b"id"]]]
    slots = slots_of(table, ("asked", 9))
    assert slots[:5] == [("h", 1), ("h", 1), None, ("asked", 5), None]
    assert len(slots) == 16384


def test_a_server_that_dies_takes_its_own_chunks_until_its_replica_takes_over(opened):
    with valkey.cluster(3, 1) as cluster:
        one = opened(url=cluster.url)
        assert one.write(*MANY) == [None] * 60
        cluster.replicas[0].do("PING")
        valkey.wait_until(lambda: _same_offset(cluster), "the replica has all")
        cluster.primaries[0].kill()
        there = one.contains(*MANY)
        assert 0 < sum(there) < 60
        assert all(one.store.still_there([key(n) for n in MANY])), "nobody knows better"
        kinds = one.read(*MANY)
        assert {kind for kind, here in zip(kinds, there, strict=True) if here} == {None}
        assert {kind for kind, here in zip(kinds, there, strict=True) if not here} == {Kind.IO}
        assert not one.removed

        def taken_over() -> bool:
            one.clock.advance(2)
            return all(one.contains(*MANY))

        valkey.wait_until(taken_over, "the replica has taken over")
        assert one.read(*MANY) == [None] * 60


def _same_offset(cluster: valkey.Cluster) -> bool:
    ours = cluster.primaries[0].do("INFO", "replication")
    return ours["slave0"]["offset"] == ours["master_repl_offset"]


def test_a_server_that_hangs_does_not_hold_up_the_others_for_long(cluster, opened):
    one = opened(url=cluster.url, prefix=prefix(), timeout_s=0.3, connect_timeout_s=0.3)
    assert one.write(*MANY) == [None] * 60
    with cluster.primaries[2].frozen():
        kinds = one.read(*MANY)
        assert set(kinds) == {None, Kind.TIMEOUT}
        again = one.read(*MANY)  # it is left alone for a moment
        assert [kind and Kind.IO for kind in kinds] == again
        with pytest.raises(Exception, match="could not be reached a moment ago"):
            one.store.usage()
        one.clock.advance(1.1)
        assert one.read(*MANY).count(Kind.TIMEOUT) == 1  # one call tries it
    one.clock.advance(2)
    assert one.read(*MANY).count(Kind.IO) == kinds.count(Kind.TIMEOUT) - 1  # and now it answers
    assert one.read(*MANY) == [None] * 60


def test_all_servers_are_down(opened, caplog):
    with valkey.cluster(3) as cluster:
        one = opened(url=cluster.url)
        one.write(*MANY)
        for node in cluster.nodes:
            node.kill()
        one.clock.advance(2)
        assert one.write(1) == [Kind.IO]
        with pytest.raises(Exception, match="could not be reached a moment ago"):
            one.contains(1)
        late = opened(url=cluster.url)
        assert "no server of the cluster says who has what" in caplog.text
        assert late.write(1) == [Kind.IO]


def test_many_lanes_share_one_table(cluster, opened):
    one = opened(url=cluster.url, prefix=prefix())
    results: list[Kind | None] = []
    lanes = [
        threading.Thread(target=lambda n=n: results.extend(one.write(*range(n, n + 20))))
        for n in range(0, 160, 20)
    ]
    for lane in lanes:
        lane.start()
    for lane in lanes:
        lane.join(30)
    assert results == [None] * 160
    assert one.read(*range(160)) == [None] * 160
    assert sum(entry.bytes for entry in one.store.scan()) == 160 * CHUNK
