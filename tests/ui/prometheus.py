"""A real Prometheus that scrapes an engine once a second."""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from scripts import setup_ui
from tests.servers.process import ServerProcess, free_ports

Series = tuple[Mapping[str, str], float]


class Prometheus:
    """Asked over its API at ``port``."""

    def __init__(self, port: int) -> None:
        self._port = port

    def ready(self) -> bool:
        """Whether it answers."""
        try:
            return self._get("/-/ready")[0] == 200
        except (OSError, HTTPException):
            return False

    def query(self, expression: str) -> list[Series]:
        """Labels and value of each series now; those that are no number are left out."""
        status, body = self._get("/api/v1/query?" + urlencode({"query": expression}))
        assert status == 200, (expression, body)
        result = json.loads(body)["data"]["result"]
        values = [(series["metric"], float(series["value"][1])) for series in result]
        return [(labels, value) for labels, value in values if math.isfinite(value)]

    def kinds(self) -> dict[str, str]:
        """What kind each scraped metric is, by the name of its family."""
        _, body = self._get("/api/v1/metadata")
        metadata: dict[str, list[dict[str, Any]]] = json.loads(body)["data"]
        return {name: found[0]["type"] for name, found in metadata.items()}

    def _get(self, path: str) -> tuple[int, bytes]:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=30)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


@contextmanager
def scraping(target_port: int, folder: Path) -> Iterator[Prometheus]:
    """One that scrapes ``127.0.0.1:target_port``; its data is in ``folder``."""
    binary = setup_ui.prometheus()
    assert binary, "no Prometheus is there: make setup-ui"
    job = {"job_name": "vllm", "static_configs": [{"targets": [f"127.0.0.1:{target_port}"]}]}
    once_a_second = {"scrape_interval": "1s", "scrape_timeout": "1s"}
    config = folder / "prometheus.yml"
    config.write_text(json.dumps({"global": once_a_second, "scrape_configs": [job]}))
    (port,) = free_ports(1)
    server = Prometheus(port)
    process = ServerProcess(
        [
            binary,
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=warn",
        ],
        ready=server.ready,
        folder=folder,
        log=folder / "prometheus.log",
    )
    process.start()
    try:
        yield server
    finally:
        process.kill()
