import pytest

from kvtiers.config import TierSpec
from kvtiers.errors import ConfigError
from kvtiers.tiers import build_tier, check_tiers
from kvtiers.tiers.obj import ObjOptions, client
from kvtiers.tiers.obj.options import Where
from kvtiers.tiers.options import parse
from tests.unit.tiers.obj.obj_kit import SECRETS

UPSTREAM = {
    "bucket": "kv-cache",
    "endpoint_override": "https://minio:9000",
    "scheme": "https",
    "access_key": SECRETS[0],
    "secret_key": SECRETS[1],
    "session_token": SECRETS[2],
    "region": "eu-west-1",
    "ca_bundle": "/etc/ca.pem",
}


def options(**values):
    return parse(ObjOptions, values)


def complaint(**values):
    with pytest.raises(ConfigError) as caught:
        options(**values)
    text = f"{caught.value!r} {caught.value.context}"
    assert not any(secret in text for secret in SECRETS)
    return str(caught.value)


@pytest.mark.parametrize(
    ("url", "where"),
    [
        ("s3://bucket/some/prefix", Where("s3", "bucket", "some/prefix")),
        ("s3://bucket", Where("s3", "bucket", "")),
        ("s3a://bucket/a//b/", Where("s3", "bucket", "a/b")),
        ("gs://bucket/x", Where("gs", "bucket", "x")),
        ("az://container/x", Where("az", "container", "x")),
    ],
)
def test_a_url_says_where(url, where):
    assert options(url=url).where == where
    assert str(where) == f"{where.scheme}://{where.bucket}/{where.prefix}".rstrip("/")


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("/mnt/kv", "url is '/mnt/kv': give one like s3://bucket/prefix"),
        ("file:///mnt/kv", "url is 'file:///mnt/kv': give one like s3://bucket/prefix"),
        ("s3:///x", "url names the bucket '', and no bucket is called so"),
        ("s3://bucket/a/../b", "url has the prefix '/a/../b'"),
        ("s3://bucket/a b", "url has the prefix '/a b'"),
        ("s3://bucket/x?endpoint=y", "options of their own"),
        (f"s3://{SECRETS[0]}:{SECRETS[1]}@bucket/x", "credentials do not belong into a URL"),
        ("s3://bucket:99999999/x", "more in it than a bucket"),
    ],
)
def test_a_url_that_is_none_is_refused(url, what):
    assert what in complaint(url=url)


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({}, "url is missing"),
        ({"endpoint": "minio:9000"}, "endpoint is no address"),
        ({"endpoint": "https://a:b@minio"}, "endpoint is no address"),
        ({"endpoint": "https://minio/bucket"}, "endpoint is no address"),
        ({"endpoint": "https://minio:99999"}, "endpoint is no address"),
        ({"endpoint": "https://minio:0"}, "endpoint is no address"),
        ({"region": "us-east-1\n"}, "region has a blank, a line break"),
        ({"access_key_id": "x\n", "secret_access_key": SECRETS[1]}, "access_key_id has a blank"),
        ({"session_token": ""}, "session_token has a blank, a line break or nothing"),
        ({"endpoint": "http://minio:9000"}, "without TLS: use https, or say allow_http"),
        ({"access_key_id": SECRETS[0]}, "and secret_access_key go together"),
        ({"session_token": SECRETS[2]}, "session_token goes with access_key_id"),
        ({"access_key_id": SECRETS[0], "secret_access_key": SECRETS[1], "profile": "p"}, "profile"),
        ({"secret_access_key": 5551234}, "secret_access_key is something else: give a string"),
        ({"secret_access_key": [SECRETS[1]]}, "secret_access_key is something else"),
        ({"request_timeout_s": 6}, "two of it do not fit into load_deadline_s (10)"),
        ({"request_timeout_s": 5, "store_deadline_s": 9}, "do not fit into store_deadline_s (9)"),
        ({"request_timeout_s": 0}, "request_timeout_s is 0: give above 0"),
        ({"connect_timeout_s": -1}, "connect_timeout_s is -1: give above 0"),
        ({"max_requests": 0}, "max_requests is 0: give 1 to 256"),
        ({"max_requests": 257}, "max_requests is 257: give 1 to 256"),
        ({"max_retries": -1}, "max_retries is -1: give 0 or more"),
        ({"transport": "rdma"}, 'transport is \'rdma\': give "obstore" or "nixl"'),
        ({"prefix": "x"}, "prefix goes with store_config"),
        ({"bucket": "x"}, "bucket is not a known option"),
    ],
)
def test_what_does_not_fit_is_refused(values, what):
    where = {} if what == "url is missing" else {"url": "s3://bucket/x"}
    assert what in complaint(**where, **values)


