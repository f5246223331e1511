"""Options of the kv tier, and where its secrets come from."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvtiers.errors import ConfigError
from kvtiers.tiers import check_tiers
from kvtiers.tiers.kv import KvOptions, build
from kvtiers.tiers.kv.address import parse_address
from kvtiers.tiers.kv.options import secret
from kvtiers.tiers.kv.servers import servers_of
from tests.unit.tiers.tier_kit import ManualClock, context

SENTINEL = "redis+sentinel://h/s"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"url": "http://h"}, "url begins with 'http'"),
        ({"username": "a", "url": "redis://b@h"}, "username is given, and the url has one"),
        ({"password_env": "A", "password_file": "/f"}, "password_env and password_file are both"),
        ({"password_env": "A", "url": "redis://:p@h"}, "password_env is given, and the url has"),
        ({"sentinel_password_env": "A"}, "sentinel_password_env is given, but redis://h:6379 asks"),
        ({"tls_ca_file": "/etc/passwd"}, "tls_ca_file is given, but the url is not rediss://"),
        ({"url": "rediss://h", "tls_ca_file": "/no"}, "tls_ca_file is /no, which cannot be read"),
        (
            {"url": "rediss://h", "tls_cert_file": "/etc/passwd"},
            "tls_key_file and tls_cert_file go together",
        ),
        ({"prefix": "a{b}"}, "prefix is 'a{b}': give up to 64 letters"),
        ({"prefix": ""}, "prefix is ''"),
        ({"ttl_s": 0.5}, "ttl_s is 0.5: give 1 or more"),
        ({"ttl_s": float("inf")}, "ttl_s is inf: give 1 or more, and at most 1000000000"),
        ({"timeout_s": 0}, "timeout_s is 0: give more than 0"),
        ({"timeout_s": float("inf")}, "timeout_s is inf: give more than 0, and at most 86400"),
        ({"connect_timeout_s": 1e12}, "connect_timeout_s is 1000000000000.0: give more than 0"),
        ({"max_batch_bytes": 0}, "max_batch_bytes is 0"),
        ({"capacity_bytes": 0}, "capacity_bytes is 0"),
    ],
)
def test_what_is_refused(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        KvOptions(**{"url": "redis://h", **options})
    assert complaint in str(refused.value)


def test_secrets_of_both_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "password"
    file.write_text("first line\nsecond\n")
    monkeypatch.setenv("KVTIERS_TEST_PASSWORD", "from the environment")
    options = KvOptions(
        url=SENTINEL,
        password_file=str(file),
        sentinel_password_env="KVTIERS_TEST_PASSWORD",
    )
    assert secret(options) == "first line"
    assert secret(options, "sentinel_") == "from the environment"
    assert secret(KvOptions(url=SENTINEL)) is None


def test_secrets_that_are_not_there(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    for given, complaint in (
        ({"password_env": "KVTIERS_NOT_SET"}, "password_env is KVTIERS_NOT_SET, which is not set"),
        ({"password_file": str(empty)}, "whose first line is empty"),
        ({"password_file": str(tmp_path)}, "which cannot be read: Is a directory"),
        ({"password_file": "/no/such"}, "No such file"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            build(context(), KvOptions(url="redis://127.0.0.1:1", **given))


def test_a_password_in_the_url_is_not_shown() -> None:
    options = KvOptions(url="redis://u:hunter2@h")
    assert "hunter2" not in repr(options)


def test_without_its_client_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    check_tiers([])  # the type is known without it
    options = KvOptions(url="redis://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError) as refused:
        build(context(), options)
    assert str(refused.value) == (
        'type is "kv", which needs redis-py 8, which is not installed: pip install "kvtiers[kv]"'
    )


def test_nobody_pays_for_the_client_who_does_not_use_it() -> None:
    told = "import sys, kvtiers.tiers, kvtiers.demo.main; sys.exit('redis' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", told], check=False).returncode == 0


def test_another_version_of_its_client_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redis.__version__", "5.0.0")
    with pytest.raises(ConfigError, match=r"redis-py 8, of which 5\.0\.0 is installed"):
        build(context(), KvOptions(url="redis://127.0.0.1:1"))


@pytest.mark.parametrize(
    ("url", "wire"),
    [
        ("redis://h", "TcpWire"),
        ("rediss://h", "TlsWire"),
        ("unix:///s", "UnixWire"),
        ("redis+sentinel://h/s", "SentinelWire"),
        ("rediss+sentinel://h/s", "SentinelTlsWire"),
    ],
)
def test_each_scheme_has_its_kind_of_connection(url: str, wire: str) -> None:
    options = KvOptions(url=url, n_read_threads=3, n_write_threads=2, timeout_s=7)
    servers = servers_of(parse_address(url), options, ManualClock())
    (server,) = servers.all()
    connection = server.pool.make_connection()
    assert type(connection).__name__ == wire
    assert (connection.socket_timeout, connection.retry.get_retries()) == (7, 0)
    assert server.pool.max_connections == 3 + 2 + options.max_replacement_threads + 4
    servers.close()
