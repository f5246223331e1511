"""Signature version 4 of a request without a query, as servers of S3 want it.

Source: "Authenticating Requests: Using the Authorization Header (AWS Signature Version 4)" in the
Amazon S3 API reference. Tests that looked through the client under test would not be tests.
"""

import hashlib
import hmac
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote

_SIGNED = "host;x-amz-content-sha256;x-amz-date"


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who asks, and of which region."""

    access_key: str
    secret_key: str
    region: str


def signed(method: str, host: str, path: str, body: bytes, by: Credentials) -> dict[str, str]:
    """The headers of the request."""
    digest = hashlib.sha256(body).hexdigest()
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    headers = {"host": host, "x-amz-content-sha256": digest, "x-amz-date": now}
    lines = [f"{name}:{value}" for name, value in headers.items()]
    request = "\n".join((method, quote(path), "", *lines, "", _SIGNED, digest))
    scope = f"{now[:8]}/{by.region}/s3/aws4_request"
    whole = hashlib.sha256(request.encode()).hexdigest()
    key = f"AWS4{by.secret_key}".encode()
    for part in (*scope.split("/"), f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{whole}"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = (
        f"Credential={by.access_key}/{scope}, SignedHeaders={_SIGNED}, Signature={key.hex()}"
    )
    return {**headers, "Authorization": f"AWS4-HMAC-SHA256 {signature}"}
