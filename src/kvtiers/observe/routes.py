"""What the observer answers to which path. It reads; nothing here changes an engine."""

import binascii
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtiers.chunks import GROUP_BYTES, Key, Namespace
from kvtiers.observe.documents import life, summary
from kvtiers.observe.http import Answer, Asked, Refused, said
from kvtiers.observe.prompts import Prompts
from kvtiers.observe.requests import Recorder
from kvtiers.observe.residency import Explain

MAX_KEYS = 65_536
_LIMIT = 50
KEY_BYTES = range(1 + GROUP_BYTES, 65 + GROUP_BYTES)


@dataclass(frozen=True, slots=True)
class Sources:
    """Where answers come from; all are called on the observer's thread."""

    namespace: Namespace
    recorder: Recorder
    prompts: Prompts
    state: Callable[[], dict[str, Any]]
    explain: Explain
    exposition: Callable[[], tuple[bytes, str]] | None
    """Text for Prometheus and its type; None: ``prometheus_client`` is not installed."""


class Routes:
    """From a request to its answer. Raises Refused."""

    def __init__(self, sources: Sources, pages: Mapping[str, Answer]) -> None:
        self._sources = sources
        self._pages = pages
        self._exact: Mapping[str, Callable[[Asked], Answer]] = {
            "/healthz": lambda asked: said(200, {"ok": True}),
            "/state": lambda asked: said(200, sources.state()),
            "/namespace": lambda asked: said(200, _manifest(sources.namespace)),
            "/requests": self._requests,
            "/explain": self._explain,
            "/metrics": self._metrics,
        }

    def __call__(self, asked: Asked) -> Answer:
        """The answer."""
        if asked.method == "POST" and asked.path != "/explain":
            raise Refused(405, "nothing is changed here: GET it", Allow="GET, HEAD")
        route = self._exact.get(asked.path)
        if route is not None:
            return route(asked)
        if asked.path.startswith("/requests/"):
            return self._request(asked.path.removeprefix("/requests/"))
        page = self._pages.get(asked.path)
        if page is None:
            raise Refused(404, f"there is nothing at {asked.path}")
        return page

    def _requests(self, asked: Asked) -> Answer:
        limit = asked.query.get("limit", str(_LIMIT))
        if not (limit.isascii() and limit.isdigit() and len(limit) < 10):
            raise Refused(400, "limit is no number")
        prompts = self._sources.prompts
        records = self._sources.recorder.latest(int(limit))
        return said(200, {"requests": [summary(record, prompts) for record in records]})

    def _request(self, name: str) -> Answer:
        records = self._sources.recorder.find(name)
        if not records:
            raise Refused(
                404,
                f"no request is remembered whose id begins with {name!a}: it may be too long ago, "
                "still wait for a tier, be shorter than a chunk, have been found whole on the "
                "accelerator, or be another engine's",
            )
        return said(200, life(records, self._sources.prompts))

    def _explain(self, asked: Asked) -> Answer:
        keys = _keys_of(asked)
        return said(200, {"chunks": len(keys), "tiers": self._sources.explain(keys)})

    def _metrics(self, asked: Asked) -> Answer:
        if self._sources.exposition is None:
            raise Refused(
                501,
                "metrics need prometheus_client: pip install kvtiers[metrics], or scrape the "
                "engine's own /metrics",
            )
        body, kind = self._sources.exposition()
        return Answer(200, body, kind)

    def __repr__(self) -> str:
        return f"<Routes: {len(self._exact)} documents, {len(self._pages)} pages>"


def _manifest(namespace: Namespace) -> dict[str, Any]:
    return {"id": namespace.id, "fields": dict(namespace.fields)}


def _keys_of(asked: Asked) -> Sequence[Key]:
    """Of the query, ``keys=HEX,HEX``, or of a JSON body, ``{"keys": [HEX, ...]}``."""
    texts: Any
    if asked.method == "POST":
        if asked.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise Refused(415, "the body is no JSON: say Content-Type: application/json")
        try:
            body = json.loads(asked.body)
        except (ValueError, RecursionError):
            raise Refused(400, "the body is no JSON") from None
        texts = body.get("keys") if isinstance(body, dict) else None
    else:
        texts = [text for text in asked.query.get("keys", "").split(",") if text]
    if not isinstance(texts, list) or not texts or len(texts) > MAX_KEYS:
        raise Refused(400, f"give keys: 1 to {MAX_KEYS} of them, in hexadecimal")
    return [_key(text) for text in texts]


def _key(text: Any) -> Key:
    try:
        key = binascii.unhexlify(text) if isinstance(text, str) else b""
    except ValueError:
        key = b""
    if len(key) not in KEY_BYTES:
        raise Refused(400, "one of the keys is no digest and group in hexadecimal")
    return Key(key)
