"""Reading ``/metrics`` of an engine over HTTP."""

import urllib.parse
from http.client import HTTPConnection, HTTPException, HTTPSConnection

from kvtiers.cli.output import clean
from kvtiers.errors import ConfigError, Kind, KVTiersError
from kvtiers.observe.exposition import Scrape, parse

MAX_BYTES = 32 << 20
"""What an engine exports is a hundredth of it."""
TIMEOUT_S = 5.0


class Endpoint:
    """The ``/metrics`` at ``url``. Raises ConfigError for a URL that is none.

    No redirect is followed and no proxy used: an engine is asked, and nobody else.
    """

    def __init__(self, url: str) -> None:
        try:
            parts = urllib.parse.urlsplit(url)
            port = parts.port
        except ValueError as e:
            raise ConfigError(f"--url is {url!a}: {e}") from e
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
            raise ConfigError(f"--url is {url!a}: give one like http://127.0.0.1:8000/metrics")
        self.url = url
        self._host = parts.hostname
        self._port = port
        self._kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        path = parts.path if parts.path not in ("", "/") else "/metrics"
        self._target = f"{path}?{parts.query}" if parts.query else path

    def __repr__(self) -> str:
        return f"<Endpoint {clean(self.url)}>"

    def scrape(self) -> Scrape:
        """Ask once. Raises KVTiersError where there is no answer."""
        connection = self._kind(self._host, self._port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", self._target)
            response = connection.getresponse()
            body = response.read(MAX_BYTES + 1)
            status = response.status
        except (OSError, HTTPException) as e:
            raise self._failure(f"does not answer: {e or type(e).__name__}") from e
        finally:
            connection.close()
        if status != 200:
            raise self._failure(f"answers {status}")
        if len(body) > MAX_BYTES:
            raise self._failure(f"sends more than {MAX_BYTES} bytes")
        return parse(body.decode(errors="replace"))

    def _failure(self, what: str) -> KVTiersError:
        return KVTiersError(
            f"{self.url} {what}; is an engine running there? --url names another",
            kind=Kind.IO,
            operation="top",
        )
