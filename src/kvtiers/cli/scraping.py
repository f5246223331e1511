"""Reading ``/metrics`` of an engine over HTTP."""

from kvtiers.cli.output import clean
from kvtiers.errors import Kind, KVTiersError
from kvtiers.observe.asking import Server, words_of
from kvtiers.observe.exposition import Scrape, parse

MAX_BYTES = 32 << 20
"""What an engine exports is a hundredth of it."""
URL = "http://127.0.0.1:8000/metrics"
TIMEOUT_S = 5.0


class Endpoint:
    """The ``/metrics`` at ``url``. Raises ConfigError for a URL that is none."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._server = Server(url, f"--url is {url!a}", URL, TIMEOUT_S)
        path, query = self._server.path, self._server.query
        path = "/metrics" if path in ("", "/") else path
        self._target = f"{path}?{query}" if query else path

    def __repr__(self) -> str:
        return f"<Endpoint {clean(self.url)}>"

    def scrape(self) -> Scrape:
        """Ask once. Raises KVTiersError where there is no answer."""
        try:
            status, body = self._server.ask("GET", self._target, MAX_BYTES)
        except OSError as e:
            raise self._failure(f"does not answer: {words_of(e)}") from e
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
