"""Memory of the server: what it evicts is a miss, what it refuses is FULL."""

import contextlib
import logging

import pytest

from kvtiers.errors import ConfigError, Kind
from kvtiers.events import Reason
from kvtiers.tiers.kv.memory import Bound
from kvtiers.tiers.kv.uses import Uses
from tests.unit.tiers.tier_kit import CHUNK, key

MANY = 600


@pytest.fixture
def small(server):
    """It has room for about half of the chunks."""
    used = server.do("INFO", "memory")["used_memory"]
    server.do("CONFIG", "SET", "maxmemory", used + MANY * CHUNK // 2)
    return server


def test_what_the_server_evicts_is_a_miss(small, opened):
    small.do("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    one = opened(url=small.url)
    for n in range(MANY):
        assert one.write(n) == [None]
    there = one.contains(*range(MANY))
    assert 0 < sum(there) < MANY
    assert there[-1]
    gone = there.index(False)
    assert one.read(gone) == [Kind.VANISHED]
    assert one.removed == [(key(gone), Reason.VANISHED)]
    usage = one.store.usage()
    assert usage.used_bytes <= usage.capacity_bytes * 1.1


def test_what_a_server_refuses_for_want_of_memory_is_full(small, opened, caplog):
    small.do("CONFIG", "SET", "maxmemory-policy", "noeviction")
    one = opened(url=small.url)
    results = [one.write(n)[0] for n in range(MANY)]
    assert set(results) == {None, Kind.FULL}
    assert "says OOM: its memory is full, and it evicts nothing: set allkeys-lru" in str(
        one.failure()
    )
    assert caplog.text.count("write fails, which costs hits and nothing else; said once") == 1
    assert one.read(0) == [None]
    small.do("CONFIG", "SET", "maxmemory", 0)
    assert one.write(MANY) == [None]


def test_a_bound_of_ours_holds_where_the_server_has_none(server, opened):
    used = server.do("INFO", "memory")["used_memory"]
    one = opened(url=server.url, capacity_bytes=used + 100 * CHUNK)
    one.store.usage()
    results = [one.write(n)[0] for n in range(300)]
    assert results.index(Kind.FULL) <= 100
    assert "as much as capacity_bytes" in str(one.failure())
    assert server.do("INFO", "memory")["used_memory"] < used + 150 * CHUNK
    assert one.store.usage().capacity_bytes == used + 100 * CHUNK
    server.do("FLUSHALL", "SYNC")
    one.store.usage()
    assert one.write(1) == [None]


@pytest.mark.parametrize(
    ("settings", "options", "warning"),
    [
        ({}, {}, "has no maxmemory, so that chunks fill its machine"),
        ({}, {"capacity_bytes": 1 << 30}, None),
        ({"maxmemory": 1 << 30, "maxmemory-policy": "allkeys-lfu"}, {}, None),
        ({"maxmemory": 1 << 30}, {}, "maxmemory-policy noeviction, so that it takes no new"),
        ({"maxmemory": 1 << 30, "maxmemory-policy": "volatile-lru"}, {}, "volatile-lru, so that"),
        ({"maxmemory": 1 << 30, "maxmemory-policy": "volatile-lru"}, {"ttl_s": 9}, None),
    ],
)
def test_a_server_without_a_bound_is_warned_of_once(
    server, opened, caplog, settings, options, warning
):
    for name, value in settings.items():
        server.do("CONFIG", "SET", name, value)
    one = opened(url=server.url, **options)
    for _ in range(2):
        one.store.usage()
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == (warning is not None)
    if warning:
        assert warning in warnings[0]


def test_a_bound_that_cannot_be_looked_at_is_refused(server, opened):
    server.do("ACL", "SETUSER", "default", "-info")
    with pytest.raises(ConfigError, match=r"capacity_bytes cannot be kept: .* NOPERM"):
        opened(url=server.url, capacity_bytes=1 << 30)
    assert opened(url=server.url).write(1) == [None]


def broken(why):
    """A check finds what is broken; under ``python -O`` it looks for nothing."""
    return pytest.raises(AssertionError, match=why) if __debug__ else contextlib.nullcontext()


def test_what_is_checked_of_bounds_can_fail():
    bound, uses = Bound(1), Uses()
    uses.note([key(n % 9) for n in range(70_000)])
    bound.check()
    uses.check()
    assert len(uses.take()) == 9
    bound._used = -1
    with broken("less than nothing"):
        bound.check()
    uses._noted = range(70_000)
    with broken("more uses are noted"):
        uses.check()
