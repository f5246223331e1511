"""What a fake S3 server stores, as it was and as it is, and what a listing says of it."""

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from xml.etree import ElementTree
from xml.sax.saxutils import escape

_NAMES = "http://s3.amazonaws.com/doc/2006-03-01/"


@dataclass(slots=True)
class Objects:
    """What is stored, and in which order that came about. Under a lock."""

    now: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    log: list[tuple[str, bytes | None]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def change(self, key: str, body: bytes | None) -> None:
        """Store a body, or delete with None."""
        with self.lock:
            self.log.append((key, body))
            if body is None:
                self.now.pop(key, None)
            else:
                self.now[key] = (body, time.time())

    def as_of(self, changes_ago: int) -> dict[str, int]:
        """Names and lengths before so many changes."""
        with self.lock:
            found: dict[str, int] = {}
            for key, body in self.log[: len(self.log) - changes_ago]:
                found.pop(key, None)
                if body is not None:
                    found[key] = len(body)
            return found

    def listing(
        self, bucket: str, query: Mapping[str, str], changes_ago: int, skew_s: float
    ) -> str:
        """What ``ListObjectsV2`` answers to ``query``."""
        page = _Page(query.get("prefix", ""), query.get("delimiter", ""))
        at_most = int(query.get("max-keys", 1000))
        after = query.get("continuation-token") or query.get("start-after", "")
        for path, length in sorted(self.as_of(changes_ago).items()):
            name = path.removeprefix(f"{bucket}/")
            if path.startswith(f"{bucket}/{page.prefix}") and name > after:
                if len(page.rows) == at_most:
                    return page.document(truncated=True)
                page.add(name, length, self._modified(path) + skew_s)
        return page.document(truncated=False)

    def _modified(self, path: str) -> float:
        with self.lock:
            return self.now[path][1] if path in self.now else time.time()

    def other_than(self, key: str) -> bytes:
        """The body of another object, of the same length if there is one."""
        with self.lock:
            length = len(self.now[key][0]) if key in self.now else 0
            others = [body for name, (body, _) in sorted(self.now.items()) if name != key]
        return next((b for b in others if len(b) == length), others[0] if others else b"other")


@dataclass(slots=True)
class _Page:
    prefix: str
    delimiter: str
    rows: list[str] = field(default_factory=list)
    folders: set[str] = field(default_factory=set)
    last: str = ""

    def add(self, name: str, length: int, modified: float) -> None:
        rest = name[len(self.prefix) :]
        if self.delimiter and self.delimiter in rest:
            self.folders.add(self.prefix + rest.partition(self.delimiter)[0] + self.delimiter)
        else:
            when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(modified))
            self.rows.append(
                f"<Contents><Key>{escape(name)}</Key><LastModified>{when}</LastModified>"
                f"<ETag>&quot;0&quot;</ETag><Size>{length}</Size></Contents>"
            )
        self.last = name

    def document(self, *, truncated: bool) -> str:
        more = f"<NextContinuationToken>{escape(self.last)}</NextContinuationToken>"
        common = (f"<Prefix>{escape(folder)}</Prefix>" for folder in sorted(self.folders))
        return (
            f'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="{_NAMES}">'
            f"<IsTruncated>{str(truncated).lower()}</IsTruncated>{more if truncated else ''}"
            f"{''.join(self.rows)}{_each('CommonPrefixes', common)}</ListBucketResult>"
        )


def deleted(names: Iterable[str]) -> str:
    """What ``DeleteObjects`` answers."""
    keys = (f"<Key>{escape(name)}</Key>" for name in names)
    return f'<DeleteResult xmlns="{_NAMES}">{_each("Deleted", keys)}</DeleteResult>'


def _each(tag: str, contents: Iterable[str]) -> str:
    return "".join(f"<{tag}>{content}</{tag}>" for content in contents)


def keys_in(body: bytes) -> list[str]:
    """What a request to delete many names."""
    found = ElementTree.fromstring(body).iter()
    return [e.text or "" for e in found if e.tag.rpartition("}")[2] == "Key"]


def range_of(header: str | None, length: int) -> tuple[int, int] | None:
    """Begin and end (exclusive) of ``bytes=a-b``, ``bytes=a-`` or ``bytes=-n``."""
    if header is None:
        return None
    first, _, last = header.removeprefix("bytes=").partition("-")
    if not first:
        return max(0, length - int(last)), length
    return int(first), min(length, int(last) + 1) if last else length