@pytest.mark.parametrize("key", ["endpoint", "region", "profile"])
def test_what_is_of_s3_is_refused_elsewhere(key):
    said = complaint(url="gs://bucket/x", **{key: "https://x"})
    assert said == f"{key} goes with s3:// only, not with gs://bucket/x"


def test_a_configuration_of_vllms_own_tier_starts_as_it_is():
    found = options(store_config=UPSTREAM, prefix="/a/b/")
    assert found.where == Where("s3", "kv-cache", "a/b")
    assert found.endpoint == "https://minio:9000"
    assert not found.allow_http
    assert (found.region, found.ca_bundle) == ("eu-west-1", "/etc/ca.pem")
    credentials = (found.access_key_id, found.secret_access_key, found.session_token)
    assert credentials == SECRETS
    assert found.locality == "REMOTE"


def test_what_vllm_lets_be_left_out_may_be():
    found = options(store_config={"bucket": "kv-cache", "endpoint_override": "minio:9000"})
    assert found.endpoint == "http://minio:9000"
    assert found.allow_http, "its scheme is http unless it says another"
    assert found.access_key_id is found.region is None


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"store_config": {"bucket": "kv-cache"}}, "store_config cannot be read: endpoint_over"),
        ({"store_config": {**UPSTREAM, "buckt": 1}}, "buckt is not a known option: did you mean"),
        ({"store_config": {**UPSTREAM, "secret_key": 1}}, "secret_key is something else"),
        ({"store_config": "kv-cache"}, "store_config is 'kv-cache': give a mapping"),
        ({"store_config": UPSTREAM, "url": "s3://x/y"}, "store_config and url say where"),
        ({"store_config": UPSTREAM, "region": "x"}, "region is said in store_config, too"),
    ],
)
def test_a_store_config_that_is_wrong_is_refused(values, what):
    assert what in complaint(**values)


def test_nothing_shows_a_secret():
    found = options(store_config=UPSTREAM)
    assert repr(found) == "<ObjOptions s3://kv-cache>"
    for shown in (repr(found), str(found), repr(found.store_config), f"{found}"):
        assert not any(secret in shown for secret in SECRETS)


def test_the_number_of_nixl_threads_has_no_effect_and_that_is_said(s3, bucket, caplog):
    from kvtiers.testing.values import LAYOUT, NAMESPACE

    config = {
        "bucket": bucket,
        "endpoint_override": s3.endpoint,
        "access_key": s3.credentials["AWS_ACCESS_KEY_ID"],
        "secret_key": s3.credentials["AWS_SECRET_ACCESS_KEY"],
        "region": s3.region,
    }
    tier = build_tier(
        {"type": "obj", "store_config": config, "prefix": "kv", "io_threads": 4},
        0,
        namespace=NAMESPACE,
        layout=LAYOUT,
        clock=lambda: 0.0,
        wall_clock=lambda: 0.0,
    )
    tier.shutdown(10.0)
    assert caplog.messages == ["1:obj: the option io_threads has no effect in kvtiers"]
    assert (tier.medium, tier.locality) == ("STORAGE", "REMOTE")


def test_a_missing_library_is_one_sentence(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(client.importlib, "import_module", missing)
    check_tiers([TierSpec("obj", None, {"url": "s3://bucket/x"})])
    with pytest.raises(ConfigError) as caught:
        client.open_client(options(url="s3://bucket/x"))
    assert str(caught.value) == 'type is "obj", which needs obstore: pip install "kvtiers[obj]"'
