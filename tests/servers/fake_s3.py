"""An S3 server in this process, for faults that no real one can be told to have.

It knows what a client of ours needs (PUT, GET with ranges, HEAD, DELETE, delete of many, list) and
lets everybody in. How a server behaves that has no faults, tests ask a real one.
"""

import contextlib
import hashlib
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.servers.s3_faults import S3Fault, What
from tests.servers.s3_objects import Objects, deleted, keys_in, range_of

_PAGE = 4096
_REFUSALS = (What.STATUS, What.SILENT, What.REDIRECT)


@dataclass(frozen=True, slots=True)
class Request:
    """One that was answered, or not."""

    method: str
    key: str
    range: str | None
    struck: What | None


class FakeS3:
    """Serves while the context lasts. ``faults`` may be changed at any time; the first counts."""

    region = "us-east-1"

    def __init__(self, *faults: S3Fault) -> None:
        self.faults = list(faults)
        self.objects = Objects()
        self.requests: list[Request] = []
        self._counts: Counter[int] = Counter()
        self._lock = threading.Lock()
        self.released = threading.Event()
        """Set at the end: what hangs gives up."""
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.fake = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "FakeS3":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def fail(self, *faults: S3Fault) -> None:
        """Have these faults from now on, and no others; requests are counted anew."""
        with self._lock:
            self._counts.clear()
            self.faults = list(faults)

    def next_fault(self, method: str, key: str, asked: str | None) -> S3Fault | None:
        """What befalls the request, which is written down."""
        with self._lock:
            found = None
            for i, fault in enumerate(self.faults):
                if fault.concerns(method, key):
                    self._counts[i] += 1
                    if fault.strikes(self._counts[i]):
                        found = fault
                        break
            self.requests.append(Request(method, key, asked, found and found.what))
            return found

    def asked(self, method: str | None = None) -> int:
        """How many requests there were."""
        with self._lock:
            return sum(method in (None, r.method) for r in self.requests)

    def struck(self) -> list[What]:
        """What struck so far, in order."""
        with self._lock:
            return [r.struck for r in self.requests if r.struck is not None]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64
    fake: FakeS3

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no error here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server
    fault: S3Fault | None

    def log_message(self, format: str, *args: Any) -> None:
        """Not a word."""

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        key = self._begin("PUT")
        if self._befallen(What.RESET, *_REFUSALS):
            return
        stored = body[: len(body) // 2] if self._has(What.SHORT, What.TRUNCATED) else body
        if self._has(What.OTHER):
            stored = self.server.fake.objects.other_than(key)
        self.server.fake.objects.change(key, stored)
        self._answer(200, b"", {"ETag": self._etag(body)})

    def do_HEAD(self) -> None:
        self._get("HEAD")

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
        if "list-type" in query:
            self._list({name: values[0] for name, values in query.items()})
        else:
            self._get("GET")

    def do_DELETE(self) -> None:
        key = self._begin("DELETE")
        if self._befallen(What.RESET, *_REFUSALS):
            return
        self.server.fake.objects.change(key, None)
        self._answer(204, b"", {})

    def do_POST(self) -> None:
        """Delete many."""
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        self._begin("DELETE")
        if self._befallen(What.RESET, *_REFUSALS):
            return
        bucket = self._path().partition("/")[0]
        found = keys_in(body)
        for name in found:
            self.server.fake.objects.change(f"{bucket}/{name}", None)
        self._answer(200, deleted(found).encode(), {})

    # -- reading --------------------------------------------------------------------------------

    def _get(self, method: str) -> None:
        key = self._begin(method)
        if self._befallen(*_REFUSALS):
            return
        objects = self.server.fake.objects
        found = objects.now.get(key)
        if found is None:
            self._error(404, "NoSuchKey")
            return
        body, modified = found
        if self._has(What.OTHER):
            body = objects.other_than(key)
        if self._has(What.GARBAGE):
            body = (b"\0\xff<not an object>" * (len(body) // 17 + 1))[: len(body)]
        headers = {
            "ETag": self._etag(body),
            "Last-Modified": formatdate(modified + self._skew(), usegmt=True),
        }
        span = None if self._has(What.WHOLE) else range_of(self.headers["Range"], len(body))
        if span is None:
            self._answer(200, body, headers)
            return
        start, end = span
        if start >= len(body):
            self._error(416, "InvalidRange")
            return
        said = start + (_PAGE if self._has(What.RANGE) else 0)
        headers["Content-Range"] = f"bytes {said}-{said + end - start - 1}/{len(body)}"
        self._answer(206, body[start:end], headers)

    def _list(self, query: Mapping[str, str]) -> None:
        bucket = self._begin("LIST").strip("/")
        if self._befallen(*_REFUSALS):
            return
        if self._has(What.GARBAGE):
            self._answer(200, b"<ListBucketResult><Contents><Key>a</Ke", {})
            return
        ago = self.fault.changes if self.fault and self.fault.what is What.STALE else 0
        listing = self.server.fake.objects.listing(bucket, query, ago, self._skew())
        self._answer(200, listing.encode(), {})

    # -- answering ------------------------------------------------------------------------------

    def _path(self) -> str:
        return unquote(urlsplit(self.path).path).lstrip("/")

    def _begin(self, method: str) -> str:
        key = self._path()
        self.fault = self.server.fake.next_fault(method, key, self.headers["Range"])
        return key

    def _has(self, *kinds: What) -> bool:
        return self.fault is not None and self.fault.what in kinds

    def _skew(self) -> float:
        return self.fault.seconds if self.fault and self.fault.what is What.SKEW else 0.0

    def _befallen(self, *kinds: What) -> bool:
        """Whether one of these struck, and there is nothing more to say."""
        if self.fault is None or self.fault.what not in kinds:
            return False
        what = self.fault.what
        if what is What.STATUS:
            self._error(self.fault.status, self.fault.code)
        elif what is What.SILENT:
            self._hang()
        elif what is What.RESET:
            self._reset()
        else:
            self._send(307, b"", {"Location": self.path})
        return True

    def _error(self, status: int, code: str) -> None:
        headers = {}
        if self.fault is not None and self.fault.retry_after_s is not None:
            headers["Retry-After"] = str(self.fault.retry_after_s)
        body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
        self._send(status, body, headers)

    def _etag(self, body: bytes) -> str:
        of = b"something else" if self._has(What.ETAG) else body
        return f'"{hashlib.md5(of, usedforsecurity=False).hexdigest()}"'

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        """The answer to what was done, as far as the fault lets it through."""
        if self._has(What.LATE):
            assert self.fault is not None
            self._error(self.fault.status, self.fault.code)
        elif self._has(What.SHORT):
            self._send(status, body[: len(body) // 2], headers)
        elif self._has(What.RESET, What.TRUNCATED):
            self._send(status, body, headers, sent=len(body) // 2)
            self._reset() if self._has(What.RESET) else self._end()
        elif self._has(What.SLOW):
            self._send(status, body, headers, sent=0)
            self._trickle(body)
        else:
            self._send(status, body, headers)

    def _send(
        self, status: int, body: bytes, headers: Mapping[str, str], sent: int | None = None
    ) -> None:
        self.send_response_only(status)
        self.send_header("Date", formatdate(time.time() + self._skew(), usegmt=True))
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:sent])
            self.wfile.flush()

    def _trickle(self, body: bytes) -> None:
        assert self.fault is not None
        with contextlib.suppress(OSError):
            for byte in body:
                if self.server.fake.released.wait(self.fault.pause_s):
                    break
                self.wfile.write(bytes((byte,)))
        self._end()

    def _hang(self) -> None:
        self.server.fake.released.wait()
        self._end()

    def _reset(self) -> None:
        """Close with data that was never read: the other side is told of it at once."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self._end()

    def _end(self) -> None:
        self.close_connection = True
