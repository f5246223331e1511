"""As much HTTP as an observer needs: one request a connection, read within bounds and in time.

Nothing of a request is believed before it is whole. What a browser must be told is told with every
answer. Grammar: RFC 9112; which hosts may be meant: see ``meant_for``.
"""

import asyncio
import ipaddress
import json
import urllib.parse
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_HEAD = 16 << 10
"""Bytes of the first line and all headers."""
MAX_BODY = 10 << 20
"""As many keys as may be asked about at once, the longest that there are, fit into it."""
MAX_FIELDS = 32
"""Of a query."""
METHODS = ("GET", "HEAD", "POST")

_REASONS = {
    200: "OK",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    413: "Content Too Large",
    415: "Unsupported Media Type",
    421: "Misdirected Request",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
}
_ALWAYS = {
    "Cache-Control": "no-store",
    "Connection": "close",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client is sent."""

    status: int
    body: bytes
    content_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)


class Refused(Exception):
    """A request that is not answered as asked."""

    def __init__(self, status: int, sentence: str, **headers: str) -> None:
        super().__init__(sentence)
        self.answer = said(status, {"error": sentence}, headers)


@dataclass(frozen=True, slots=True)
class Asked:
    """A whole request."""

    method: str
    path: str
    """Percent-decoded."""
    query: Mapping[str, str]
    headers: Mapping[str, str]
    """By name in lower case."""
    body: bytes = b""


def said(status: int, document: Any, headers: Mapping[str, str] | None = None) -> Answer:
    """A JSON document."""
    return Answer(status, json.dumps(document).encode(), JSON, headers or {})


async def read(reader: asyncio.StreamReader) -> Asked | None:
    """The request of a connection; None if it ended first. Raises Refused."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    except asyncio.LimitOverrunError:
        raise Refused(431, f"the request has more than {MAX_HEAD} bytes of headers") from None
    asked = parse(head)
    size = _body_size(asked)
    if not size:
        return asked
    try:
        body = await reader.readexactly(size)
    except asyncio.IncompleteReadError:
        return None
    return Asked(asked.method, asked.path, asked.query, asked.headers, body)


def parse(head: bytes) -> Asked:
    """First line and headers. Raises Refused."""
    first, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise Refused(400, "this is no HTTP/1.1 request")
    method, target, _ = words
    if method not in METHODS:
        raise Refused(405, f"only {', '.join(METHODS)} are answered", Allow=", ".join(METHODS))
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise Refused(400, "a header of the request is malformed")
        if name.lower() in ("host", "content-length") and name.lower() in headers:
            raise Refused(400, f"the request has two headers {name}")
        headers[name.lower()] = value.strip()
    if not target.startswith("/"):
        raise Refused(400, "the request names no path")
    path, _, query = target.partition("?")
    try:
        pairs = urllib.parse.parse_qsl(query, keep_blank_values=True, max_num_fields=MAX_FIELDS)
    except ValueError:
        raise Refused(400, f"the query has more than {MAX_FIELDS} fields") from None
    return Asked(method, urllib.parse.unquote(path), dict(pairs), headers)


def _body_size(asked: Asked) -> int:
    if "transfer-encoding" in asked.headers:
        raise Refused(501, "a body in chunks is not read: send a Content-Length")
    text = asked.headers.get("content-length", "0")
    if not (text.isascii() and text.isdigit()):
        raise Refused(400, "the Content-Length is no number")
    size = int(text) if len(text) < 20 else MAX_BODY + 1
    if size > MAX_BODY:
        raise Refused(413, f"the body has more than {MAX_BODY} bytes")
    return size


def meant_for(headers: Mapping[str, str], names: Collection[str]) -> bool:
    """Whether the ``Host`` header can be meant for us.

    A page of a foreign site can have its own name resolve to our address and then read what we
    say, as to its browser both are one site. So a name must be ours: one of ``names`` or
    ``localhost``. An address is no name that anybody else can have.
    """
    host = _host(headers.get("host", ""))
    if host is None:
        return False
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != headers.get("host"):
        return False
    return host in names or host == "localhost" or _is_address(host)


def _host(header: str) -> str | None:
    """The host of a ``Host`` header, without its port; None if it is none."""
    try:
        parts = urllib.parse.urlsplit(f"//{header}")
        _ = parts.port
    except ValueError:
        return None
    if parts.netloc != header or parts.username is not None:
        return None
    return parts.hostname


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def written(answer: Answer, *, head_only: bool) -> bytes:
    """An answer as it is sent."""
    headers = {
        "Content-Type": answer.content_type,
        "Content-Length": str(len(answer.body)),
        **_ALWAYS,
        **answer.headers,
    }
    lines = [f"HTTP/1.1 {answer.status} {_REASONS[answer.status]}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    head = "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"
    return head if head_only else head + answer.body
