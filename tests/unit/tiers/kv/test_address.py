"""URLs of servers."""

import pytest

from kvtiers.errors import ConfigError
from kvtiers.tiers.kv.address import Address, parse_address

ONE = (("h", 6379),)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://h", Address("single", ONE)),
        ("valkey://h/", Address("single", ONE)),
        ("redis://h:1/3", Address("single", (("h", 1),), db=3)),
        ("redis://[::1]:7/0", Address("single", (("::1", 7),))),
        ("rediss://h", Address("single", ONE, tls=True)),
        ("valkeys://u@h", Address("single", ONE, tls=True, username="u")),
        ("redis://:p%40w@h", Address("single", ONE, password="p@w")),
        ("redis://u:a@b:c@h", Address("single", ONE, username="u", password="a@b:c")),
        ("redis+cluster://a,b:2", Address("cluster", (("a", 6379), ("b", 2)))),
        ("valkeys+cluster://a", Address("cluster", (("a", 6379),), tls=True)),
        (
            "redis+sentinel://a,b:3/s/2",
            Address("sentinel", (("a", 26379), ("b", 3)), service="s", db=2),
        ),
        ("unix:///run/v.sock?db=4", Address("single", (), path="/run/v.sock", db=4)),
        ("unix://:pw@/run/v", Address("single", (), path="/run/v", password="pw")),
    ],
)
def test_what_a_url_says(url: str, address: Address) -> None:
    assert parse_address(url) == address
    assert address.password is None or address.password not in str(address) + repr(address)
    if not (address.username or address.password):
        assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("s3://bucket", "begins with 's3': write one that begins with redis://"),
        ("h:6379", "is no URL"),
        ("redis://", "it names no server"),
        ("redis://h:0", "it names no server"),
        ("redis://h:70000", "it names no server"),
        ("redis://h:x", "it names no server"),
        ("redis://a,b", "it names several servers: write redis+cluster://"),
        ("redis://h/x", "a database is a number"),
        ("redis://h/1/2", "a database is a number"),
        ("redis+cluster://h/1", "a cluster has no databases"),
        ("redis+sentinel://h", "it names no service; write one like redis+sentinel://"),
        ("redis://h?db=1", "options stand beside the url"),
        ("redis://h#x", "it has a #"),
        ("redis+cluster+tls://h", "begins with 'redis+cluster+tls'"),
        ("unix://host/x", "it names no socket; write one like unix:///"),
        ("unix://", "it names no socket"),
        ("unix:///x?password=y", "there may be db=NUMBER"),
        ("redis://[::1", "it cannot be read"),
    ],
)
def test_what_is_refused(url: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_address(url)
    assert complaint in str(refused.value)
    assert refused.value.context["key"] == "url"


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hunter2@",
        "redis://u:hunter2@h:x",
        "rediss://u:hunter2@a,b",
        "redis://u:hunter2@h?x=1",
        "redis://u:hunter2@h#1",
        "unix://u:hunter2@h/x",
        "redis://u:hunter2@[::1",
        "redis+cluster://u:hunter2@h/1",
    ],
)
def test_a_refusal_shows_no_password(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_address(url)
    assert "hunter2" not in f"{refused.value} {refused.value!r} {refused.value.context}"
    assert refused.value.__cause__ is None
