"""An engine's observer as the page sees it: recorded answers, and the page's own files."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import unquote, urlsplit

PAGE = files("kvtiers.observe").joinpath("page")
_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
BEGUN = 1_800_000_000.0
MIB = 1 << 20


class Observer:
    """What is answered. With each ``/state`` a second passes and counters grow by ``growth``."""

    def __init__(self) -> None:
        self.port = 0
        self.now = BEGUN + 60
        self.begun = BEGUN
        self.inert = False
        self.model = "SmolLM2-135M-Instruct"
        self.tiers = [
            tier("0:primary", "CPU", capacity=64 * MIB, resident=48 * MIB, pinned=MIB),
            tier("1:fs", "STORAGE", capacity=1024 * MIB, used=256 * MIB),
            tier("2:p2p", "CPU", state="left alone"),
        ]
        self.counters: dict[tuple[str, ...], float] = {
            ("lookups", "0:primary"): 100,
            ("hits", "0:primary"): 50,
            ("lookups", "1:fs"): 50,
            ("hits", "1:fs"): 40,
            ("bytes", "promote", "1:fs"): 0,
            ("bytes", "cascade", "1:fs"): 0,
            ("loaded_tokens", "1:fs"): 4096,
            ("lookup_misses", "1:fs", "absent"): 10,
            ("declined", "cascade", "1:fs", "pressure"): 3,
        }
        self.growth: dict[tuple[str, ...], float] = {
            ("lookups", "0:primary"): 10,
            ("hits", "0:primary"): 8,
            ("bytes", "promote", "1:fs"): 5e6,
            ("bytes", "cascade", "1:fs"): 2.5e9,
        }
        self.active = [{"hop": "promote", "tier": "1:fs", "jobs": 3, "chunks": 12}]
        self.records = [record("cmpl-2", arrived=50), record("cmpl-1", arrived=40)]
        self.silent = False

    def answer(self, path: str) -> tuple[int, Any]:
        """Status and JSON of what is asked for."""
        if self.silent:
            return 503, {}
        if path == "/state":
            return 200, self._state()
        if path == "/requests":
            return 200, {"requests": self.records}
        wanted = unquote(path.removeprefix("/requests/"))
        found = [each for each in self.records if each["request_id"] == wanted]
        return (200, found[0]) if found else (404, {})

    def _state(self) -> dict[str, Any]:
        self.now += 1
        for name, amount in self.growth.items():
            self.counters[name] = self.counters.get(name, 0) + amount
        return {
            "engine": {
                "model": self.model,
                "namespace": "3e395b6e63b1ebdd",
                "replica": 0,
                "started_at": self.begun,
                "now": self.now,
                "inert": self.inert,
            },
            "tiers": self.tiers,
            "counters": [
                {"name": name, "labels": labels, "value": value}
                for (name, *labels), value in self.counters.items()
            ],
            "active": self.active,
        }


def tier(label: str, medium: str, *, state: str | None = "in use", **sizes: int) -> dict[str, Any]:
    """A tier of ``/state``; what is not given is not known."""
    known = ("capacity", "used", "resident", "pinned", "filling")
    figures = {f"{name}_bytes": sizes.get(name) for name in known}
    return {"label": label, "medium": medium, "locality": "LOCAL", "state": state, **figures}


def record(name: str, *, arrived: float) -> dict[str, Any]:
    """A request of which host memory had a part, the disk another, and nobody the rest."""

    def said(label: str, verdict: str, reason: str | None, seconds: float) -> dict[str, Any]:
        return {"tier": label, "verdict": verdict, "reason": reason, "seconds": seconds}

    def run(first: int, count: int, *verdicts: dict[str, Any]) -> dict[str, Any]:
        of_run = {"group": 0, "first": first, "count": count, "tokens": 128 * count}
        return {**of_run, "verdicts": list(verdicts)}

    absent = said("0:primary", "miss", "absent", 0.00002)
    return {
        "request_id": name,
        "arrived_at": BEGUN + arrived,
        "settled_at": BEGUN + arrived + 0.25,
        "waited_s": 0.21,
        "tokens": {"asked": 1152, "by_source": {"0:primary": 512, "1:fs": 256}, "missed": 384},
        "untold_chunks": 5,
        "runs": [
            run(0, 4, said("0:primary", "hit", None, 0.00001)),
            run(4, 2, absent, said("1:fs", "hit", None, 0.21)),
            run(6, 3, absent, said("1:fs", "miss", "corrupt", 0.004)),
        ],
        "why": "384 of 1152 tokens were computed: 3 chunks were damaged in 1:fs.",
    }


class _Handler(BaseHTTPRequestHandler):
    observer: Observer

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        name = "index.html" if path == "/" else path[1:]
        if "/" not in name and name.rpartition(".")[2] in _TYPES and PAGE.joinpath(name).is_file():
            self._send(200, _TYPES[name.rpartition(".")[2]], PAGE.joinpath(name).read_bytes())
        else:
            status, document = self.observer.answer(path)
            self._send(status, "application/json", json.dumps(document).encode())

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def serving(observer: Observer) -> Iterator[str]:
    """Its address, as long as it is served."""
    handler = type("Handler", (_Handler,), {"observer": observer})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()
