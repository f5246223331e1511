"""Signature version 4 of a request without a body or a query, as servers of S3 want it.

Source: "Authenticating Requests: Using the Authorization Header (AWS Signature Version 4)" in the
Amazon S3 API reference. Tests that looked through the client under test would not be tests.
"""

import hashlib
import hmac
from datetime import UTC, datetime
from urllib.parse import quote

_EMPTY = hashlib.sha256(b"").hexdigest()
_SIGNED = "host;x-amz-content-sha256;x-amz-date"


def signed(
    method: str, host: str, path: str, access_key: str, secret_key: str, region: str
) -> dict[str, str]:
    """The headers of the request."""
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    headers = {"host": host, "x-amz-content-sha256": _EMPTY, "x-amz-date": now}
    lines = [f"{name}:{value}" for name, value in headers.items()]
    request = "\n".join((method, quote(path), "", *lines, "", _SIGNED, _EMPTY))
    scope = f"{now[:8]}/{region}/s3/aws4_request"
    digest = hashlib.sha256(request.encode()).hexdigest()
    key = f"AWS4{secret_key}".encode()
    for part in (*scope.split("/"), f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{digest}"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = f"Credential={access_key}/{scope}, SignedHeaders={_SIGNED}, Signature={key.hex()}"
    return {**headers, "Authorization": f"AWS4-HMAC-SHA256 {signature}"}
