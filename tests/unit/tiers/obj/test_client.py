"""How a server is reached: certificates, hosts, credentials, time."""

import signal
import ssl
import threading
from datetime import timedelta
from pathlib import Path

import pytest

from kvtiers.errors import ConfigError, Kind, KVTiersError
from kvtiers.tiers.obj import ObjOptions
from kvtiers.tiers.obj import client as client_module
from kvtiers.tiers.obj.client import open_client
from tests.servers.fake_s3 import FakeS3
from tests.servers.s3_faults import S3Fault, What
from tests.servers.s3_objects import Objects
from tests.unit.tiers.obj.obj_kit import SECRETS, Bucket

TLS = Path(__file__).parents[3] / "servers" / "tls"
"""A certificate for 127.0.0.1, and that of its authority; made for these tests, until 2126."""
KEYS = {"access_key_id": SECRETS[0], "secret_access_key": SECRETS[1]}


@pytest.fixture
def secure():
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / "server.pem")
    server = FakeS3()
    listener = server._server
    listener.socket = context.wrap_socket(listener.socket, server_side=True)
    server.endpoint = server.endpoint.replace("http", "https")
    with server:
        yield server


def opened(**options):
    return open_client(ObjOptions(url="s3://bucket/kv", **KEYS, **options))


def test_a_certificate_of_ones_own_authority_is_trusted_if_it_is_named(secure):
    client = opened(endpoint=secure.endpoint, ca_bundle=str(TLS / "ca.pem"))
    client.put("x", [b"over TLS"])
    assert bytes(client.get("x", 100)) == b"over TLS"


def test_a_certificate_of_nobody_known_is_not(secure):
    client = opened(endpoint=secure.endpoint, max_retries=0)
    with pytest.raises(KVTiersError, match="UnknownIssuer") as caught:
        client.put("x", [b"over TLS"])
    assert caught.value.kind is Kind.IO
    assert not secure.objects.now


@pytest.mark.parametrize(
    ("content", "what"),
    [(None, "which cannot be read: No such file"), ("nothing", "which has no certificate")],
)
def test_a_bundle_that_is_none_is_refused(content, what, tmp_path):
    path = tmp_path / "ca.pem"
    if content:
        path.write_text(content)
    with pytest.raises(ConfigError, match=f"^ca_bundle is {path}, {what}"):
        opened(ca_bundle=str(path))


def test_the_bucket_is_in_the_path_or_in_the_host():
    for endpoint in ("https://s3.example.com", "https://bucket.s3.example.com/"):
        found = opened(endpoint=endpoint, virtual_hosted=True).store.config
        assert found["endpoint"] == "https://bucket.s3.example.com"
        assert found["virtual_hosted_style_request"] == "true"
    found = opened(endpoint="https://s3.example.com", region="eu-west-1").store.config
    assert found["endpoint"] == "https://s3.example.com"
    assert found["region"] == "eu-west-1"
    assert found["virtual_hosted_style_request"] == "false"


def test_credentials_are_those_of_the_environment_unless_given(s3, bucket):
    client = Bucket(s3.endpoint, bucket).client()
    client.put("x", [b"by the environment"])
    with pytest.raises(KVTiersError, match="403 InvalidAccessKeyId"):
        Bucket(s3.endpoint, bucket, KEYS).client().get("x", 1)


def test_credentials_of_a_profile(s3, bucket, tmp_path, monkeypatch):
    known = s3.credentials["AWS_ACCESS_KEY_ID"], s3.credentials["AWS_SECRET_ACCESS_KEY"]
    for name in s3.credentials:
        monkeypatch.delenv(name)
    file = tmp_path / "credentials"
    file.write_text(
        "[somebody]\naws_access_key_id = {}\naws_secret_access_key = {}\n".format(*known)
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    client = Bucket(s3.endpoint, bucket).client(profile="somebody")
    client.put("x", [b"by a profile"])
    assert client.size("x") == 12
    with pytest.raises(ConfigError, match="profile is nobody, which gives no credentials"):
        Bucket(s3.endpoint, bucket).client(profile="nobody")


def test_what_a_client_is_told_of_time():
    store = opened(request_timeout_s=2.5, connect_timeout_s=0.5, max_retries=1).store
    assert store.client_options["timeout"] == "2s 500ms"
    assert store.client_options["connect_timeout"] == "500ms"
    assert store.retry_config["max_retries"] == 1
    assert store.retry_config["retry_timeout"] == timedelta(seconds=2.5)


def test_buckets_of_other_clouds(monkeypatch):
    assert repr(open_client(ObjOptions(url="gs://bucket/x"))) == "<Client gs://bucket/x>"
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "somebody")
    assert repr(open_client(ObjOptions(url="az://container/x"))) == "<Client az://container/x>"
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    with pytest.raises(ConfigError, match="cannot be opened: set AZURE_STORAGE_ACCOUNT_NAME"):
        open_client(ObjOptions(url="az://container/x"))


def test_objects_are_listed_in_order_from_a_name_on(s3, bucket):
    client = Bucket(s3.endpoint, bucket).client()
    for n in range(5):
        client.put(f"a/{n}", [b"x" * n])
    client.put("b/1", [b""])
    (page,) = client.objects("a", "a/2")
    assert [(found.name, found.bytes) for found in page] == [("a/3", 3), ("a/4", 4)]
    assert client.folders() == ["a", "b"]
    assert [found.name for page in client.objects() for found in page][-1] == "b/1"


def test_a_listing_that_begins_again_is_given_up(fake, faulty, monkeypatch):
    for name in ("a", "b"):
        fake.objects.change(f"bucket/kv/{name}", b"x")
    listing = Objects.listing
    more = "<IsTruncated>true</IsTruncated><NextContinuationToken>0</NextContinuationToken>"

    def endless(*args):
        return listing(*args).replace("<IsTruncated>false</IsTruncated>", more)

    monkeypatch.setattr(client_module, "_LIST_AT_ONCE", 2)
    monkeypatch.setattr(Objects, "listing", endless)
    pages = faulty.client().objects()
    assert [found.name for found in next(pages)] == ["a", "b"]
    with pytest.raises(KVTiersError, match="lists the same objects again and again") as caught:
        next(pages)
    assert caught.value.kind is Kind.IO


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.size("a"),
        lambda client: client.get("a", 1),
        lambda client: client.put("a", [b"x"]),
        lambda client: client.delete(["a"]),
        lambda client: client.folders(),
        lambda client: list(client.objects()),
    ],
)
def test_ctrl_c_does_not_wait_for_an_answer(ask, fake, faulty):
    def interrupt(name):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        return True

    fake.fail(S3Fault(What.SILENT, keys=interrupt))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup has it ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            ask(faulty.client(request_timeout_s=300, load_deadline_s=600, store_deadline_s=600))
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_name_that_is_no_path_is_said(fake, faulty):
    fake.objects.change("bucket/kv/a//b", b"x")
    with pytest.raises(KVTiersError, match="an object there is called 'kv/a//b', which is no"):
        list(faulty.client().objects())


def test_what_is_not_there_is_deleted_without_a_word(s3, bucket):
    client = Bucket(s3.endpoint, bucket).client()
    client.put("a", [b"x"])
    client.delete(["absent", "a", "absent too"])
    client.delete([])
    assert client.size("a") is None
