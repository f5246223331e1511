"""Whatever a server or the network says: one sentence, with what to do, and never a secret."""

import pytest
from redis import exceptions as redis
from redis._parsers import BaseParser

from kvtiers.errors import Kind, KVTiersError, Retry
from kvtiers.tiers.kv.failures import explained, refusal


@pytest.mark.parametrize(
    ("said", "kind", "what"),
    [
        ("OOM command not allowed when used memory > 'maxmemory'.", Kind.FULL, "OOM: its memory"),
        ("READONLY You can't write against a read only replica.", Kind.IO, "READONLY: it is a rep"),
        ("MISCONF Errors writing to the AOF file", Kind.IO, "MISCONF: it takes nothing while it"),
        ("NOREPLICAS Not enough good replicas to write.", Kind.IO, "NOREPLICAS: it takes nothing"),
        ("LOADING Valkey is loading the dataset in memory", Kind.IO, "LOADING: it is loading"),
        ("BUSY Valkey is busy running a script.", Kind.IO, "BUSY: a script keeps it busy"),
        ("MASTERDOWN Link with MASTER is down", Kind.IO, "MASTERDOWN: it is a replica"),
        ("CLUSTERDOWN Hash slot not served", Kind.IO, "CLUSTERDOWN: some slots"),
        ("TRYAGAIN Multiple keys request during rehashing", Kind.IO, "TRYAGAIN: the slot"),
        ("MOVED 3999 127.0.0.1:6381", Kind.IO, "MOVED: it is of a cluster: write redis+cluster"),
        ("ASK 3999 127.0.0.1:6381", Kind.IO, "ASK: it is of a cluster"),
        ("NOAUTH Authentication required.", Kind.IO, "NOAUTH: it asks who we are: give password"),
        ("WRONGPASS invalid username-password pair", Kind.IO, "WRONGPASS: it does not accept"),
        ("NOPERM this user has no permissions", Kind.IO, "NOPERM: the user may not do that"),
        ("WRONGTYPE Operation against a key holding", Kind.CORRUPT, "WRONGTYPE: what lies there"),
        ("ERR max number of clients reached", Kind.IO, "cannot be reached: max number of clients"),
        ("ERR unknown command 'GET'", Kind.IO, "refuses to read: unknown command"),
        ("UNKNOWNWORD whatever " + "x" * 999, Kind.IO, "refuses to read: UNKNOWNWORD whatever"),
    ],
)
def test_what_servers_say(said: str, kind: Kind, what: str) -> None:
    error = explained(BaseParser.parse_error(said), "read", "host:1")
    assert (error.kind, error.operation) == (kind, "read")
    assert what in str(error)
    assert len(str(error)) < 300


def test_what_the_network_says() -> None:
    late = explained(redis.TimeoutError("Timeout reading from socket"), "read", "h")
    assert (late.kind, late.retry) == (Kind.TIMEOUT, Retry.NEVER)
    lost = explained(redis.ConnectionError("Connection closed by server."), "read", "h")
    assert (lost.kind, lost.retry) == (Kind.IO, Retry.MAY)
    refused = redis.ConnectionError("Error 111 connecting to h:1. Connection refused.")
    refused.__context__ = ConnectionRefusedError()
    assert str(explained(refused, "read", "h")) == "h cannot be reached: nobody listens there"
    assert explained(refused, "read", "h").retry is Retry.NEVER
    ours = KVTiersError("ours", kind=Kind.IO)
    assert explained(ours, "read", "h") is ours


def test_what_is_worth_a_refusal() -> None:
    for said in ("NOAUTH x", "WRONGPASS x", "NOPERM x"):
        refused = refusal(BaseParser.parse_error(said), "h")
        assert refused is not None
        assert refused.context["key"] == "password_file"
    moved = refusal(BaseParser.parse_error("MOVED 1 h:1"), "h")
    assert moved is not None
    assert str(moved).startswith("url is wrong or missing: h says MOVED")
    for passing in (redis.ConnectionError("x"), redis.TimeoutError("x"), OSError("x")):
        assert refusal(passing, "h") is None
