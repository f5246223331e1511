"""Who may log in, over what; and that nobody reads the password anywhere."""

import logging
from pathlib import Path

import pytest

from kvtiers.errors import ConfigError, Kind
from tests.servers import valkey
from tests.unit.tiers.kv.tls import certificate, tls_in_front_of

SECRET = "hunter2 at midnight"
NEEDED = "+get +set +exists +unlink +touch +expire +scan +info"


@pytest.fixture
def guarded():
    """A server whose default user has a password, with a user that may do what is needed."""
    with valkey.valkey(requirepass=SECRET) as server:
        rights = (*NEEDED.split(), "~ours:*")
        server.do("ACL", "SETUSER", "engine", "on", f">{SECRET}", *rights)
        yield server


@pytest.fixture
def password(tmp_path: Path) -> str:
    file = tmp_path / "password"
    file.write_text(SECRET + "\n")
    return str(file)


def test_a_password_from_a_file_the_environment_or_the_url(guarded, password, opened, monkeypatch):
    monkeypatch.setenv("KVTIERS_TEST_PASSWORD", SECRET)
    in_url = f"redis://:{SECRET.replace(' ', '%20')}@{guarded.host}"
    one = opened(url=guarded.url, password_file=password)
    assert one.write(1) == [None]
    for options in (
        {"url": guarded.url, "password_env": "KVTIERS_TEST_PASSWORD"},
        {"url": in_url},
        {"url": f"unix://{guarded.socket}", "password_file": password},
    ):
        assert opened(**options).read(1) == [None]


def test_a_user_with_the_rights_that_the_documents_name_is_enough(guarded, password, opened):
    one = opened(
        url=guarded.url, username="engine", password_file=password, prefix="ours", ttl_s=100
    )
    assert one.write(1, 2) == [None] * 2
    assert one.read(1) == [None]
    assert one.contains(1, 3) == [True, False]
    assert len(list(one.store.scan())) == 2
    one.store.delete([])
    one.store.touch([entry.key for entry in one.store.scan()])
    assert one.contains(1) == [True]
    one.store.usage()
    with guarded.admin() as admin:
        assert {e["username"] for e in admin.acl_log()} == set()


def test_rights_that_are_taken_away_later_cost_misses(guarded, password, opened, caplog):
    options = {"username": "engine", "password_file": password, "prefix": "ours"}
    one = opened(url=guarded.url, **options)
    guarded.do("ACL", "SETUSER", "engine", "-set")
    assert one.write(1) == [Kind.IO]
    assert "says NOPERM: the user may not do that: allow it with ACL SETUSER" in str(one.failure())
    guarded.do("ACL", "SETUSER", "engine", "+set")
    assert one.write(1) == [None]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({}, "password_file is wrong or missing: redis://HOST says NOAUTH: it asks who we are"),
        ({"username": "engine"}, "says WRONGPASS: it does not accept the user or the password"),
        ({"username": "nobody", "right": True}, "says WRONGPASS"),
        ({"username": "engine", "right": True, "prefix": "theirs"}, "says NOPERM"),
    ],
)
def test_who_may_not_is_refused_at_the_start(
    guarded, password, tmp_path, opened, options, complaint
):
    wrong = tmp_path / "wrong"
    wrong.write_text("wrong " + SECRET)
    given = dict(options)
    if given.pop("right", False):
        given["password_file"] = password
    elif given:
        given["password_file"] = str(wrong)
    with pytest.raises(ConfigError) as refused:
        opened(url=guarded.url, **given)
    assert complaint.replace("HOST", guarded.host) in str(refused.value)
    assert SECRET not in str(refused.value) + repr(refused.value)


def test_a_password_is_nowhere_to_be_read(guarded, opened, caplog):
    """Not in what is shown, logged, reported, raised or stored, and not while nobody answers."""
    caplog.set_level(logging.DEBUG)
    url = f"redis://:{SECRET.replace(' ', '%20')}@{guarded.host}"
    one = opened(url=url)
    one.write(1)
    parts = one.store, one.options, one.store._complaints, one.store._servers
    shown = [repr(part) for part in parts]
    with guarded.admin() as admin:
        shown += [f"{name}{admin.get(name)}" for name in admin.scan_iter()]
    guarded.kill()
    shown += [repr(one.failure()), repr(opened(url=url).failure())]
    shown += [record.getMessage() + str(record.args) for record in caplog.records]
    for text in shown:
        assert SECRET not in text
        assert SECRET.replace(" ", "%20") not in text


@pytest.fixture
def trusted(tmp_path):
    return certificate(tmp_path, "trusted")


def test_over_tls_with_a_certificate_of_ones_own(server, trusted, tmp_path, opened):
    with tls_in_front_of(server.port, trusted, None) as port:
        one = opened(url=f"rediss://127.0.0.1:{port}", tls_ca_file=str(trusted[0]))
        assert one.write(*range(300)) == [None] * 300
        assert one.read(*range(300)) == [None] * 300
        other, _ = certificate(tmp_path, "other")
        with pytest.raises(ConfigError, match="tls_ca_file does not vouch for rediss://"):
            opened(url=f"rediss://127.0.0.1:{port}", tls_ca_file=str(other))
        with pytest.raises(ConfigError, match="tls_ca_file does not vouch for rediss://"):
            opened(url=f"rediss://127.0.0.1:{port}")


def test_a_certificate_for_another_host(server, tmp_path, opened):
    elsewhere = certificate(tmp_path, "elsewhere", host="192.0.2.1")
    with tls_in_front_of(server.port, elsewhere, None) as port:
        options = {"url": f"rediss://127.0.0.1:{port}", "tls_ca_file": str(elsewhere[0])}
        with pytest.raises(ConfigError, match="does not vouch for"):
            opened(**options)
        assert opened(**options, tls_check_hostname=False).write(1) == [None]


def test_a_certificate_of_ours_where_the_server_asks_for_one(server, trusted, tmp_path, opened):
    cert, key = certificate(tmp_path, "engine")
    with tls_in_front_of(server.port, trusted, cert) as port:
        options = {"url": f"rediss://127.0.0.1:{port}", "tls_ca_file": str(trusted[0])}
        one = opened(**options, tls_cert_file=str(cert), tls_key_file=str(key))
        assert one.write(1) == [None]
        with pytest.raises(ConfigError, match="does not speak TLS as we do"):
            opened(**options)
