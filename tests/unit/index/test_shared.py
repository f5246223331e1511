"""Snapshots in a real Valkey: what a replica that starts, or one that lost the thread, takes up."""

import msgspec
import pytest

from kvtiers.errors import ConfigError
from kvtiers.index.places import MAX_PLACES
from kvtiers.index.presence import Presence
from kvtiers.index.shared import Shared
from kvtiers.index.snapshot import packed, unpacked
from tests.servers import valkey
from tests.unit.index.index_kit import Now, Publisher, following, held, on_a_loop, stored, until
from tests.unit.index.test_presence import CPU, GPU, asked, told
from tests.unit.index.test_presence import removed as lost
from tests.unit.index.test_presence import stored as says
from tests.unit.test_checks import broken


@pytest.fixture(scope="module")
def server():
    with valkey.valkey() as made:
        yield made


def test_a_snapshot_is_what_was_known():
    window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 17}
    presence = told(
        ("a", says([1, 2, 3], group=0)),
        ("a", says([1], group=0)),
        ("a", says([3, 2**64 - 1], CPU, group=0)),
        ("a", says([3], group=1, **window)),
        ("b", says([1, 2, 9])),
    )
    before = asked(presence, [1, 2, 3])
    data = packed(presence.snapshot("a", 7, 8))
    other = told(("a", says([5], CPU, group=4)))
    other.drop("a")
    other.restore("a", unpacked(data))
    other.check()
    assert asked(other, [1, 2, 3]) == {"a": before["a"]}
    other.apply("a", lost([1], group=0))
    assert asked(other, [1, 2, 3]) == {"a": before["a"]}, "it was held twice"
    other.apply("a", lost([1], GPU, group=0))
    assert asked(other, [1, 2, 3]) == {}


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x01", packed(told(("a", says([1]))).snapshot("a", 1, 1))[:-1]]
)
def test_what_is_no_snapshot_is_none(data):
    assert unpacked(data) is None


def test_a_snapshot_of_another_version_or_torn_is_none():
    whole = msgspec.msgpack.decode(packed(told(("a", says([1]))).snapshot("a", 1, 1)))
    version, body = whole
    assert unpacked(msgspec.msgpack.encode((version + 2, body))) is None
    body[4][0][-1] = body[4][0][-1][:-1]
    assert unpacked(msgspec.msgpack.encode((version, body))) is None


@pytest.mark.parametrize(
    ("at", "lie"),
    [
        (0, -1),
        (0, 2**64 - 1),
        (3, [[0, "", -16, 0]]),
        (4, [["GPU", "", "", 0, b""]] * (MAX_PLACES + 1)),
        (5, [[-2, 1, 1]]),
        (5, [[0, -1, 1]]),
        (5, [[0, 1, 0]]),
    ],
)
def test_a_snapshot_of_what_cannot_be_is_none(at, lie):
    whole = msgspec.msgpack.decode(packed(told(("a", says([1]))).snapshot("a", 1, 1)))
    whole[1][at] = lie
    assert unpacked(msgspec.msgpack.encode(whole)) is None


@on_a_loop
async def test_a_replica_begins_with_what_the_engine_no_longer_replays(tmp_path, server):
    clock = Now()
    async with Publisher(tmp_path, keeps=2) as engine:
        shared = Shared(server.url)
        async with following(engine, clock, shared=shared) as one:
            for block in (1, 2, 3):
                await engine.say(stored(block))
                await until(lambda block=block: one.course.next == block)
            clock.now += 61
            await until(lambda: shared.written)
            await engine.say(stored(4))
        async with following(engine, clock, shared=shared) as other:
            await until(lambda: held(other, 1, 2, 3, 4) == (4, True))
        async with following(engine, clock) as alone:
            await until(lambda: held(alone, 3, 4) == (2, False))
            assert held(alone, 1) == (0, False)
        assert shared.read == 1
        shared.check()
        await shared.close()


@on_a_loop
async def test_a_snapshot_of_a_process_that_is_gone_is_left_alone(tmp_path, server):
    clock, publisher, shared = Now(), Publisher(tmp_path), Shared(server.url)
    async with publisher as engine, following(engine, clock, shared=shared) as one:
        await engine.say(stored(1))
        await until(lambda: held(one, 1) == (1, True))
        clock.now += 61
        await until(lambda: shared.written)
    async with publisher as engine:
        await engine.say(stored(2))
        async with following(engine, clock, shared=shared) as other:
            await until(lambda: held(other, 2) == (1, True))
            assert held(other, 1) == (0, True)
    await shared.close()


@on_a_loop
async def test_without_the_server_it_goes_on(tmp_path):
    clock, shared = Now(), Shared("redis://127.0.0.1:1")
    async with (
        Publisher(tmp_path) as engine,
        following(engine, clock, shared=shared) as one,
    ):
        await engine.say(stored(1))
        await until(lambda: held(one, 1) == (1, True))
        clock.now += 61
        await until(lambda: shared.failed >= 2)
        assert repr(shared).startswith("<Shared 0 written, 0 read, ")
    await shared.close()


@on_a_loop
async def test_what_is_no_url_is_refused():
    with pytest.raises(ConfigError, match="no URL"):
        Shared("http://127.0.0.1")
    shared = Shared("redis://127.0.0.1:1")
    shared._waiting["x"] = Presence(1)
    with broken("nobody knows"):
        shared.check()
