"""Asking an engine's observer, from a program: why a request missed, and where chunks are now.

Example, with ``"observe": {"port": 9810}`` in the engine's ``kv_connector_extra_config``::

    from kvtiers.observe import why

    print(why("cmpl-4f1c")["why"])
"""

import json
import urllib.parse
from collections.abc import Iterable
from typing import Any

from kvtiers.chunks import Key, Namespace
from kvtiers.errors import Kind, KVTiersError
from kvtiers.observe.asking import Server, words_of

AT = "http://127.0.0.1:9810"
TIMEOUT_S = 40.0
MAX_BYTES = 64 << 20

Document = dict[str, Any]


def why(request_id: str, at: str = AT) -> Document:
    """The life of a request: see ``ObserverClient.request``."""
    return ObserverClient(at).request(request_id)


class ObserverClient:
    """The observer at ``url``. Raises ConfigError for a URL that is none."""

    def __init__(self, url: str = AT, timeout_s: float = TIMEOUT_S) -> None:
        self._server = Server(url, f"{url!a} is no URL of an observer", AT, timeout_s)
        self.url = url.rstrip("/")

    def request(self, request_id: str) -> Document:
        """What its lookups found, and why not the rest.

        ``request_id`` is what a client was told, or the beginning of the engine's id. Of the keys:
        ``why``, one sentence; ``tokens`` (``prompt``, ``asked``, ``by_source``, ``missed``);
        ``runs`` of chunks with the ``verdicts`` of the tiers; ``arrived_at`` and ``settled_at`` in
        seconds since the epoch. Raises KVTiersError, ``VANISHED`` for one that is not remembered.
        """
        return self._ask("GET", f"/requests/{urllib.parse.quote(request_id, safe='')}")

    def requests(self, limit: int = 50) -> list[Document]:
        """The last ones, newest first, without their runs."""
        found: list[Document] = self._ask("GET", f"/requests?limit={limit:d}")["requests"]
        return found

    def explain(self, keys: Iterable[Key]) -> list[Document]:
        """By tier, where these chunks are now, as runs of equal ``state`` in their order."""
        body = json.dumps({"keys": [key.hex() for key in keys]}).encode()
        found: list[Document] = self._ask("POST", "/explain", body)["tiers"]
        return found

    def state(self) -> Document:
        """The engine, its tiers, counters since its start, and jobs in flight."""
        return self._ask("GET", "/state")

    def namespace(self) -> Namespace:
        """What the engine's chunks are interchangeable by; it says how keys are made."""
        return Namespace(self._ask("GET", "/namespace")["fields"])

    def _ask(self, method: str, path: str, body: bytes | None = None) -> Document:
        target = self._server.path.rstrip("/") + path
        try:
            status, text = self._server.ask(method, target, MAX_BYTES, body)
        except OSError as e:
            raise KVTiersError(
                f"no observer answers at {self.url} ({words_of(e)}): set observe in the engine's "
                "kv_connector_extra_config, and name its address",
                kind=Kind.IO,
            ) from None
        return self._document(status, text)

    def _document(self, status: int, text: bytes) -> Document:
        try:
            document = json.loads(text) if len(text) <= MAX_BYTES else None
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
            raise KVTiersError(f"{self.url} is no observer of kvtiers", kind=Kind.BROKEN)
        if status != 200:
            kind = Kind.VANISHED if status == 404 else Kind.IO
            raise KVTiersError(f"{self.url}: {document.get('error', status)}", kind=kind)
        return document

    def __repr__(self) -> str:
        return f"<ObserverClient {self.url}>"
