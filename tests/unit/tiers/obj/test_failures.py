"""Texts as obstore 0.12 gives them, and what is left of them."""

import pytest
from obstore.exceptions import GenericError, InvalidPathError, PermissionDeniedError

from kvtiers.errors import Kind, Retry
from kvtiers.tiers.obj.failures import error_of
from tests.unit.tiers.obj.obj_kit import SECRETS

DENIED = (
    "The operation lacked the necessary privileges to complete for path a/1: Error performing GET "
    f"http://minio:9000/b/a/1?X-Amz-Credential={SECRETS[0]} in 1ms - Server returned non-2xx status"
    " code: 403 Forbidden: <Error><Code>SignatureDoesNotMatch</Code><Message>The request signature "
    f"we calculated does not match</Message><AWSAccessKeyId>{SECRETS[0]}</AWSAccessKeyId>"
    f"<StringToSign>AWS4-HMAC-SHA256 {SECRETS[1]}</StringToSign><Token>{SECRETS[2]}</Token></Error>"
    f'\n\nDebug source:\nPermissionDenied {{ source: "{SECRETS[1]}" }}'
)


def status(code, name=""):
    body = f"<Error><Code>{name}</Code></Error>" if name else ""
    return f"Error performing PUT - Server returned non-2xx status code: {code} Some Reason: {body}"


def test_no_secret_of_an_answer_is_passed_on():
    error = error_of(PermissionDeniedError(DENIED), "read", "s3://b/a/1")
    assert str(error) == (
        "read of s3://b/a/1 failed: the server answered 403 SignatureDoesNotMatch: check the "
        "credentials and what they allow (get, put, list, delete)"
    )
    assert not any(secret in f"{error!r} {error.context}" for secret in SECRETS)
    assert error.__cause__ is error.__context__ is None


@pytest.mark.parametrize(
    ("failure", "kind", "says"),
    [
        (FileNotFoundError("not found"), Kind.VANISHED, "it is not there"),
        (FileNotFoundError(status(404, "NoSuchKey")), Kind.VANISHED, "404 NoSuchKey"),
        (FileNotFoundError(status(404, "NoSuchBucket")), Kind.IO, "make the bucket"),
        (GenericError(status(503, "SlowDown")), Kind.IO, "503 SlowDown: too many requests"),
        (GenericError(status(429)), Kind.IO, "429: too many requests"),
        (GenericError(status(500, "InternalError")), Kind.IO, "answered 500 InternalError"),
        (GenericError(status(507)), Kind.FULL, "507"),
        (GenericError(status(403, "QuotaExceeded")), Kind.FULL, "QuotaExceeded"),
        (GenericError(status(403, "RequestTimeTooSkewed")), Kind.IO, "the clock of this machine"),
        (GenericError(status(416, "InvalidRange")), Kind.CORRUPT, "416"),
        (GenericError("kind: Timeout, source: TimedOut"), Kind.TIMEOUT, "is the server alive?"),
        (
            GenericError('Os { code: 111, message: "Connection refused" }'),
            Kind.IO,
            "Connection refused: is the endpoint right",
        ),
        (
            GenericError('"dns error", error: "failed to lookup address information: Name or s"'),
            Kind.IO,
            "failed to lookup address information: Name or s: is the endpoint right",
        ),
        (
            GenericError(
                "Generic S3 error: DeleteObjects request failed for key kv/b: The Key "
                f"{SECRETS[0]} is bad (code: AccessDenied)\n\nDebug source: DeleteFailed {{ path: "
                f'"kv/b", code: "AccessDenied", message: "The Key {SECRETS[0]} is bad" }}'
            ),
            Kind.IO,
            "failed: the server answered AccessDenied: check the credentials",
        ),
        (FileNotFoundError(status(404, "ContainerNotFound")), Kind.IO, "make the bucket"),
        (InvalidPathError('BadSegment { path: "a\\n\\u{202e}"'), Kind.IO, "is no path"),
        (GenericError("invalid peer certificate: UnknownIssuer"), Kind.IO, "UnknownIssuer"),
        (GenericError("x" * 9999), Kind.IO, "an answer that cannot be understood (GenericError)"),
        (ValueError(SECRETS[1]), Kind.IO, "an answer that cannot be understood (ValueError)"),
    ],
)
def test_each_failure_has_a_kind_and_a_reason(failure, kind, says):
    error = error_of(failure, "write", "s3://b/x")
    assert error.kind is kind
    assert says in str(error)
    assert len(str(error)) < 250
    assert not any(secret in str(error) for secret in SECRETS)


@pytest.mark.parametrize(
    ("text", "retry"),
    [
        (status(503), Retry.EXHAUSTED),
        (status(429), Retry.EXHAUSTED),
        (status(403), Retry.NEVER),
        ("kind: Timeout", Retry.EXHAUSTED),
        ("kind: Connect, source: ConnectionRefused", Retry.EXHAUSTED),
        ("kind: Interrupted", Retry.MAY),
        ("Error getting list response body", Retry.MAY),
    ],
)
def test_what_the_client_tried_again_is_not_tried_again_at_once(text, retry):
    assert error_of(GenericError(text), "read", "s3://b/x").retry is retry
