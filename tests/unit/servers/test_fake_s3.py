"""The fake does, without faults, what the real server does; and with a fault that, and no more."""

from datetime import UTC, datetime, timedelta

import obstore
import pytest
from obstore.store import S3Store

from tests.servers.fake_s3 import FakeS3
from tests.servers.s3_faults import S3Fault, What

NAMES = ["a", "b/c", "b/d/e", "f g&<h>", "z"]
BODY = bytes(range(256)) * 64


def store(server, bucket="bucket", *, retries=0, timeout_s=20.0):
    return S3Store(
        bucket,
        endpoint=server.endpoint,
        region=server.region,
        skip_signature=not hasattr(server, "credentials"),
        client_options={"allow_http": True, "timeout": timedelta(seconds=timeout_s)},
        retry_config={"max_retries": retries},
    )


@pytest.fixture
def fake():
    with FakeS3() as server:
        yield server


def test_it_answers_as_the_real_server_does(fake, s3, bucket):
    assert answers(store(fake)) == answers(store(s3, bucket))


def answers(at):
    """Whatever a client sees that is not a time or a tag."""
    for name in NAMES:
        obstore.put(at, name, BODY + name.encode(), use_multipart=False)
    found = [bytes(obstore.get(at, name).bytes()) == BODY + name.encode() for name in NAMES]
    found.append(bytes(obstore.get_range(at, "a", start=5, length=7)))
    found.append([bytes(b) for b in obstore.get_ranges(at, "a", starts=[0, 99], lengths=[1, 2])])
    found.append(bytes(obstore.get_range(at, "a", start=0, length=1 << 20)) == BODY + b"a")
    found.append(obstore.head(at, "b/c")["size"])
    found.append(listed(at))
    found.append(listed(at, "b"))
    found.append([m["path"] for page in obstore.list(at, offset="b/c") for m in page])
    found.append([len(page) for page in obstore.list(at, chunk_size=2)])
    found.append(sorted(obstore.list_with_delimiter(at)["common_prefixes"]))
    obstore.delete(at, ["a", "b/c", "nothing"])
    obstore.delete(at, "z")
    found.append(listed(at))
    for refused in (lambda: obstore.head(at, "a"), lambda: obstore.get(at, "a")):
        with pytest.raises(FileNotFoundError):
            refused()
    return found


def listed(at, below=None):
    return [(m["path"], m["size"]) for page in obstore.list(at, below) for m in page]


def read(at, name="a"):
    return bytes(obstore.get(at, name).bytes())


@pytest.mark.parametrize("what", [What.STATUS, What.SILENT, What.REDIRECT])
@pytest.mark.parametrize("method", ["PUT", "GET", "HEAD", "DELETE", "LIST"])
def test_what_is_refused_is_not_done(fake, what, method):
    at = store(fake, timeout_s=0.5)
    obstore.put(store(fake), "a", BODY)
    fake.fail(S3Fault(what, method, status=429))
    acts = {
        "PUT": lambda: obstore.put(at, "b", BODY, use_multipart=False),
        "GET": lambda: read(at),
        "HEAD": lambda: obstore.head(at, "a"),
        "DELETE": lambda: obstore.delete(at, "a"),
        "LIST": lambda: listed(at),
    }
    with pytest.raises(Exception, match=r"429|time|redirect"):
        acts[method]()
    assert set(fake.struck()) == {what}
    fake.fail()
    assert listed(store(fake)) == [("a", len(BODY))]  # which has time enough


@pytest.mark.parametrize("what", [What.TRUNCATED, What.RESET, What.SLOW])
def test_a_body_that_does_not_end_is_an_error_for_a_client(fake, what):
    at = store(fake, timeout_s=0.5)
    obstore.put(store(fake), "a", BODY)
    fake.fail(S3Fault(what, "GET"))
    with pytest.raises(Exception, match=r"body|timed out|time"):
        read(at)


def test_an_answer_that_is_wrong_in_good_form(fake):
    at = store(fake)
    obstore.put(at, "a", BODY)
    obstore.put(at, "b", BODY[::-1])
    fake.fail(S3Fault(What.OTHER, "GET"))
    assert read(at) == BODY[::-1]
    fake.fail(S3Fault(What.SHORT, "GET"))
    assert read(at) == BODY[: len(BODY) // 2]
    fake.fail(S3Fault(What.GARBAGE, "GET"))
    assert len(read(at)) == len(BODY)
    assert read(at) != BODY
    fake.fail(S3Fault(What.ETAG, "HEAD"))
    tag = obstore.head(at, "a")["e_tag"]
    fake.fail()
    assert obstore.head(at, "a")["e_tag"] != tag


def test_a_range_that_is_another_or_all_of_it(fake):
    at = store(fake)
    obstore.put(at, "a", BODY)
    for what in (What.RANGE, What.WHOLE):
        fake.fail(S3Fault(what, "GET"))
        with pytest.raises(Exception, match=r"[Rr]ange|partial"):
            obstore.get_range(at, "a", start=0, length=4096)


def test_a_stale_listing_and_a_wrong_clock(fake):
    at = store(fake)
    obstore.put(at, "a", BODY)
    obstore.put(at, "b", BODY)
    obstore.delete(at, "a")
    fake.fail(S3Fault(What.STALE, "LIST", changes=2))
    assert [name for name, _ in listed(at)] == ["a"]
    fake.fail(S3Fault(What.SKEW, "LIST", seconds=-86400))
    (page,) = obstore.list(at)
    assert datetime.now(UTC) - page[0]["last_modified"] > timedelta(hours=23)


def test_what_was_done_may_be_called_a_failure(fake):
    at = store(fake)
    fake.fail(S3Fault(What.LATE, "PUT"))
    with pytest.raises(Exception, match="503"):
        obstore.put(at, "a", BODY, use_multipart=False)
    assert read(at) == BODY


def test_a_storm_passes_and_is_counted(fake):
    fake.fail(S3Fault(What.STATUS, "PUT", first=2, status=429, retry_after_s=0))
    obstore.put(store(fake, retries=3), "a", BODY, use_multipart=False)
    assert fake.asked("PUT") == 3
    assert fake.struck() == [What.STATUS] * 2
